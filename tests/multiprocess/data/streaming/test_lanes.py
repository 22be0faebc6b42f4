"""A streamed run: one curve on any number of processes, and it resumes where it stopped on any other."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from ftcli.checkpoint.folder import read_state
from ftcli.config.recipe import Recipe
from ftcli.loop import steps
from ftcli.runtime.checkpoint_names import checkpoint_path
from ftcli.runtime.errors import InputError
from ftcli.testing import run_on_cpu
from ftcli.training.checkpointing import save_checkpoint
from ftcli.training.resume import recipe_changes
from ftcli.training.setup import prepare
from ftcli.training.step import Step

from ....support.cells import cell, resume_cell, save_cell
from ....support.runner import MakeInputs
from ...test_profile_matrix import assert_same, curve

FILES, ROWS = 4, 30
STEPS = 8
VARIANTS: dict[str, dict[str, Any]] = {"padded": {}, "packed": {"packing": True, "max_length": 512}}


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    folder = make_inputs()
    (folder / "shards").mkdir()
    draw = random.Random(1)
    words = ["alpha", "beta", "gamma", "delta", "eps"]
    for number in range(FILES):
        rows = [
            {
                "ask": " ".join(draw.choices(words, k=4)),
                "completion": " ".join(draw.choices(words, k=draw.randint(4, 9))),
            }
            for _ in range(ROWS)
        ]
        (folder / "shards" / f"{number}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    write_bad_rows(folder)
    return folder


def write_bad_rows(folder: Path) -> None:
    """Write the same shards with four rows that cannot be used: of another type, or empty, and one that is no JSON."""
    (folder / "some-bad").mkdir()
    bad = {(0, 3): '{"ask": "alpha", "completion": [7]}', (1, 20): '{"ask": "alpha", "completion": ""}'}
    bad |= {(2, 11): '{"ask": "alpha", ', (3, 2): '{"ask": "alpha"}'}
    for number in range(FILES):
        rows = (folder / "shards" / f"{number}.jsonl").read_text().splitlines()
        rows = [bad.get((number, row), text) for row, text in enumerate(rows)]
        (folder / "some-bad" / f"{number}.jsonl").write_text("\n".join(rows) + "\n")


def recipe(folder: Path, variant: str = "padded", **changes: Any) -> Recipe:
    source = {"train": str(folder / "shards"), "columns": {"prompt": "ask"}, "streaming": True, "shuffle_buffer": 20}
    data = source | {"max_length": 128, "eval": {"path": str(folder / "chats.jsonl"), "columns": {"prompt": "prompt"}}}
    values: dict[str, Any] = {
        "data": data | VARIANTS[variant] | changes.pop("data", {}),
        "batch": {"global_size": 12, "micro_size": 3},
        "train": {"max_steps": STEPS},
    }
    return cell(folder, "sft-tied", **values | changes)


def curves(folder: Path) -> dict[str, Any]:
    return {name: curve(recipe(folder, name)) for name in VARIANTS}


def packed_curve(folder: Path) -> Any:
    return curve(recipe(folder, "packed"))


@pytest.fixture(scope="module")
def single(inputs: Path) -> dict[str, Any]:
    return curves(inputs)


def saved_and_resumed(folder: Path, output: Path, at: int = 5) -> tuple[Any, Any]:
    saved = save_cell(recipe(folder, "packed"), output, at=(at,))
    return saved, resume_cell(recipe(folder, "packed"), checkpoint_path(output, at))


def resumed_rows(folder: Path, output: Path) -> Any:
    return resume_cell(recipe(folder, "packed"), checkpoint_path(output, 5))["rows"]


@pytest.fixture(scope="module")
def saved(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    output = tmp_path_factory.mktemp("runs") / "run"
    return output, *saved_and_resumed(inputs, output)


def test_stream_gives_the_same_rows_at_every_micro_size_and_from_a_loader_process(inputs: Path, single: Any) -> None:
    assert_same(
        single["padded"], curve(recipe(inputs, data={"workers": 1}, batch={"global_size": 12, "micro_size": 4}))
    )
    assert len({step["samples"] for step in single["padded"]}) == STEPS
    assert single["packed"][0]["rows"] > 12  # documents


def test_resume_of_a_streamed_run_is_bit_exact(saved: tuple[Path, Any, Any]) -> None:
    _, whole, resumed = saved
    assert resumed["rows"] == whole["rows"][5:]
    assert all((resumed["after"][name] == value).all() for name, value in whole["after"].items())


def test_checkpoint_of_a_stream_has_the_cursor_of_every_lane(saved: tuple[Path, Any, Any]) -> None:
    table = read_state(checkpoint_path(saved[0], 5))["stream"]
    assert [row[0] for row in table] == [0, 1, 2, 3]


def test_resume_of_a_stream_with_other_files_is_refused(inputs: Path, saved: tuple[Path, Any, Any]) -> None:
    (inputs / "shards" / "4.jsonl").write_bytes((inputs / "shards" / "0.jsonl").read_bytes())
    try:
        with pytest.raises(InputError, match="the prepared rows are not those"):
            prepare(recipe(inputs, "packed"), cpu=True, resume=checkpoint_path(saved[0], 5))
        with pytest.raises(InputError, match="has no position in this stream"):
            prepare(recipe(inputs, "packed"), cpu=True, resume=checkpoint_path(saved[0], 5), resume_anyway=True)
    finally:
        (inputs / "shards" / "4.jsonl").unlink()


@pytest.mark.parametrize("workers", [0, 1])
def test_unusable_row_of_a_stream_ends_the_run_with_its_file_and_number(
    inputs: Path, tmp_path: Path, workers: int
) -> None:
    rows = [{"prompt": "alpha", "completion": "beta"}] * 300
    rows[270] = {"prompt": "alpha", "completion": [7]}  # type: ignore[dict-item]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    recipe_path = recipe(
        inputs,
        data={"train": str(path), "columns": {}, "shuffle_buffer": 12, "workers": workers},
        train={"max_steps": 30},
    )
    with pytest.raises(InputError, match="row 271 of .*rows.jsonl"):
        curve(recipe_path)


def with_bad_rows(folder: Path, most: int, **changes: Any) -> Recipe:
    return recipe(folder, data={"train": str(folder / "some-bad"), "max_bad_rows": most} | changes.pop("data", {}))


def reading(recipe: Recipe, checkpoint: Path | None = None) -> list[tuple[int, dict[str, int | float]]]:
    """Return (digest of the rows, what was read) of every step; one that has too many unusable rows ends it."""
    run = prepare(recipe, cpu=True, resume=checkpoint)
    assert run.stream is not None
    return [(step.samples, run.stream.metrics()) for step in steps(run)]


def reading_of_bad_rows(folder: Path) -> list[tuple[int, dict[str, int | float]]]:
    return reading(with_bad_rows(folder, 4))


def message_of_too_many(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        reading(with_bad_rows(folder, 3))
    return str(caught.value)


def test_unusable_rows_of_a_stream_within_max_bad_rows_are_skipped_and_counted(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = reading_of_bad_rows(inputs)
    assert whole[-1][1]["bad_rows"] == 4 and whole[0][1]["bad_rows"] < 4
    printed = capsys.readouterr().err
    for fact in (
        "row 4 of .*0.jsonl: ",
        "row 21 of .*1.jsonl: ",
        "row 12 of .*2.jsonl: is not JSON",
        "row 3 of .*3.jsonl: ",
    ):
        assert len(re.findall(rf"left out {fact}", printed)) == 1
    assert "4 rows left out so far (data.max_bad_rows 4)" in printed
    assert reading(with_bad_rows(inputs, 4, data={"workers": 1})) == whole
    save_cell(with_bad_rows(inputs, 4), tmp_path / "run", at=(3,))
    capsys.readouterr()
    for most in (4, 5):  # a run that the bound ended resumes with a higher one
        assert reading(with_bad_rows(inputs, most), checkpoint_path(tmp_path / "run", 3)) == whole[3:]
        resumed = capsys.readouterr().err
        assert len(re.findall("left out row", resumed)) == 4 - whole[2][1]["bad_rows"]
    state = read_state(checkpoint_path(tmp_path / "run", 3))
    assert recipe_changes(state, with_bad_rows(inputs, 5)) == ([], ["data.max_bad_rows: 4 -> 5"])


def test_unusable_rows_of_a_stream_beyond_max_bad_rows_end_the_run(inputs: Path) -> None:
    message = message_of_too_many(inputs)
    assert re.search(
        r"row \d+ of .*some-bad/\d.jsonl: .* \(more than data.max_bad_rows 3 rows cannot be used\)", message
    )


def test_rollback_of_a_stream_skips_the_rows_of_the_bad_step(inputs: Path, tmp_path: Path) -> None:
    path = recipe(inputs, checkpoint={"every_steps": 2}, faults={"non_finite": "rollback"})
    run = prepare(path, cpu=True, output=tmp_path / "run")
    loss, steps_seen = run.task.loss, list[Step]()
    poisoned: list[int] = []

    def poison(model: Any, batch: Any) -> Any:
        value = loss(model, batch)
        is_bad = len(steps_seen) == 4 and not poisoned
        poisoned.extend([1] if is_bad else [])
        return value * float("nan") if is_bad else value

    run.task.loss = poison  # type: ignore[method-assign]
    for step in steps(run):
        steps_seen.append(step)
        if step.number % 2 == 0 and run.guard.check_previous_step():
            save_checkpoint(run, step.number, {})
    numbers = [step.number for step in steps_seen]
    assert numbers == [1, 2, 3, 4, 5, 6, 7, 8] or numbers == [1, 2, 3, 4, 5, 5, 6, 7, 8]
    whole = [one["samples"] for one in curve(recipe(inputs))]
    of_last = {step.number: step for step in steps_seen}
    assert [of_last[n].samples for n in range(1, 9) if n != 5] == [whole[n - 1] for n in range(1, 9) if n != 5]
    assert of_last[5].rows == 0 and len(run.guard.excluded) == 12


def reading_and_the_error(folder: Path) -> tuple[Any, str]:
    return reading_of_bad_rows(folder), message_of_too_many(folder)


@pytest.mark.slow
def test_unusable_rows_of_a_stream_are_the_same_on_every_number_of_processes(inputs: Path) -> None:
    expected = reading_and_the_error(inputs)
    for processes in (2, 3):
        assert run_on_cpu(reading_and_the_error, inputs, processes=processes) == [expected] * processes


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "processes"), [("ddp", 2), ("ddp", 3), ("fsdp", 2), ("zero3", 2)])
def test_stream_on_every_profile_gives_one_curve(inputs: Path, single: Any, profile: str, processes: int) -> None:
    for rank in run_on_cpu(packed_curve, inputs, processes=processes, profile=profile):
        assert_same(single["packed"], rank)


@pytest.mark.slow
def test_resume_of_a_stream_on_another_number_of_processes_gives_the_same_curve(
    inputs: Path, saved: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    expected = [samples for _, _, samples in saved[1]["rows"]]
    actual = run_on_cpu(resumed_rows, inputs, saved[0], processes=2, profile="ddp")
    assert [[samples for _, _, samples in rows] for rows in actual] == [expected[5:]] * 2
    of_two, again = run_on_cpu(saved_and_resumed, inputs, tmp_path / "run", processes=2, profile="ddp")[0]
    assert again["rows"] == of_two["rows"][5:]  # bit for bit on the same world
    assert [samples for _, _, samples in of_two["rows"]] == expected
    assert [samples for _, _, samples in resumed_rows(inputs, tmp_path / "run")] == expected[5:]


def test_check_preview_and_tokenize_describe_a_stream(inputs: Path, tmp_path: Path) -> None:
    from ftcli.cli.prepare_data import tokenize
    from ftcli.config.load import dump_recipe
    from ftcli.reports.check import check
    from ftcli.reports.preview import preview_data

    path = tmp_path / "stream.yaml"
    path.write_text(dump_recipe(recipe(inputs)))
    log_lines = "\n".join(tokenize(path))
    assert "training rows    a stream, tokenized while it is read" in log_lines and "evaluation rows  42" in log_lines
    report = check(path, data=True)
    lines = "\n".join(report.lines())
    assert report.plan.steps == STEPS and report.plan.rows is None
    for fact in ("4 files in 4 lanes", "read from a stream", "shards: prompt and completion"):
        assert fact in lines
    shown = preview_data(path, rows=2)
    assert [row.number for row in shown.rows] == [1, 2]
    text = "\n".join(shown.lines())
    assert "row 1 of shards (the first rows of the stream), not yet shuffled" in text and "an epoch" not in text


def test_train_command_with_streaming_trains_and_resumes(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ftcli.__main__ import main
    from ftcli.config.load import dump_recipe
    from ftcli.runtime.run_folder import RunFolder

    monkeypatch.chdir(tmp_path)
    path, constant = tmp_path / "stream.yaml", {"name": "constant", "warmup_steps": 0}
    path.write_text(dump_recipe(recipe(inputs, schedule=constant, train={"max_steps": 4})))
    for arguments in (["--output", "whole"], ["--output", "two", "--set", "train.max_steps=2"]):
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(["train", str(path), "--cpu", *arguments])
        assert end.value.code == 0
    assert re.search(r"data.train: \d+ rows read, 0.00 passes", capsys.readouterr().err)
    with pytest.raises(SystemExit) as end:
        main(["train", str(path), "--cpu", "--output", "two", "--resume", "auto"])
    assert end.value.code == 0
    whole, two = (RunFolder(tmp_path / name) for name in ("whole", "two"))
    fields = ("loss", "grad_norm", "samples", "items")
    curves = [[[row.get(name) for name in fields] for row in run.metrics() if "loss" in row] for run in (whole, two)]
    assert curves[0] == curves[1] and len(curves[0]) == 4
    first = next(iter(whole.metrics()))
    assert first["epoch"] == 0 and first["rows_read"] > 12 and first["bad_rows"] == 0
    assert (two.final / "config.json").exists() and (two.path / "probe.safetensors").exists()
