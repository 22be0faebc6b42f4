"""What the loss functions of TRL's trainers read of a trainer."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any


def trl_attributes() -> dict[str, Any]:
    """Return the attributes of a TRL trainer on one process, without the options of its loss."""
    alone = SimpleNamespace(gather_for_metrics=lambda value: value, gather=lambda value: value, device="cpu")
    return {
        "model": SimpleNamespace(training=True),
        "accelerator": alone,
        "aux_loss_enabled": False,
        "precompute_ref_logps": True,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
