"""Batch normalisation in training: frozen statistics, those of one process, or those of all processes.

    mode     normalised with, in training                 running statistics (evaluation, export)
    frozen   the running statistics                       as loaded
    train    the rows of one forward pass of a process    updated; the mean over the processes
    sync     the rows of one forward pass of all          updated, equal on every process

The formulas are those of Ioffe & Szegedy 2015 (arXiv 1502.03167). A forward pass under `no_grad`, such as the first
pass of a loss, does not update the running statistics, because the same rows follow with gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.functional import batch_norm

from ftcli.models.structure import base_model_of, helper_prefixes
from ftcli.runtime.errors import InputError
from ftcli.runtime.process import current_rank, world_size

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ftcli.hardware.collectives import Ranks


KINDS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)
PLAIN_FORWARDS = {kind.forward for kind in KINDS}


def set_batch_norm(model: nn.Module, mode: str) -> list[str]:
    """Make every batch normalisation of a model train as the recipe says.

    Args:
        model: The model, not yet prepared.
        mode: `model.batch_norm` of the recipe.

    Returns:
        One line for the log, or none for a model without batch normalisation.

    Raises:
        InputError: The statistics of a model without batch normalisation are to be trained, or those of a base model
            beside an adapter, which does not hold them; or all processes are to share those of a layer of its own kind.
    """
    norms = _norms_of(model)
    if mode != "frozen" and not norms:
        message = f"model.batch_norm: {mode} has no effect: the model has no batch normalisation"
        raise InputError(message, hint="delete it")
    if mode != "frozen" and base_model_of(model) is not model:
        _check_saved([name for name, _ in norms], mode)
    for name, module in norms:
        if mode == "sync" and type(module).forward not in PLAIN_FORWARDS:
            raise InputError(
                f"model.batch_norm: sync: {name} is a {type(module).__name__} with a forward pass of its own, and only "
                "the usual one can use the statistics of all processes",
                hint="set batch_norm to train or frozen",
            )
        if mode == "frozen":
            module.eval()
            module.train = lambda mode=True, module=module: module
        else:
            module.forward = partial(_forward, module, type(module).forward, name, mode)
    return [f"batch norm: {mode}, {len(norms)} layers"] if norms else []


def _norms_of(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the batch normalisations of a model by name, without those of its frozen helper networks."""
    helpers, modules = helper_prefixes(model), model.named_modules()
    return [(name, one) for name, one in modules if isinstance(one, KINDS) and not f"{name}.".startswith(helpers)]


def _check_saved(names: list[str], mode: str) -> None:
    """Raise `InputError` if a batch normalisation beside an adapter is not in a module that the adapter saves whole."""
    inside = {"modules_to_save", "original_module"}  # the module that is trained, and its unused original
    lost = [name.removeprefix("base_model.model.") for name in names if not inside & set(name.split("."))]
    if lost:
        last = lost[0].rpartition(".")[2]
        raise InputError(
            f"model.batch_norm: {mode} would update the running statistics of {lost[0]}, which the adapter does not "
            "hold, so they would be lost at the end of the run",
            hint="set batch_norm to frozen, train the whole model (adapter.type: none), or name all batch norms in "
            f"adapter.modules_to_save, for instance {lost[0] if last.isdigit() else last}",
        )


def trained_norms(model: nn.Module) -> Iterator[Any]:
    """Yield the batch normalisations of a model whose running statistics are updated in training."""
    for module in model.modules():
        if getattr(getattr(module, "forward", None), "func", None) is _forward and module.running_mean is not None:
            yield module


@torch.no_grad()
def average_statistics(model: nn.Module, mode: str, ranks: Ranks) -> None:
    """Give every process the mean over the processes of all running statistics. A collective under mode `train`.

    Under `train` each process updates them from its own rows. Evaluations and checkpoints need one set of values. The
    update is linear, so the mean may be taken at any step.

    Args:
        model: The model without wrapper.
        mode: `model.batch_norm` of the recipe.
        ranks: The processes of the run.
    """
    if mode != "train" or ranks.world == 1:
        return
    values = [v for module in trained_norms(model) for v in (module.running_mean, module.running_var)]
    if values:
        means = ranks.sum_on_device(torch.cat([value.float() for value in values])) / ranks.world
        for value, mean in zip(values, means.split([len(value) for value in values]), strict=True):
            value.copy_(mean)


def _forward(module: Any, forward: Any, name: str, mode: str, inputs: Tensor) -> Tensor:
    """Normalise as `forward`, the method of the module's class, with the statistics of `mode`."""
    if not module.training:
        result: Tensor = forward(module, inputs)
        return result
    is_shared = mode == "sync" and world_size() > 1
    if inputs.numel() == inputs.shape[1] and not is_shared:
        raise InputError(
            f"model.batch_norm: {mode}: {name} gets one value for each of {inputs.shape[1]} channels, "
            f"from an input of shape {list(inputs.shape)}, and a single value has no variance",
            hint="raise batch.micro_size, use larger images, or set model.batch_norm to frozen",
        )
    if is_shared:
        return _forward_of_all(module, inputs)
    if torch.is_grad_enabled():
        result = forward(module, inputs)
        return result
    if type(module).forward in PLAIN_FORWARDS:
        return batch_norm(inputs, None, None, module.weight, module.bias, training=True, eps=module.eps)
    before = [buffer.clone() for buffer in module.buffers(recurse=False)]
    result = forward(module, inputs)
    for buffer, value in zip(module.buffers(recurse=False), before, strict=True):
        buffer.data.copy_(value)  # an earlier pass may have saved it for its backward pass
    return result


def _forward_of_all(module: Any, inputs: Tensor) -> Tensor:
    """Normalise with the statistics of all processes, and update the running statistics. A collective."""
    # float32 weights let the kernel take 16-bit inputs; this copies nothing if they are float32 already.
    weight, bias = (None if value is None else value.float() for value in (module.weight, module.bias))
    output, mean, variance, count = _NormaliseOfAll.apply(inputs, weight, bias, module.eps)
    if module.running_mean is not None and torch.is_grad_enabled():
        with torch.no_grad():
            module.num_batches_tracked.add_(1)
            rate = 1.0 / module.num_batches_tracked if module.momentum is None else module.momentum
            for running, value in ((module.running_mean, mean), (module.running_var, variance * count / (count - 1))):
                running.copy_(torch.lerp(running.float(), value, rate))
    result: Tensor = output
    return result


class _NormaliseOfAll(torch.autograd.Function):
    """Batch normalisation with the mean and variance of all processes. Forward and backward are collectives.

    With x' = (x - mean) / deviation and the sums over the N values of a channel on all processes, the gradient is

        dx = weight / deviation * (dy - sum(dy) / N - x' * sum(dy * x') / N)
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the normalised inputs, and mean `[C]`, variance `[C]` and number of values `[1]` of all processes."""
        channels = inputs.shape[1]
        variance, mean = torch.var_mean(inputs.float(), _dims(inputs), correction=0)
        every = mean.new_zeros(world_size(), 2 * channels + 1)
        every[current_rank()] = torch.cat([mean, variance, mean.new_full((1,), inputs.numel() // channels)])
        dist.all_reduce(every)  # gathers; each process adds its row
        means, variances, counts = every.split([channels, channels, 1], dim=1)
        count = counts.sum(0)
        mean = (means * counts).sum(0) / count
        variance = ((variances + (means - mean).square()) * counts).sum(0) / count
        ctx.save_for_backward(inputs, weight, mean, variance, count)
        ctx.eps = eps
        ctx.mark_non_differentiable(mean, variance, count)
        return batch_norm(inputs, mean, variance, weight, bias, training=False, eps=eps), mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of inputs, weight and bias; those of weight and bias are sums over this process."""
        inputs, weight, mean, variance, count = ctx.saved_tensors
        scale = torch.ones_like(mean) if weight is None else weight
        inverse, grad = (variance + ctx.eps).rsqrt(), _in_format_of(inputs, grad)
        # The two sums of this process, in float32. CUDA's own kernels differ by dtype and memory format.
        centred = inputs - _wide(mean, inputs)
        of_product, of_grad = (centred * grad).sum(_dims(inputs)) * inverse, grad.sum(_dims(inputs), dtype=mean.dtype)
        grad_weight, grad_bias = (None, None) if weight is None else (of_product, of_grad)
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, grad_bias, None
        sums = torch.cat([of_product, of_grad])
        dist.all_reduce(sums)
        of_product, of_grad = sums.split(len(mean))
        # In float32 too, and rounded once to the dtype of the inputs, as the kernels for one process do.
        factor, slope = scale * inverse, scale * inverse.square() * of_product / count
        grad_inputs = (grad * _wide(factor, inputs)).sub_(centred.mul_(_wide(slope, inputs)))
        grad_inputs.sub_(_wide(factor * of_grad / count, inputs))
        return grad_inputs.to(inputs.dtype), grad_weight, grad_bias, None


def _in_format_of(inputs: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of the outputs in the memory format of the inputs.

    The gradient of the inputs then has it too, as the convolution before needs it (models/kernels/channels_last.py).
    """
    is_last = inputs.ndim == 4 and inputs.is_contiguous(memory_format=torch.channels_last)
    # Tensors with one channel or one pixel fit both formats, and stay in the usual one.
    keeps = is_last and not inputs.is_contiguous()
    return grad.contiguous(memory_format=torch.channels_last if keeps else torch.contiguous_format)


def _dims(inputs: Tensor) -> list[int]:
    """Return all dimensions but that of the channels."""
    return [0, *range(2, inputs.ndim)]


def _wide(values: Tensor, inputs: Tensor) -> Tensor:
    """Return values of channels `[C]` in a shape that broadcasts to inputs `[B, C, ...]`."""
    return values.view(1, -1, *[1] * (inputs.ndim - 2))
