"""Sums of token values by row without atomic additions, so that two runs on a GPU give the same bits.

`index_add` and `scatter_add` add in any order on CUDA. Here the values of a row are gathered by an index that the host
made while it collated the rows, and added along one dimension. The gradient of a sum is gathered as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def row_index(items: Sequence[int]) -> dict[str, Tensor]:
    """Return the index that `sum_by_row` needs, as entries of a batch.

    Args:
        items: Number of values of each of R rows. The values of a row stand together, and rows are in order.

    Returns:
        `row_index [R, longest]` int64: positions of the values of each row, filled up with N, and `row_of_item [N]`
        int64: the row of each value.
    """
    import torch

    counts = torch.tensor(list(items), dtype=torch.int64)
    ends = counts.cumsum(0)
    places = torch.arange(int(counts.max()) if len(counts) else 0)
    index = torch.where(places < counts[:, None], (ends - counts)[:, None] + places, int(counts.sum()))
    return {"row_index": index, "row_of_item": torch.arange(len(counts)).repeat_interleave(counts)}


def sum_by_row(values: Tensor, row_index: Tensor, row_of_item: Tensor) -> Tensor:
    """Return the sum of each row's values, `[R]`. Differentiable once; no device sync.

    Args:
        values: `[N]` float32.
        row_index: `[R, longest]`, see `row_index`.
        row_of_item: `[N]`, see `row_index`.
    """
    sums: Tensor = _function().apply(values, row_index, row_of_item)
    return sums


@cache
def _function() -> Any:
    """Return the autograd function. It is made on first use, because tasks are imported without torch."""
    import torch

    class RowSums(torch.autograd.Function):
        """Gathers in both directions."""

        @staticmethod
        def forward(ctx: Any, values: Tensor, index: Tensor, rows: Tensor) -> Tensor:
            ctx.save_for_backward(rows)
            return torch.cat([values, values.new_zeros(1)])[index].sum(-1)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            (rows,) = ctx.saved_tensors
            return gradient.index_select(0, rows), None, None

    return RowSums
