"""Train or evaluate a run in one process. Every form of launch calls this module.

    claim the folder -> listen for stop requests -> write recipe and profile -> prepare -> check the world -> train

setup.py builds the `Run`, and loop.py has the steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.checkpoint.folder import newest_intact, read_state
from ftcli.config.load import load_run_recipe
from ftcli.config.recipe import Recipe
from ftcli.config.recipe_model import NO_MODEL
from ftcli.config.recipe_training import ANSWER_METRICS
from ftcli.runtime.checkpoint_names import step_of
from ftcli.runtime.errors import InputError
from ftcli.runtime.failures import record_failure, watch_parent, watch_peers
from ftcli.runtime.heartbeat import Heartbeat
from ftcli.runtime.load_monitor import LoadMonitor
from ftcli.runtime.log import log_line
from ftcli.runtime.process import current_rank, has_ftcli_parent, world_size
from ftcli.runtime.run_folder import START, RunFolder
from ftcli.runtime.stop import Stopped, StopRequest, record_early_stop
from ftcli.runtime.torn_files import read_object
from ftcli.tasks.protocol import properties_of
from ftcli.training.resume import belongs_to
from ftcli.training.run import Run
from ftcli.training.run_start import rewind_run_folder, write_run_inputs
from ftcli.training.setup import prepare

if TYPE_CHECKING:
    from ftcli.config.profile import Profile


def work(
    recipe: Recipe,
    profile: Profile | None,
    *,
    output: Path,
    cpu: bool = False,
    dry_run: bool = False,
    record_start: bool = False,
    resuming: bool = False,
    start: Path | None = None,
    resume_anyway: bool = False,
) -> None:
    """Train as one process of a run, from the claimed folder to the final weights. A collective.

    Args:
        recipe: The recipe.
        profile: The profile of the launch; None without one.
        output: The run folder.
        cpu: Train on the CPU, even on a machine with GPUs.
        dry_run: Train two steps and evaluate one batch.
        record_start: Write a digest of every trained weight before the first step to start.json.
        resuming: Whether the folder may hold earlier steps of the run. Only used if this process claims the folder.
        start: The checkpoint to resume from.
        resume_anyway: Resume also with rows that give another loss curve.

    Raises:
        InputError: Recipe, data, model, checkpoint or folder are wrong.
        RuntimeError: Accelerate started another backend than the profile's.
    """
    from ftcli.loop import train

    folder = RunFolder(output)
    is_main = current_rank() == 0
    has_parent = has_ftcli_parent()  # a parent ftcli has claimed the folder
    if is_main and not has_parent:
        folder.claim(
            resuming=resuming
        )  # before failures are recorded, so that a refusal writes nothing into another run
    is_alone = not has_parent and world_size() == 1
    with (
        record_failure(folder),
        Heartbeat(folder) as heart,
        LoadMonitor(folder) as load,
        StopRequest.listening(folder) as stop,
    ):
        watch_parent()
        watch_peers(folder)
        try:
            with stop.raise_on_signal() if is_alone else nullcontext():
                continues_folder = start is not None and belongs_to(folder, start)
                if is_main:
                    folder.write_status("loading", 0 if start is None else step_of(start), 0)
                    if not continues_folder:  # else the stored recipe stays until the checkpoint is loaded
                        write_run_inputs(folder, recipe, profile, start, dry_run=dry_run)
                run = prepare(
                    recipe, output=output, cpu=cpu, dry_run=dry_run, resume=start, resume_anyway=resume_anyway
                )
                run.heartbeat, run.load = heart, load
                check_world(run, profile)
                if run.hardware.ranks.is_main:
                    write_run_inputs(folder, run.resolved.applied_to(recipe), profile, start, dry_run=dry_run)
                    rewind_run_folder(run, folder)
                if record_start:
                    _record_start(run, folder)
        except Stopped:
            record_early_stop(folder, stop.reason)
            return
        run.stop = stop
        train(run)
        run.hardware.close()


def evaluate_run(
    path: str | Path, profile: Profile | None = None, *, cpu: bool = False, trust_remote_code: bool = False
) -> dict[str, float]:
    """Evaluate the final weights of a run on its recipe's evaluation rows, and write evaluation.json. A collective.

    Args:
        path: The run folder.
        profile: The profile of the launch; None without one.
        cpu: Evaluate on the CPU, even on a machine with GPUs.
        trust_remote_code: Run Python code of the model or the task.

    Returns:
        The metrics by name.

    Raises:
        InputError: The run has no evaluation rows or no final weights, or needs code that is not trusted.
    """
    from ftcli.checkpoint.final import check_base
    from ftcli.models.trained_on import ENVIRONMENT, check_trained_on, trained_on
    from ftcli.training.evaluation import evaluate
    from ftcli.training.evaluation_drawings import write_drawings

    folder = RunFolder(path)
    with record_failure(folder):
        watch_parent()
        watch_peers(folder)
        recipe = load_run_recipe(folder.path, trust_remote_code=trust_remote_code)
        if recipe.data.eval is None and not recipe.data.eval_rows:
            raise InputError("the recipe has no evaluation rows", hint="set data.eval or data.eval_rows")
        if not folder.final.is_dir():
            raise InputError(f"{folder.path} has no final weights", hint="`ftcli show RUN` prints its state")
        check_base(folder, recipe)
        rows_only = recipe.evaluate.model_copy(update={"generate": None})  # without answering prompts
        stored = read_object(folder.path / ENVIRONMENT) or {}
        if recipe.model.name != NO_MODEL:  # rows are encoded by the processor of the base
            name, revision = recipe.model.name, recipe.model.revision
            hint = "restore the old model"
            check_trained_on(trained_on(folder.path), name, revision, hint=hint, parts=("processor",))
        run = prepare(recipe.model_copy(update={"evaluate": rows_only}), cpu=cpu, weights=folder.final)
        if run.hardware.ranks.is_main:
            _warn_of_other_rows(run, stored.get("trained_on") or {})
        _use_facts_of_training(run, folder)
        check_world(run, profile)
        metrics = evaluate(run)
        write_drawings(run, folder, "final")
        if run.hardware.ranks.is_main:
            folder.write_json("evaluation.json", metrics)
        run.hardware.close()
    return metrics


def _warn_of_other_rows(run: Run, stored: Mapping[str, Any]) -> None:
    """Log that evaluation rows are not those of the training run, if it recorded which these were."""
    before, now = stored.get("rows", {}).get("eval"), run.rows.digests.get("eval")
    if before is not None and before != now:
        log_line(
            "warning: the evaluation rows are not those of the run, so the metrics cannot be compared: "
            f"a source, the tokenizer of {run.recipe.model.name} or ftcli's own encoding has changed"
        )


def _use_facts_of_training(run: Run, folder: RunFolder) -> None:
    """Give the task what it learned from the rows that were trained on, from the newest checkpoint of the run."""
    task: Any = run.task
    if not hasattr(task, "use_facts"):
        return
    checkpoint = newest_intact(folder.path, hashes=False)[0]
    facts = None if checkpoint is None else read_state(checkpoint)["data"]["facts"]  # None in older versions
    if facts is not None:
        task.use_facts(facts)
    elif run.hardware.ranks.is_main and "class_weights" in run.rows.facts:
        log_line("the run has no checkpoint with class weights, so they are those of today's training rows")


def check_world(run: Run, profile: Profile | None) -> None:
    """Raise `RuntimeError` if the backend is not the profile's. Accelerate does not always report a difference."""
    if profile is None:
        return
    real = run.hardware.distributed_type.replace("MULTI_CPU", "MULTI_GPU")
    expected = profile.distributed_type
    if real != expected and not (run.plan.processes == 1 and {real, expected} == {"NO", "MULTI_GPU"}):
        raise RuntimeError(
            f"profile {profile.name} asks for {expected}, but Accelerate started {run.hardware.distributed_type} "
            f"on {run.plan.processes} processes; start it with: ftcli train RECIPE --profile {profile.name}"
        )


def _record_start(run: Run, folder: RunFolder) -> None:
    """Write digests of the trained weights, and facts for `parity`, to start.json.

    A collective, which gathers one weight at a time.
    """
    import torch

    from ftcli.models.load import largest_dropout

    weights = {
        name: hashlib.sha256(value.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, value in run.hardware.parameters(run.model, trained_only=True)
        if value is not None  # not on the main process
    }
    dropout = max(largest_dropout(run.hardware.unwrap(run.model)), run.recipe.adapter.lora_dropout)
    if run.hardware.ranks.is_main:
        uncompared = [*properties_of(run.task).uncompared_metrics, *ANSWER_METRICS]
        folder.write_json(START, {"weights": weights, "dropout": dropout, "uncompared_metrics": uncompared})
