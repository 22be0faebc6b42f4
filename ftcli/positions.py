"""How long a row may be for a model that has learned one vector for each position: beyond the last there is none.

Rotary and relative positions have no end, so nothing is said of them. Knows no task.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .errors import InputError
from .packing import lengths_of

if TYPE_CHECKING:
    from torch import nn

    from .cache import PreparedRows
    from .recipe import Recipe

LEARNED = re.compile(r"(^|\.)(wpe|position_embeddings|embed_positions)$")  # as transformers calls their embeddings


def check_lengths(model: nn.Module, recipe: Recipe, rows: PreparedRows) -> None:
    """Raise `InputError` when a prepared row is longer than the model has positions, where a GPU would abort."""
    most = learned_positions(model)
    if most is None or recipe.data.max_length <= most or "input_ids" not in rows.train.column_names:
        return
    longest = max(int(lengths_of(part).max()) for part in (rows.train, rows.eval) if part is not None)
    if longest > most:
        raise InputError(
            f"the longest row has {longest} tokens, and {recipe.model.name} has {most} positions",
            hint=f"set data.max_length to {most} at most",
        )


def learned_positions(model: nn.Module) -> int | None:
    """Return the tokens of the longest row that a model has learned positions for; None: they are not learned."""
    from torch import nn

    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and LEARNED.search(name):
            # OPT begins to count at `offset`, RoBERTa behind the padding token's position
            begin = getattr(module, "offset", 0) if module.padding_idx is None else module.padding_idx + 1
            found.append(module.num_embeddings - begin)
    return min(found, default=None)
