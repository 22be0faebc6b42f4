"""Runs that stop, fail or are damaged resume as if never interrupted. Tiny models, mostly one process."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ftcli.__main__ import main
from ftcli.checkpoint.folder import read_state, update_state
from ftcli.config.load import load_recipe
from ftcli.data.fingerprints import FORMULA, legacy_fingerprints
from ftcli.data.revisions import resolve
from ftcli.launch.worker import evaluate_run
from ftcli.loop import steps
from ftcli.runtime.checkpoint_names import checkpoints_of
from ftcli.runtime.errors import InputError
from ftcli.runtime.run_folder import RunFolder
from ftcli.tasks.build import build_task
from ftcli.testing import run_on_cpu
from ftcli.training.checkpointing import save_checkpoint
from ftcli.training.final_weights import save_final
from ftcli.training.own_loop import prepare
from ftcli.training.setup import _Start

from ..support.cells import cell
from ..support.recipes import recipe_values
from ..support.run_folders import stable_metrics
from ..support.runner import MakeInputs, RunCli

RECIPE = recipe_values(
    "./troubled.py",
    batch={"global_size": 6, "micro_size": 6},
    train={"max_steps": 8},
    schedule={"name": "cosine", "warmup_steps": 2},
    evaluate={"every_steps": 2, "at_start": True},
    checkpoint={"every_steps": 2},
)
# A step is one micro-batch here: the task stops or fails its own run at the steps that the environment names.
TROUBLED_TASK = """
import os, signal
from ftcli.tasks import sft

Options = sft.Options

class Task(sft.Task):
    calls = 0

    def loss(self, model, batch):
        self.calls += 1
        if str(self.calls) in os.environ.get("STOP_AT", "").split():
            os.kill(os.getpid(), signal.SIGTERM)
        if str(self.calls) == os.environ.get("FAIL_AT"):
            raise ArithmeticError("a fault")
        return super().loss(model, batch)
"""
Ftcli = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    return make_inputs({"troubled.py": TROUBLED_TASK, "recipe.yaml": RECIPE})


@pytest.fixture
def ftcli(inputs: Path, monkeypatch: pytest.MonkeyPatch, run_cli: RunCli) -> Ftcli:
    """Return a function that runs one command line in this process and gives (exit code, all output)."""
    monkeypatch.chdir(inputs)

    def run(*arguments: object, **trouble: str) -> tuple[int, str]:
        ended = run_cli(*arguments, **trouble)
        return ended.code, ended.text

    return run


@pytest.fixture
def train(ftcli: Ftcli) -> Ftcli:
    def run(output: Path, *arguments: object, **trouble: str) -> tuple[int, str]:
        return ftcli("train", "recipe.yaml", "--output", output, *arguments, **trouble)

    return run


@pytest.fixture(scope="module")
def never_stopped(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "run"
    before = Path.cwd()
    os.chdir(inputs)
    with pytest.raises(SystemExit) as end:
        main(["train", "recipe.yaml", "--output", str(run)])
    os.chdir(before)
    assert not end.value.code
    return run


@pytest.fixture
def finished(never_stopped: Path, tmp_path: Path) -> Path:
    """Return a copy of the finished run, to be spoiled."""
    return Path(shutil.copytree(never_stopped, tmp_path / "run"))


def assert_same_run(actual: Path, expected: Path) -> None:
    assert stable_metrics(actual) == stable_metrics(expected)
    weights = "final/model.safetensors"
    assert (actual / weights).read_bytes() == (expected / weights).read_bytes()
    assert RunFolder(actual).status()["state"] == "done"


def saved_steps(run: Path) -> list[int]:
    return [read_state(folder)["step"] for folder in checkpoints_of(run)]


def test_resume_of_a_run_stopped_twice_is_bit_exact(train: Ftcli, never_stopped: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, output = train(run, STOP_AT="3")
    assert code == 75 and "stopped on request after step" in output
    stopped = RunFolder(run).status()["step"]
    assert stopped == 3 and saved_steps(run)[-1] == stopped
    code, output = train(run, "--resume", "auto", STOP_AT="2")
    assert code == 75 and f"resumed after step {stopped}" in output
    code, output = train(run, "--resume", "auto")
    assert code == 0, output
    assert_same_run(run, never_stopped)
    assert saved_steps(run)[-1] == 8
    assert not (run / "metrics.abandoned.jsonl").exists()


def test_resume_sets_metrics_after_the_checkpoint_aside_and_repeats_the_steps(
    train: Ftcli, never_stopped: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    code, output = train(run, FAIL_AT="6")
    assert code == 1 and "a fault" in output and saved_steps(run) == [2, 4]
    assert [row["step"] for row in stable_metrics(run)][-1] == 5
    code, output = train(run, "--resume", "auto")
    assert code == 0, output
    assert_same_run(run, never_stopped)
    assert saved_steps(run) == [6, 8]
    assert '{"step": 5, "loss"' in (run / "metrics.abandoned.jsonl").read_text()


def test_resume_auto_of_a_run_without_a_checkpoint_restarts(train: Ftcli, never_stopped: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(run, FAIL_AT="2")[0] == 1
    code, output = train(run, "--resume", "auto")
    assert code == 0, output
    assert_same_run(run, never_stopped)


def test_train_into_a_folder_with_a_run_is_refused_and_names_resume_auto(train: Ftcli, finished: Path) -> None:
    code, output = train(finished)
    assert code == 2 and "already holds a run" in output and "--resume auto" in output


def test_resume_of_a_checkpoint_that_does_not_exist_lists_the_others(train: Ftcli, finished: Path) -> None:
    code, output = train(finished, "--resume", str(finished / "checkpoints" / "step-000099"))
    assert code == 2 and "there is no such checkpoint" in output and "has step-00000" in output


def test_resume_of_a_finished_run_changes_nothing(train: Ftcli, finished: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in finished.rglob("*")}
    code, output = train(finished, "--resume", "auto", "--set", "log.every_steps=2")
    assert code == 0 and "is done at step 8: nothing is left to resume" in output
    assert {file: file.stat().st_mtime_ns for file in finished.rglob("*")} == before


def test_resume_of_a_run_killed_before_its_final_weights_writes_them(
    train: Ftcli, finished: Path, never_stopped: Path
) -> None:
    final, notes = (finished / "final").rename(finished / "final.tmp"), "notes.txt"
    shutil.copytree(final, finished / "final")
    half = finished / "checkpoints" / "step-000009.tmp"
    half.mkdir()
    for folder in (final, finished / "final", half):
        (folder / notes).write_text("mine")
    RunFolder(finished).write_status("running", 8, 0)
    code, output = train(finished, "--resume", "auto")
    assert code == 0, output
    assert_same_run(finished, never_stopped)
    places = [finished / "not-by-ftcli-final.tmp", finished / "not-by-ftcli-final"]
    for place in [*places, half.with_name(f"not-by-ftcli-{half.name}")]:  # what ftcli did not write is all that is left
        assert [path.name for path in place.iterdir()] == [notes] and f"it was moved to {place}" in output
    assert not half.exists() and not (finished / "final" / notes).exists() and not final.exists()


def test_resume_of_a_damaged_checkpoint_names_the_file_and_auto_falls_back(
    train: Ftcli, finished: Path, never_stopped: Path
) -> None:
    newest = checkpoints_of(finished)[-1]
    file = next(newest.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    code, output = train(finished, "--resume", newest)
    assert code == 2 and f"{file} is damaged" in output
    code, output = train(finished, "--resume", "auto")
    assert code == 0, output
    assert f"{file} is damaged" in output and "falling back to" in output and "step-000006" in output
    assert_same_run(finished, never_stopped)
    assert not list((finished / "checkpoints").glob("abandoned*"))


def test_resume_with_a_changed_key_is_refused_until_accepted(train: Ftcli, finished: Path) -> None:
    changes = ("--set", "optimizer.weight_decay=0.5", "--set", "log.every_steps=2", "--set", "train.max_steps=10")
    before = (finished / "metrics.jsonl").read_text()
    code, output = train(finished, "--resume", "auto", *changes)
    assert code == 2 and "optimizer.weight_decay: 0.0 -> 0.5" in output and "train.max_steps: 8 -> 10" in output
    assert "error: resuming" in output and "log.every_steps" not in output
    assert (finished / "metrics.jsonl").read_text() == before
    recipe = (finished / "recipe.yaml").read_text()
    code, output = train(finished, "--resume", "auto", "--resume-anyway", *changes, "--set", "adapter.type=lora")
    assert code == 2 and "is of another model" in output
    assert (finished / "recipe.yaml").read_text() == recipe  # that of the weights which are there
    code, output = train(finished, "--resume", "auto", "--resume-anyway", *changes)
    assert code == 0, output
    assert "log.every_steps: 1 -> 2" in output
    assert saved_steps(finished) == [8, 10] and RunFolder(finished).status()["step"] == 10
    assert (finished / "final" / "model.safetensors").is_file()


def test_resume_with_other_rows_is_refused_until_accepted(train: Ftcli, finished: Path, inputs: Path) -> None:
    rows = inputs / "chats.jsonl"
    before = rows.read_text()
    rows.write_text(before.replace("alpha", "omega", 1))
    more = ("--set", "train.max_steps=9", "--set", "schedule.name=constant", "--resume-anyway")
    code, output = train(finished.parent / "new", "--resume", finished)
    refused = code == 2 and "rows are not those" in output
    code, output = train(finished.parent / "newer", "--resume", finished, *more)
    rows.write_text(before)
    assert refused and code == 0, output


def test_resume_of_a_checkpoint_without_formula_accepts_its_own_rows_only(
    train: Ftcli, finished: Path, never_stopped: Path, inputs: Path
) -> None:
    shutil.rmtree(checkpoints_of(finished)[-1])
    (before,) = [folder for folder in checkpoints_of(finished) if read_state(folder)["step"] == 6]
    recipe = load_recipe(inputs / "recipe.yaml")
    legacy = legacy_fingerprints(recipe, build_task(recipe))
    data = read_state(before)["data"]
    facts = {key: data[key] for key in ("rows", "facts")}  # all that 2f09857 wrote beside the fingerprint
    update_state(before, data={"fingerprint": "0" * 32} | facts)
    code, output = train(finished, "--resume", "auto")
    assert code == 2 and "rows are not those that the checkpoint was trained on" in output
    update_state(before, data={"fingerprint": legacy[-1]} | facts)
    code, output = train(finished, "--resume", "auto")
    assert code == 0, output
    assert_same_run(finished, never_stopped)
    assert read_state(checkpoints_of(finished)[-1])["data"]["formula"] == FORMULA


def test_resume_of_an_adapter_with_another_base_is_refused(train: Ftcli, inputs: Path, tmp_path: Path) -> None:
    run, base = tmp_path / "run", Path(shutil.copytree(inputs / "tied", tmp_path / "base"))
    given = ("--set", "adapter.type=lora", "--set", f"model.name={base}", "--resume", "auto")
    assert train(run, *given, STOP_AT="2")[0] == 75
    file = base / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-2] + bytes([content[-2] ^ 0x40, content[-1]]))
    code, output = train(run, *given)
    assert code == 2 and f"the frozen weights of {base} are not those" in output and " then (of " in output
    copy = shutil.copytree(run, tmp_path / "copy")
    code, output = train(copy, *given, "--resume-anyway", STOP_AT="1")
    assert code == 75, output
    file.unlink()
    weights = safetensors.torch.load(content)
    torch.save(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}, base / "pytorch_model.bin")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"use_cache": False, "about": "the same model"}))
    base.rename(tmp_path / "moved")  # the same model in another format at another place
    code, output = train(run, *given[:3], f"model.name={tmp_path / 'moved'}", *given[4:], STOP_AT="1")
    assert code == 75 and f"model.name: '{base}' -> '{tmp_path / 'moved'}'" in output, output


def test_resume_with_another_image_processor_is_refused_until_accepted(inputs: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(inputs / "vit", tmp_path / "vit"))
    recipe = cell(inputs, "vit", model={"name": str(model)})
    run = prepare(recipe, cpu=True, output=tmp_path / "run")
    next(iter(steps(run)))
    checkpoint = save_checkpoint(run, 1)
    settings = json.loads((model / "preprocessor_config.json").read_text())
    (model / "preprocessor_config.json").write_text(json.dumps(settings | {"image_mean": [0.1, 0.1, 0.1]}))
    with pytest.raises(InputError, match=r"the image processor of .*vit is not the one of the run \(image_mean: "):
        prepare(recipe, cpu=True, resume=checkpoint)
    again = prepare(recipe, cpu=True, resume=checkpoint, resume_anyway=True)
    assert again.first_step == 1
    assert any("resuming with another base: the image processor of" in line for line in again.log_lines)
    state, folder = read_state(checkpoint), tmp_path / "run"
    start = _Start(recipe, resolve(recipe, state), None, {}, checkpoint, state)  # the model was downloaded only now
    with pytest.raises(InputError, match="the image processor of .*vit is not the one of the run"):
        start.checked_base(anyway=False)
    assert start.checked_base(anyway=True) is not None
    save_final(run)
    with pytest.raises(InputError, match=r"the image processor of .*vit is not the one of the run \(image_mean: "):
        evaluate_run(folder, cpu=True)


def test_resume_with_other_evaluation_rows_is_refused_until_accepted_and_leaves_training_steps_unchanged(
    train: Ftcli, inputs: Path, tmp_path: Path
) -> None:
    rows, evaluated = (inputs / "chats.jsonl").read_text().splitlines(keepends=True), tmp_path / "eval.jsonl"
    given = ("--set", "data.eval_rows=0", "--set", f"data.eval={evaluated}", "--resume", "auto")
    evaluated.write_text("".join(rows[:6]))
    assert train(tmp_path / "6", *given, STOP_AT="4")[0] == 75
    for count in (3, 9):
        shutil.copytree(tmp_path / "6", tmp_path / f"{count}")
        evaluated.write_text("".join(rows[:count]))
        code, output = train(tmp_path / f"{count}", *given)
        assert code == 2 and "rows are not those that the checkpoint was trained on" in output
        code, output = train(tmp_path / f"{count}", *given, "--resume-anyway")
        assert code == 0 and f", {count} for evaluation" in output, output
    evaluated.write_text("".join(rows[:6]))
    assert train(tmp_path / "6", *given)[0] == 0
    trained = [RunFolder(tmp_path / name).training_rows() for name in ("3", "6", "9")]
    losses = [[(row["step"], row["loss"], row["samples"]) for row in run_rows] for run_rows in trained]
    assert losses[0] == losses[1] == losses[2] and len(losses[0]) == 8


def test_keep_best_retains_the_best_beside_the_newest(train: Ftcli, tmp_path: Path) -> None:
    best = ("--set", "checkpoint.keep=1", "--set", "checkpoint.keep_best.direction=max")
    code, output = train(tmp_path / "run", *best, "--set", "checkpoint.keep_best.metric=loss")
    assert code == 0, output
    assert saved_steps(tmp_path / "run") == [2, 8]  # the largest loss is that of the first evaluation that is saved
    code, output = train(tmp_path / "wrong", *best, "--set", "checkpoint.keep_best.metric=accuracy")
    assert code == 2 and "no metric accuracy" in output and "perplexity" in output


def test_show_lists_checkpoints_of_a_run_and_contents_of_a_checkpoint(ftcli: Ftcli, finished: Path) -> None:
    first, last = checkpoints_of(finished)
    code, output = ftcli("show", last)
    assert code == 0
    for expected in (
        "step             8 of 8, 8 optimizer updates\n",
        "trains           ./troubled.py of tied, adapter none\n",
        "no profile: NO, 1 process\n",
        "eval/perplexity  ",
        "  learning_rate: 0.005\n",
        "\n  model.norm.weight [32]\n",
        "\n  model.layers.*.mlp.up_proj.weight [63, 32], 2 times\n",
    ):
        assert expected in output
    code, output = ftcli("show", finished)
    assert code == 0 and f"saved    {first}" in output and f"saved    {last}" in output
    next(last.glob("*.safetensors")).unlink()
    code, output = ftcli("show", last)
    assert code == 0 and "damaged" in output and "is missing" in output


def test_train_with_too_little_disk_is_refused_before_the_first_step(
    train: Ftcli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real._replace(free=1_000_000))  # 27 thousand weights
    code, output = train(tmp_path / "enough", "--set", "train.max_steps=2")
    assert code == 0, output
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real._replace(free=600_000))
    code, output = train(tmp_path / "run")
    assert code == 2 and "3 checkpoints of" in output and "do not fit" in output
    assert RunFolder(tmp_path / "run").metrics() == []


def resume_here(inputs: Path, output: Path, checkpoint: Path) -> None:
    """Resume on this rank of several with smaller micro-batches, as a process of a bare launch does."""
    from ftcli.launch import launcher

    os.chdir(inputs)
    overrides = ["batch.micro_size=1"]
    launcher.train("recipe.yaml", output=output, resume=str(checkpoint), overrides=overrides, cpu=True)


def test_resume_with_another_profile_processes_micro_size_and_folder_gives_the_same_curve(
    train: Ftcli, never_stopped: Path, inputs: Path, tmp_path: Path
) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    assert train(run, STOP_AT="3")[0] == 75
    stopped = RunFolder(run).status()["step"]
    run_on_cpu(resume_here, inputs, other, checkpoints_of(run)[-1], profile="fsdp")
    expected = [row for row in stable_metrics(never_stopped) if row["step"] > stopped]
    actual = stable_metrics(other)
    assert [row["step"] for row in actual] == [row["step"] for row in expected]
    for a, b in zip(expected, actual, strict=True):
        assert b == pytest.approx(a, rel=1e-5)
    assert saved_steps(other) == [6, 8]


def test_resume_anyway_with_fewer_rows_does_not_begin_behind_the_end(inputs: Path, tmp_path: Path) -> None:
    lines = (inputs / "chats.jsonl").read_text().splitlines()
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines[:36]) + "\n")
    changes = {"data": {"train": str(path), "max_length": 128}, "train": {"epochs": 2}}
    recipe = cell(inputs, "sft-tied", **changes)
    run = prepare(recipe, cpu=True, output=tmp_path / "run")
    for step in steps(run):
        if step.number == 5:
            checkpoint = save_checkpoint(run, 5)
            break
    path.write_text("\n".join(lines[:24]) + "\n")
    with pytest.raises(InputError, match="the checkpoint is of step 5, but the recipe ends after 4"):
        prepare(recipe, cpu=True, resume=checkpoint, resume_anyway=True)


def test_checkpoint_of_a_stream_has_the_digest_of_the_files_with_which_the_run_began(
    inputs: Path, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text((inputs / "chats.jsonl").read_text())
    recipe = cell(inputs, "sft-tied", data={"train": str(path), "streaming": True, "max_length": 128})
    run = prepare(recipe, cpu=True, output=tmp_path / "run")
    next(iter(steps(run)))
    path.write_text(path.read_text().replace("alpha", "gamma"))  # of the same size
    checkpoint = save_checkpoint(run, 1)
    with pytest.raises(InputError, match="rows.jsonl are not those that the checkpoint was trained on"):
        prepare(recipe, cpu=True, resume=checkpoint)
