"""Estimate the time of an optimizer step from its work and the rates of a GPU. The module never imports torch.

The rates come from data sheets and kernel profiles, or were measured on the machine. The other constants below come
from groups of measurements; docs/explanation/plan-accuracy.md has the groups and the errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftcli.models.estimates.step_work import Kernels, Rows, count_work

if TYPE_CHECKING:
    from ftcli.config.plan import Plan
    from ftcli.config.profile import ShardCounts
    from ftcli.config.recipe import Recipe
    from ftcli.models.estimates.shape import ModelSize, Shape
    from ftcli.models.estimates.step_work import Work
    from ftcli.runtime.gpus import GPU


# Rate of attention over long documents, as a part of the rate of matrix products, and the length at which it is half of
# that. flash-attn 4: about 490 TFLOP/s over long documents (FlashAttention-3, arXiv:2407.08608), and 180 to 240 in the
# kernel profiles of documents of 490 tokens (benchmarks/where). PyTorch's kernels: lines with and without extras.
FLASH_ATTENTION_4, TORCH_ATTENTION = 0.7, 0.36
HALF_RATE_LENGTH = 1200  # tokens that a token's attention spans
# Part of the time of communication by which a step becomes longer although computation runs beside it: collectives use
# multiprocessors and memory that computation needs. Mean of four values, each estimated without the lines of one of the
# groups DDP, FSDP2, ZeRO-3 and fp8.
NOT_HIDDEN = 0.65
HOOKS_NOT_HIDDEN = 1.0  # the same where hooks inside layers gather weights: the host waits for each gather
IDLE = 0.04  # part of a step in which no kernel runs: median of nine kernel profiles of ftcli (benchmarks/where)
# Seconds in which the host launches the kernels of a layer that is not compiled, forward and backward, and the rest of
# a step. From steps that wait for the host: BERT and ViT; layers of language models have gates, rotary positions and
# more norms. Hosts differ: a step of BERT took 14 to 55 ms (docs/explanation/plan-accuracy.md).
HOST_LAYER, HOST_GATED_LAYER, HOST_STEP = 1.6e-3, 5.2e-3, 7e-3
COMPILED_HOST = 0.77  # of these seconds, for compiled layers
# What hooks of a layer add that gather its weights and sum its gradients, and what adapters on its matrices add.
HOST_SHARDED, HOST_STAGE_3, HOST_ADAPTER = 4.3e-3, 3.2e-3, 2.1e-3
# The same for one pass (forward, backward or recomputation) through a layer of 4-bit weights with an adapter. From
# eight lines of 8B QLoRA with one row, whose kernels take less time than the host.
FOUR_BIT_PASS = 4.4e-3
# Seconds of the device for the gaps between the kernels of a layer in a CUDA graph, and for kernels that are shorter
# than the time to start one. From two lines of BERT and one of ViT, which the estimate without it misses by 5 and 6 ms.
GRAPH_LAYER = 0.4e-3
LENGTH_SPREAD = 2.0  # mean of squared lengths over the squared mean, of lengths with an exponential distribution
COLLATED = 5e6  # tokens per second that a training process collates without loader processes (benchmarks/data_wait.py)
HOST_BANDWIDTH = 25e9  # bytes per second of host memory for each GPU: eight channels of DDR4-3200 for eight GPUs


@dataclass(frozen=True)
class StepTime:
    """The seconds of an optimizer step.

    Attributes:
        compute: Computation.
        communication: What communication adds to it.
        data: Waiting for rows.
        sent: Communication by itself, hidden or not.
        waiting: Part of `compute` in which the GPU waits for the host to launch its kernels.
    """

    compute: float
    communication: float
    data: float
    sent: float
    waiting: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.communication + self.data


def estimate_step(
    recipe: Recipe,
    size: ModelSize,
    shape: Shape,
    shares: ShardCounts,
    plan: Plan,
    rows: Rows,
    kernels: Kernels,
    gpu: GPU,
) -> StepTime:
    """Return the time of a step.

    Args:
        recipe: The recipe.
        size: The size of the model.
        shape: The sizes of its layers.
        shares: Over how many processes the profile shards weights, gradients and optimizer state.
        plan: The batch sizes.
        rows: Lengths of the rows.
        kernels: What computes the layers.
        gpu: The GPU. It must have an entry for the recipe's precision.
    """
    work = count_work(recipe, size, shape, shares, plan, rows, kernels)
    half = gpu.products["bf16" if "bf16" in gpu.products else "fp16"]
    other = gpu.products["fp32"] if recipe.precision == "fp32" else half
    attended = shape.patches or rows.attended
    share = FLASH_ATTENTION_4 if kernels.flash_attention_4 else TORCH_ATTENTION
    attention = other * share * attended / (attended + HALF_RATE_LENGTH)
    device = work.layer_flops / gpu.products[recipe.precision] + work.other_flops / other
    device += work.attention_flops / attention + work.traffic / gpu.bandwidth
    device += GRAPH_LAYER * work.host_layers * kernels.graphs
    host = _host_seconds(recipe, shape, shares, kernels, work) / gpu.host
    compute = max(device / (1 - IDLE), host) + work.updated_on_host / HOST_BANDWIDTH
    sent = work.sent / gpu.link + work.host_traffic / gpu.host_link
    has_hooks = shares.is_stage_3 and not kernels.compiled
    waits = max(0.0, host - device / (1 - IDLE))  # communication costs nothing in this time
    exposed = max(sent - compute, (HOOKS_NOT_HIDDEN if has_hooks else NOT_HIDDEN) * sent - waits, 0.0)
    reads_itself = recipe.data.workers == 0 and shape.patches is None
    tokens = plan.micro_size * plan.accumulation * rows.tokens
    return StepTime(compute, exposed, tokens / COLLATED if reads_itself else 0.0, sent, waits)


def _host_seconds(recipe: Recipe, shape: Shape, shares: ShardCounts, kernels: Kernels, work: Work) -> float:
    """Return the seconds in which the host launches the kernels of a step."""
    layer = HOST_GATED_LAYER if shape.has_gate else HOST_LAYER
    layer = 0.0 if kernels.graphs else COMPILED_HOST * layer if kernels.compiled else layer
    if shares.weights != 1:
        layer += HOST_STAGE_3 if shares.is_stage_3 else HOST_SHARDED
    if recipe.adapter.type != "none":
        layer += HOST_ADAPTER
    launches = layer * work.host_layers
    if recipe.model.quantization is not None:
        launches = max(launches, FOUR_BIT_PASS * work.host_passes)
    return launches + HOST_STEP
