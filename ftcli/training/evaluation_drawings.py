"""Files that a task draws at each evaluation, such as a sheet of images, in the folder of the run.

They are in RUN/drawings, with the number of the step before the name: step-000100-faces.png. An evaluation of the final
weights (`ftcli evaluate`) writes final-faces.png.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftcli.runtime.durable_files import make_folder, sync, write_durably
from ftcli.runtime.run_folder import explain_disk_errors
from ftcli.training.batches.dataloaders import Collate, Rows

if TYPE_CHECKING:
    from pathlib import Path

    from ftcli.runtime.run_folder import RunFolder
    from ftcli.training.run import Run

FOLDER = "drawings"


def write_drawings(run: Run, folder: RunFolder | None, prefix: str) -> list[Path]:
    """Write the files that the task of a run draws of its first evaluation rows. A collective.

    Every process computes the same rows, because a forward pass of sharded weights needs all of them.

    Args:
        run: The run.
        folder: The run folder; None writes nothing.
        prefix: Start of each file's name.

    Returns:
        The files, on the main process. None for a task that draws nothing.

    Raises:
        DiskError: A file cannot be written. On the main process.
    """
    import torch

    task: Any = run.task
    if folder is None or run.rows.eval is None or not hasattr(task, "draw"):
        return []
    rows = Rows(run.rows.eval, task, training=False, columns=run.rows.derived["eval"])
    batch = Collate(task)([rows[0, number] for number in range(min(task.drawn_rows, len(rows)))])
    batch.pop("sample_ids")
    run.model.eval()
    with torch.no_grad():
        files: dict[str, bytes] = task.draw(run.model, run.to_device(batch))
    if not run.hardware.ranks.is_main:
        return []
    paths = [folder.path / FOLDER / f"{prefix}-{name}" for name in files]
    folder.ensure()
    with explain_disk_errors(folder.path / FOLDER):
        make_folder(folder.path / FOLDER)
        for path, content in zip(paths, files.values(), strict=True):
            temporary = path.with_name(f".{path.name}")
            write_durably(temporary, content)
            temporary.replace(path)
        sync(folder.path / FOLDER)
    return paths
