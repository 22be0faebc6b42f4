"""Work and time of a step by hand, for a tiny model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ftcli.config.plan import derive_plan
from ftcli.config.profile import ShardCounts
from ftcli.models.estimates import step_time
from ftcli.models.estimates.shape import ModelSize, Shape, size_of_shape
from ftcli.models.estimates.step_time import estimate_step
from ftcli.models.estimates.step_work import Kernels, Rows, Work, count_work, layer_traffic
from ftcli.runtime.gpus import GPU

from .test_memory_estimate import LLAMA, recipe

SHAPE = Shape.of(LLAMA)
assert SHAPE is not None
LAYERS = 2 * 8 * (2 * 8 + 2 * 4 + 3 * 20)  # elements of the matrices of both layers
COMPILED = Kernels("none", compiled=True, liger=False, flash_attention_4=True)
ROWS = Rows(tokens=10, attended=6, trained=0.5)


def work(shares: ShardCounts | None = None, processes: int = 1, kernels: Kernels = COMPILED, **changes: Any) -> Work:
    """Return the work of 8 rows of 10 tokens in micro-batches of 4."""
    small_recipe = recipe(**{"task": "pretrain", "precision": "bf16"} | changes)
    size = size_of_shape(SHAPE, small_recipe)
    return count_work(
        small_recipe, size, SHAPE, shares or ShardCounts(), derive_plan(small_recipe, processes), ROWS, kernels
    )


def test_count_work_flops_equal_a_hand_count() -> None:
    one = work()
    assert one.layer_flops == 80 * 6 * LAYERS
    assert one.other_flops == 80 * 6 * 100 * 8 * 0.5, "only trained tokens reach the head"
    assert one.attention_flops == 80 * 6 * 2 * 8 * 6
    full = work(kernels=replace(COMPILED, mode="full"))
    assert full.layer_flops == 80 * 8 * LAYERS and full.attention_flops == 80 * 8 * 2 * 8 * 6
    assert full.host_layers == pytest.approx(one.host_layers * 4 / 3) and one.host_layers == 2 * 2


def test_count_work_of_recomputed_compiled_layers_leaves_their_last_product_out() -> None:
    assert SHAPE is not None
    llama, full = replace(SHAPE, tiles_mlp=True), replace(COMPILED, mode="full")
    size = size_of_shape(llama, recipe())

    def flops(
        shape: Shape = llama, kernels: Kernels = full, shares: ShardCounts | None = None, **changes: Any
    ) -> float:
        one = recipe(**{"task": "pretrain", "precision": "bf16"} | changes)
        return count_work(one, size, shape, shares or ShardCounts(), derive_plan(one, 1), ROWS, kernels).layer_flops

    assert flops() == 80 * (8 * LAYERS - 2 * 2 * 8 * 20)
    assert flops(shares=ShardCounts(2, 2, 2)) == flops(kernels=replace(full, mode="tiled")) == flops()
    others = [
        flops(kernels=replace(full, compiled=False)),
        flops(replace(llama, norms_outputs=True)),
        flops(replace(llama, tiles_mlp=False)),
        flops(shares=ShardCounts(2, 2, 2, zero_stage=3)),
        flops(precision="fp8"),
    ]
    assert others == [80 * 8 * LAYERS] * 5


def test_count_work_of_an_adapter_has_no_gradients_of_frozen_weights() -> None:
    one = work(adapter={"type": "lora", "r": 3})
    trained = size_of_shape(SHAPE, recipe(adapter={"type": "lora", "r": 3})).trained
    assert one.layer_flops == 80 * 4 * LAYERS
    assert one.other_flops == 80 * (6 * trained + 4 * 100 * 8 * 0.5)


def test_count_work_without_vocabulary_logits_has_no_head() -> None:
    assert work(task="text_classification").other_flops == 0


def test_layer_traffic_of_compiled_layers_equals_a_hand_count() -> None:
    size = ModelSize(1, 0, SHAPE)
    heads, inner = 8 * (8 + 4), 16 * 20
    assert layer_traffic(recipe(precision="bf16"), size, SHAPE, COMPILED) == (26 + 44) * 8 + heads + inner
    assert layer_traffic(recipe(precision="bf16_pure"), size, SHAPE, COMPILED) == (26 + 22) * 8 + heads + inner
    liger = replace(COMPILED, compiled=False, liger=True)
    eager = replace(COMPILED, compiled=False)
    compiled, fused, plain = (
        layer_traffic(recipe(precision="bf16"), size, SHAPE, kernels) for kernels in (COMPILED, liger, eager)
    )
    assert compiled < fused < plain


def test_count_work_sends_what_rings_send() -> None:
    weights = SHAPE.weights
    tables = weights - LAYERS
    assert work().sent == 0
    assert work(processes=4).sent == 2 * 3 / 4 * 4 * weights, "one all-reduce for a step, in float32"
    gathered = 2 * LAYERS * 2 + 4 * tables  # twice in 16 bits, and the rest once
    summed = 2 * LAYERS + 4 * tables
    assert work(ShardCounts(4, 4, 4), 4).sent == 3 / 4 * (gathered + summed), "one micro-batch of two rows"
    assert work(ShardCounts(2, 2, 2), 2).sent == 1 / 2 * (gathered + summed), "one micro-batch of four rows"
    between = 2 * 1 / 2 * 4 * weights / 2
    assert work(ShardCounts(2, 2, 2), 4).sent == 1 / 2 * (gathered + summed) + between, "two copies"
    assert work(ShardCounts(1, 4, 4, zero_stage=2), 4).sent == 3 / 4 * 4 * weights * 2


def test_count_work_of_offloaded_weights_moves_them_and_updates_on_the_host() -> None:
    one = work(ShardCounts(0, 0, 0), 2)
    assert one.host_traffic == 3 * 2 * SHAPE.weights, "weights twice to the device, gradients once back, in 16 bits"
    assert one.updated_on_host == 28 * SHAPE.weights / 2
    assert work(processes=2).updated_on_host == 0


def test_count_work_of_offloaded_activations_moves_them_there_and_back() -> None:
    hosted = {"name": "m", "activation_offloading": True}
    one = work(kernels=replace(COMPILED, mode="full"), model=hosted)
    assert one.host_traffic == 2 * 80 * 2 * 4 * 8, "the float32 input of each of two layers"


GPU_OF_ONES = GPU("one", 1, {"bf16": 1e15, "fp32": 1e15}, 1e12, 1e12, 1e12, "by hand")


def time_of(
    shares: ShardCounts | None = None,
    processes: int = 1,
    kernels: Kernels = COMPILED,
    changes: dict[str, Any] | None = None,
    **rates: Any,
) -> Any:
    small_recipe = recipe(task="pretrain", precision="bf16", **changes or {})
    size, plan = size_of_shape(SHAPE, small_recipe), derive_plan(small_recipe, processes)
    gpu = replace(GPU_OF_ONES, **rates)
    return estimate_step(small_recipe, size, SHAPE, shares or ShardCounts(), plan, ROWS, kernels, gpu)


def test_estimate_step_is_work_over_rates() -> None:
    one, slow = work(), time_of(products={"bf16": 1e6, "fp32": 1e6}, bandwidth=1e7)
    share = step_time.FLASH_ATTENTION_4 * 6 / (6 + step_time.HALF_RATE_LENGTH)
    device = (one.layer_flops + one.other_flops + one.attention_flops / share) / 1e6
    device += one.traffic / 1e7
    assert slow.compute == pytest.approx(device / (1 - step_time.IDLE))
    assert slow.data == 80 / step_time.COLLATED and slow.communication == 0
    assert slow.total == slow.compute + slow.data


def test_estimate_step_scales_launches_with_the_speed_of_the_host() -> None:
    # Kernels take no time on this GPU, so the step is that of the host.
    usual, slow = time_of(), time_of(host=0.5)
    assert slow.compute == pytest.approx(2 * usual.compute) and usual.waiting == pytest.approx(usual.compute, rel=1e-3)
    by_device = {"products": {"bf16": 1e6, "fp32": 1e6}, "bandwidth": 1e7}
    assert time_of(**by_device, host=0.5) == time_of(**by_device) and time_of(**by_device).waiting == 0


@pytest.mark.parametrize(
    ("kernels", "shares", "changes", "expected"),
    [
        ({}, ShardCounts(), {}, 0.77 * 5.2),
        ({"compiled": False}, ShardCounts(), {}, 5.2),
        ({"mode": "full"}, ShardCounts(), {}, 4 / 3 * 0.77 * 5.2),
        ({"graphs": True}, ShardCounts(), {}, 0.0),
        ({}, ShardCounts(2, 2, 2), {}, 0.77 * 5.2 + 4.3),
        ({"compiled": False}, ShardCounts(2, 2, 2, zero_stage=3), {}, 5.2 + 3.2),
        ({}, ShardCounts(1, 2, 2, zero_stage=2), {}, 0.77 * 5.2),
        ({}, ShardCounts(), {"adapter": {"type": "lora"}}, 0.77 * 5.2 + 2.1),
    ],
    ids=["compiled", "plain", "recomputed", "graphs", "fsdp", "zero3", "zero2", "adapter"],
)
def test_estimate_step_of_a_tiny_model_waits_for_the_host(
    kernels: dict[str, Any], shares: ShardCounts, changes: dict[str, Any], expected: float
) -> None:
    one = time_of(shares, kernels=replace(COMPILED, **kernels), changes=changes)
    assert 1000 * one.compute == pytest.approx(expected * 4 + 7), "two micro-batches through two layers"


@pytest.mark.parametrize(("checkpointing", "passes"), [("none", 2), ("full", 3)])
def test_estimate_step_of_a_tiny_model_in_4_bits_waits_for_the_host_in_each_pass(
    checkpointing: str, passes: int
) -> None:
    four_bit = {"name": "m", "quantization": {"load_in_4bit": True}}
    changes = {"model": four_bit, "adapter": {"type": "lora"}}
    one = time_of(kernels=replace(COMPILED, mode=checkpointing), changes=changes)
    expected = step_time.FOUR_BIT_PASS * 2 * 2 * passes + step_time.HOST_STEP
    assert one.compute == pytest.approx(expected), "two micro-batches through two layers"


def test_estimate_step_hides_a_part_of_communication_or_what_computation_covers() -> None:
    sent = work(ShardCounts(2, 2, 2), 2).sent
    busy: dict[str, Any] = {
        "products": {"bf16": 1e6, "fp32": 1e6},
        "bandwidth": 1e7,
    }  # the device is slower than the host
    quick = time_of(ShardCounts(2, 2, 2), 2, link=1e9, **busy)
    assert quick.sent == sent / 1e9 and quick.communication == pytest.approx(step_time.NOT_HIDDEN * quick.sent)
    assert time_of(ShardCounts(2, 2, 2), 2, link=1e9).communication == 0, "the device waits for the host meanwhile"
    slow = time_of(ShardCounts(2, 2, 2), 2, link=1e3)
    assert slow.communication == pytest.approx(sent / 1e3 - slow.compute)
