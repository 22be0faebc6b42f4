"""AdamW with moments in 8 bits, in blocks of 256 values with one scale each, by bitsandbytes' GPU kernels.

Method: Dettmers et al. 2022 (arXiv:2110.02861). Weights and gradients stay float32. Tensors of fewer than 4096 elements
have float32 moments. Blocks follow the tensors of a process, so they differ between profiles. A checkpoint therefore
stores both moments in float32 under AdamW's names, and every profile and plain AdamW can resume from it. Unpacking and
packing the moments again gives the same bits. This module is independent of the backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ftcli.hardware.moments_8bit import SIGNED, absmax, byte_values, local_shard, round_scales
from ftcli.runtime.patches import declare
from ftcli.training.optim.adamw_per_parameter import PerParameterAdamW

if TYPE_CHECKING:
    from torch import Tensor


LEAST = 4096  # elements; smaller tensors such as norms and biases are few and sensitive to rounding


def kernel_problem() -> str | None:
    """Return how the parameters of bitsandbytes' kernels differ from the expected ones; None if they do not."""
    import bitsandbytes  # noqa: F401 - its operations come with it

    for name, count in (("optimizer_update_8bit_blockwise", 19), ("optimizer_update_32bit", 18)):
        actual = len(getattr(torch.ops.bitsandbytes, name).default._schema.arguments)
        if actual != count:
            return f"bitsandbytes' {name} takes {actual} arguments, and ftcli passes {count}"
    return None


KERNELS = declare(
    __name__,
    "adamw-8bit-kernels",
    library="bitsandbytes",
    versions=">=0.50,<0.51",
    purpose="Calls bitsandbytes' kernels for AdamW with arguments by position",
    without="optimizer adamw_8bit is refused.",
    alternative="`bitsandbytes.optim.AdamW8bit`, whose state other profiles cannot read.",
    apis=("torch._ops:OpOverload._schema",),
    required=True,
    also=kernel_problem,
)
KINDS = dict.fromkeys(SIGNED, torch.uint8)


class AdamW8bit(PerParameterAdamW):
    """AdamW with 8-bit moments for parameter groups with `kinds: KINDS`, and float32 moments for other groups."""

    kinds = dict.fromkeys(SIGNED, torch.float32)

    def step_weight(self, group: dict[str, Any], weight: Tensor, state: dict[str, Any]) -> None:
        """Step one weight in place with the bitsandbytes kernel for the dtype of its moments."""
        import bitsandbytes  # noqa: F401 - its operations come with it

        (beta1, beta2), count, rate = group["betas"], int(state["step"]), float(group["lr"])
        gradient, value = local_shard(weight.grad).contiguous(), local_shard(weight)  # type: ignore[arg-type]
        first, second = (local_shard(state[kind]) for kind in SIGNED)
        eps, decay = group["eps"], group["weight_decay"]
        kernels = torch.ops.bitsandbytes
        if first.dtype == torch.uint8:
            maps = [byte_values(signed, value.device) for signed in SIGNED.values()]
            scales = [absmax(state, kind) for kind in SIGNED]
            numbers = (beta1, beta2, 0.0, 0.0, eps, count, rate, *maps, *scales, decay, 1.0, False)
            kernels.optimizer_update_8bit_blockwise("adam", gradient, value, first, second, *numbers)
            for scale in scales:
                round_scales(scale)
            return
        numbers = (0.0, 0.0, beta1, beta2, 0.0, 0.0, eps, decay, count, rate, 1.0, False)
        kernels.optimizer_update_32bit("adam", gradient, value, first, second, None, *numbers)
