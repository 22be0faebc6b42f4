"""Estimate the memory of one process, on its device and on the host.

The estimate needs the model's configuration and sizes only, so `ftcli check` prints it before a launch. Measured peaks
on GPUs may differ by a fifth; `batch.micro_size: auto` measures instead. The module never imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ftcli.config.profile import gradient_part
from ftcli.config.task_registry import task_class
from ftcli.models.estimates.shape import COMPUTE_BYTES, OF_WHOLE_LAYERS, ModelSize, Shape
from ftcli.tasks.protocol import properties_of

if TYPE_CHECKING:
    from ftcli.config.plan import Plan
    from ftcli.config.profile import ShardCounts
    from ftcli.config.recipe import Recipe


MODES = ("none", "selective", "full", "tiled")  # what the backward pass recomputes; the fastest mode first
USABLE_FRACTION = 0.9  # of a device's memory; driver, communication buffers and fragmentation take the rest
# Largest number of logits in one chunk of linear_cross_entropy.py, unless a single row has more. 2^28 bfloat16 logits
# are 512 MiB. Chunks are large because each one reads and writes the whole gradient of the head's weight.
MAX_LOGITS_PER_CHUNK = 2**28
# Tiles of tokens in which tiled_mlp.py computes the MLP of a recomputed layer. In 4 bits each tile dequantizes the
# weights again, which takes about a tenth of the time of its products.
TILE_TOKENS, MOST_TILES = 2048, 64
OFFLOADED_ON_DEVICE = 3  # activations that are on their way to the host or back, or are used


@dataclass(frozen=True)
class MemoryEstimate:
    """The largest number of bytes that one process has on its device during a step.

    Attributes:
        bytes_by_use: Bytes of weights, gradients, activations and so on, by name.
        host_bytes_by_key: Bytes that are in host memory instead, by the key of the recipe's section `model`.
    """

    bytes_by_use: dict[str, int]
    host_bytes_by_key: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """The sum of all bytes."""
        return sum(self.bytes_by_use.values())

    @property
    def host_bytes(self) -> int:
        """All bytes that are in host memory instead."""
        return sum(self.host_bytes_by_key.values())

    def __str__(self) -> str:
        uses = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in self.bytes_by_use.items() if size)
        return f"about {self.total / 1e9:.2f} GB per process ({uses})"


def estimate_memory(
    recipe: Recipe,
    sizes: ModelSize,
    shares: ShardCounts,
    *,
    rows: int,
    tokens: int,
    mode: str,
    fused: bool = False,
    compiled: bool = False,
    fresh_gradients: bool = False,
    graphs: bool = False,
) -> MemoryEstimate:
    """Return the memory of a process whose forward pass has `rows` rows of `tokens` tokens.

    Args:
        recipe: The recipe of the run. What it leaves to `auto` is not in host memory.
        sizes: The size of the model.
        shares: Over how many processes the profile shards weights, gradients and optimizer state.
        rows: Rows of a micro-batch.
        tokens: Tokens of a row.
        mode: What the backward pass recomputes, one of `MODES`.
        fused: Whether the layers are compiled, or have Liger's norms and gates.
        compiled: Whether the layers are compiled.
        fresh_gradients: Whether each backward pass allocates the gradients. They then use the memory of activations
            that have been freed.
        graphs: Whether passes are CUDA graphs, which leave the gradients in memory of their own.
    """
    weight_bytes = 2 if recipe.precision == "bf16_pure" else 4
    shard = lambda size, shards: size // shards if shards else 0  # noqa: E731 - 0 shards: offloaded to the host
    has_casts = COMPUTE_BYTES[recipe.precision] < weight_bytes and not _keeps_no_casts(recipe, sizes.shape, shares)
    rounds = _keeps_rounded_shards(recipe, sizes.shape, shares)
    state_bytes = optimizer_bytes(recipe) + weight_bytes * shares.has_master_weights
    on_host = {"embeddings_on_host": sizes.table_bytes if recipe.model.embeddings_on_host is True else 0}
    uses = {
        "weights": shard(
            sizes.trained * weight_bytes + max(0, sizes.frozen_bytes - sum(on_host.values())), shares.weights
        ),
        "gradients": shard(sizes.trained * weight_bytes, shares.gradients),
        "optimizer": shard(sizes.trained * state_bytes, shares.optimizer),
        "copies of weights": 2 * sizes.trained * has_casts,  # autocast's, until the backward pass
        "rounded weights": shard(2 * sizes.trained, shares.weights) * rounds,
    }
    if graphs:
        uses["gradients of CUDA graphs"] = sizes.trained * weight_bytes
    if sizes.shape is None:
        return MemoryEstimate(uses, on_host)
    shape, batch = sizes.shape, rows * tokens
    if shares.weights != 1:  # weights and gradients of the current layer are whole, and the weights of the next one
        layer = shape.hidden * (2 * shape.attention + 2 * shape.keys + 3 * shape.inner)
        gathered_bytes = 2 if uses["rounded weights"] else weight_bytes
        uses["gathered"] = 3 * gathered_bytes * layer + weight_bytes * shape.vocabulary * shape.hidden
    how: dict[str, Any] = {"fused": fused or compiled, "adapter": has_frozen_16_bit_weights(recipe)}
    how["rank"] = 0 if recipe.adapter.type == "none" else recipe.adapter.r
    current = shape.activation_bytes(recipe.precision, "none", **how)  # the layer that is computing
    # Whether a whole layer is recomputed before its gradients are computed.
    if mode in OF_WHOLE_LAYERS or (compiled and how["adapter"]):
        has_tiles = mode == "tiled" and tiles_mlps(recipe, shape, shares)
        tile = min(batch, max(TILE_TOKENS, -(-batch // MOST_TILES))) if has_tiles else batch
        scaled = compiled and scales_inside_adapters(recipe)
        of_pass = {"is_fused": how["fused"], "tokens": batch, "tile": tile, "scaled": scaled}
        computing = shape.recomputed_bytes(recipe.precision, current, **of_pass)
    else:
        computing = batch * current
    layer = shape.activation_bytes(recipe.precision, mode, compiled=compiled, **how)
    on_device = min(OFFLOADED_ON_DEVICE, shape.layers) if recipe.model.activation_offloading is True else shape.layers
    uses["activations"] = batch * on_device * layer + computing
    on_host["activation_offloading"] = batch * layer * (shape.layers - on_device)
    if fresh_gradients:
        uses["gradients"] = _fresh_gradients(uses, computing, shares, shape)
    if uses_vocabulary_logits(recipe):
        size = COMPUTE_BYTES[recipe.precision] + 8 * shape.changes_logits
        chunk = min(batch, max(1, MAX_LOGITS_PER_CHUNK // max(shape.vocabulary, 1))) * shape.vocabulary
        uses["logits"] = chunk * size
        if trains_head(recipe):
            uses["logits"] += shape.vocabulary * shape.hidden * 4  # the head's gradient in float32
    if shares.weights == 1 and not shares.zero_stage and recipe.adapter.type == "none":
        # At the end of a backward pass. The gradient of the embeddings comes last, and that of a tied head waits for
        # it. Gradients of casts that an earlier forward pass made come after those of all layers. Under ddp the last
        # pass makes its own, which is not counted here.
        matrices = 0 if compiled else shape.layers * shape.layer_weights
        tables = 1 + (shape.ties_head and uses_vocabulary_logits(recipe)) - fresh_gradients
        arriving = tables * weight_bytes * shape.table + 2 * matrices * has_casts * (not fresh_gradients)
        gradients = sizes.trained * weight_bytes - uses["gradients"]
        freed = uses["activations"] + uses.get("logits", 0)
        uses["arriving gradients"] = max(0, arriving + gradients - freed)
    return MemoryEstimate(uses, on_host)


def _fresh_gradients(uses: dict[str, int], computing: int, shares: ShardCounts, shape: Shape) -> int:
    """Return the bytes of gradients that need more memory than the activations, which are freed meanwhile.

    ZeRO-3 allocates gradients in parts. The first one may contain an untied head. At the end of the backward pass all
    parts exist, and a layer is still computed.

    Args:
        uses: The bytes of each use, with all gradients and all activations.
        computing: The activations of the layer that is computed.
        shares: Over how many processes gradients are sharded.
        shape: The sizes of the model.
    """
    gradients, activations = uses["gradients"], uses["activations"]
    if not shares.gradient_parts:
        return max(0, gradients - activations)
    head = 0 if shape.ties_head else 4 * shape.table // shares.gradients
    first = min(gradients, 4 * gradient_part(gradients // 4) + head)
    return max(first, gradients - (activations - computing))


def scales_inside_adapters(recipe: Recipe) -> bool:
    """Return whether the LoRA layers of a recipe scale small tensors (kernels/adapter_scaling.py).

    Args:
        recipe: The recipe.
    """
    adapter = recipe.adapter
    if adapter.type == "none" or adapter.use_dora or recipe.precision != "bf16":
        return False
    scaling = adapter.lora_alpha / (math.sqrt(adapter.r) if adapter.use_rslora else adapter.r)
    return is_exact_scaling(scaling)


def is_exact_scaling(scaling: float) -> bool:
    """Return whether products with a scaling are rounded as without it: whether it is a power of two.

    Args:
        scaling: The factor of a LoRA adapter.
    """
    return math.frexp(abs(scaling))[0] == 0.5


def tiles_mlps(recipe: Recipe, shape: Shape | None, shares: ShardCounts) -> bool:
    """Return whether the MLPs of recomputed layers can be computed in tiles in long passes (kernels/tiled_mlp.py).

    Under ZeRO-3 that depends on the layers, which are not known here; the estimate is then too high.
    """
    return shape is not None and shape.tiles_mlp and recipe.precision != "fp8" and not shares.is_stage_3


def tiles_of_pass(tokens: int) -> int:
    """Return in how many tiles of tokens the MLPs of recomputed layers compute a forward pass.

    Args:
        tokens: Tokens of the pass, with padding.
    """
    return max(1, min(MOST_TILES, -(-tokens // TILE_TOKENS)))


def _keeps_no_casts(recipe: Recipe, shape: Shape | None, shares: ShardCounts) -> bool:
    """Return whether 16-bit casts of weights are freed with the layer that uses them.

    Autocast caches 16-bit copies of weights for a whole forward pass, even with gradient checkpointing. There is no
    such cache under ZeRO-3 or FSDP2, which gather 16-bit weights already. Expert layers always keep the copies.
    """
    if shape is None or shape.has_experts:
        return False
    return shares.is_stage_3 or (shares.weights != 1 and trains_language_model(recipe))


def _keeps_rounded_shards(recipe: Recipe, shape: Shape | None, shares: ShardCounts) -> bool:
    """Return whether ZeRO-3 also has its shards in 16 bits during a window (zero3_leaf_modules.py); not for experts."""
    if shape is not None and shape.has_experts:
        return False
    return shares.is_stage_3 and trains_language_model(recipe) and recipe.precision in ("bf16", "fp16")


def trains_language_model(recipe: Recipe) -> bool:
    """Return whether a whole language model is trained; matrix weights are then sent in 16 bits."""
    return uses_vocabulary_logits(recipe) and recipe.adapter.type == "none"


def uses_vocabulary_logits(recipe: Recipe) -> bool:
    """Return whether the loss of a recipe's task needs logits of the whole vocabulary."""
    return properties_of(task_class(recipe.task)).uses_vocabulary_logits


def has_fresh_gradients(shares: ShardCounts, plan: Plan) -> bool:
    """Return whether each backward pass allocates the gradients. DDP's buckets and ZeRO-2 allocate them once."""
    has_buckets = plan.processes > 1 and shares.gradients == 1
    return plan.accumulation == 1 and not has_buckets and (not shares.zero_stage or shares.gradient_parts)


def has_frozen_16_bit_weights(recipe: Recipe) -> bool:
    """Return whether a recipe trains an adapter on 16-bit weights. The residual stream then has 16 bits too."""
    wide = recipe.model.dtype == "float32" or recipe.precision == "fp32"
    return recipe.adapter.type != "none" and not wide


def trains_head(recipe: Recipe) -> bool:
    """Return whether the head has a gradient, which an adapter alone does not give it."""
    return recipe.adapter.type == "none" or bool(recipe.adapter.modules_to_save or recipe.model.new_tokens)


def optimizer_bytes(recipe: Recipe) -> int:
    """Return the bytes of optimizer state per trained element, without weight and gradient."""
    if recipe.optimizer.name == "adamw_8bit":
        return 2
    if recipe.optimizer.name == "sgd":
        return 4 if recipe.optimizer.momentum else 0
    return 8  # two moments in float32; under bf16_pure one in bfloat16, and the low bits of the weight
