"""Tell a checkpoint that its run deletes, while another command reads it, from one that is damaged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ftcli.checkpoint.folder import find_damage
from ftcli.runtime.errors import InputError


class DeletedCheckpoint(InputError):
    """A checkpoint was deleted while it was read: the run in progress has newer ones."""


@contextmanager
def explain_deletion(checkpoint: Path | None) -> Iterator[None]:
    """Convert exceptions of the block, which reads an intact checkpoint, if files of it are missing now.

    Args:
        checkpoint: The checkpoint; None converts nothing.

    Raises:
        DeletedCheckpoint: The block raised an exception, and the checkpoint was deleted.
    """
    try:
        yield
    except Exception as error:
        if checkpoint is None or not find_damage(checkpoint, hashes=False):
            raise
        message = f"{checkpoint} was deleted while it was read: its run continues and keeps newer checkpoints"
        raise DeletedCheckpoint(
            message, hint="run the command again, with a newer checkpoint or the run folder"
        ) from error
