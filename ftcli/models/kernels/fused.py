"""Run a formula over tensors as one GPU kernel, with an uncompiled fallback.

Separate operations each read and write all their tensors; one kernel does so once. torch.compile makes it from the
formula, or the formula itself launches a Triton kernel. If compilation fails, for example because Triton or a C
compiler is missing, the plain function runs and one line is logged. Both agree up to float32 rounding.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ftcli.runtime.log import log_line
from ftcli.runtime.patches import declare

DYNAMIC_MARKS = declare(
    __name__,
    "fused-lengths",
    library="torch",
    versions=">=2.11,<2.14",
    purpose="Marks the first dimension of tensors as one that changes, so that one compiled kernel serves all lengths",
    without="The formulas then run uncompiled, with the same numbers.",
    alternative="`torch._dynamo.mark_dynamic`, which fails for tensors with one row.",
    apis=("torch._dynamo:maybe_mark_dynamic", "torch._dynamo.config:disable"),
    measurement="249.6 ms and 31.9 GiB a step, without it 371.2 ms and 33.9 GiB: 1B, 4 rows of 4,096 tokens, "
    "`bf16_pure`, one H100.",
)
# Without the first option, a first call with few rows would split sums over several kernels for all later calls. One
# kernel does not need a pool of compiler processes on every rank.
COMPILE_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"split_reductions": False, "compile_threads": 1}


class Fused:
    """Calls `formula` compiled if its first tensor is on one of `DEVICE_TYPES`, else `plain`.

    One kernel serves all lengths of the first dimension. Other sizes are compiled into the kernel, because loads of 16
    bytes need sizes that are known to be multiples of 16. The formula sets its dtypes itself; autocast is off. Both
    functions must return, and overwrite, equal values. Only the first call makes the host wait for the device.

    Args:
        formula: The function to compile.
        plain: The fallback; None uses `formula` uncompiled.
        has_kernel: Whether `formula` launches a Triton kernel, which torch.compile need not make.
    """

    DEVICE_TYPES = ("cuda",)

    def __init__(
        self, formula: Callable[..., Any], plain: Callable[..., Any] | None = None, *, has_kernel: bool = False
    ) -> None:
        self.formula, self.plain, self.has_kernel = formula, plain or formula, has_kernel
        self.problem: str | None = None  # why compilation failed

    def __call__(self, first: Tensor, *rest: Tensor | None) -> Any:
        """Call the compiled formula and return its result. After an error of the compiler, call the fallback."""
        is_possible = self.has_kernel or DYNAMIC_MARKS.is_usable()
        if first.device.type not in self.DEVICE_TYPES or self.problem is not None or not is_possible:
            return self.plain(first, *rest)
        for tensor in () if self.has_kernel else (first, *rest):
            if tensor is not None and tensor.dim():
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        device_type = first.device.type
        has_autocast = torch.is_autocast_enabled(device_type)
        without_autocast = torch.autocast(device_type, enabled=False) if has_autocast else nullcontext()
        try:
            with without_autocast:
                return self._compiled(first, *rest)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - compilers raise many errors, all before a tensor is changed
            self.problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        log_line(f"{self.formula.__name__} is not compiled: same results, but slower ({self.problem[:300]})")
        return self.plain(first, *rest)

    @cached_property
    def _compiled(self) -> Callable[..., Any]:
        """The compiled formula, or `plain` if torch.compile is disabled and would run `formula` uncompiled."""
        if self.has_kernel:
            return self.formula
        if torch._dynamo.config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
            return self.plain
        return torch.compile(self.formula, fullgraph=True, dynamic=False, options=COMPILE_OPTIONS)
