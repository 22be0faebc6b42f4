"""Write the inputs of a run into its folder, and remove what an earlier launch wrote after the first step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ftcli.checkpoint.folder import abandon
from ftcli.config.load import dump_recipe
from ftcli.config.recipe import Recipe
from ftcli.config.trust import stored_form
from ftcli.runtime.checkpoint_names import step_of
from ftcli.runtime.environment import describe_environment
from ftcli.runtime.process import profile_path
from ftcli.runtime.run_folder import DRY_RUN, ORIGIN, RunFolder
from ftcli.training.resume import belongs_to
from ftcli.training.run import Run

if TYPE_CHECKING:
    from ftcli.config.profile import Profile


def write_run_inputs(
    folder: RunFolder, recipe: Recipe, profile: Profile | None, start: Path | None, *, dry_run: bool
) -> None:
    """Write recipe, profile, and origin of a run into its folder.

    Args:
        folder: The run folder.
        recipe: The recipe. It is stored without credentials and without consent to remote code.
        profile: The profile; None without one.
        start: The checkpoint that the run starts from. It is recorded if it belongs to another run.
        dry_run: Whether the run is a dry run, which the next dry run may replace.
    """
    folder.write_text("recipe.yaml", dump_recipe(stored_form(recipe)))
    folder.write_text("profile.yaml", "# trained without a profile\n" if profile is None else profile.as_yaml())
    if start is None:
        (folder.path / ORIGIN).unlink(missing_ok=True)  # of an earlier launch that ended before its first step
    elif not belongs_to(folder, start):
        folder.write_json(ORIGIN, {"checkpoint": str(start.resolve()), "step": step_of(start)})
    if dry_run:
        folder.write_text(DRY_RUN, "a dry run of two steps; the next dry run replaces this folder\n")


def rewind_run_folder(run: Run, folder: RunFolder, *, from_start: bool = True) -> None:
    """Remove metrics and checkpoints after the first step, write environment.json, and record the launch.

    Args:
        run: The run.
        folder: Its folder.
        from_start: Whether a run at step 0 repeats the evaluation at its start.
    """
    folder.rewind(run.first_step, evaluated=run.is_measured, from_start=from_start)
    abandon(folder.path, run.first_step)
    device = str(run.hardware.accelerator.device)
    environment = describe_environment(device, run.plan.processes) | {"resolution": run.resolved.entries}
    if run.base is not None:
        environment["trained_on"] = run.base | {"rows": run.rows.digests}
    folder.write_json("environment.json", environment)
    named = profile_path()
    profile = "no profile" if named is None else Path(named).stem
    hardware = f"{profile} ({run.hardware.distributed_type}), processes: {run.plan.processes}, device: {device}"
    folder.append_event("launch", run.first_step, hardware)
