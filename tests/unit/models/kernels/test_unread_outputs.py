"""A recomputed layer leaves its last product out: the same bits, fewer products, and no numbers where it must not."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from ftcli.models.adapters import add_adapter
from ftcli.models.architectures import ARCHITECTURES
from ftcli.models.kernels import unread_outputs
from ftcli.models.kernels.activation_checkpointing import enable_recomputation
from ftcli.models.kernels.compile import compile_layers
from ftcli.models.kernels.unread_outputs import leave_out, leave_out_unread_outputs, recomputation
from ftcli.models.structure import layers_of

from .test_adapter_scaling import adapted, seen
from .test_compile import compiled_recipe
from .test_document_attention import tiny
from .test_varlen_attention import recipe

SPARED = [kind for kind, row in ARCHITECTURES.items() if row.tiles_mlp and not row.norms_outputs]
NORMED = [kind for kind, row in ARCHITECTURES.items() if row.tiles_mlp and row.norms_outputs]


def changed(model: Any) -> int:
    """Return the number of modules that leave their product out."""
    return sum(getattr(type(module).forward, "__module__", "") == unread_outputs.__name__ for module in model.modules())


@pytest.fixture
def left_out(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each product that is left out adds its features."""
    features: list[int] = []
    unread = unread_outputs._unread
    monkeypatch.setattr(unread_outputs, "_unread", lambda x, n: (features.append(n), unread(x, n))[1])
    return features


@pytest.fixture
def as_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let layers behave as in a graph: products are operations, and a recomputation goes on to its end."""
    monkeypatch.setattr(unread_outputs, "is_compiling", lambda: True)


def gradients(model: Any) -> dict[str, Tensor]:
    """Return the gradients of a step in which all layers are recomputed to their end."""
    enable_recomputation(model.train(), "full")
    ids = torch.randint(3, 90, (2, 20), generator=torch.Generator().manual_seed(1))
    with set_checkpoint_early_stop(False):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("kind", SPARED)
def test_no_layer_reads_the_output_that_is_left_out(kind: str, as_in_graphs: None, left_out: list[int]) -> None:
    plain = gradients(tiny(kind))
    model = tiny(kind)
    leave_out_unread_outputs(model, "full")
    if getattr(layers_of(model)[0].mlp.down_proj, "bias", None) is not None:
        assert changed(model) == 0
        return
    assert changed(model) == len(layers_of(model))
    found = gradients(model)
    assert left_out == [model.config.hidden_size] * len(layers_of(model))
    assert list(found) == list(plain)
    assert all(torch.equal(found[name], value) for name, value in plain.items())


@pytest.mark.parametrize("kind", NORMED)
def test_layers_with_normed_outputs_stay_and_would_have_no_numbers(kind: str, as_in_graphs: None) -> None:
    model = tiny(kind)
    leave_out_unread_outputs(model, "full")
    assert changed(model) == 0
    for layer in layers_of(model):
        leave_out(layer.mlp.down_proj)
    assert any(value.isnan().any() for value in gradients(model).values())


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_the_product_and_its_gradients_have_the_bits_of_linear(
    trained: bool, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unread_outputs, "is_compiling", lambda: True)
    results = []
    for spares in (False, True):
        torch.manual_seed(0)
        layer, x = nn.Linear(24, 16, bias=False), torch.randn(2, 5, 24, requires_grad=True)
        layer.requires_grad_(trained)
        if spares:
            leave_out(layer)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = layer(x)
        output.float().square().sum().backward()
        results.append([output, x.grad, *([layer.weight.grad] if trained else [])])
    assert all(torch.equal(one, other) and one.dtype == other.dtype for one, other in zip(*results, strict=True))
    with recomputation:
        assert layer(x).isnan().all()


def test_operations_are_declared_correctly() -> None:
    x, weight = torch.randn(2, 5, 24, requires_grad=True), torch.randn(16, 24, requires_grad=True)
    torch.library.opcheck(unread_outputs.output_product, (x, weight))


def test_products_outside_of_graphs_are_those_of_torch(left_out: list[int]) -> None:
    layer, x = nn.Linear(24, 16, bias=False), torch.randn(2, 24)
    expected = layer(x)
    leave_out(layer)
    with recomputation:
        assert torch.equal(layer(x), expected)
    assert left_out == []


def test_4_bit_weights_that_a_backend_has_replaced_are_multiplied_by_bitsandbytes(as_in_graphs: None) -> None:
    class Linear4bit(nn.Linear):
        """A layer whose weight is a plain parameter, as FSDP leaves it. bitsandbytes then looks for its own state."""

    layer, x = Linear4bit(24, 16, bias=False), torch.randn(2, 24)
    expected = layer(x)
    layer.__class__ = unread_outputs._spared_four_bits(Linear4bit)
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("mode", ["none", "selective"])
def test_other_modes_keep_their_products(mode: str) -> None:
    model = tiny("llama")
    leave_out_unread_outputs(model, mode)
    assert changed(model) == 0


def test_dora_biases_and_other_functions_keep_their_products(monkeypatch: pytest.MonkeyPatch) -> None:
    section = {"type": "lora", "r": 4, "use_dora": True}
    model = add_adapter(tiny("llama"), recipe("llama", adapter=section), keep=[], task_type=None)
    leave_out_unread_outputs(model, "full")
    assert changed(model) == 0
    for layer in (nn.Linear(4, 4), nn.Conv1d(4, 4, 1)):
        leave_out(layer)
        assert changed(layer) == 0
    model = tiny("llama")
    product = nn.functional.linear
    with monkeypatch.context() as patch:  # as ZeRO-3 does
        patch.setattr(nn.functional, "linear", lambda *arguments: product(*arguments))
        leave_out_unread_outputs(model, "full")
        assert changed(model) == 0
    leave_out_unread_outputs(model, "full")
    assert changed(model) == 3


def test_layers_that_are_not_compiled_keep_their_classes() -> None:
    model = tiny("llama")
    compile_layers(model, recipe("llama"), "full")
    assert changed(model) == 0
    compile_layers(model, compiled_recipe("llama"), "full")
    assert changed(model) == 3


def test_compiled_layers_with_an_adapter_leave_products_out_and_change_no_bit(
    left_out: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for spares in (False, True):
        torch._dynamo.reset()
        with monkeypatch.context() as patch:
            patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # graphs without C++
            if not spares:
                patch.setattr(unread_outputs, "leave_out_unread_outputs", lambda *_: None)
            model = adapted(inside=True, compiled=True)
        enable_recomputation(model, "full")
        results.append(seen(model))
        assert left_out == [32] * 3 * spares
    assert list(results[0]) == list(results[1]) and len(results[0]) == 1 + 2 * 3 * 7
    assert all(torch.equal(results[1][name], value) for name, value in results[0].items())
