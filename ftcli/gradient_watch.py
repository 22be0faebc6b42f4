"""Whether everything that is trained really learns, seen early: a tensor without a gradient is a mistake somewhere.

A wrong freeze, an unused head or a lost link in the graph costs nothing but the result. Read from the optimizer's
moments, which every backend keeps and a checkpoint brings along: where no gradient came they are zero to the last
bit. So training pays for one look at one step, and nothing before it. Knows no backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .errors import RunError
from .hardware.state import MOMENTS

if TYPE_CHECKING:
    from .run import Run

LOOKED_AT = 20  # steps; a shorter run is looked at after its last
MOST_NAMED = 8
# Modules whose tensors may rightly see none for a while: the rows choose among experts. A task adds its own.
SPARSE = ("experts",)


def check_gradients(run: Run, step: int) -> None:
    """Raise `RunError` after step 20, or a shorter run's last, naming trained tensors that never had a gradient.

    A collective at that one step, which waits for the device. A run of a single update is not judged: LoRA's A has no
    gradient before B has moved. Tensors inside a module named in `SPARSE`, or in the task's own `sparse` (module
    names), are left out.
    """
    scale = run.hardware.loss_scale
    skipped = len(run.flags.record) + (0 if scale is None else scale.skipped)
    if step != min(LOOKED_AT, run.steps) or step - skipped < 2:
        return
    names = list(run.hardware.trained_shapes(run.model))
    seen = _with_gradient(run)
    counts = run.hardware.ranks.sum_later([int(name in seen) for name in names])()  # a rank may hold no part of one
    apart = {*SPARSE, *getattr(run.task, "sparse", ())}
    dead = [name for name, n in zip(names, counts, strict=True) if not n and apart.isdisjoint(name.split("."))]
    if dead:
        more = f" and {len(dead) - MOST_NAMED} more" if len(dead) > MOST_NAMED else ""
        raise RunError(
            f"{len(dead)} of {len(names)} trained tensors had no gradient in {step} steps: "
            f"{', '.join(dead[:MOST_NAMED])}{more}. Is a part of the model not used, or cut off from the loss? "
            "Where that is meant, a task names such modules in `sparse`"
        )


@torch.no_grad()
def _with_gradient(run: Run) -> set[str]:
    """Return the names of tensors of which this rank holds a moment that is not zero."""
    names, largest = [], []
    for piece in run.hardware.pieces(run.model, run.optimizer):  # one by one: some are made for the look
        held = [piece.tensors[kind] for kind in MOMENTS if kind in piece.tensors and piece.tensors[kind].numel()]
        names += [piece.name] * len(held)
        largest += [torch.linalg.vector_norm(tensor, float("inf")).float() for tensor in held]
    values = torch.stack(largest).tolist() if largest else []  # asked for once
    return {name for name, value in zip(names, values, strict=True) if value != 0}
