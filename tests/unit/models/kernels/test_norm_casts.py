"""Under bf16 each weight is cast once per accumulation window, and an input that several layers read is cast once.

The loss curve is unchanged.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ftcli.hardware import interface, precision
from ftcli.hardware.fsdp import FSDP2
from ftcli.loop import steps
from ftcli.models.adapters import add_adapter
from ftcli.models.architectures import model_types_with
from ftcli.models.kernels.norm_casts import leave_adapter_inputs, share_casts
from ftcli.training.run import Run
from ftcli.training.setup import prepare

from ....support.cells import cell, weights
from .test_document_attention import tiny
from .test_varlen_attention import recipe


class Casts(TorchDispatchMode):
    """Counts casts of weights to bfloat16 by autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.count: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._to_copy.default and isinstance(args[0], torch.nn.Parameter):
            self.count[id(args[0])] = self.count.get(id(args[0]), 0) + 1
        return function(*args, **(kwargs or {}))


def bf16(folder: Path, **model: Any) -> Run:
    section = {"name": str(folder / "untied"), "dropout": 0.0} | model
    return prepare(cell(folder, "sft-untied", precision="bf16", model=section), cpu=True)


@pytest.mark.parametrize("again", [False, True])
def test_norm_casts_with_a_weight_is_cast_once_a_window_also_where_layers_are_computed_again(
    inputs: Path, again: bool
) -> None:
    run = bf16(inputs, gradient_checkpointing=again)
    head = run.hardware.unwrap(run.model).get_output_embeddings().weight  # type: ignore[operator]
    assert run.plan.accumulation == 4
    training = steps(run)
    for _ in range(2):
        with Casts() as casts:
            next(training)
        casts.count.pop(id(head))  # cast by the loss itself, not by autocast
        assert len(casts.count) == 2 * 7 and set(casts.count.values()) == {1}


def test_norm_casts_equal_casts_in_every_micro_batch(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = bf16(inputs)
    losses = [step.loss for step in steps(shared)]
    monkeypatch.setattr(precision, "cast_once", lambda device_type: contextlib.nullcontext())
    apart = bf16(inputs)
    with Casts() as casts:
        assert [step.loss for step in steps(apart)] == losses
    assert max(casts.count.values()) == 4 * shared.plan.accumulation
    assert all((a == b).all() for a, b in zip(weights(shared).values(), weights(apart).values(), strict=True))


def test_norm_casts_with_a_window_that_fails_leaves_no_cast_behind(inputs: Path) -> None:
    run, layer = bf16(inputs), torch.nn.Linear(2, 2, bias=False)

    def compute() -> list[float]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output: list[float] = layer(torch.ones(1, 2)).flatten().tolist()
        return output

    with pytest.raises(ZeroDivisionError) as caught:  # and its traceback, as a notebook does
        for _ in run.hardware.micro_batches([{}, {}]):
            compute()
            raise ZeroDivisionError
    with torch.no_grad():
        layer.weight.fill_(1.0)
    assert compute() == [2.0, 2.0] and caught.traceback


def test_norm_casts_under_sharded_profiles_are_not_cached(inputs: Path) -> None:
    run = bf16(inputs)
    sharded = interface.Hardware(
        **{name: getattr(run.hardware, name) for name in ("accelerator", "ranks", "distributed_type", "loss_scale")},
        skips=False,
        autocast_dtype=None,
        backend=FSDP2(),
    )
    for first, seen in ((run.hardware, 1), (sharded, 2)):
        layer = torch.nn.Linear(2, 2, bias=False)
        with Casts() as casts:
            for _ in first.micro_batches([{}, {}]):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    layer(torch.ones(1, 2))
        assert casts.count == {id(layer.weight): seen}


def seen(model: Any, *, half: bool = True) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return logits, the gradient of all weights, and the bytes saved for the backward pass apart from weights."""
    if model.config.model_type == "vit":
        batch = {"pixel_values": torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))}
    else:
        ids = torch.randint(3, 97, (8, 11), generator=torch.Generator().manual_seed(0))
        batch = {"input_ids": ids, "use_cache": False}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    model.zero_grad()
    listening = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with listening, torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        logits = model(**batch).logits.float()
    size = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return logits.detach(), gradient, size


def model_of(kind: str) -> Any:
    if kind != "vit":
        return tiny(kind)
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    torch.manual_seed(0)
    return ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, **sizes)).eval()


@pytest.mark.parametrize("kind", model_types_with("cast_norms"))
def test_norm_casts_of_a_shared_input_are_made_once_and_the_forward_pass_is_unchanged(kind: str) -> None:
    model = model_of(kind)
    exact, (logits, gradient, size) = seen(model, half=False), seen(model)
    share_casts(model)
    shared = seen(model)
    assert torch.equal(shared[0], logits)
    assert shared[2] < size
    noise, actual = ((g - exact[1]).norm() / exact[1].norm() for g in (gradient, shared[1]))
    assert float(actual) < 1.15 * float(noise)
    assert torch.equal(seen(model, half=False)[1], exact[1]), "without autocast nothing changes"


def with_adapter(precision: str) -> tuple[Any, Any]:
    small_recipe = recipe("llama", precision=precision, adapter={"type": "lora", "r": 3, "lora_alpha": 6})
    model = add_adapter(tiny("llama"), small_recipe, keep=[], task_type=None)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
    return model, small_recipe


def test_leave_adapter_inputs_under_autocast_saves_fewer_tensors_and_changes_no_bit() -> None:
    model, small_recipe = with_adapter("bf16")
    share_casts(model)  # what LoRA layers read is in 16 bits, as in every run
    logits, gradient, size = seen(model)
    leave_adapter_inputs(model, small_recipe)
    left = seen(model)
    assert torch.equal(left[0], logits)
    assert torch.equal(left[1], gradient)
    assert left[2] < size


def test_leave_adapter_inputs_without_autocast_leaves_the_cast_of_peft() -> None:
    model, small_recipe = with_adapter("fp32")
    leave_adapter_inputs(model, small_recipe)
    layers = [module for module in model.modules() if hasattr(module, "cast_input_dtype_enabled")]
    assert layers and all(layer.cast_input_dtype_enabled for layer in layers)


@pytest.mark.parametrize(("ranks", "newest_first"), [(1, False), (2, True)])
def test_norm_casts_are_made_again_where_gradients_are_summed_during_the_backward_pass(
    ranks: int, newest_first: bool
) -> None:
    layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(3)))
    seen: list[str] = []
    layers[0].register_full_backward_hook(lambda *_: seen.append("first layer done"))
    layers[2].weight.register_post_accumulate_grad_hook(lambda _: seen.append("gradient of the last layer"))
    with precision.cast_once("cpu"):
        for is_last in (False, True):
            seen.clear()
            with precision.casting_again(ranks) if is_last else contextlib.nullcontext():
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = layers(torch.ones(2, 4, requires_grad=True)).sum()
                loss.backward()
    assert seen == sorted(seen, reverse=newest_first)
