"""A user's loop over `ftcli.steps`: left and entered again, recorded, and refused if a key would have no effect."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import ftcli
from ftcli.checkpoint.folder import read_state
from ftcli.config.load import dump_recipe, load_recipe
from ftcli.config.plan import describe_dropped_rows
from ftcli.config.recipe import Recipe
from ftcli.runtime import load_monitor, process_settings
from ftcli.runtime.errors import InputError, RunError
from ftcli.runtime.folder_lock import LOCK
from ftcli.runtime.run_folder import RunFolder
from ftcli.testing import run_on_cpu
from ftcli.training.checkpointing import save_checkpoint
from ftcli.training.final_weights import save_final
from ftcli.training.run import Run

from ..support.cells import cell

STEPS = 6


def recipe(folder: Path, **changes: Any) -> Recipe:
    return cell(folder, "sft-tied", **({"train": {"max_steps": STEPS}} | changes))


def rows_of(loop: Any, until: int = STEPS) -> list[tuple[int, float, int]]:
    """Iterate up to a step and leave the loop there."""
    rows = []
    for step in loop:
        rows.append((step.number, step.loss, step.samples))
        if step.number == until:
            break
    return rows


def streamed(folder: Path) -> dict[str, Any]:
    return {"train": str(folder / "chats.jsonl"), "max_length": 128, "streaming": True}


@pytest.mark.parametrize("is_stream", [False, True])
def test_steps_entered_again_continues_the_curve(is_stream: bool, inputs: Path, tmp_path: Path) -> None:
    what = recipe(inputs, **({"data": streamed(inputs)} if is_stream else {}))
    expected = rows_of(ftcli.steps(ftcli.prepare(what, cpu=True)))
    run = ftcli.prepare(what, cpu=True, output=tmp_path / "run")
    first = rows_of(ftcli.steps(run), until=2)
    saved = save_checkpoint(run, 2)
    second = rows_of(ftcli.steps(run), until=3)
    third = rows_of(ftcli.steps(run))
    assert first + second + third == expected
    assert rows_of(ftcli.steps(run)) == []  # nothing is left
    save_checkpoint(run, STEPS)
    save_final(run)
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()
    assert saved is not None
    assert rows_of(ftcli.steps(ftcli.prepare(what, cpu=True, resume=saved))) == expected[2:]


def test_steps_entered_again_records_the_load_inside_the_loop_only(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_monitor, "SAMPLE_SECONDS", 0.01)
    monkeypatch.setattr(load_monitor, "RECORD_SECONDS", 0.0)
    run = ftcli.prepare(recipe(inputs), cpu=True, output=tmp_path / "run")
    for until in (3, STEPS):
        for step in ftcli.steps(run):
            while not run.load._pending:  # samples for the row of the next step
                time.sleep(0.01)
            if step.number == until:
                break
        assert "ftcli-load" not in {thread.name for thread in threading.enumerate()}
    with_load = {row["step"] for row in RunFolder(tmp_path / "run").metrics() if "load/cpu_percent/rank-0" in row}
    assert {2, 3, 5, 6} <= with_load


def leave_and_enter(folder: Path, output: Path) -> tuple[list[Any], list[Any], int]:
    what = recipe(folder)
    expected = rows_of(ftcli.steps(ftcli.prepare(what, cpu=True)))
    run = ftcli.prepare(what, cpu=True, output=output)
    actual = rows_of(ftcli.steps(run), until=2) + rows_of(ftcli.steps(run))
    saved = save_checkpoint(run, STEPS)
    assert saved is not None
    return expected, actual, read_state(saved)["optimizer_updates"]


@pytest.mark.parametrize("profile", [pytest.param(p, marks=pytest.mark.slow) for p in ("fsdp", "zero3")])
def test_steps_entered_again_on_two_processes_continues_and_is_written_once(
    profile: str, inputs: Path, tmp_path: Path
) -> None:
    for expected, actual, updates in run_on_cpu(leave_and_enter, inputs, tmp_path / "run", profile=profile):
        assert actual == expected and updates == STEPS
    folder = RunFolder(tmp_path / "run")
    assert [row["step"] for row in folder.metrics()] == list(range(1, STEPS + 1))
    assert profile.rstrip("3") in (folder.path / "profile.yaml").read_text().lower().replace("deepspeed", "zero")


def test_steps_of_an_older_loop_after_a_new_one_are_refused(inputs: Path) -> None:
    run = ftcli.prepare(recipe(inputs), cpu=True)
    older = ftcli.steps(run)
    next(older)
    assert next(newer := ftcli.steps(run)).number == 2
    with pytest.raises(RunError, match="another loop over the steps of this run has begun, and 2 steps are done"):
        next(older)
    assert next(newer).number == 3


def interrupt_second_step(run: Run, monkeypatch: pytest.MonkeyPatch, owner: Any, function: str) -> None:
    """Train a step, and interrupt the second one when it calls a function of `owner`."""

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    loop = ftcli.steps(run)
    next(loop)
    with monkeypatch.context() as patch:
        patch.setattr(owner, function, interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(loop)


def test_steps_and_a_save_after_an_interrupted_step_raise_an_error_with_the_reason(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ftcli.prepare(recipe(inputs), cpu=True, output=tmp_path / "run")
    interrupt_second_step(run, monkeypatch, run.task, "loss")
    for use in (lambda: next(ftcli.steps(run)), lambda: save_checkpoint(run, run.position)):
        with pytest.raises(RunError, match=r"step 2 was interrupted before it was complete.*resume=CHECKPOINT"):
            use()


def test_evaluation_after_an_interrupted_step_is_refused_and_not_recorded(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ftcli.prepare(recipe(inputs), cpu=True, output=tmp_path / "run")
    # The weights are those of step 2 by then.
    interrupt_second_step(run, monkeypatch, run.guard, "check_previous_step")
    with pytest.raises(RunError, match="step 2 was interrupted before it was complete"):
        ftcli.evaluate(run)
    assert [row for row in RunFolder(tmp_path / "run").metrics() if "eval/loss" in row] == []


def test_weights_of_a_run_may_be_a_text_and_other_folders_are_refused(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = ftcli.train(recipe(inputs), cpu=True, output=tmp_path / "run")
    expected = ftcli.evaluate(ftcli.prepare(recipe(inputs), cpu=True, weights=trained.final))
    assert ftcli.evaluate(ftcli.prepare(recipe(inputs), cpu=True, weights=str(trained.final))) == expected
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ftcli.evaluate(ftcli.prepare(recipe(inputs), cpu=True, weights="~/run/final")) == expected
    checkpoint = next((trained.path / "checkpoints").iterdir())
    for folder in (trained.path, checkpoint, tmp_path / "nowhere"):
        with pytest.raises(InputError, match=r"(?s)weights: .* has no config.json.*name the folder `final` of a run"):
            ftcli.prepare(recipe(inputs), cpu=True, weights=folder)


def test_save_and_evaluate_without_a_folder_or_rows_are_refused(inputs: Path, tmp_path: Path) -> None:
    what = recipe(inputs, data={"train": str(inputs / "chats.jsonl"), "max_length": 128})
    run = ftcli.prepare(what, cpu=True)
    rows_of(ftcli.steps(run), until=1)
    for save_it in (lambda: save_checkpoint(run, 1), lambda: save_final(run)):
        with pytest.raises(InputError, match=r"(?s)the run has no folder.*ftcli.prepare\(recipe, output=FOLDER\)"):
            save_it()
    with pytest.raises(InputError, match="the recipe has no evaluation rows"):
        ftcli.evaluate(run)
    run = ftcli.prepare(what, cpu=True, output=tmp_path / "run")
    rows_of(ftcli.steps(run), until=2)
    with pytest.raises(InputError, match="save_checkpoint was called for step 1, but the run has done 2 steps"):
        save_checkpoint(run, 1)


def other_rate(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] = 1e-3


def other_decay(run: Run) -> None:
    run.optimizer.param_groups[0]["weight_decay"] = 0.5


def other_groups(run: Run) -> None:
    run.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.1})


def other_optimizer(run: Run) -> None:
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)


def other_model(run: Run) -> None:
    run.model = torch.nn.Linear(1, 1)


def no_model(run: Run) -> None:
    run.model = None  # type: ignore[assignment]  # to free its memory


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (no_model, r"run.model was replaced by another object \(NoneType\)"),
        (
            other_rate,
            "(?s)the learning rate or the parameter groups .*the keys of optimizer and schedule",
        ),
        (other_decay, "the learning rate or the parameter groups of run.optimizer were changed"),
        (other_groups, "the learning rate or the parameter groups of run.optimizer were changed"),
        (other_optimizer, r"(?s)run.optimizer was replaced by another object \(SGD\).*optimizer.name"),
        (other_model, r"(?s)run.model was replaced by another object \(Linear\).*load_model or finish_model"),
    ],
)
def test_steps_refuses_what_it_would_overwrite_or_ignore(change: Any, message: str, inputs: Path) -> None:
    before = ftcli.prepare(recipe(inputs), cpu=True)
    change(before)
    with pytest.raises(InputError, match=message):
        next(ftcli.steps(before))
    meanwhile = ftcli.prepare(recipe(inputs), cpu=True)
    loop = ftcli.steps(meanwhile)
    next(loop)
    change(meanwhile)
    with pytest.raises(InputError, match=message):
        next(loop)


@pytest.mark.parametrize("is_valid", [True, False])
def test_steps_of_a_run_after_another_one_was_prepared_are_refused(is_valid: bool, inputs: Path) -> None:
    run = ftcli.prepare(recipe(inputs, batch={"global_size": 12, "micro_size": 3}), cpu=True)
    loop = ftcli.steps(run)
    next(loop)
    if is_valid:  # it would divide gradients by 1 instead of 4 micro-batches
        other = ftcli.prepare(recipe(inputs, batch={"global_size": 12, "micro_size": 12}), cpu=True)
    else:
        with pytest.raises(InputError, match="nowhere"):
            ftcli.prepare(recipe(inputs, model={"name": str(inputs / "nowhere")}), cpu=True)
    for later in (loop, ftcli.steps(run)):
        with pytest.raises(RunError, match=r"another run was prepared in this process since.*ftcli.save_checkpoint"):
            next(later)
    if is_valid:
        next(ftcli.steps(other))


def test_output_in_the_home_folder_is_written_there(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    next(ftcli.steps(ftcli.prepare(recipe(inputs), cpu=True, output="~/mine")))
    assert (tmp_path / "mine" / "recipe.yaml").is_file()


def test_older_loop_writes_nothing_into_the_folder_of_a_newer_run(inputs: Path, tmp_path: Path) -> None:
    what, folder = recipe(inputs, log={"trackers": ["tensorboard"]}), RunFolder(tmp_path / "run")
    older = ftcli.prepare(what, cpu=True, output=folder.path)
    loop = ftcli.steps(older)
    next(loop)
    save_checkpoint(older, 1)
    newer = ftcli.prepare(what, cpu=True, output=folder.path, resume="auto")
    first = next(ftcli.steps(newer))
    files = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    with pytest.raises(RunError, match="and has its folder: prepare this run again with another output"):
        next(loop)
    assert "loss" in ftcli.evaluate(older)
    with pytest.raises(InputError, match="the folder of this run belongs to a run that was prepared"):
        save_checkpoint(older, 1)
    assert {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()} == files
    assert first.number == 2 and rows_of(ftcli.steps(newer))[-1][0] == STEPS
    assert folder.status()["state"] == "done"


def test_older_run_without_a_loop_can_be_evaluated_after_a_newer_one_took_its_folder(
    inputs: Path, tmp_path: Path
) -> None:
    what = recipe(inputs, log={"trackers": ["tensorboard"]})
    older, newer = (ftcli.prepare(what, cpu=True, output=tmp_path / "run", resume="auto") for _ in range(2))
    assert "loss" in ftcli.evaluate(older)
    assert not list((tmp_path / "run").rglob("events.out.tfevents*"))
    assert len(rows_of(ftcli.steps(newer), until=STEPS + 1)) == STEPS


def test_steps_of_a_finished_run_are_none_also_after_another_one_was_prepared(inputs: Path) -> None:
    run = ftcli.prepare(recipe(inputs), cpu=True)
    assert len(rows_of(ftcli.steps(run), until=STEPS + 1)) == STEPS
    ftcli.prepare(recipe(inputs), cpu=True)
    assert list(ftcli.steps(run)) == []


@pytest.mark.parametrize("is_renamed", [True, False])
def test_run_into_a_folder_that_was_removed_since_the_run_before(
    is_renamed: bool, inputs: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    run = ftcli.prepare(recipe(inputs), cpu=True, output=output)
    next(ftcli.steps(run))
    output.rename(tmp_path / "old") if is_renamed else shutil.rmtree(output)
    run = ftcli.prepare(recipe(inputs), cpu=True, output=output)  # as a cell of a notebook that runs again
    assert len(rows_of(ftcli.steps(run), until=STEPS + 1)) == STEPS
    assert (output / LOCK).exists() and RunFolder(output).status()["state"] == "done"


def test_fork_of_a_process_that_ends_keeps_the_lock_of_its_run(inputs: Path, tmp_path: Path) -> None:
    run = ftcli.prepare(recipe(inputs), cpu=True, output=tmp_path / "run")
    loop = ftcli.steps(run)
    next(loop)
    child = os.fork()
    if child == 0:
        from ftcli.runtime.folder_lock import _BLOCKS

        try:
            assert _BLOCKS[(tmp_path / "run").resolve()] == 1
            for finalizer in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
                if getattr(finalizer.peek()[1], "__self__", None).__class__ is ExitStack:
                    finalizer()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / "run" / LOCK).exists()
    next(loop)


def test_folder_of_an_own_loop_is_locked_until_the_run_is_freed(inputs: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    run = ftcli.prepare(recipe(inputs), cpu=True, output=output)
    command = f"from ftcli.runtime.run_folder import RunFolder\nwith RunFolder({str(output)!r}).locked(): pass"
    refused = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert f"another process trains into {output}: process {os.getpid()} on " in refused.stderr
    run = ftcli.prepare(recipe(inputs), cpu=True, output=output, resume="auto")  # as when a cell runs again
    assert subprocess.run([sys.executable, "-c", command], capture_output=True).returncode == 1
    del run
    assert subprocess.run([sys.executable, "-c", command], capture_output=True).returncode == 0
    held = f"import time\n{command.replace('pass', '')}print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", held], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        with pytest.raises(InputError, match="another process trains into"):
            ftcli.prepare(recipe(inputs), cpu=True, output=output, resume="auto")
        other.kill()


@pytest.mark.parametrize("at", [0, 2])
def test_evaluation_of_an_own_loop_at_a_checkpoint_without_metrics_stays(at: int, inputs: Path, tmp_path: Path) -> None:
    what = recipe(inputs, data=streamed(inputs) | {"streaming": False, "eval": str(inputs / "chats.jsonl")})
    run = ftcli.prepare(what, cpu=True, output=tmp_path / "run")
    if at:
        rows_of(ftcli.steps(run), until=at)
    ftcli.evaluate(run)
    save_checkpoint(run, at)
    before = RunFolder(tmp_path / "run").metrics()
    assert any("eval/loss" in row and row["step"] == at for row in before)
    ftcli.prepare(what, cpu=True, output=tmp_path / "run", resume="auto")
    assert RunFolder(tmp_path / "run").metrics() == before


def test_prepare_waits_for_a_checkpoint_that_an_earlier_run_is_still_writing(inputs: Path, tmp_path: Path) -> None:
    run = ftcli.prepare(recipe(inputs), cpu=True, output=tmp_path / "run")
    rows_of(ftcli.steps(run), until=2)
    may_begin = threading.Event()
    run.saving._thread.submit(may_begin.wait)  # as a slow disk
    save_checkpoint(run, 2, background=True)
    assert not (tmp_path / "run" / "checkpoints" / "step-000002").is_dir()
    threading.Timer(1.0, may_begin.set).start()
    again = ftcli.prepare(recipe(inputs), cpu=True, output=tmp_path / "run", resume="auto")
    assert again.first_step == 2


def test_prepare_with_output_writes_the_files_of_a_run(inputs: Path, tmp_path: Path) -> None:
    what, folder = recipe(inputs, log={"trackers": ["tensorboard"]}), RunFolder(tmp_path / "run")
    run = ftcli.prepare(what, cpu=True, output=folder.path)
    assert dump_recipe(load_recipe(folder.path / "recipe.yaml")) == dump_recipe(what)
    assert {"profile.yaml", "environment.json"} <= {path.name for path in folder.path.iterdir()}
    assert folder.status()["state"] == "loading"
    (left_out,) = describe_dropped_rows(run.recipe, run.plan)
    assert left_out in run.log_lines and left_out in ftcli.check(folder.path / "recipe.yaml").notes
    assert run.plan.rows % run.plan.global_size
    first = rows_of(ftcli.steps(run), until=2)
    saved = save_checkpoint(run, 2)
    metrics = ftcli.evaluate(run)
    assert folder.status()["state"] == "stopped" and "after step 2 of 6" in folder.status()["error"]
    rest = rows_of(ftcli.steps(run))
    assert (folder.status()["state"], folder.status()["step"]) == ("done", STEPS)
    assert [(row["step"], row["loss"], row["samples"]) for row in folder.training_rows()] == first + rest
    assert [row for row in folder.metrics() if "loss" not in row] == [
        {"step": 2} | {f"eval/{name}": value for name, value in metrics.items()}
    ]
    assert list(folder.path.rglob("events.out.tfevents*"))
    with pytest.raises(InputError, match="already holds a run"):
        ftcli.prepare(what, cpu=True, output=folder.path)
    resumed = ftcli.prepare(what, cpu=True, output=folder.path, resume=saved)
    assert [row["step"] for row in folder.training_rows()] == [1, 2]
    assert rows_of(ftcli.steps(resumed)) == rest


def test_steps_with_an_error_writes_status_failed(inputs: Path, tmp_path: Path) -> None:
    run = ftcli.prepare(recipe(inputs), cpu=True, output=tmp_path / "run")
    loop = ftcli.steps(run)
    next(loop)
    other_rate(run)
    with pytest.raises(InputError):
        next(loop)
    status = RunFolder(tmp_path / "run").status()
    assert (status["state"], status["step"], status["exit_code"]) == ("failed", 1, 2)


@pytest.mark.parametrize("is_left", [False, True])
def test_run_that_is_no_longer_used_is_freed_at_once_and_restores_settings(
    is_left: bool, inputs: Path, tmp_path: Path
) -> None:
    run = ftcli.prepare(recipe(inputs), cpu=True, output=tmp_path / "run")
    rows_of(ftcli.steps(run), until=2 if is_left else STEPS)
    save_checkpoint(run, run.position)
    restored: list[bool] = []
    process_settings.on_restore(lambda: restored.append(True))
    del run  # before the garbage collector runs
    assert restored == [True]


KEPT = """
import ftcli

run = ftcli.prepare("recipe.yaml", cpu=True, output="run")
step_iterator = ftcli.steps(run)
for _ in range(3):  # the third one puts objects aside from Python's garbage collection
    next(step_iterator)
"""


@pytest.mark.slow
def test_steps_open_at_interpreter_exit_are_closed(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe(inputs)))
    settings = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", KEPT]
    done = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True)
    assert done.returncode == 0 and "ignored" not in done.stderr and "Traceback" not in done.stderr, done.stderr
    status = RunFolder(tmp_path / "run").status()
    assert (status["state"], status["step"]) == ("stopped", 3)


def test_prepare_refuses_a_recipe_that_cannot_run_on_the_launched_profile(
    inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the check, a rank under FSDP waited forever for embeddings that the other ranks had on their host."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(InputError, match="precision: fp32") as refused:
        model = {"name": str(inputs / "untied"), "embeddings_on_host": True}
        ftcli.prepare(cell(inputs, "sft-lora", model=model), cpu=True)
    assert "embeddings_on_host cannot run on this profile" in str(refused.value)


def refusal(folder: Path, name: str, changes: dict[str, Any]) -> str:
    """Return the message with which `prepare` refuses a cell."""
    try:
        ftcli.prepare(cell(folder, name, **changes), cpu=True)
    except InputError as error:
        return str(error)
    return "not refused"


def test_prepare_refuses_what_the_command_refuses(inputs: Path, tmp_path: Path) -> None:
    sharded = {"model": {"name": str(inputs / "tied"), "shard_frozen": False}}
    messages = run_on_cpu(refusal, inputs, "sft-lora", sharded, profile="fsdp_offload")
    assert all("model.shard_frozen: false cannot run" in message for message in messages), "on every rank"
    tracked = recipe(inputs, log={"trackers": ["trackio"]})
    with pytest.raises(InputError, match="log.trackers: trackio is not installed"):
        ftcli.prepare(tracked, cpu=True, output=tmp_path / "run")
    ftcli.prepare(tracked, cpu=True)  # without a folder nothing is sent
    with pytest.raises(InputError, match="overrides need a recipe file"):
        ftcli.prepare(recipe(inputs), overrides=["train.max_steps=2"], cpu=True)
    with pytest.raises(InputError, match="momentum"):
        ftcli.prepare(recipe(inputs, optimizer={"learning_rate": 5e-3, "momentum": 0.5}), cpu=True)


def test_resume_with_a_recipe_that_gives_another_curve_is_refused(inputs: Path, tmp_path: Path) -> None:
    run = ftcli.prepare(recipe(inputs), cpu=True, output=tmp_path / "run")
    next(iter(ftcli.steps(run)))
    saved = ftcli.save_checkpoint(run, 1)
    other = recipe(inputs, optimizer={"name": "sgd", "learning_rate": 0.1})
    with pytest.raises(InputError, match=r"(?s)optimizer.name: 'adamw' -> 'sgd'.*resume_anyway=True"):
        ftcli.prepare(other, cpu=True, resume=saved)
    assert ftcli.prepare(other, cpu=True, resume=saved, resume_anyway=True).first_step == 1
    assert ftcli.prepare(recipe(inputs), cpu=True, resume=tmp_path / "run").first_step == 1
    assert ftcli.prepare(recipe(inputs), cpu=True, resume="auto", output=tmp_path / "run").first_step == 1
    with pytest.raises(InputError, match='resume="auto" needs `output`'):
        ftcli.prepare(recipe(inputs), cpu=True, resume="auto")


def refused_folder(folder: Path, inputs: Path) -> str:
    """Return the message with which `prepare` refuses a folder."""
    with pytest.raises(InputError) as refused:
        ftcli.prepare(recipe(inputs), cpu=True, output=folder)
    return str(refused.value)


def test_folder_of_another_run_is_refused_on_every_rank(inputs: Path, tmp_path: Path) -> None:
    for _ in ftcli.steps(ftcli.prepare(recipe(inputs), cpu=True, output=tmp_path / "run")):
        pass
    messages = run_on_cpu(refused_folder, tmp_path / "run", inputs, profile="ddp")
    assert len(messages) == 2 and all("already holds a run" in message for message in messages)


def test_interruption_inside_a_step_is_recorded(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ftcli.prepare(recipe(inputs), cpu=True, output=tmp_path / "run")
    loop = ftcli.steps(run)
    next(loop)

    def interrupt(*given: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(run.task, "loss", interrupt)
    with pytest.raises(KeyboardInterrupt):
        next(loop)
    status = RunFolder(tmp_path / "run").status()
    assert (status["state"], status["exit_code"]) == ("stopped", 75)
    assert "interrupted in step 2 of 6" in status["error"]


@pytest.mark.parametrize("reason", ["train.max_minutes", "my reason"])
def test_loop_ends_after_a_step_with_a_stop_request(reason: str, inputs: Path, tmp_path: Path) -> None:
    limit = {} if reason == "my reason" else {"max_minutes": 1e-6}
    run = ftcli.prepare(recipe(inputs, train={"max_steps": STEPS} | limit), cpu=True, output=tmp_path / "run")
    done = []
    for step in ftcli.steps(run):
        done.append(step.number)
        if step.number == 1 and reason == "my reason":
            (tmp_path / "run" / "stop").write_text(reason)
            time.sleep(0.6)  # the file is read twice a second
        if step.stop:
            ftcli.save_checkpoint(run, step.number)
    assert done[-1] < STEPS and "loss" in ftcli.evaluate(run), "an evaluation after the loop is not stopped"
    status = RunFolder(tmp_path / "run").status()
    expected = f"stopped on request after step {done[-1]} of {STEPS} ({reason})"
    assert (status["state"], status["exit_code"], status["error"]) == ("stopped", 75, expected)
    resumed = ftcli.prepare(recipe(inputs), cpu=True, resume="auto", output=tmp_path / "run")
    assert resumed.first_step == done[-1]


def test_second_loop_after_a_stop_file_goes_on(inputs: Path, tmp_path: Path) -> None:
    run = ftcli.prepare(recipe(inputs), cpu=True, output=tmp_path / "run")
    for step in ftcli.steps(run):
        if step.number == 1:
            (tmp_path / "run" / "stop").write_text("")
            time.sleep(0.6)
    assert run.position < STEPS
    assert [step.number for step in ftcli.steps(run)][-1] == STEPS


def stopped_by_the_other_rank(folder: Path, inputs: Path) -> None:
    """Train until the clock of the second rank stops the loop."""
    run = ftcli.prepare(recipe(inputs), cpu=True, output=folder)
    for step in ftcli.steps(run):
        if step.number == 1 and not run.hardware.ranks.is_main:
            run.stop.reason = "train.max_minutes"


def test_stop_of_another_rank_is_told(inputs: Path, tmp_path: Path) -> None:
    run_on_cpu(stopped_by_the_other_rank, tmp_path / "run", inputs, profile="ddp")
    assert RunFolder(tmp_path / "run").status()["error"].startswith("stopped on request after step")
