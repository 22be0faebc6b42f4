"""A formula over tensors as one kernel on a GPU, by torch.compile; elsewhere, and where that fails, what it stands for.

Operations one by one each read and write all their tensors; a compiled formula does so once. What it needs (Triton, a C
compiler) may be missing: then the plain form runs, which gives the same numbers up to float32's rounding, and one line
says so. Knows no model and no task.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

# Few rows in the first call would split a sum over several kernels, for good; and one kernel needs no pool of compiling
# processes on every rank.
OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"split_reductions": False, "compile_threads": 1}


class Fused:
    """Calls `formula` compiled where the first of its tensors is on one of `PLACES`, and else `plain`.

    Tensors may have any length in their first dimension: one kernel serves all. Other sizes are part of the kernel,
    which makes it fast: 16 bytes are read at a time only where the number of elements is known to be a multiple of 16;
    so other sizes are another kernel. A formula says its own dtypes, and knows no autocast. What both give must be
    equal, what they overwrite too; no call makes the host wait for the device, but the first.
    """

    PLACES = ("cuda",)

    def __init__(self, formula: Callable[..., Any], plain: Callable[..., Any] | None = None) -> None:
        self.formula, self.plain = formula, plain or formula
        self.problem: str | None = None  # why nothing is compiled any more

    def __call__(self, first: Tensor, *rest: Tensor | None) -> Any:
        """Return what the function does; an error of its own is raised by `plain`, running out of memory by either."""
        if first.device.type not in self.PLACES or self.problem is not None:
            return self.plain(first, *rest)
        for tensor in (first, *rest):
            if tensor is not None and tensor.dim():
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        kind = first.device.type
        plainly = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
        try:
            with plainly:
                return self._compiled(first, *rest)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - compilers fail in many ways, and all before anything is computed
            self.problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if os.environ.get("RANK", "0") == "0":
            told = f"{self.formula.__name__} is not compiled: the same numbers, but slower ({self.problem[:300]})"
            print(f"ftcli: {told}", file=sys.stderr, flush=True)
        return self.plain(first, *rest)

    @cached_property
    def _compiled(self) -> Callable[..., Any]:
        if torch._dynamo.config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":  # it would run uncompiled
            return self.plain
        return torch.compile(self.formula, fullgraph=True, dynamic=False, options=OPTIONS)
