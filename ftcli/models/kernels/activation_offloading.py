"""Offload activations to pinned host memory while the device computes.

Two streams beside the one that computes: one copies to the host during the forward pass, the other one copies back
during the backward pass, one activation ahead of the one in use. Values and dtypes do not change.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ftcli.models.structure import base_model_of
from ftcli.runtime.patches import declare

if TYPE_CHECKING:
    from torch import Tensor, nn


VIEWS = declare(
    __name__,
    "views-of-weights",
    library="torch",
    versions=">=2.11,<2.14",
    purpose="Finds saved tensors that are views of a weight, which stay on the device when activations are offloaded",
    without="Such views are then copied to the host and back, with the same result.",
    alternative="None: `Tensor._base` has no public name.",
    apis=("torch:Tensor._base",),
    measurement="308.6 ms a step, without it 312.5 ms, 15.3 GiB both times: 1B, 4 rows of 4,096 tokens, `bf16_pure`, "
    "recomputed layers with their inputs in host memory, one H100.",
)
MIN_OFFLOAD_BYTES = 2**16  # a smaller tensor is not worth a copy to the host


def offload_activations(model: nn.Module) -> None:
    """Store the activations of the forward pass in pinned host memory until the backward pass uses them.

    Unlike with `torch.autograd.graph.save_on_cpu`, weights stay on the device, and copies run beside the computation.
    Activations of a layer that is being recomputed stay on the device.

    Args:
        model: The model, not prepared. The forward pass of its base model is replaced.
    """
    inner = base_model_of(model)
    forward = inner.forward

    def offloading(*args: Any, **kwargs: Any) -> Any:
        host = ActivationHost()
        with torch.autograd.graph.saved_tensors_hooks(host.store, load):
            return forward(*args, **kwargs)

    inner.forward = offloading


@dataclass(eq=False)
class HostActivation:
    """An activation whose values are in host memory.

    Args:
        copy: The values in host memory, pinned where the device is a GPU.
        device: Where the activation came from.
        copied: Set once the copy to the host is complete; None on a CPU.
        on_device: The activation itself, or its copy that is on the way back.
        returned: Set once `on_device` has its values again.
        previous: The activation that was stored before this one. The backward pass uses it next.
    """

    copy: Tensor
    device: torch.device
    copied: torch.cuda.Event | None = None
    on_device: Tensor | None = None
    returned: torch.cuda.Event | None = None
    previous: weakref.ref[HostActivation] | None = field(default=None, repr=False)


class ActivationHost:
    """Stores the activations of one forward pass."""

    def __init__(self) -> None:
        self._last: HostActivation | None = None

    def store(self, tensor: Tensor) -> Tensor | HostActivation:
        """Return where an activation is stored; weights, their views and small tensors are returned themselves."""
        is_weight = isinstance(tensor, torch.nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)
        is_view_of_weight = VIEWS.is_usable() and isinstance(tensor._base, torch.nn.Parameter)
        if is_weight or is_view_of_weight or tensor.numel() * tensor.element_size() < MIN_OFFLOAD_BYTES:
            return tensor
        copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        stored = HostActivation(copy, tensor.device)
        if not tensor.is_cuda:
            copy.copy_(tensor)
            return stored
        computing = torch.cuda.current_stream(tensor.device)
        if self._last is not None:
            stored.previous = weakref.ref(self._last)
            # The device may use the memory of the previous activation again once its copy is complete. The newest one
            # stays on the device, because the backward pass begins with it.
            if self._last.copied is not None:
                computing.wait_event(self._last.copied)
            self._last.on_device = None
        to_host = _side_streams(tensor.device)[0]
        to_host.wait_stream(computing)
        with torch.cuda.stream(to_host):
            copy.copy_(tensor, non_blocking=True)
        stored.copied = to_host.record_event()
        stored.on_device, self._last = tensor.detach(), stored
        return stored


def load(stored: Tensor | HostActivation) -> Tensor:
    """Return the activation that `ActivationHost.store` stored, and start the copy of the one that is used next."""
    if isinstance(stored, torch.Tensor):
        return stored
    if stored.device.type != "cuda":
        return stored.copy.to(stored.device)
    if stored.on_device is None:
        _start_return(stored)
    computing = torch.cuda.current_stream(stored.device)
    if stored.returned is not None:
        computing.wait_event(stored.returned)
    values, stored.on_device = stored.on_device, None
    previous = None if stored.previous is None else stored.previous()
    if previous is not None and previous.on_device is None:
        _start_return(previous)
    assert values is not None
    return values


def _start_return(stored: HostActivation) -> None:
    """Copy an activation back to its device, beside what the device computes."""
    computing, back = torch.cuda.current_stream(stored.device), _side_streams(stored.device)[1]
    values = torch.empty_like(stored.copy, device=stored.device)
    back.wait_stream(computing)  # until here the device may still use this memory for something else
    if stored.copied is not None:
        back.wait_event(stored.copied)
    with torch.cuda.stream(back):
        values.copy_(stored.copy, non_blocking=True)
    values.record_stream(back)  # if the graph is dropped before the copy is complete
    stored.on_device, stored.returned = values, back.record_event()


_streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}


def _side_streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return a device's streams for copies to the host and back; a process makes them once."""
    if device not in _streams:
        _streams[device] = (torch.cuda.Stream(device), torch.cuda.Stream(device))
    return _streams[device]
