"""The loss scale of fp16, worked by hand; what a precision means for dtypes."""

from __future__ import annotations

import pytest
import torch

from ftcli.config.recipe import Recipe
from ftcli.hardware.precision import LossScale, check, compute_in
from ftcli.models.precision import frozen_dtype, load_dtype, trained_dtype
from ftcli.runtime import process_settings

from ...support.recipes import minimal_values


def recipe(precision: str, adapter: str = "none", dtype: str = "auto") -> Recipe:
    values = minimal_values(
        precision=precision,
        model={"name": "x", "dtype": dtype},
        adapter={"type": adapter},
        data={"train": "x.jsonl"},
        batch={"global_size": 8},
    )
    return Recipe.model_validate(values)


def test_loss_scale_halves_at_once_and_doubles_after_enough_good_steps() -> None:
    scale = LossScale(scale=8.0, growth_interval=3)
    seen = []
    for finite in (True, True, False, True, True, True, True, True, True):
        scale.update(finite=finite)
        seen.append(scale.scale)
    assert seen == [8, 8, 4, 4, 4, 8, 8, 8, 16]
    assert scale.skipped == 1


def test_loss_scale_after_load_state_continues() -> None:
    first, second = LossScale(growth_interval=3), LossScale(growth_interval=3)
    for finite in (False, True, True):
        first.update(finite=finite)
    second.restore(first.state())
    for scale in (first, second):
        scale.update(finite=True)
    assert first.state() == second.state() == {"scale": 2.0**16, "good_steps": 0, "skipped": 1}


def test_gradients_that_are_never_finite_end_the_run() -> None:
    scale = LossScale(scale=2.0)
    scale.update(finite=False)
    with pytest.raises(RuntimeError, match="not finite even when the loss is not scaled up"):
        scale.update(finite=False)


@pytest.mark.parametrize(
    ("precision", "adapter", "dtype", "expected"),
    [
        ("fp32", "none", "auto", ("float32", "float32")),
        ("bf16", "none", "auto", ("float32", "float32")),
        ("bf16", "lora", "auto", ("float32", "bfloat16")),
        ("bf16", "lora", "float32", ("float32", "float32")),
        ("fp16", "lora", "auto", ("float32", "float16")),
        ("bf16_pure", "none", "auto", ("bfloat16", "bfloat16")),
        ("bf16_pure", "lora", "auto", ("bfloat16", "bfloat16")),
    ],
)
def test_load_dtypes_of_trained_weights_are_float32_and_of_frozen_ones_configured(
    precision: str, adapter: str, dtype: str, expected: tuple[str, str]
) -> None:
    given = recipe(precision, adapter, dtype)
    dtypes = trained_dtype(given), load_dtype(given)
    assert tuple(str(value).removeprefix("torch.") for value in dtypes) == expected


def test_weights_of_another_dtype_are_named() -> None:
    model = torch.nn.Linear(2, 2).to(torch.bfloat16)
    with pytest.raises(RuntimeError, match="trained weight weight is torch.bfloat16 after prepare"):
        check(model, recipe("bf16"))
    model.requires_grad_(False)
    assert frozen_dtype(recipe("bf16")) == torch.bfloat16
    assert "frozen weights bfloat16" in check(model, recipe("bf16", "lora"))
    with pytest.raises(RuntimeError, match="frozen weight weight is torch.bfloat16"):
        check(model, recipe("fp32", "lora"))


@pytest.mark.parametrize(("precision", "rounds"), [("fp32", False), ("bf16", True)])
def test_convolutions_do_not_round_to_tf32_in_fp32_until_the_run_ends(precision: str, rounds: bool) -> None:
    process_settings.restore_all()
    assert torch.backends.cudnn.allow_tf32  # PyTorch's default
    compute_in(torch.nn.Linear(2, 2), recipe(precision), "cpu")
    assert torch.backends.cudnn.allow_tf32 == rounds
    process_settings.restore_all()
    assert torch.backends.cudnn.allow_tf32


def test_options_of_convolutions_that_the_user_set_stay() -> None:
    convolutions = torch.backends.cudnn.conv
    before, convolutions.fp32_precision = convolutions.fp32_precision, "ieee"
    try:
        compute_in(torch.nn.Linear(2, 2), recipe("fp32"), "cpu")
        assert convolutions.fp32_precision == "ieee"
    finally:
        convolutions.fp32_precision = before
