"""Mixed-precision communication for FSDP2: which weights and gradients are sent in 16 bits. ZeRO-3 uses it too.

    weights of matrix products       cast, then all-gathered: half the bytes, and no cast kept for the backward pass
    norms and other small weights    float32, in one FSDP unit that is all-gathered before the forward pass
    embeddings and head              float32, each in an FSDP unit

Casting before gathering gives the same values as casting after it, so no product changes. Norms in bfloat16 would
ignore many small updates (precision.py). Gradients are summed over ranks in float32. If all shards are inside one
machine, the 16-bit gradients of matrix products are sent in 16 bits (gradient_reduction.py). The unit of small weights
has no hooks of FSDP2, because hooks inside layers would split the graphs that layers are compiled to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ftcli.hardware.gradient_reduction import in_one_machine, reduce_scatter_in_float32
from ftcli.models.architectures import LINEAR_CLASSES
from ftcli.runtime.patches import declare

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accelerate import Accelerator
    from torch import Tensor
    from torch.optim import Optimizer


FSDP_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState"
SMALL_UNIT = declare(
    __name__,
    "fsdp-small-unit",
    library="torch",
    versions=">=2.11,<2.14",
    purpose="Removes the hooks of the FSDP unit of small weights, which would split compiled layers",
    without="All weights are then sent in float32, twice the bytes.",
    alternative="None: `fully_shard` always adds both hooks.",
    apis=(
        "torch.distributed.fsdp:fully_shard.state",
        f"{FSDP_STATE}._pre_forward_hook_handle",
        f"{FSDP_STATE}._post_forward_hook_handle",
    ),
    measurement="301.5 ms and 30.7 GiB a step, without it 306.6 ms and 32.8 GiB: 1B, 4 x 4,096 tokens, two H100s.",
)
SUMS = declare(
    __name__,
    "fsdp-16-bit-gradients",
    library="torch",
    versions=">=2.11,<2.14",
    purpose="Reads the mixed-precision policy of an FSDP unit, to send the gradients of 16-bit weights in 16 bits",
    without="Gradients are then sent in float32, twice the bytes.",
    alternative="None: the policy of a unit has no public name. `set_custom_reduce_scatter` is public.",
    apis=(
        "torch.distributed.fsdp:fully_shard.state",
        f"{FSDP_STATE}._mp_policy",
        "torch.distributed.fsdp:FSDPModule.set_custom_reduce_scatter",
    ),
    measurement="301.5 ms a step, without it 300.5 ms, 30.7 GiB both times: 1B, 4 x 4,096 tokens, two H100s. Sums are "
    "hidden there. Lines with the same patches differ as much.",
)
MAX_SMALL_FRACTION = 0.02  # of all elements may be in the unit of small weights, which is whole on each rank


def shard_small_params(
    accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, dtype: torch.dtype | None
) -> None:
    """Shard the parameters that must stay float32, and set the policy of the others to send them in `dtype`.

    Does nothing if `dtype` is None or if some weight is frozen or not float32. It also does nothing if the parameters
    outside matrix products are large, as experts are. All weights are then sent in the dtype that they have.

    Args:
        accelerator: The Accelerator of this process.
        model: The unprepared model. Small weights, embeddings and head become DTensors.
        optimizer: Its optimizer; the parameter groups are updated.
        dtype: The autocast dtype; None without autocast.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if dtype is None or any(not p.requires_grad or p.dtype != torch.float32 for p in model.parameters()):
        return
    if not SMALL_UNIT.is_usable():
        return
    plugin, ends = accelerator.state.fsdp_plugin, _embeddings_and_head(model)
    small = _small_modules(model, ends) if ends else []
    if not small:
        return
    mesh = getattr(accelerator, "torch_device_mesh", None)
    options: dict[str, Any] = {
        "offload_policy": plugin.cpu_offload,
        "mesh": None if mesh is None else mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)],
        "reshard_after_forward": False,
    }
    names = {parameter: name for name, parameter in model.named_parameters()}
    fully_shard(small, **options)
    are_tied = len({module.weight for module in ends}) == 1
    for unit in [ends] if are_tied else ends:
        fully_shard(unit, **options)
    _gather_before_forward(model, small)
    parameters: dict[str, Any] = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [parameters[names[parameter]] for parameter in group["params"]]
    plugin.mixed_precision_policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def matrix_weights(model: nn.Module) -> list[Any]:
    """Return the parameters of a language model that its layers use only in matrix products; else an empty list."""
    ends = _embeddings_and_head(model)
    in_ends = {parameter for module in ends for parameter in module.parameters()}
    modules = [module for module in model.modules() if ends and type(module).__name__ in LINEAR_CLASSES]
    return [p for module in modules for p in module.parameters(recurse=False) if p not in in_ends]


def _embeddings_and_head(model: Any) -> list[Any]:
    """Return the modules of embeddings and head; empty unless each has one parameter, a matrix."""
    if {"get_input_embeddings", "get_output_embeddings"} & set(vars(model)):  # replaced in fsdp.py for Accelerate
        return []
    try:
        ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    except (AttributeError, NotImplementedError):
        return []
    whole = [list(dict(module.named_parameters())) == ["weight"] for module in ends if module is not None]
    return ends if whole == [True, True] else []


def _small_modules(model: nn.Module, ends: list[nn.Module]) -> list[nn.Module]:
    """Return the outermost modules with parameters outside matrix products and `ends`; empty if they are large."""
    outermost: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():  # parents come before their children
        if module in inside or module in ends or type(module).__name__ in LINEAR_CLASSES:
            continue
        if next(module.parameters(recurse=False), None) is not None:
            outermost.append(module)
            inside.update(module.modules())
    size = sum(parameter.numel() for module in outermost for parameter in module.parameters())
    return outermost if size <= MAX_SMALL_FRACTION * sum(parameter.numel() for parameter in model.parameters()) else []


def _gather_before_forward(model: nn.Module, small: list[Any]) -> None:
    """Replace the hooks of the small unit by one on the model: gather before each forward pass. Backward frees it."""
    from torch.distributed.fsdp import fully_shard

    state: Any = fully_shard.state(small[0])  # type: ignore[attr-defined]
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    model.register_forward_pre_hook(lambda module, inputs: _gather(small[0]))


def _gather(unit: Any) -> None:
    """All-gather the weights of an FSDP unit."""
    unit.unshard()


def send_gradients_in_16_bits(model: nn.Module) -> bool:
    """Make FSDP units whose weights are sent in 16 bits send their gradients in 16 bits too, inside one machine.

    Gradients must be sent after each micro-batch, because sums over micro-batches have more than 16 bits.

    Args:
        model: The prepared model.

    Returns:
        Whether any unit sends its gradients in 16 bits.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    any_unit = False
    if not SUMS.is_usable():
        return any_unit
    for unit in model.modules():
        if not isinstance(unit, FSDPModule):
            continue
        policy = fully_shard.state(unit)._mp_policy  # type: ignore[attr-defined]
        shards = [
            parameter.device_mesh.shape[-1] for parameter in unit.parameters() if hasattr(parameter, "device_mesh")
        ]
        if policy.param_dtype is None or policy.reduce_dtype != torch.float32 or not shards:
            continue
        if shards[0] > 1 and in_one_machine(shards[0]):  # neighbouring ranks share a copy of the model
            unit.set_custom_reduce_scatter(Float32Sums(policy.param_dtype, shards[0]))  # type: ignore[arg-type]
            any_unit = True
    return any_unit


class Float32Sums:
    """A reduce-scatter for FSDP2 (torch's `ReduceScatter`) that sends gradients in 16 bits and sums in float32."""

    def __init__(self, dtype: torch.dtype, shards: int) -> None:
        self.dtype, self.shards, self.sent = dtype, shards, 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a communication buffer.

        FSDP2 calls this method twice per reduce-scatter: first for the 16-bit send buffer, then for the float32 output
        shard of this rank. The output has `1 / shards` of the size, which distinguishes the calls.

        Args:
            size: Shape of the buffer, one dimension.
            dtype: Dtype of the output.
            device: Device of the buffer.
        """
        (count,) = size
        is_sum = count * self.shards == self.sent
        self.sent = 0 if is_sum else count
        return torch.empty(size, dtype=dtype if is_sum else self.dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Write this rank's shard of the sum or the mean of the inputs of all ranks. A collective.

        Args:
            output_tensor: `[N / ranks]`, float32.
            input_tensor: `[N]`, 16 bits.
            group: The ranks that share a copy of the model.
            op: SUM or AVG.
            async_op: False.
        """
        assert (input_tensor.dtype, output_tensor.dtype) == (self.dtype, torch.float32)
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) and not async_op, "FSDP2 uses no other operations"
        rows = input_tensor.view(group.size(), -1)
        reduce_scatter_in_float32(rows, group, mean=op == dist.ReduceOp.AVG, out=output_tensor)
