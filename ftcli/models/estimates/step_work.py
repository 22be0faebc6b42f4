"""Count the work of an optimizer step of one process: matrix products, memory traffic, attention and messages.

Counts follow from the model's sizes, the recipe and the profile. They contain no rate of a device; step_time.py turns
them into seconds. The module never imports torch.

Bytes of traffic are those of kernels that read and write a tensor of T tokens: 2 for a 16-bit tensor, r for the
residual stream. H is hidden size, A and K the features of queries and keys, I those of the feed-forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftcli.models.estimates.memory_estimate import (
    MAX_LOGITS_PER_CHUNK,
    has_frozen_16_bit_weights,
    optimizer_bytes,
    trains_head,
    trains_language_model,
    uses_vocabulary_logits,
)
from ftcli.models.estimates.shape import OF_WHOLE_LAYERS

if TYPE_CHECKING:
    from ftcli.config.plan import Plan
    from ftcli.config.profile import ShardCounts
    from ftcli.config.recipe import Recipe
    from ftcli.models.estimates.shape import ModelSize, Shape


LIGER_TRAFFIC = 1.45  # of compiled layers: Liger fuses inside modules, not over them (benchmarks/tables.md, ladder)
EAGER_BYTES, EAGER_RESIDUAL = 150, 25  # per hidden feature, and per byte of the residual stream: norms in float32
FP8_CASTS = 2  # copies of 8 bits are also written transposed, at half the bandwidth (benchmarks/where/where-fp8.txt)
SHARD_TRAFFIC = 14  # bytes per gathered weight and micro-batch: two copies out (8), one in (4), a sum (2)


@dataclass(frozen=True)
class Rows:
    """The rows of a step, as far as they matter for its time.

    Attributes:
        tokens: Tokens of a row that the model computes, with padding.
        attended: Tokens that a token's attention spans on average: the mean of squared lengths over the mean length.
        trained: Share of the tokens that the loss uses.
    """

    tokens: float
    attended: float
    trained: float = 1.0


@dataclass(frozen=True)
class Kernels:
    """What computes the layers.

    Attributes:
        mode: What the backward pass recomputes, one of `memory_estimate.MODES`.
        compiled: Whether the layers are compiled.
        liger: Whether layers that are not compiled have Liger's kernels.
        flash_attention_4: Whether attention is flash-attn 4, else PyTorch's kernels.
        graphs: Whether passes are CUDA graphs, which the host launches at once.
    """

    mode: str
    compiled: bool
    liger: bool
    flash_attention_4: bool
    graphs: bool = False


@dataclass(frozen=True)
class Work:
    """The work of one optimizer step of one process.

    Attributes:
        layer_flops: FLOPs of matrix products in the layers, in the recipe's precision.
        other_flops: FLOPs of all other matrix products, in 16 bits or float32.
        attention_flops: FLOPs of attention, by the usual count of a causal mask.
        traffic: Bytes that kernels limited by memory read and write.
        sent: Bytes that the process sends to others.
        host_traffic: Bytes between device and host.
        host_layers: Layers that the host launches kernels for, over all micro-batches; a recomputed one counts 4/3.
        host_passes: Passes through layers, over all micro-batches: forward, backward, and recomputation.
        updated_on_host: Bytes that the optimizer reads and writes in host memory.
    """

    layer_flops: float
    other_flops: float
    attention_flops: float
    traffic: float
    sent: float
    host_traffic: float
    host_layers: float
    host_passes: int
    updated_on_host: float


def count_work(
    recipe: Recipe, size: ModelSize, shape: Shape, shares: ShardCounts, plan: Plan, rows: Rows, kernels: Kernels
) -> Work:
    """Return the work of a step.

    Args:
        recipe: The recipe.
        size: The size of the model.
        shape: The sizes of its layers.
        shares: Over how many processes the profile shards weights, gradients and optimizer state.
        plan: The batch sizes.
        rows: Lengths of the rows.
        kernels: What computes the layers.
    """
    tokens = plan.micro_size * plan.accumulation * (shape.patches or rows.tokens)
    has_adapter = recipe.adapter.type != "none"
    passes = (4 if has_adapter else 6) + 2 * (kernels.mode in OF_WHOLE_LAYERS)
    adapter = (6 + 2 * (kernels.mode in OF_WHOLE_LAYERS)) * size.trained * has_adapter
    head = (6 if trains_head(recipe) else 4) * shape.table * rows.trained * uses_vocabulary_logits(recipe)
    attended = shape.patches or rows.attended
    attention = (6 + 2 * (kernels.mode in OF_WHOLE_LAYERS)) * shape.layers * shape.attention * attended
    of_optimizer = _optimizer_traffic(recipe, size, shares)
    traffic = tokens * shape.layers * layer_traffic(recipe, size, shape, kernels)
    traffic += plan.accumulation * _weight_traffic(recipe, size, shape, shares, kernels)
    traffic += _head_traffic(recipe, shape, tokens * rows.trained) + _clip_traffic(recipe, size, shares)
    host = plan.accumulation * _offloaded_bytes(recipe, size, shape, shares)
    products = passes * shape.layer_products - 2 * _left_out(recipe, shape, shares, kernels)
    return Work(
        layer_flops=tokens * shape.layers * products,
        other_flops=tokens * (adapter + head),
        attention_flops=tokens * attention,
        traffic=traffic + (of_optimizer if shares.optimizer else 0),
        sent=_sent_bytes(recipe, size, shape, shares, plan),
        host_traffic=host + _offloaded_activations(recipe, shape, kernels, tokens),
        host_layers=plan.accumulation * shape.layers * (4 / 3 if kernels.mode in OF_WHOLE_LAYERS else 1),
        host_passes=plan.accumulation * shape.layers * (3 if kernels.mode in OF_WHOLE_LAYERS else 2),
        updated_on_host=0 if shares.optimizer else of_optimizer / plan.processes,
    )


def _left_out(recipe: Recipe, shape: Shape, shares: ShardCounts, kernels: Kernels) -> int:
    """Return the weights of a layer's product that recomputation leaves out (kernels/unread_outputs.py).

    That is the last one. A backend that multiplies by functions of its own computes it again.
    """
    has_own_products = shares.is_stage_3 and shares.weights != 1
    has_other_products = recipe.precision == "fp8" or recipe.adapter.use_dora or has_own_products
    if kernels.mode not in OF_WHOLE_LAYERS or not kernels.compiled or has_other_products:
        return 0
    return shape.hidden * shape.inner if shape.tiles_mlp and not shape.norms_outputs else 0


def layer_traffic(recipe: Recipe, size: ModelSize, shape: Shape, kernels: Kernels) -> float:
    """Return the bytes that elementwise kernels of a layer read and write per token, forward and backward.

    Compiled, forward: two norms read r and write 2; two residual sums read 2 + r and write r, and one more read each
    where a graph begins; rotary positions read and write q and k; the gate reads 2 and writes 1 tensors of size I.
    Backward: norms read 2 + 2r and write r, sums of gradients read 10 and write 4, the gate reads 3 and writes 2.
    """
    residual = 2 if recipe.precision == "bf16_pure" or has_frozen_16_bit_weights(recipe) else 4
    heads = 8 * (shape.attention + shape.keys) * (2 if shape.norms_queries else 1)
    wide = 2 if recipe.precision == "fp32" else 1
    fused: float = (26 + 11 * residual) * shape.hidden + wide * (heads + 16 * shape.inner)
    if not shape.has_gate:
        fused = (66 + 11 * residual) * shape.hidden + wide * (heads + 12 * shape.inner)
    elif not kernels.compiled and not kernels.liger:
        fused = (EAGER_BYTES + EAGER_RESIDUAL * residual) * shape.hidden + wide * (7.5 * heads + 30 * shape.inner)
    elif not kernels.compiled:
        fused *= LIGER_TRAFFIC
    if kernels.mode != "none":
        fused *= 4 / 3
    if recipe.precision == "fp8":  # largest elements (2), rounding (2 + 1), for two products of each tensor
        fused += FP8_CASTS * 8 * (4 * shape.hidden + 2 * shape.attention + 2 * shape.keys + 3 * shape.inner)
    if recipe.adapter.type != "none":  # A reads 2 bytes forward and 2 + 6 backward; B writes 6 forward and reads 4
        fused += 10 * shape.adapter_weights(1) / shape.layers * (4 / 3 if kernels.mode in OF_WHOLE_LAYERS else 1)
    return fused


def _weight_traffic(recipe: Recipe, size: ModelSize, shape: Shape, shares: ShardCounts, kernels: Kernels) -> float:
    """Return the bytes of passes over weights and their gradients in a micro-batch: casts, sums, copies of shards."""
    weights = shape.layers * shape.layer_weights
    traffic = 0.0
    if recipe.adapter.type == "none" and recipe.precision not in ("fp32", "bf16_pure"):
        # Casts of weights (4 + 2) and gradients that become float32 (2 + 4), on the shards where they are sharded.
        traffic += 12 * size.trained / max(1, shares.weights)
    if recipe.model.quantization is not None:  # 4 bits are read and 16 written, for each pass over the layers
        traffic += 2.5 * weights * (3 if kernels.mode in OF_WHOLE_LAYERS else 2)
        traffic -= 2.5 * shape.layers * _left_out(recipe, shape, shares, kernels)
    if recipe.precision == "fp8":  # whole weights: largest elements and rounding, forward and backward
        traffic += FP8_CASTS * 10 * weights
    if shares.weights != 1:
        traffic += SHARD_TRAFFIC * weights
    elif shares.optimizer != 1:  # stages 1 and 2 copy float32 gradients into buckets
        traffic += 8 * size.trained
    return traffic


def _head_traffic(recipe: Recipe, shape: Shape, trained_tokens: float) -> float:
    """Return the bytes of the softmax (two reads and one write) and of the float32 sums of the head's gradient."""
    if not uses_vocabulary_logits(recipe):
        return 0.0
    logits = trained_tokens * shape.vocabulary
    chunks = logits / MAX_LOGITS_PER_CHUNK
    return 6 * logits * (1 + 4 * shape.changes_logits) + 8 * chunks * shape.table * trains_head(recipe)


def _optimizer_traffic(recipe: Recipe, size: ModelSize, shares: ShardCounts) -> float:
    """Return the bytes of an update: weights and state are read and written, gradients are read."""
    weight = 2 if recipe.precision == "bf16_pure" else 4
    return (3 * weight + 2 * optimizer_bytes(recipe)) * size.trained / max(1, shares.optimizer)


def _clip_traffic(recipe: Recipe, size: ModelSize, shares: ShardCounts) -> float:
    """Return the bytes of the gradient norm (one read) and of scaling the gradients (a read and a write)."""
    weight = 2 if recipe.precision == "bf16_pure" else 4
    return 3 * weight * size.trained / max(1, shares.gradients, shares.optimizer)


def _offloaded_bytes(recipe: Recipe, size: ModelSize, shape: Shape, shares: ShardCounts) -> float:
    """Return the bytes between device and host in a micro-batch: weights twice there, gradients once back."""
    sent = 2 if trains_language_model(recipe) else 4
    total = size.trained * sent + size.frozen_bytes
    return (2 * total if shares.weights == 0 else 0) + (size.trained * sent if shares.gradients == 0 else 0)


def _offloaded_activations(recipe: Recipe, shape: Shape, kernels: Kernels, tokens: float) -> float:
    """Return the bytes of activations that go to the host and back in a step."""
    if recipe.model.activation_offloading is not True:
        return 0.0
    adapter = has_frozen_16_bit_weights(recipe)
    bytes_per_token = shape.activation_bytes(recipe.precision, kernels.mode, compiled=kernels.compiled, adapter=adapter)
    return 2 * tokens * shape.layers * bytes_per_token


def _sent_bytes(recipe: Recipe, size: ModelSize, shape: Shape, shares: ShardCounts, plan: Plan) -> float:
    """Return the bytes that a process sends in a step, as rings send them: (n - 1)/n for a gather or a reduce-scatter.

    Linear layers of a language model that is trained as a whole are gathered and summed in 16 bits, other weights in
    float32. Offloaded weights are gathered like sharded ones.
    """
    n, weight = plan.processes, 2 if recipe.precision == "bf16_pure" else 4
    if n == 1:
        return 0.0
    whole = weight * size.trained
    if shares.weights == 1 and shares.optimizer == 1:  # one all-reduce, the same as a reduce-scatter and a gather
        return 2 * (n - 1) / n * whole
    if shares.weights == 1:  # stage 2: a sum for each micro-batch, a gather of updated weights
        return (n - 1) / n * whole * (plan.accumulation + 1)
    shards = shares.weights or n
    sent = 2 if trains_language_model(recipe) or recipe.adapter.type != "none" else weight
    layers = shape.layers * shape.layer_weights
    tables = max(0, size.trained - layers) if recipe.adapter.type == "none" else shape.table
    summed = layers * sent + tables * weight if recipe.adapter.type == "none" else whole
    of_batch = 2 * layers * sent + tables * weight + summed
    copies = n // shards
    between_copies = 2 * (copies - 1) / copies * whole / shards
    return plan.accumulation * ((shards - 1) / shards * of_batch + between_copies)
