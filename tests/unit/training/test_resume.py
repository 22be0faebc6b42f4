"""The start of a run: changes of a recipe that are allowed or reported, and finished runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ftcli import prepare, train
from ftcli.checkpoint.folder import read_state, update_state
from ftcli.config.recipe import Recipe
from ftcli.data.streaming.samples import changed_streams, stream_digests
from ftcli.reports.run_summary import show_run
from ftcli.runtime.checkpoint_names import checkpoint_path
from ftcli.runtime.errors import DiskError, InputError
from ftcli.runtime.folder_lock import LOCK
from ftcli.runtime.run_folder import ORIGIN, RunFolder
from ftcli.runtime.stop import StopRequest
from ftcli.training.resume import belongs_to, check_rows, find_start, is_done, machine_hints, recipe_changes
from ftcli.training.run_start import write_run_inputs

from ...support.cells import cell
from ...support.recipes import minimal_values
from ..checkpoint.test_folder import DATA, write

VALUES: dict[str, Any] = minimal_values(
    model={"name": "m"},
    data={"train": "rows.jsonl", "eval_rows": 2},
    batch={"global_size": 4},
    train={"max_steps": 10},
    schedule={"name": "constant", "warmup_steps": 2},
)


def recipe(**sections: Any) -> Recipe:
    """Return the small recipe with some keys of some sections changed."""
    merged = {k: VALUES.get(k, {}) | v if isinstance(v, dict) else v for k, v in sections.items()}
    return Recipe.model_validate(VALUES | merged)


def save(run: Path, step: int) -> Path:
    written = state(step)
    del written["step"]
    return write(run, step, **written)


def state(step: int = 5, **sections: Any) -> dict[str, Any]:
    written = recipe(**sections).model_dump(mode="json")
    return {"recipe": written, "step": step, "data": {"rows": 40, "fingerprint": "abc"}}


def test_recipe_changes_with_an_unchanged_recipe_changes_nothing() -> None:
    assert recipe_changes(state(), recipe()) == ([], [])


def test_recipe_changes_with_a_checkpoint_from_before_a_key_had_its_default() -> None:
    before = state()
    del before["recipe"]["data"]["chat_template_kwargs"], before["recipe"]["batch"]["micro_size"]
    assert recipe_changes(before, recipe()) == ([], [])


def test_recipe_changes_lists_keys_that_change_the_curve() -> None:
    changed = recipe(
        optimizer={"learning_rate": 2e-3},
        batch={"micro_size": 2},
        seed=3,
        log={"every_steps": 5},
        evaluate={"every_steps": 5},
        checkpoint={"keep": 1},
        output="elsewhere",
        data={"workers": 2},
        train={"max_minutes": 30.0},
        model={"gradient_checkpointing": True, "dropout": 0.5},
    )
    moving, harmless = recipe_changes(state(), changed)
    assert moving == ["seed: 0 -> 3", "model.dropout: None -> 0.5", "optimizer.learning_rate: 0.001 -> 0.002"]
    assert {line.partition(":")[0] for line in harmless} == {
        "batch.micro_size",
        "log.every_steps",
        "evaluate.every_steps",
        "checkpoint.keep",
        "output",
        "data.workers",
        "train.max_minutes",
        "model.gradient_checkpointing",
    }


def test_recipe_changes_with_other_paths_of_prepared_rows_leaves_them_to_the_fingerprint() -> None:
    several = [{"path": "a.jsonl"}, {"path": "b.jsonl", "weight": 2}]
    moved = [{"path": "new/a.jsonl"}, {"path": "b.jsonl", "weight": 3}]
    changes = recipe_changes(state(data={"train": "rows.jsonl"}), recipe(data={"train": "copy/rows.jsonl"}))
    assert changes == ([], ["data.train.path: 'rows.jsonl' -> 'copy/rows.jsonl'"])
    assert recipe_changes(state(data={"train": several}), recipe(data={"train": moved})) == (
        ["data.train.1.weight: 2.0 -> 3.0"],
        ["data.train.0.path: 'a.jsonl' -> 'new/a.jsonl'"],
    )
    streams = {"eval_rows": 0, "streaming": True}  # only the first rows of a stream are compared
    moving, _ = recipe_changes(
        state(data={"train": "rows.jsonl"} | streams), recipe(data={"train": "copy/rows.jsonl"} | streams)
    )
    assert moving == ["data.train.path: 'rows.jsonl' -> 'copy/rows.jsonl'"]


def test_find_start_with_a_stream_at_another_place_compares_its_files(tmp_path: Path) -> None:
    old, new = tmp_path / "rows.jsonl", tmp_path / "copy" / "rows.jsonl"
    new.parent.mkdir()
    for path in (old, new):
        path.write_text("x" * 2**20)
    before, after = (recipe(data={"train": str(path), "eval_rows": 0, "streaming": True}) for path in (old, new))
    data = {"rows": 40, "fingerprint": "abc", "streams": stream_digests(before)}
    checkpoint = write(tmp_path, 5, recipe=before.model_dump(mode="json"), data=data)
    assert (
        find_start(RunFolder(tmp_path), after, "auto") == checkpoint and changed_streams(data["streams"], after) == []
    )
    new.write_text("x" * (2**20 - 1) + "y")
    assert changed_streams(data["streams"], after) == [str(new)]
    with pytest.raises(InputError, match="data.train.path: "):
        find_start(RunFolder(tmp_path), after, "auto")


def test_machine_hints_every_machine_hint_is_found() -> None:
    assert {
        "batch.micro_size",
        "data.workers",
        "model.gradient_checkpointing",
        "model.attn_implementation",
    } <= set(machine_hints(Recipe))


@pytest.mark.parametrize(
    ("schedule", "length", "moves"),
    [
        ({"name": "constant"}, {"max_steps": 20}, False),
        ({"name": "constant"}, {"epochs": 3.0}, False),  # 40 rows, 4 a step: 30 steps
        ({"name": "constant", "warmup_steps": 0.2}, {"max_steps": 20}, True),  # 4 steps of warm-up, not 2
        ({"name": "cosine"}, {"max_steps": 20}, True),
        ({"name": "linear"}, {"epochs": 1.0}, False),  # the same ten steps
        ({"name": "linear", "warmup_steps": 5}, {"max_steps": 20}, False),  # the five steps done were warm-up
    ],
)
def test_recipe_changes_with_a_longer_run_is_harmless_while_the_learning_rates_used_stay(
    schedule: dict[str, Any], length: dict[str, Any], moves: bool
) -> None:
    longer = Recipe.model_validate(VALUES | {"train": length, "schedule": VALUES["schedule"] | schedule})
    moving, harmless = recipe_changes(state(schedule=schedule), longer)
    assert bool(moving) == moves and bool(harmless) != moves


def test_recipe_changes_with_a_run_that_would_end_before_its_checkpoint_is_refused() -> None:
    with pytest.raises(InputError, match="of step 5, but the recipe ends after 4"):
        recipe_changes(state(), recipe(train={"max_steps": 4}))


def test_check_rows_other_rows_are_refused_unless_accepted() -> None:
    check_rows(state(), "abc", anyway=False)
    check_rows(state(), "xyz", anyway=True)
    with pytest.raises(InputError, match="rows are not those"):
        check_rows(state(), "xyz", anyway=False)


def test_resume_auto_starts_without_checkpoints_and_refuses_damaged_ones(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert find_start(folder, recipe(), "auto") is None
    good, bad = save(tmp_path, 5), save(tmp_path, 10)
    assert find_start(folder, recipe(), "auto") == bad
    (bad / DATA).write_bytes(b"")
    assert find_start(folder, recipe(), "auto") == good
    (good / DATA).write_bytes(b"")
    with pytest.raises(InputError, match="no intact checkpoint is left") as caught:
        find_start(folder, recipe(), "auto")
    assert [str(folder / DATA) in str(p) for folder, p in zip((bad, good), caught.value.problems, strict=True)] == [
        True
    ] * 2


def test_resume_from_an_empty_or_a_wrong_name_is_refused(tmp_path: Path, inputs: Path) -> None:
    save(tmp_path, 5)
    for name, what in (("", "--resume is empty"), (str(tmp_path / "no"), f"--resume {tmp_path / 'no'}: not a check")):
        with pytest.raises(InputError) as caught:
            find_start(RunFolder(tmp_path), recipe(), name)
        (problem,) = caught.value.problems
        assert problem.what.startswith(what) and problem.hint.startswith("auto, never, a run folder, or one of its")
    with pytest.raises(InputError, match="--resume is empty"):
        train(cell(inputs, "sft-tied"), output=tmp_path / "run", cpu=True, resume="")
    for name, what in (("", "--resume is empty"), (str(tmp_path / "no"), "not a checkpoint, and not a run")):
        with pytest.raises(InputError, match=what):
            prepare(cell(inputs, "sft-tied"), cpu=True, resume=name)


def test_resume_auto_uses_the_start_checkpoint_until_the_run_has_one(tmp_path: Path) -> None:
    origin, folder = save(tmp_path / "run", 5), RunFolder(tmp_path / "other")
    folder.write_json(ORIGIN, {"checkpoint": str(origin), "step": 5})
    assert find_start(folder, recipe(), "auto") == origin
    own = save(folder.path, 6)
    assert find_start(folder, recipe(), "auto") == own


def test_find_start_with_a_named_checkpoint_is_accepted_or_refused_with_the_file_that_is_damaged(
    tmp_path: Path,
) -> None:
    run, other = tmp_path / "run", RunFolder(tmp_path / "other")
    first, last = save(run, 5), save(run, 10)
    assert find_start(other, recipe(), str(first)) == first
    assert find_start(other, recipe(), str(run)) == last
    assert find_start(other, recipe(), "never") is None
    (first / DATA).unlink()
    with pytest.raises(InputError, match=DATA):
        find_start(other, recipe(), str(first))
    with pytest.raises(InputError, match="not a checkpoint, and not a run"):
        find_start(other, recipe(), str(tmp_path / "nothing"))


def test_find_start_with_a_changed_key_is_refused_unless_accepted(tmp_path: Path) -> None:
    save(tmp_path, 5)
    changed = recipe(optimizer={"learning_rate": 2e-3})
    with pytest.raises(InputError, match=r"optimizer.learning_rate: 0.001 -> 0.002\n.*--resume-anyway"):
        find_start(RunFolder(tmp_path), changed, "auto")
    assert find_start(RunFolder(tmp_path), changed, "auto", anyway=True) == checkpoint_path(tmp_path, 5)


def test_is_done_with_a_run_is_done_at_the_last_step_of_the_recipe_only(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    middle, last = save(tmp_path, 5), save(tmp_path, 10)
    assert not is_done(folder, recipe(), last)
    folder.write_status("done", 10, 0)
    folder.final.mkdir()
    assert is_done(folder, recipe(), last)
    assert not is_done(folder, recipe(), middle)
    assert not is_done(folder, recipe(train={"max_steps": 20}), last)
    assert not is_done(RunFolder(tmp_path / "other"), recipe(), last)


def test_run_folder_rows_beyond_a_checkpoint_are_moved_and_so_is_one_that_was_cut_off(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (0, 1, 2, 2, 3):
        folder.append_metrics({"step": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    folder.rewind(2)
    assert [row["step"] for row in folder.metrics()] == [0, 1, 2, 2]
    assert (tmp_path / "metrics.abandoned.jsonl").read_text() == '{"step": 3}\n{"step": 4, "lo\n'
    folder.rewind(0, from_start=False)
    assert folder.metrics() == [{"step": 0}]
    folder.rewind(0)
    assert folder.metrics() == []
    assert len((tmp_path / "metrics.abandoned.jsonl").read_text().splitlines()) == 6


def test_run_folder_with_an_evaluation_that_the_checkpoint_does_not_know_is_made_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    rows: list[dict[str, Any]] = [{"step": 2, "loss": 1.0}, {"step": 2, "eval/loss": 1.0}]
    for row in [*rows, {"step": 3, "loss": 1.0}]:
        folder.append_metrics(row)
    folder.rewind(2)
    assert folder.metrics() == rows
    folder.rewind(2, evaluated=False)
    assert folder.metrics() == rows[:1]


def test_run_folder_folder_that_another_process_trains_into_is_refused_and_a_dead_one_holds_nothing(
    tmp_path: Path,
) -> None:
    holding = (
        "import sys, time; from ftcli.runtime.run_folder import RunFolder\n"
        "folder = RunFolder(sys.argv[1])\n"
        "with folder.locked(): folder.claim(); print('held', flush=True); time.sleep(60)"
    )
    command, folder = [sys.executable, "-c", holding, str(tmp_path / "run")], RunFolder(tmp_path / "run")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with (
            pytest.raises(InputError, match=f"another process trains into .*: process {holder.pid} on "),
            folder.locked(),
        ):
            raise AssertionError("two processes train into one folder")
        assert (tmp_path / "run" / LOCK).exists()
        holder.kill()
    for _ in range(2):
        with folder.locked():
            folder.claim()
            assert (tmp_path / "run" / LOCK).exists()
        assert list((tmp_path / "run").iterdir()) == []


def test_checkpoints_on_another_disk_are_the_runs_own(tmp_path: Path) -> None:
    save(tmp_path / "disk", 5)
    run, link = tmp_path / "run", tmp_path / "link"
    run.mkdir()
    (run / "checkpoints").symlink_to(tmp_path / "disk" / "checkpoints")
    link.symlink_to(run)
    for folder in (RunFolder(run), RunFolder(link)):
        start = find_start(folder, recipe(), "auto")
        assert start == checkpoint_path(folder.path, 5)
        assert belongs_to(folder, start) and belongs_to(folder, start.resolve())
        assert not belongs_to(RunFolder(tmp_path / "other"), start)


def test_resume_of_a_recipe_of_another_version_names_the_version(tmp_path: Path) -> None:
    folder = save(tmp_path, 5)
    update_state(folder, recipe=read_state(folder)["recipe"] | {"quantum": {"qubits": 3}}, versions={"ftcli": "0.0.7"})
    reason = r"cannot read the recipe of .*\(keys: quantum\)\n.*the version that wrote it: 0.0.7"
    with pytest.raises(InputError, match=reason):
        find_start(RunFolder(tmp_path), recipe(), "auto")


def test_run_folder_with_a_run_with_checkpoints_is_not_taken_for_one_that_never_started(tmp_path: Path) -> None:
    save(tmp_path, 5)
    folder = RunFolder(tmp_path)
    folder.write_status("failed", 0, 1)
    with pytest.raises(InputError, match="already holds a run") as caught:
        folder.claim()
    assert "--resume auto" in str(caught.value)
    folder.claim(resuming=True)


def test_run_folder_refused_at_a_checkpoint_of_another_run_can_be_used_again(tmp_path: Path) -> None:
    start = save(tmp_path / "other", 5)
    folder = RunFolder(tmp_path / "run")
    write_run_inputs(folder, recipe(), None, start, dry_run=False)
    folder.write_status("failed", 5, 2, "other rows")
    folder.claim()
    folder.write_status("failed", 6, 2)
    with pytest.raises(InputError, match="already holds a run"):
        folder.claim()
    write_run_inputs(folder, recipe(), None, None, dry_run=False)
    assert folder.origin() == "", "a run from the beginning does not resume the other run"


def test_run_folder_best_checkpoint_needs_evaluation_rows() -> None:
    best = {"keep_best": {"metric": "loss", "direction": "min"}}
    assert recipe(checkpoint=best).checkpoint.keep_best is not None
    with pytest.raises(ValueError, match="needs evaluation rows"):
        recipe(checkpoint=best, data={"eval_rows": 0})
    asks: dict[str, Any] = {"data": {"eval_rows": 0}, "evaluate": {"generate": {"prompts": ["a"]}}}
    ended = {"keep_best": {"metric": "answers_ended", "direction": "max"}}
    assert recipe(checkpoint=ended, **asks).checkpoint.keep_best is not None
    with pytest.raises(ValueError, match="needs evaluation rows"):
        recipe(checkpoint=best, **asks)


def test_show_run_run_whose_process_was_killed_is_not_shown_as_running(tmp_path: Path) -> None:
    holding = (
        "import sys, time; from ftcli.runtime.run_folder import RunFolder\n"
        "folder = RunFolder(sys.argv[1])\n"
        "with folder.locked():\n"
        "    folder.claim(); folder.write_text('recipe.yaml', ''); folder.write_status('running', 3, 0)\n"
        "    print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", holding, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        assert not [line for line in show_run(tmp_path / "run") if line.startswith("killed")]
        holder.kill()
    assert [
        line
        for line in show_run(tmp_path / "run")
        if line.startswith("killed   its processes ended without recording a reason")
    ]
    (tmp_path / "run" / LOCK).write_text("process 7 on another-machine")
    assert not [line for line in show_run(tmp_path / "run") if line.startswith("killed")]


@pytest.mark.parametrize("target", ["nowhere", "link"])
def test_claim_of_a_run_folder_that_is_a_broken_link_is_refused(target: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "link")
    folder.path.symlink_to(target)
    with pytest.raises(InputError, match="link is a broken link"), folder.locked():
        folder.claim()


def test_run_folder_writes_on_a_full_disk_name_the_file_and_leave_no_partial_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(DiskError, match="metrics.jsonl could not be written: No space left on device"):
        RunFolder(tmp_path).append_metrics({"step": 1})
    (tmp_path / "status.json").mkdir()  # replaced by no file
    with pytest.raises(DiskError, match="status.json could not be written: Is a directory"):
        RunFolder(tmp_path).write_status("running", 1, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "status.json"]


def test_run_folder_cleanup_error_does_not_hide_the_first_error(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(DiskError, match="the first"), folder.locked(), StopRequest.listening(folder):
        folder.claim()
        for path in (tmp_path / LOCK, folder.stop_file):  # folders cannot be unlinked, as nothing on a read-only disk
            path.unlink(missing_ok=True)
            path.mkdir()
        raise DiskError("the first")


def test_export_of_older_final_weights_names_the_newest_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ftcli.checkpoint.export import find_weights

    save(tmp_path, 5)
    (tmp_path / "final").mkdir()
    assert find_weights(tmp_path) == (tmp_path / "final", None) and capsys.readouterr().err == ""
    os.utime(tmp_path / "final", (1, 1))
    assert find_weights(tmp_path) == (tmp_path / "final", None)
    assert f"to export the newest checkpoint, name {checkpoint_path(tmp_path, 5)}" in capsys.readouterr().err
