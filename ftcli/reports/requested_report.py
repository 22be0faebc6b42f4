"""Write the report of a run that has ended, if its recipe asks for one with `log.report: true`.

The command that owns the run calls this after the run. Only the first process of all does so: ftcli's parent process,
or rank 0 of a plain `accelerate launch`. Light: never imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ftcli.config.load import load_recipe, run_output
from ftcli.config.yaml_document import read_document
from ftcli.runtime.errors import InputError
from ftcli.runtime.log import log_line
from ftcli.runtime.process import current_rank, has_ftcli_parent
from ftcli.runtime.reader_errors import first_line
from ftcli.runtime.run_folder import RunFolder


def write_report_of_failure(recipe: str | Path, overrides: Sequence[str], output: Path | None, *, began: float) -> None:
    """Write the requested report of a run that has failed during training.

    An earlier run in the folder is left alone if this command failed before its own run had metrics.

    Args:
        recipe: A recipe file, or the name of a shipped recipe.
        overrides: Changes of the recipe.
        output: The run folder as the user gave it.
        began: Start of the command, in seconds since the epoch.
    """
    try:
        folder = RunFolder(run_output(recipe, load_recipe(recipe, overrides), output))
    except InputError:  # the command has failed with the same error
        return
    status = folder.status()
    has_failed = status.get("state") == "failed" and status.get("time", 0.0) >= began
    if has_failed and (folder.path / "metrics.jsonl").is_file():
        write_requested_report(folder)


def write_requested_report(folder: RunFolder) -> None:
    """Write report.html into a run folder if the recipe of the run asks for it.

    A failure is one log line. It does not change how the command ends.

    Args:
        folder: The run folder. Without a shared disk it has no run on machines other than the first.
    """
    recipe = folder.path / "recipe.yaml"
    if has_ftcli_parent() or current_rank() != 0 or not recipe.is_file():
        return
    try:
        section = read_document(recipe).values.get("log")
        if isinstance(section, dict) and section.get("report") is True:
            from ftcli.reports.report import write_report

            log_line(f"report: {write_report(folder.path)}")
    except Exception as error:  # also a bug: the exit code of the run must not depend on its report
        log_line(f"the report could not be written: {first_line(error)}; ftcli report {folder.path} tries again")
