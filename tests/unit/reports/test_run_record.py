"""Run folders as reports read them: what is missing, incomplete or not a run, and the events of the time line."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from ftcli.reports.run_events import Event
from ftcli.reports.run_record import number, read_runs
from ftcli.reports.run_series import curve, extremes, find_panels, smooth, thin
from ftcli.runtime import load_findings
from ftcli.runtime.errors import InputError
from ftcli.runtime.run_folder import RunFolder

from ...support.run_folders import FOLDERS, change_rows, copy_run


def kinds(events: list[Event]) -> list[tuple[str, int]]:
    return [(event.kind, event.step) for event in events]


def test_read_runs_of_a_finished_run_has_rows_samples_and_events() -> None:
    (run,) = read_runs([FOLDERS / "sft"])
    assert run.label == "sft" and run.notes == [] and run.profile_name == "no profile"
    assert [row["step"] for row in run.training] == [row["step"] for row in run.evaluations] == [1, 2, 3]
    assert len(run.samples) == 6 and run.samples[0]["answer"] == "bbbb"
    evaluated = [("evaluation", step) for step in (1, 2, 3)]
    assert kinds(run.events) == [*evaluated[:2], ("checkpoint", 3), evaluated[2], ("end", 3)]
    assert list(run.texts) == ["Recipe", "Environment"]
    (ddp,) = read_runs([FOLDERS / "sft_ddp"])
    assert ddp.profile_name == "ddp" and ddp.profile["distributed_type"] == "MULTI_GPU"


def test_read_runs_of_folders_that_are_no_runs_names_each(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    checkpoint = FOLDERS / "sft" / "checkpoints" / "step-000003"
    with pytest.raises(InputError) as refused:
        read_runs([tmp_path / "none", tmp_path / "file", tmp_path, checkpoint, FOLDERS / "sft"])
    texts = [str(problem) for problem in refused.value.problems]
    endings = ("does not exist", "is a file, not a run folder", "environment.json", "is a checkpoint, not a run folder")
    assert [ending for text, ending in zip(texts, endings, strict=True) if ending not in text.splitlines()[0]] == []
    assert f"give {FOLDERS / 'sft'}" in texts[3] and "runs/<recipe>" in texts[0]


def test_read_runs_of_one_run_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(FOLDERS / "sft")
    with pytest.raises(InputError, match="the same run twice"):
        read_runs([FOLDERS / "sft", tmp_path / "link"])


def test_read_runs_of_equal_names_are_labelled_by_path(tmp_path: Path) -> None:
    folders = [copy_run("sft", tmp_path / place / "run") for place in "ab"]
    assert [run.label for run in read_runs(folders)] == [str(path) for path in folders]


def test_read_runs_of_an_incomplete_folder_notes_what_is_missing(tmp_path: Path) -> None:
    run = copy_run("sft", tmp_path / "run")
    for name in ("recipe.yaml", "environment.json"):
        (run / name).unlink()
    (run / "profile.yaml").write_bytes(b"\x00\xff{")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            '{"step": Infinity, "loss": 1.0}\n{"step": 2.5, "loss": 1.0}\n' + "[" * 100_000 + '\n{"step": 4, "lo'
        )
    (record,) = read_runs([run])
    assert len(record.training) == 3 and record.texts == {} and record.profile_name == "unknown"
    assert [re.split(r" is | are inc| cannot", note.removeprefix("run: "))[0] for note in record.notes] == [
        "metrics.jsonl: lines 9, 10",
        "2 rows of metrics.jsonl without a usable step are left out",
        "recipe.yaml",
        "profile.yaml",
        "environment.json",
    ]


def test_read_runs_without_metrics_notes_that_there_is_no_curve(tmp_path: Path) -> None:
    run = copy_run("sft_stopped", tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    (record,) = read_runs([run])
    assert record.notes == ["run: metrics.jsonl has no training row, so there is no curve"]
    assert find_panels([record]) == ([], 0)


def test_find_events_has_bad_steps_skipped_steps_and_failures(tmp_path: Path) -> None:
    run = copy_run("sft_fp16", tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    first, second, third = (place for place, line in enumerate(lines) if "loss_scale" in line)
    change_rows(run, {place: {"skipped_steps": 2 * (place > first)} for place in (first, second, third)})
    change_rows(run, {second: {"grad_norm": math.inf}})
    (state,) = run.glob("checkpoints/*/state.json")
    entry = {"step": 2, "policy": "skip", "samples": []}
    state.write_text(json.dumps(json.loads(state.read_text()) | {"not_finite": [entry]}))
    (run / "errors").mkdir()
    (run / "errors" / "rank-1.json").write_text(json.dumps({"message": "out of memory"}))
    (run / "metrics.abandoned.jsonl").write_text('{"step": 2, "loss": 1.0}\n{"step": 3, "loss": 1.0}\n')
    (record,) = read_runs([run])
    texts = {(event.kind, event.step, event.text) for event in record.events}
    assert ("not finite", 2, "grad_norm is inf") in texts
    assert ("skipped step", 2, "faults.non_finite: skip") in texts
    assert ("skipped step", 2, "2 updates skipped since the row before: overflow in fp16") in texts
    assert ("failure", 3, "rank-1: out of memory") in texts
    assert ("trained again", 2, "2 rows of steps 2 to 3: metrics.abandoned.jsonl") in texts


def test_find_events_of_an_earlier_version_finds_resumes_by_their_seconds(tmp_path: Path) -> None:
    run = copy_run("sft_ddp", tmp_path / "run")
    change_rows(run, {1: {"seconds": 0.05}})
    (record,) = read_runs([run])
    assert Event("launch", 1, "resumed; ddp, processes: 2") in record.events


def test_find_events_reads_what_the_run_recorded(tmp_path: Path) -> None:
    run = copy_run("sft", tmp_path / "run")
    folder = RunFolder(run)
    folder.append_event("launch", 0, "fsdp (FSDP), processes: 8, device: cuda:0")
    folder.append_event("checkpoint", 2, "training waited 0.1 s")  # a folder that was deleted since
    folder.append_event("stall", 2, "step 2 has taken 60 s")
    for kind in load_findings.KINDS:
        folder.append_event(kind, 2, "rank 1 on node-b")
    with (run / "events.jsonl").open("a") as file:
        file.write('{"step": 3, "event": "unknown"}\n{"step": 3, "ev')
    (record,) = read_runs([run])
    assert kinds(record.events)[0] == ("launch", 0)
    assert [event.step for event in record.events if event.kind == "checkpoint"] == [2, 3]
    assert [event.text for event in record.events if event.kind == "stall"] == ["step 2 has taken 60 s"]
    assert {event.kind for event in record.events if "node-b" in event.text} == set(load_findings.KINDS)


def test_find_panels_draws_the_load_of_all_ranks_as_one_chart(tmp_path: Path) -> None:
    run = copy_run("sft", tmp_path / "run")
    cpu_of = "load/cpu_percent/rank-{}".format
    change_rows(run, {0: {cpu_of(0): 90.0, cpu_of(1): 30.0}})
    change_rows(run, {2: {cpu_of(0): 60.0, cpu_of(1): math.nan, "load/gpu_power_watts/rank-0": 5}})
    (record,) = read_runs([run])
    panels = {panel.key: panel for panel in find_panels([record])[0] if panel.group == "Devices and host"}
    assert panels.keys() == {"load/cpu_percent", "load/gpu_power_watts"}
    cpu, power = panels["load/cpu_percent"], panels["load/gpu_power_watts"]
    assert cpu.title == "CPU time of a process, in percent of one core"
    assert curve(record, cpu) == ([1, 2], [60.0, 60.0])
    lowest, highest = ("lowest rank", [1, 2], [30.0, 60.0]), ("highest rank", [1, 2], [90.0, 60.0])
    assert extremes(record, cpu) == [lowest, highest]
    assert curve(record, power) == ([2], [5.0]) and extremes(record, power) == []


def test_number_of_values_from_json_never_fails() -> None:
    assert [number(value) for value in (1, 2.5, True, "1", None, [1], {})] == [1.0, 2.5, None, None, None, None, None]
    assert math.isnan(number(10**400) or 0) and number(-math.inf) == -math.inf


def test_find_panels_groups_values_and_leaves_out_digests(tmp_path: Path) -> None:
    run = copy_run("sft", tmp_path / "run")
    change_rows(run, {0: {"train/chats/loss": 1.0, "gpu_utilization": 0.5, "new_value": 3, "text": "x"}})
    panels, left_out = find_panels(read_runs([run]))
    groups = {panel.key: panel.group for panel in panels}
    assert left_out == 0 and list(groups)[:4] == ["loss", "grad_norm", "learning_rate", "train/chats/loss"]
    assert groups["train/chats/loss"] == "Sources, terms and notes" and groups["eval/loss"] == "Evaluation"
    assert groups["tokens_per_second"] == groups["peak_memory_gb"] == "Speed and memory"
    assert groups["gpu_utilization"] == "Devices and host" and groups["new_value"] == "Further values"
    assert not {"samples", "step", "text"} & set(groups)


def test_curve_of_infinite_values_has_gaps(tmp_path: Path) -> None:
    run = copy_run("sft_ddp", tmp_path / "run")
    change_rows(run, {1: {"loss": -math.inf}})
    runs = read_runs([run])
    panel = next(panel for panel in find_panels(runs)[0] if panel.columns == ("loss",))
    steps, values = curve(runs[0], panel)
    assert steps == [1, 2, 3] and [math.isnan(value) for value in values] == [False, True, False]


def test_smooth_of_a_constant_is_the_constant_and_skips_gaps() -> None:
    assert smooth([1.0] * 19) == []
    values = [2.0] * 30
    values[10] = math.nan
    smoothed = smooth(values)
    assert math.isnan(smoothed[10])
    assert smoothed[:10] + smoothed[11:] == pytest.approx([2.0] * 29)


def test_smooth_equals_a_hand_count() -> None:
    values = [3.0, 0.0] * 50  # 100 values: a window of 4, so 2/5 of each new value
    assert smooth(values)[:2] == pytest.approx([3.0, 3.0 * 0.4 * 0.6 / (0.4 * 0.6 + 0.4)])


def test_thin_keeps_peaks_ends_and_gaps() -> None:
    steps = list(range(10_000))
    values = [0.0] * 10_000
    values[1234], values[8765] = 99.0, -99.0
    values[5000:5100] = [math.nan] * 100
    xs, ys = thin(steps, values, 300)
    assert len(xs) <= 300 and xs == sorted(set(xs)) and {0, 1234, 8765, 9999} <= set(xs)
    assert ys[xs.index(1234)] == 99.0 and any(map(math.isnan, ys))
    assert thin(steps[:300], values[:300], 300) == (steps[:300], values[:300])
