"""`ftcli trace`: steps divided by hand-computed values, remedies in their order, and text that stays text."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ftcli
from ftcli.config.profile import load_profile
from ftcli.config.recipe import Recipe
from ftcli.launch.trace_files import COOL_DOWN, STEP, WARM_UP
from ftcli.reports.tracing.events import PARTS, break_down, divide, read_events
from ftcli.reports.tracing.merge import of_rank
from ftcli.reports.tracing.page import draw_page
from ftcli.reports.tracing.trace import _setting, explain, shorten
from ftcli.reports.tracing.verdict import Setting, communication_remedies, slowest, verdict
from ftcli.runtime.errors import InputError
from ftcli.runtime.run_folder import RunFolder

from ...support.recipes import minimal_values, recipe_values
from ...support.run_folders import MARKUP, SCRIPT
from .test_report import Elements

MAIN, GLOO = 1, 2
FSDP = Setting(
    gathers_weights=True,
    change_to_gather_once="fsdp_config.fsdp_reshard_after_forward: false",
    processes=2,
    accumulation=4,
    micro_size=2,
    precision="fp32",
    adapter=None,
    evens_rows=False,
    workers=0,
    compiled=False,
    on_gpu=True,
)


def event(name: str, start: float, end: float, kind: str = "cpu_op", thread: int = MAIN, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": kind,
        "name": name,
        "ts": start,
        "dur": end - start,
        "tid": thread,
        "pid": 7,
        "args": args,
    }


def mark(name: str, start: float, end: float, thread: int = MAIN) -> dict[str, Any]:
    return event(name, start, end, "user_annotation", thread)


# One step from 0 to 100 on the CPU. Compute: 10-30 and 40-50. A collective: 25-40, so 5 are hidden and 10 exposed.
# Waiting for ranks: 0-4. Optimizer: 50-70. Rows: 70-80, in which counts are sent that arrive at 95. Idle: the rest.
CPU_STEP = [
    mark(STEP, 0, 100),
    mark("ftcli.phase: waiting for ranks", 0, 4),
    event("aten::mm", 10, 30),
    event("autograd::engine::evaluate_function: AddBackward0", 30, 40),
    event("c10d::allreduce_", 31, 39),
    mark("gloo:all_reduce", 25, 40, GLOO),
    event("aten::mul", 26, 39, thread=GLOO),
    event("MyFunctionBackward", 40, 50),
    mark("ftcli.phase: optimizer", 50, 70),
    event("aten::add_", 55, 60),
    mark("ftcli.phase: loading rows", 70, 80),
    event("aten::stack", 71, 75),
    event("c10d::allreduce_", 78, 79),
    mark("gloo:all_reduce", 79, 95, GLOO),
]
CPU_SHARES = {"compute": 0.25, "hidden": 0.05, "exposed": 0.14, "data": 0.10, "optimizer": 0.20, "idle": 0.26}

# The same on a GPU: kernels at 10-30 and 50-60 (that of the optimizer, started at 5), NCCL at 25-45.
GPU_STEP = [
    mark(STEP, 0, 100),
    mark("ftcli.phase: optimizer", 4, 6),
    mark("ftcli.phase: loading rows", 60, 75),
    event("cudaLaunchKernel", 1, 2, "cuda_runtime", correlation=1),
    event("cudaLaunchKernel", 5, 5.5, "cuda_runtime", correlation=2),
    event("gemm", 10, 30, "kernel", 9, correlation=1),
    event("adamw", 50, 60, "kernel", 9, correlation=2),
    event("ncclDevKernel_AllGather_RING_LL", 25, 45, "kernel", 10, correlation=3),
    event("aten::mm", 0, 90),
    mark("gloo:all_reduce", 0, 100, GLOO),
]


def write_ranks(folder: Path, *traces: list[dict[str, Any]], name: str = "CPU") -> RunFolder:
    """Write the traces and the facts of ranks."""
    folder.mkdir()
    for rank, events in enumerate(traces):
        with gzip.open(folder / f"rank-{rank}.trace.json.gz", "wt") as file:
            json.dump({"traceEvents": events}, file)
        facts = {"rank": rank, "processes": 2, "steps": 1, "accumulation": 1, "micro_size": 3, "compiled": False}
        facts |= {"device": name, "step_seconds": [0.1], "plain_step_seconds": [0.05]}
        (folder / f"rank-{rank}.json").write_text(json.dumps(facts))
    return RunFolder(folder)


def make_recipe(**sections: Any) -> Any:
    from ftcli.config.recipe import Recipe

    return Recipe.model_validate(recipe_values(**sections))


def test_divide_gives_every_moment_to_one_part() -> None:
    shares = divide([(0, 10)], [(1, 4)], [(3, 6)], [(1, 2), (8, 9)], [(5, 8)])
    assert shares == {"hidden": 0.1, "exposed": 0.2, "optimizer": 0.2, "compute": 0.1, "data": 0.2, "idle": 0.2}


def test_break_down_of_a_step_on_the_cpu_has_its_shares() -> None:
    found = break_down(CPU_STEP)
    assert found.shares == pytest.approx(CPU_SHARES) and sum(found.shares.values()) == pytest.approx(1)
    assert (found.on_gpu, found.gather, found.seconds) == (False, 0.0, pytest.approx(100e-6))
    names = [name for name, _, _ in found.top]
    assert names[:2] == ["aten::mm", "gloo:all_reduce"] and not any(
        "c10d" in name or "engine" in name for name in names
    )


def test_break_down_of_a_step_on_a_gpu_uses_its_kernels() -> None:
    found = break_down(GPU_STEP)
    assert found.shares == pytest.approx(
        {"compute": 0.15, "hidden": 0.05, "exposed": 0.15, "data": 0.15, "optimizer": 0.10, "idle": 0.40}
    )
    assert found.on_gpu and found.gather == 1.0 and found.top[0] == ("gemm", pytest.approx(20e-6), 1.0)


def test_break_down_of_a_host_that_waits_for_ranks_while_the_gpu_computes_is_compute() -> None:
    found = break_down([*GPU_STEP, mark("ftcli.phase: waiting for ranks", 10, 20)])
    assert found.shares == pytest.approx(break_down(GPU_STEP).shares)


def test_break_down_of_the_only_process_has_no_wait_for_ranks() -> None:
    events = [mark(STEP, 0, 10), event("aten::mm", 0, 4), mark("ftcli.phase: waiting for ranks", 4, 5)]
    assert break_down(events).shares["exposed"] == pytest.approx(0.1)
    alone = break_down(events, is_alone=True).shares
    assert alone["exposed"] == 0 and alone["idle"] == pytest.approx(0.6)


def test_break_down_leaves_out_counts_that_were_sent_before_the_first_step() -> None:
    found = break_down([*CPU_STEP, mark("gloo:all_reduce", -3, 20, GLOO)])
    assert found.shares == pytest.approx(CPU_SHARES)


def test_break_down_of_nested_operators_lists_their_own_time() -> None:
    events = [mark(STEP, 0, 10), event("aten::linear", 0, 8), event("aten::mm", 1, 6)]
    assert [(name, seconds) for name, seconds, _ in break_down(events).top] == [
        ("aten::mm", pytest.approx(5e-6)),
        ("aten::linear", pytest.approx(3e-6)),
    ]


def test_break_down_without_a_complete_step_says_so() -> None:
    with pytest.raises(ValueError, match="no complete step"):
        break_down([event("aten::mm", 0, 1)])


def test_read_events_of_a_torn_file_names_it(tmp_path: Path) -> None:
    write_ranks(tmp_path / "trace", CPU_STEP)
    path = tmp_path / "trace" / "rank-0.trace.json.gz"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"rank-0.trace.json.gz is not a complete trace"):
        read_events(path)


def test_slowest_of_even_step_times_is_the_rank_that_waits_least() -> None:
    rank, more = slowest({0: CPU_SHARES | {"exposed": 0.4}, 1: CPU_SHARES | {"exposed": 0.1}})
    assert (rank, more) == (1, pytest.approx(0.3))


def test_communication_remedies_are_in_the_order_of_their_gain() -> None:
    shares = [CPU_SHARES | {"exposed": exposed} for exposed in (0.4, 0.5)]
    found = communication_remedies(shares, 0.6, FSDP)
    gains = {remedy.change.split(",")[0].split(" (")[0]: pytest.approx(remedy.gain) for remedy in found}
    assert gains == {
        "recipe: batch.micro_size: 8": 0.30,  # three of four times of 0.4
        "profile: ddp": 0.24,
        "recipe: batch.global_size: twice the value": 0.20,
        "recipe: precision: bf16": 0.20,
        "recipe: adapter.type: lora": 0.16,
        "profile: fsdp_config.fsdp_reshard_after_forward: false": 0.12,
        "recipe: data.group_by_length: true": 0.05,  # the mean waits 0.05 longer than the first rank
    }
    assert [remedy.gain for remedy in found] == sorted((remedy.gain for remedy in found), reverse=True)


@pytest.mark.parametrize(
    ("name", "gathers", "change"),
    [
        ("single", False, None),
        ("ddp", False, None),
        ("zero2", False, None),
        ("zero3", True, None),
        ("fsdp", True, "fsdp_config.fsdp_reshard_after_forward: false"),
    ],
)
def test_gathers_weights_of_shipped_profiles(name: str, gathers: bool, change: str | None) -> None:
    profile = load_profile(name)
    assert (profile.gathers_weights, profile.change_to_gather_once) == (gathers, change)


def test_communication_remedies_of_ddp_with_an_adapter_leave_out_what_does_not_help() -> None:
    ddp = replace(FSDP, gathers_weights=False, change_to_gather_once=None, adapter="lora")
    found = communication_remedies([CPU_SHARES | {"exposed": 0.4}] * 2, 0.0, ddp)
    assert [remedy.change for remedy in found] == ["recipe: batch.global_size: twice the value"]


@pytest.mark.parametrize(("exposed", "has_remedies"), [(0.19, False), (0.21, True)])
def test_verdict_lists_remedies_above_a_fifth_only(exposed: float, has_remedies: bool) -> None:
    lines, remedies = verdict({0: CPU_SHARES | {"exposed": exposed}}, 0.5, FSDP)
    assert bool(remedies) is has_remedies and ("Remedies" in lines[0]) is has_remedies


def test_verdict_of_other_limits_names_their_keys() -> None:
    shares = {"compute": 0.1, "hidden": 0.0, "exposed": 0.0, "data": 0.3, "optimizer": 0.2, "idle": 0.4}
    text = "\n".join(verdict({0: shares}, 0.0, replace(FSDP, processes=1))[0])
    for key in ("data.workers: 2", "model.torch_compile: true", "batch.micro_size: above 2", "batch.global_size"):
        assert key in text, key
    assert "communication" not in text


def test_explain_of_a_rank_that_died_uses_the_others_and_names_it(tmp_path: Path) -> None:
    folder = write_ranks(tmp_path / "trace", CPU_STEP)
    folder.errors.mkdir()
    record = {"rank": 1, "message": "OSError: disk", "exit_code": 1, "time": 0, "traceback": ""}
    (folder.errors / "rank-1.json").write_text(json.dumps(record))
    report = explain("r.yaml", make_recipe(), None, folder, 1)
    assert list(report.ranks) == [0] and report.exit_code == 1 and report.failures == ["rank 1: OSError: disk"]
    assert "failed: rank 1: OSError: disk" in report.lines()


def test_explain_of_a_rank_without_files_and_of_a_torn_trace_names_them(tmp_path: Path) -> None:
    folder = write_ranks(tmp_path / "trace", CPU_STEP)
    assert explain("r", make_recipe(), None, folder, 1).failures == ["rank 1: it ended without rank-1.json"]
    (folder.path / "rank-0.trace.json.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(ftcli.LaunchError, match=r"rank-0.trace.json.gz is not a complete trace"):
        explain("r", make_recipe(), None, folder, 1)


def test_draw_page_of_hostile_names_has_no_element_of_them(tmp_path: Path) -> None:
    hostile = [*CPU_STEP, event(f"aten::{SCRIPT}", 5, 9)]
    folder = write_ranks(tmp_path / "trace", hostile, hostile, name=MARKUP)
    page = draw_page(explain(f"a {MARKUP} recipe", make_recipe(), None, folder, 0))
    found = Elements(page)
    assert found.tags.count("script") == 2 and "img" not in found.tags and "src" not in found.attributes
    assert f"a {MARKUP} recipe" in found.text and f"aten::{SCRIPT}" in found.text and SCRIPT not in found.scripts
    policy = page.partition('Content-Security-Policy" content="')[2].partition('"')[0]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and policy.count("sha256-") == 2


def test_of_rank_moves_times_and_numbers(tmp_path: Path) -> None:
    name = {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}}
    moved = of_rank([name, mark(STEP, 40, 50), event("aten::mm", 42, 43) | {"id": 3}], 1)
    assert moved[0]["args"] == {"name": "rank 1: python"} and moved[0]["pid"] == 1_000_000_007
    assert [item["ts"] for item in moved[1:]] == [0, 2] and moved[2]["id"] == "1/3"


def test_shorten_of_a_recipe_has_the_length_of_the_trace() -> None:
    short = shorten(make_recipe(train={"epochs": 3, "max_minutes": 1}, schedule={"warmup_steps": 100}), 3)
    length = WARM_UP + 3 + COOL_DOWN
    assert (short.train.max_steps, short.train.epochs, short.train.max_minutes) == (length, None, None)
    assert short.schedule.warmup_steps == length


def test_trace_in_a_launched_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(InputError, match="trace launches its own processes"):
        ftcli.trace("smoke/sft")


def test_parts_are_those_of_the_report() -> None:
    assert set(CPU_SHARES) == set(PARTS)


def test_setting_of_a_run_that_was_trained_as_under_ddp_gathers_no_weights() -> None:
    recipe = Recipe.model_validate(minimal_values(model={"name": "m"}, data={"train": "t.jsonl"}))
    facts = {"processes": 2, "accumulation": 2, "micro_size": 1, "compiled": False}
    for replaces, gathers in ((False, True), (True, False)):
        setting = _setting(recipe, load_profile("fsdp"), facts | {"replaces_shards": replaces}, on_gpu=True)
        assert setting.gathers_weights is gathers
        assert (setting.change_to_gather_once is not None) is gathers
