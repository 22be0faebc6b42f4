"""Read the sizes of a model from config.json and from the headers of its weight files, without loading it.

The memory estimate and the step times of `ftcli plan` are functions of these sizes. The module never imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.models.architectures import HEAD_SETTINGS, architecture_of
from ftcli.models.estimates.adapter_size import count_adapter, is_inside, layer_matrices, named_matrices
from ftcli.models.files import parse_json_object, stored_shapes
from ftcli.runtime.reader_errors import reading

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe


COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "bf16_pure": 2, "fp8": 2}
# Bytes per hidden feature that a layer stores for norms, residuals and inputs of matrix products. Attention and the
# feed-forward products are counted separately. The numbers come from live storages of Llama, Qwen 3 and GPT-2.
RESIDUAL_BYTES = {"fp32": 24, "bf16": 26, "fp16": 26, "bf16_pure": 16, "fp8": 26}
AUTOCAST = ("bf16", "fp16")  # precisions in which the output of a norm may be cast for each product that reads it
# The same for a layer that is compiled or has Liger's kernels: it stores inputs of norms and of products only. In fp8
# the inputs of products are stored in 8 bits.
FUSED_BYTES = {"fp32": 16, "bf16": 12, "fp16": 12, "bf16_pure": 8, "fp8": 9}
# The same for layers without a gate (BERT, ViT). Their norms are one kernel that stores its input (4 bytes), and the
# inputs of the four products are stored once each (2 bytes). BERT stores a third cast of a norm's output.
UNGATED_BYTES = {"fp32": 20, "bf16": 16, "fp16": 16, "bf16_pure": 10, "fp8": 16}
# The same above frozen 16-bit weights. The residual stream then has 16 bits. Compiled layers with an adapter recompute
# the outputs of norms and the gated product (models/kernels/compile.py).
ADAPTER_BYTES, ADAPTER_FUSED_BYTES, ADAPTER_COMPILED_BYTES = 12, 8, 4
# A norm that is no fused kernel stores its input in float32, and its normalised values if its weight is trained.
NORM_INPUT_BYTES = 4
OF_WHOLE_LAYERS = ("full", "tiled")  # modes of recomputation that store the input of a layer only


@dataclass(frozen=True)
class Shape:
    """The sizes of a transformer that determine its weights, its activations and its matrix products.

    Attributes:
        layers: Number of layers.
        hidden: Hidden features.
        inner: Features of the feed-forward; with experts, those of all experts that one token uses.
        attention: Features of all query heads.
        keys: Features of all key heads.
        heads: Number of query heads.
        vocabulary: Size of the vocabulary.
        patches: Patches of an image plus the class token; None for text.
        changes_logits: Whether the model changes logits after the head, for example by soft-capping.
        has_experts: Whether the feed-forward consists of experts.
        has_gate: Whether the feed-forward is gated: three matrix products instead of two.
        norms_queries: Whether queries and keys pass norms.
        spared_casts: Casts of norm outputs that are shared under autocast (models/kernels/norm_casts.py).
        norms_outputs: Whether the outputs of attention and of the feed-forward pass norms, too.
        ties_head: Whether the head is the table of embeddings.
        stored_inner: Features of the feed-forward with all experts; None if there is one.
        tiles_mlp: Whether a recomputed layer computes its MLP in tiles of tokens (models/kernels/tiled_mlp.py).
    """

    layers: int
    hidden: int
    inner: int
    attention: int
    keys: int
    heads: int
    vocabulary: int
    patches: int | None
    changes_logits: bool = False
    has_experts: bool = False
    has_gate: bool = True
    norms_queries: bool = False
    ties_head: bool = False
    stored_inner: int | None = None
    spared_casts: int = 0
    norms_outputs: bool = False
    tiles_mlp: bool = False

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape | None:
        """Return the shape that a transformers configuration describes; None if the model is not a transformer."""
        tiles = architecture_of(config.get("model_type")).tiles_mlp  # kernels read the type of the whole model
        if isinstance(config.get("text_config"), dict):
            config = config["text_config"]

        def first(*names: str) -> int | None:
            values = (config.get(name) for name in names)
            return next((value for value in values if isinstance(value, int) and value > 0), None)

        layers, hidden = first("num_hidden_layers", "n_layer", "n_layers"), first("hidden_size", "n_embd", "dim")
        heads = first("num_attention_heads", "n_head", "n_heads")
        if layers is None or hidden is None or heads is None:
            return None
        size = first("head_dim") or hidden // heads
        inner = first("intermediate_size", "n_inner", "ffn_dim", "hidden_dim") or 4 * hidden
        used, stored = first("num_experts_per_tok", "num_experts_per_token"), None
        if used is not None:
            of_one, shared = first("moe_intermediate_size") or inner, first("shared_expert_intermediate_size") or 0
            inner = used * of_one + shared
            stored = (first("num_experts", "num_local_experts", "n_routed_experts") or used) * of_one + shared
        keys = (first("num_key_value_heads") or heads) * size
        side, patch = first("image_size"), first("patch_size")
        row = architecture_of(config.get("model_type"))
        return cls(
            layers,
            hidden,
            inner,
            heads * size,
            keys,
            heads,
            first("vocab_size") or 0,
            None if side is None or patch is None else (side // patch) ** 2 + 1,
            # Changed logits also exist as float32 log-probabilities, for a moment twice. Unchanged logits on GPUs do
            # not: one compiled kernel turns them into their gradient.
            changes_logits=any(config.get(name) is not None for name in HEAD_SETTINGS),
            has_experts=used is not None,
            has_gate=not row.lacks_gate,
            norms_queries=row.norms_queries,
            # Queries, keys and values share one cast, the gate and the other input of the feed-forward another.
            spared_casts=2 * bool(row.cast_norms) + (len(row.cast_norms) > 1),
            norms_outputs=row.norms_outputs,
            ties_head=config.get("tie_word_embeddings", row.ties_head) is True,
            stored_inner=stored,
            tiles_mlp=tiles,
        )

    @property
    def layer_products(self) -> int:
        """Elements of the weights of one layer that one token is multiplied with."""
        return self._products(self.inner)

    @property
    def layer_weights(self) -> int:
        """Elements of the matrices of one layer, with all experts."""
        return self._products(self.inner if self.stored_inner is None else self.stored_inner)

    def _products(self, inner: int) -> int:
        return self.hidden * (2 * self.attention + 2 * self.keys + (3 if self.has_gate else 2) * inner)

    @property
    def table(self) -> int:
        """Elements of the table of embeddings, and of the head."""
        return self.vocabulary * self.hidden

    @property
    def weights(self) -> int:
        """Elements of all weights: matrices, embeddings, two norms for each layer and an untied head."""
        tables = (1 if self.ties_head or not self.vocabulary else 2) * self.table
        return self.layers * (self.layer_weights + 2 * self.hidden) + tables + self.hidden

    def adapter_weights(self, r: int) -> int:
        """Return the number of weights of a LoRA adapter of rank `r` on every matrix of the layers."""
        return self.layers * r * sum(map(sum, layer_matrices(self).values()))

    def activation_bytes(
        self,
        precision: str,
        mode: str,
        *,
        fused: bool = False,
        compiled: bool = False,
        adapter: bool = False,
        rank: int = 0,
    ) -> int:
        """Return the bytes of activations that one layer stores per token until its backward pass.

        A fused layer recomputes its activation function.

        Args:
            precision: The recipe's precision.
            mode: One of `memory_estimate.MODES`.
            fused: Whether the layer is compiled, or has Liger's norms and gate.
            compiled: Whether the layer is compiled and nothing else is recomputed.
            adapter: Whether the layer's own weights are frozen, in 16 bits.
            rank: Features of a LoRA adapter; 0 without one.
        """
        size, residual = COMPUTE_BYTES[precision], 2 if precision == "bf16_pure" or adapter else 4
        if mode in OF_WHOLE_LAYERS:
            return residual * self.hidden
        attention = size * (2 * self.attention + 2 * self.keys) + 4 * self.heads  # q, result, k, v, sums
        attention += size * rank * (7 if self.has_gate else 6)  # between the two matrices of each adapter
        products = size * self.inner  # one tensor of the feed-forward
        if mode == "selective":  # norms are computed again
            return residual * self.hidden + attention + size * 2 * self.hidden + (2 if self.has_gate else 1) * products
        if not self.has_gate:
            return UNGATED_BYTES[precision] * self.hidden + attention + 2 * products
        is_fused = fused or compiled
        attention += self._norm_bytes(size, is_fused=is_fused, adapter=adapter)
        if adapter and compiled:
            return ADAPTER_COMPILED_BYTES * self.hidden + attention + 2 * products
        if is_fused:
            bytes_by_feature = ADAPTER_FUSED_BYTES if adapter else FUSED_BYTES[precision]
            return bytes_by_feature * self.hidden + attention + (2 if precision == "fp8" else 3) * products
        bytes_by_feature = ADAPTER_BYTES if adapter else RESIDUAL_BYTES[precision]
        if precision in AUTOCAST and not adapter:
            bytes_by_feature -= size * self.spared_casts
        return bytes_by_feature * self.hidden + attention + 4 * products

    def _norm_bytes(self, size: int, *, is_fused: bool, adapter: bool) -> int:
        """Return the bytes per token that norms of queries, of keys and of outputs store.

        Args:
            size: Bytes of a value in the precision of products.
            is_fused: Whether each norm is one kernel, which stores its input and computes the rest again.
            adapter: Whether the weights of norms are frozen.
        """
        features = (self.attention + self.keys) * self.norms_queries
        groups = self.heads * features // self.attention  # each has a factor in float32
        if is_fused:
            return size * (features + 2 * self.hidden * self.norms_outputs) + 4 * groups
        each = NORM_INPUT_BYTES + (0 if adapter else size)
        return each * (features + 2 * self.hidden * self.norms_outputs) + 4 * groups

    def gradient_bytes(self, precision: str) -> int:
        """Return the bytes of gradients that one layer has per token in its backward pass, beside what it recomputed.

        These are the gradients of the feed-forward's tensors, of attention's, and of four tensors of hidden size.
        """
        size = COMPUTE_BYTES[precision]
        inside = (3 if self.has_gate else 2) * self.inner + 2 * self.attention + 2 * self.keys
        return size * (inside + 4 * self.hidden)

    def recomputed_bytes(
        self, precision: str, activations: int, *, is_fused: bool, tokens: int, tile: int, scaled: bool = False
    ) -> int:
        """Return the bytes of a layer that is recomputed and differentiated.

        With tiles, the inner tensors of the feed-forward exist for one tile only. The larger one of two moments counts:
        the feed-forward's, with the gradients of its input and output, and attention's. A pass needs no less than a
        shorter one without tiles.

        Args:
            precision: The recipe's precision.
            activations: Bytes that the layer stores per token if nothing is recomputed (`activation_bytes`).
            is_fused: Whether the layer is compiled, or has Liger's norms and gate.
            tokens: Tokens of the pass.
            tile: The most tokens for which the feed-forward is computed at once.
            scaled: Whether the layer is compiled, and its LoRA adapters scale small tensors. Two gradients of the
                feed-forward's tensors are then not copied.
        """
        size = COMPUTE_BYTES[precision]
        copied = 2 * size * self.inner if scaled and self.has_gate else 0
        gradients = self.gradient_bytes(precision) - copied
        if tile == tokens:
            return tokens * (activations + gradients)
        products, gradients_of_products = (3 if is_fused else 4) * size * self.inner, 3 * size * self.inner - copied
        outside = activations - products
        return max(
            tokens * (outside + 2 * size * self.hidden) + tile * (products + gradients_of_products),
            tokens * (outside + gradients - gradients_of_products),
            tile * (activations + gradients),
        )


@dataclass(frozen=True)
class ModelSize:
    """The size of a model.

    Attributes:
        trained: Number of trained elements.
        frozen_bytes: Bytes of frozen weights.
        shape: The sizes of its layers; None if the model is not a known transformer.
        table_bytes: Those of the frozen weights that are input embeddings and can be in host memory.
    """

    trained: int
    frozen_bytes: int
    shape: Shape | None
    table_bytes: int = 0

    def tokens_of_row(self, tokens: int) -> int:
        """Return the tokens of the longest row: `tokens`, or the patches of a model for images.

        Args:
            tokens: Tokens of the longest row, if rows have tokens.
        """
        return tokens if self.shape is None or self.shape.patches is None else self.shape.patches


def measure_model(folder: Path, recipe: Recipe) -> ModelSize:
    """Return the size of a model in a local folder, from the headers of its files, else from its configuration.

    Args:
        folder: The model's folder, with safetensors files or with config.json only.
        recipe: The recipe that trains it.

    Raises:
        InputError: A file of the model cannot be read.
    """
    shapes = stored_shapes(folder)
    config = folder / "config.json"
    with reading(config):
        shape = Shape.of(parse_json_object(config, config.read_bytes())) if config.is_file() else None
    if not shapes and shape is not None:
        return size_of_shape(shape, recipe)
    inside = sum(math.prod(size) for name, size in shapes.items() if is_inside(name, size))
    total = sum(math.prod(size) for size in shapes.values())
    return _divide(recipe, total, inside, count_adapter(recipe, shapes), shape)


def size_of_shape(shape: Shape, recipe: Recipe) -> ModelSize:
    """Return the size of a model without weight files, from its configuration.

    Args:
        shape: The sizes of its layers.
        recipe: The recipe that trains it.
    """
    inside = shape.layers * shape.layer_weights
    return _divide(recipe, shape.weights, inside, count_adapter(recipe, named_matrices(shape)), shape)


def _divide(recipe: Recipe, total: int, inside: int, adapter: int, shape: Shape | None) -> ModelSize:
    """Return the trained elements and the bytes of frozen ones.

    Args:
        recipe: The recipe.
        total: Elements of the model.
        inside: Elements of the matrices of its layers.
        adapter: Elements of the recipe's adapter.
        shape: The sizes of its layers.
    """
    if recipe.adapter.type == "none":
        return ModelSize(total, 0, shape)
    wide = recipe.model.dtype == "float32" or (recipe.model.dtype == "auto" and recipe.precision == "fp32")
    size = 4 if wide else 2
    frozen, table = total * size, 0
    if shape is not None and not shape.ties_head and not _trains_embeddings(recipe):
        table = min(frozen, shape.table * size)
    if recipe.model.quantization is not None:  # 4 bits, and a scale per 64 weights
        frozen -= int(inside * (size - 0.52))
    return ModelSize(adapter, frozen, shape, table)


def _trains_embeddings(recipe: Recipe) -> bool:
    """Return whether a recipe's adapter has parts at the embeddings, by the names in the recipe."""
    targets = recipe.adapter.target_modules
    names = [*recipe.adapter.modules_to_save, *([targets] if isinstance(targets, str) else targets)]
    return bool(recipe.model.new_tokens) or any("emb" in name or "wte" in name for name in names)
