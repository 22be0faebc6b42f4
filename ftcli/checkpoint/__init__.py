"""File formats of checkpoints. The alias `ftcli.checkpoint.save` of earlier versions remains for one release."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "save":
        raise AttributeError(f"module 'ftcli.checkpoint' has no attribute '{name}'")
    from ftcli.training.checkpointing import save_checkpoint

    return save_checkpoint
