"""LoRA layers that scale the small tensor inside have the same bits, and compiled layers then need less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ftcli.models.adapters import add_adapter
from ftcli.models.kernels.adapter_scaling import scale_inside_adapters
from ftcli.models.kernels.compile import compile_layers
from ftcli.models.kernels.norm_casts import leave_adapter_inputs

from .test_compile import recipe, tiny


def adapted(*, inside: bool, precision: str = "bf16", compiled: bool = False, **adapter: Any) -> Any:
    """Return a model with an adapter that has trained."""
    sections = {"adapter": {"type": "lora", "r": 4, "lora_alpha": 8} | adapter}
    expected = recipe("llama", precision=precision, model={"name": "llama", "torch_compile": compiled}, **sections)
    torch.manual_seed(0)
    model = add_adapter(tiny("llama").bfloat16(), expected, keep=[], task_type=None).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # they begin at zero
            torch.nn.init.normal_(parameter, std=0.05)
    leave_adapter_inputs(model, expected)
    if inside:
        scale_inside_adapters(model, expected)
    compile_layers(model, expected, "full")
    return model


def seen(model: Any) -> dict[str, Tensor]:
    """Return logits and gradients of one step under autocast."""
    torch.manual_seed(1)
    ids = torch.arange(3, 40)[None]
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits
    logits.float().square().mean().backward()
    return {"logits": logits.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def changed(model: Any) -> int:
    """Return the number of modules whose forward function scales inside."""
    name = "ftcli.models.kernels.adapter_scaling"
    return sum(getattr(type(module).forward, "__module__", "") == name for module in model.modules())


@pytest.mark.parametrize(
    ("adapter", "compiled"),
    [
        *(({"lora_alpha": alpha, "r": r}, False) for alpha, r in ((8, 4), (1, 4), (32, 8))),
        ({"lora_dropout": 0.3}, False),
        pytest.param({"lora_dropout": 0.3}, True, marks=pytest.mark.slow),
        pytest.param({}, True, marks=pytest.mark.slow),
    ],
)
def test_scaling_inside_adapters_changes_no_bit(adapter: dict[str, Any], compiled: bool) -> None:
    if compiled:
        torch._dynamo.reset()
    plain = seen(adapted(inside=False, compiled=compiled, **adapter))
    if compiled:
        torch._dynamo.reset()
    model = adapted(inside=True, compiled=compiled, **adapter)
    assert changed(model) == 3 * 7
    inside = seen(model)
    assert list(inside) == list(plain) and len(plain) == 1 + 2 * 3 * 7
    for name, value in plain.items():
        assert torch.equal(inside[name], value), name


@pytest.mark.parametrize(
    ("precision", "adapter"),
    [("bf16", {"lora_alpha": 12}), ("bf16", {"use_dora": True}), ("fp32", {}), ("bf16_pure", {}), ("fp16", {})],
)
def test_other_scalings_precisions_and_dora_stay_as_they_are(precision: str, adapter: dict[str, Any]) -> None:
    assert changed(adapted(inside=True, precision=precision, **adapter)) == 0


def test_a_layer_without_autocast_or_with_its_adapter_off_or_merged_computes_as_in_peft() -> None:
    plain = adapted(inside=False)
    inside = adapted(inside=True)
    ids = torch.arange(3, 40)[None]

    def logits(model: Any, *, autocast: bool = False) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found: Tensor = model(input_ids=ids, use_cache=False).logits
        return found

    for model in (plain, inside):
        model.requires_grad_(False).float()
    assert torch.equal(logits(inside), logits(plain))
    with inside.disable_adapter(), plain.disable_adapter():
        off = logits(inside, autocast=True)
        assert torch.equal(off, logits(plain, autocast=True))
    assert not torch.equal(off, logits(inside, autocast=True))
    merged = [model.merge_and_unload() for model in (inside, plain)]
    assert torch.equal(logits(merged[0]), logits(merged[1])) and changed(merged[0]) == 0


def bytes_of_backward(tokens: int, *, inside: bool) -> int:
    """Return the most bytes that the backward pass of a compiled MLP with an adapter has allocated at once."""
    model = adapted(inside=inside)
    torch._dynamo.reset()
    mlp = torch.compile(model.base_model.model.model.layers[0].mlp, dynamic=True)
    with torch.autocast("cpu", torch.bfloat16):
        output = mlp(torch.randn(1, tokens, 32, dtype=torch.bfloat16, requires_grad=True))
    with torch.profiler.profile(profile_memory=True) as recorded:
        output.backward(torch.ones_like(output))
    allocated = peak = 0
    for event in sorted(recorded.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    return peak


@pytest.mark.slow
def test_compiled_mlp_that_scales_inside_allocates_less() -> None:
    needed = {inside: bytes_of_backward(4096, inside=inside) for inside in (False, True)}
    print(needed)
    assert needed[True] < 0.8 * needed[False]
