"""The sizes of a model from its configuration, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from ftcli.models.estimates.shape import Shape, size_of_shape

from .test_memory_estimate import LLAMA, recipe


def shape(**changes: Any) -> Shape:
    parsed = Shape.of(LLAMA | changes)
    assert parsed is not None
    return parsed


MATRICES = 8 * (2 * 8 + 2 * 4 + 3 * 20)  # q and o, k and v, gate, up and down of one layer


def test_shape_weights_equal_a_hand_count() -> None:
    assert shape().layer_products == shape().layer_weights == MATRICES
    assert shape().weights == 2 * (MATRICES + 16) + 2 * 100 * 8 + 8
    assert shape(tie_word_embeddings=True).weights == 2 * (MATRICES + 16) + 100 * 8 + 8


def test_shape_with_experts_multiplies_the_used_ones_and_stores_all() -> None:
    experts = shape(num_experts_per_tok=2, num_experts=6, moe_intermediate_size=5)
    assert experts.layer_products == 8 * (24 + 3 * 2 * 5) and experts.layer_weights == 8 * (24 + 3 * 6 * 5)


@pytest.mark.parametrize("kind", ["bert", "gpt2", "vit", "opt"])
def test_shape_without_a_gate_has_two_products(kind: str) -> None:
    assert shape(model_type=kind).layer_products == 8 * (24 + 2 * 20)


def test_shape_of_an_unknown_type_has_a_gate_and_an_untied_head() -> None:
    unknown = shape(model_type="something_new")
    assert unknown.has_gate and not unknown.ties_head and not unknown.norms_queries


def test_size_of_shape_of_an_adapter_counts_both_matrices_of_each_product() -> None:
    size = size_of_shape(shape(), recipe(adapter={"type": "lora", "r": 3}, precision="bf16"))
    sides = 2 * (8 + 8) + 2 * (8 + 4) + 3 * (8 + 20)
    assert (size.trained, size.frozen_bytes) == (2 * 3 * sides, 2 * shape().weights)


def test_size_of_shape_with_a_head_of_its_own_has_one_table_that_can_be_on_the_host() -> None:
    size = size_of_shape(shape(), recipe(adapter={"type": "lora"}, precision="bf16"))
    assert size.table_bytes == 2 * shape().vocabulary * shape().hidden


def test_size_of_shape_in_4_bits_keeps_embeddings_in_16() -> None:
    model = {"name": "m", "quantization": {"load_in_4bit": True}}
    size = size_of_shape(shape(), recipe(adapter={"type": "lora"}, precision="bf16", model=model))
    assert size.frozen_bytes == 2 * shape().weights - int(2 * MATRICES * 1.48)


def test_activation_bytes_of_layers_above_frozen_weights_equal_a_hand_count() -> None:
    attention, products = 2 * (2 * 8 + 2 * 4) + 4 * 4, 2 * 20
    how: dict[str, Any] = {"adapter": True}
    assert shape().activation_bytes("bf16", "full", **how) == 2 * 8, "the residual stream has 16 bits"
    assert shape().activation_bytes("bf16", "none", **how) == 12 * 8 + attention + 4 * products
    assert shape().activation_bytes("bf16", "none", **how, rank=3) == 12 * 8 + attention + 4 * products + 7 * 2 * 3
    assert shape().activation_bytes("bf16", "none", fused=True, **how) == 8 * 8 + attention + 3 * products
    assert shape().activation_bytes("bf16", "none", compiled=True, **how) == 4 * 8 + attention + 2 * products


def test_activation_bytes_of_a_layer_without_a_gate_and_with_normed_queries() -> None:
    attention, products = 2 * (2 * 8 + 2 * 4) + 4 * 4, 2 * 20
    assert shape(model_type="bert").activation_bytes("bf16", "none") == 16 * 8 + attention + 2 * products
    normed = shape(model_type="qwen3").activation_bytes("bf16", "none", fused=True)
    groups = 4 * (4 + 2)  # a factor for each head of queries and of keys
    assert normed == 12 * 8 + attention + 2 * (8 + 4) + groups + 3 * products
    plain = shape(model_type="qwen3").activation_bytes("bf16", "none")
    assert plain == 20 * 8 + attention + (4 + 2) * (8 + 4) + groups + 4 * products, "the norm's input in float32"
    four = shape(model_type="gemma2").activation_bytes("bf16", "none")
    assert four == (20 + 2 * (4 + 2)) * 8 + attention + 4 * products, "the outputs pass norms, too"


def test_activation_bytes_in_fp8_are_inputs_of_8_bits_without_the_gated_product() -> None:
    attention, products = 2 * (2 * 8 + 2 * 4) + 4 * 4, 2 * 20
    assert shape().activation_bytes("fp8", "none", fused=True) == 9 * 8 + attention + 2 * products


def test_gradient_bytes_equal_a_hand_count() -> None:
    assert shape().gradient_bytes("bf16") == 2 * (3 * 20 + 2 * 8 + 2 * 4 + 4 * 8)


def test_recomputed_bytes_with_tiles_equal_a_hand_count() -> None:
    how: dict[str, Any] = {"fused": True, "adapter": True}
    kept = shape().activation_bytes("bf16", "none", **how)
    outside = 8 * 8 + 2 * (2 * 8 + 2 * 4) + 4 * 4  # norms and attention; the feed-forward stores 3 tensors
    assert kept == outside + 3 * 40
    every, most, half, few = (
        shape().recomputed_bytes("bf16", kept, is_fused=True, tokens=100, tile=tile) for tile in (100, 99, 50, 1)
    )
    whole = kept + shape().gradient_bytes("bf16")
    assert every == 100 * whole and most == 99 * whole, "no less than 99 tokens without tiles"
    of_tile = 50 * 6 * 40
    assert half == 100 * (outside + 2 * 2 * 8) + of_tile, "gradients of input and output, and the tensors of a tile"
    assert few == 100 * (outside + 2 * (2 * 8 + 2 * 4 + 4 * 8)), "gradients of attention and of the residual stream"


def test_layers_inside_a_vision_language_model_have_no_tiles() -> None:
    """The kernels know a model by the type of its whole configuration."""
    assert shape(model_type="gemma3_text").tiles_mlp
    inside = Shape.of({"model_type": "gemma3", "text_config": LLAMA | {"model_type": "gemma3_text"}})
    assert inside is not None and not inside.tiles_mlp
