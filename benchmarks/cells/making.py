"""Make inputs of a cell: `python -m cells.making make_model,make_rows,make_adapter CELL WORK`, CELL as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from .cell import Cell, Inputs, inputs_of


def make_model(cell: Cell, inputs: Inputs) -> None:
    """Write the initial weights."""
    from .models import write_model

    write_model(cell.shape, inputs.model)


def make_rows(cell: Cell, inputs: Inputs) -> None:
    """Write texts, recipe and packed rows."""
    from .rows import write_packed, write_recipe

    write_recipe(cell, inputs)
    write_packed(inputs.recipe, inputs.rows)


def make_adapter(cell: Cell, inputs: Inputs) -> None:
    """Write the adapter."""
    from .adapters import write_adapter

    write_adapter(inputs.model, cell.lora, inputs.adapter)


if __name__ == "__main__":
    made = Cell(**json.loads(sys.argv[2]))
    for name in sys.argv[1].split(","):
        {"make_model": make_model, "make_rows": make_rows, "make_adapter": make_adapter}[name](
            made, inputs_of(made, Path(sys.argv[3]))
        )
