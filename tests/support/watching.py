"""Record the operations of a block: the sizes of their results, and the number of matrix products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.linear)


class Watch(TorchDispatchMode):
    """Notes numbers of elements, in forward and backward alike."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = result if isinstance(result, (tuple, list)) else [result]
        self.sizes |= {tensor.numel() for tensor in tensors if isinstance(tensor, Tensor)}
        self.products += func.overloadpacket in PRODUCTS
        return result
