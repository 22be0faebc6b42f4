"""Read weights on one rank and send them to the others one at a time, so that a host holds one copy of them.

The reader is the main rank. The other ranks build the model on the meta device, where a parameter has a shape but no
values. Until the weights are sent, other ranks cannot read them, and values that they write are lost. The code is
independent of the backend, which decides where a received parameter is stored.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from mmap import PAGESIZE
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from ftcli.hardware.collectives import patient_group
from ftcli.runtime.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn


T = TypeVar("T")
READER_RANK = 0
MADV_DONTNEED = 4  # Linux


def has_several_ranks() -> bool:
    """Return whether more than one rank is running."""
    return dist.is_initialized() and dist.get_world_size() > 1


def is_reader() -> bool:
    """Return whether this rank reads the weights for all ranks."""
    return dist.get_rank() == READER_RANK


def read_for_all(read: Callable[[], tuple[nn.Module, T]], build: Callable[[], nn.Module]) -> tuple[nn.Module, T]:
    """Call `read` on the reader and `build` on the other ranks, on the meta device. A collective.

    Args:
        read: Returns a model with its weights, and a result.
        build: Returns the same model without weights.

    Returns:
        The model of this rank, and the reader's result.

    Raises:
        InputError: `read` raised it; it is raised on every rank.
    """
    if is_reader():
        try:
            model, result = read()
        except InputError as error:
            _broadcast(error)
            raise
        _broadcast(result)
        return model, result
    with torch.device("meta"):
        model = build()
    message = _broadcast(None)
    if isinstance(message, InputError):
        raise message
    return model, message


def _broadcast(value: Any) -> Any:
    """Return the reader's value on every rank. A collective that waits up to a day, because reading may be slow."""
    message = [value]
    dist.broadcast_object_list(message, src=READER_RANK, group=patient_group())
    return message[0]


def match_reader(model: nn.Module) -> None:
    """Set the dtypes and ties of meta tensors to those of the reading rank's weights. A collective.

    Args:
        model: The unprepared model.

    Raises:
        RuntimeError: A parameter or buffer differs from the reader's; the message names the first one.
    """
    expected: dict[str, tuple[Any, ...]] = _broadcast(_describe(model))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        if not parameter.is_meta or name not in expected:
            continue
        _, _, dtype, first = expected[name]
        if first == name:
            parameter.data = parameter.data.to(dtype)
        elif parameter is not parameters.get(first, parameter):
            _put(model, name, parameters[first])
    actual = _describe(model)
    for name in [*expected, *actual]:
        if actual.get(name) != expected.get(name):
            raise RuntimeError(
                f"rank {READER_RANK}, which reads the weights for all, has {name} as {expected.get(name)}, "
                f"and rank {dist.get_rank()} has it as {actual.get(name)}"
            )


def _describe(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Return (shape, is trained, dtype, first name of the same weight) of every parameter and buffer, by name."""
    firsts: dict[int, str] = {}
    descriptions: dict[str, tuple[Any, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = firsts.setdefault(id(parameter), name)
        descriptions[name] = (tuple(parameter.shape), parameter.requires_grad, parameter.dtype, first)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        descriptions[name] = (tuple(buffer.shape), False, buffer.dtype, name)
    return descriptions


def share_buffers(model: nn.Module, device: torch.device) -> None:
    """Copy the reader's buffers, persistent or not, to the device of every rank. A collective."""
    dtypes: dict[str, torch.dtype] = _broadcast({name: buffer.dtype for name, buffer in model.named_buffers()})
    for name, buffer in list(model.named_buffers()):
        value = buffer.to(device) if is_reader() else torch.empty(buffer.shape, dtype=dtypes[name], device=device)
        if value.numel():
            dist.broadcast(value.contiguous() if is_reader() else value, src=READER_RANK)
        _put(model, name, value)


def _put(model: nn.Module, name: str, value: Tensor) -> None:
    """Set the parameter or buffer of this name."""
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, value)


def replace(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """Replace the value of a parameter in place, so that ties and the optimizer keep their reference.

    Args:
        parameter: Any parameter.
        value: The new value, which may be on another device.

    Returns:
        The old value.
    """
    fresh = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, fresh)
    return fresh.detach()


class HostMemory:
    """Returns memory to the operating system while weights are sent. Only Linux has the calls for it."""

    def __init__(self) -> None:
        self._files: list[tuple[int, int]] = []  # addresses of mapped files, in which safetensors keeps weights
        maps = Path("/proc/self/maps")
        for line in maps.read_text().splitlines() if maps.exists() else ():
            addresses, permissions, _, _, inode, *_ = line.split()
            if inode != "0" and "x" not in permissions:
                low, _, high = addresses.partition("-")
                self._files.append((int(low, 16), int(high, 16)))
        self._c = ctypes.CDLL(None)

    def release(self, value: Tensor) -> None:
        """Return the pages of a value that was sent, and memory that was freed before.

        The pages of a file would otherwise stay in memory until its last weight is freed. Pages outside of files are
        not returned, because they may still be in use. The C library retains freed memory unless it is trimmed.
        """
        if value.device.type != "cpu" or value.numel() * value.element_size() < PAGESIZE:
            return
        low = -(-value.data_ptr() // PAGESIZE) * PAGESIZE
        high = (value.data_ptr() + value.numel() * value.element_size()) // PAGESIZE * PAGESIZE
        if value.is_contiguous() and any(start <= low < high <= end for start, end in self._files):
            self._c.madvise(ctypes.c_void_p(low), ctypes.c_size_t(high - low), MADV_DONTNEED)
        if hasattr(self._c, "malloc_trim"):
            self._c.malloc_trim(0)
