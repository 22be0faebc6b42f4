"""Record the operations of a block: the sizes of their results, and the number of matrix products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
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


class Alive(TorchDispatchMode):
    """Counts the tensors of a shape that exist before each matrix product that makes another one of this shape.

    Args:
        shape: The shape.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.before_products: list[int] = []
        self._made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        alive = sum(not storage.expired() for storage in self._made)
        result = func(*args, **(kwargs or {}))
        tensors = result if isinstance(result, (tuple, list)) else [result]
        made = [tensor for tensor in tensors if isinstance(tensor, Tensor) and tuple(tensor.shape) == self.shape]
        if made and func.overloadpacket in PRODUCTS:
            self.before_products.append(alive)
        self._made += [StorageWeakRef(tensor.untyped_storage()) for tensor in made]
        return result
