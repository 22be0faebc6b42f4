"""What is computed again, or waits on the host, gives the same loss and gradients; dropout included."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from ftcli import activations
from ftcli.activations import keeps_products, offload, recompute
from ftcli.errors import InputError
from ftcli.memory import MODES, Shape

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def llama(dropout: float, **changes: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES | changes, tie_word_embeddings=True, attention_dropout=dropout))


def bert(dropout: float) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(**SIZES, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    return BertForMaskedLM(config)


def gradients(make: Callable[[float], Any], dropout: float, mode: str, autocast: bool, host: bool = False) -> Any:
    torch.manual_seed(0)
    model = make(dropout).train()
    recompute(model, mode)
    if host:
        offload(model)
    ids = torch.randint(0, 100, (3, 17), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(5)
    for _ in range(2):  # two micro-batches
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("make", [llama, bert])
def test_recomputing_and_the_host_leave_every_bit(make: Any, autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "LEAST_MOVED", 0)
    wanted, goal = gradients(make, 0.0, "none", autocast)
    for mode, host in (("none", True), ("selective", False), ("full", False), ("full", True)):
        loss, found = gradients(make, 0.0, mode, autocast, host)
        assert torch.equal(loss, wanted)
        assert [name for name, value in goal.items() if not torch.equal(found[name], value)] == [], (mode, host)


@pytest.mark.parametrize("make", [llama, bert])
def test_dropout_is_drawn_again_as_it_was(make: Any) -> None:
    wanted, goal = gradients(make, 0.2, "none", False)
    for mode in ("selective", "full"):
        loss, found = gradients(make, 0.2, mode, False)
        assert torch.equal(loss, wanted)
        for name, value in goal.items():  # sums over branches may come in another order
            assert (found[name] - value).abs().max() <= 1e-6 * value.abs().max().clamp(min=1e-3), (mode, name)


def test_products_are_kept_and_attention_unless_it_draws_dropout() -> None:
    kernels = torch.ops.aten
    flash, q = kernels._scaled_dot_product_flash_attention.default, torch.empty(1, 1, 2, 8)
    keep, again = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    assert keeps_products(None, kernels.mm.default, q, q) == keeps_products(None, kernels.addmm.default) == keep
    assert keeps_products(None, kernels.mul.Tensor, q, q) == keeps_products(None, kernels._to_copy.default, q) == again
    assert keeps_products(None, flash, q, q, q) == keeps_products(None, flash, q, q, q, 0.0, True) == keep
    assert keeps_products(None, flash, q, q, q, 0.1, True) == again
    assert keeps_products(None, flash, q, q, q, dropout_p=0.1) == again


class Storages(TorchDispatchMode):
    """What the operations of a block make, for as long as somebody holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                seen = StorageWeakRef(tensor.untyped_storage())
                self.made[seen.cdata] = seen, tensor.untyped_storage().nbytes()
        return result


def held_after_forward(layers: int, precision: str, mode: str, tokens: int) -> int:
    """Return the bytes that wait for the backward pass, but for weights and their casts."""
    model = llama(0.0, num_hidden_layers=layers, hidden_size=64, intermediate_size=192, num_key_value_heads=2).train()
    weights = list((model.bfloat16() if precision == "bf16_pure" else model).parameters())
    recompute(model, mode)
    with Storages() as storages, torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        output = model.model(input_ids=torch.ones(2, tokens // 2, dtype=torch.long), use_cache=False)
    gc.collect()
    own = {StorageWeakRef(weight.untyped_storage()).cdata for weight in weights}
    held = sum(size for key, (seen, size) in storages.made.items() if not seen.expired() and key not in own)
    casts = sum(2 * w.numel() for name, w in model.model.named_parameters() if "proj" in name)
    assert output.last_hidden_state.requires_grad
    return held - casts * (precision == "bf16" and mode == "none")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_pure"])
@pytest.mark.parametrize("mode", MODES)
def test_a_layer_keeps_what_the_estimate_says(mode: str, precision: str) -> None:
    tokens = 256
    four, two = (held_after_forward(layers, precision, mode, tokens) for layers in (4, 2))
    config = SIZES | {"hidden_size": 64, "intermediate_size": 192, "num_key_value_heads": 2}
    shape = Shape.of(config)
    assert shape is not None
    assert (four - two) / 2 / tokens == pytest.approx(shape.kept(precision, mode), rel=0.05)


def test_weights_stay_where_they_are_and_large_values_go_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "LEAST_MOVED", 40)
    weight = torch.nn.Parameter(torch.ones(4, 4))
    assert activations._to_host(weight) is weight
    transposed = weight.t()
    assert activations._to_host(transposed) is transposed
    small, large = torch.ones(9), torch.ones(10)
    assert activations._to_host(small) is small
    device, copy = activations._to_host(large)
    assert device == large.device and copy is not large and torch.equal(activations._from_host((device, copy)), large)


def test_a_model_that_cannot_is_told() -> None:
    with pytest.raises(InputError, match="Linear does not support it"):
        recompute(torch.nn.Linear(2, 2), "full")
    recompute(torch.nn.Linear(2, 2), "none")
