"""Recomputation and host offloading give the same loss and gradients, including dropout."""

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
from transformers import AutoConfig, AutoModelForCausalLM

from ftcli.models.estimates.memory_estimate import MODES
from ftcli.models.estimates.shape import Shape
from ftcli.models.kernels import activation_offloading
from ftcli.models.kernels.activation_checkpointing import enable_recomputation, recompute_policy
from ftcli.models.kernels.activation_offloading import offload_activations
from ftcli.models.kernels.norm_casts import share_casts
from ftcli.runtime.errors import InputError

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
    enable_recomputation(model, mode)
    if host:
        offload_activations(model)
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
    monkeypatch.setattr(activation_offloading, "MIN_OFFLOAD_BYTES", 0)
    expected, goal = gradients(make, 0.0, "none", autocast)
    for mode, host in (("none", True), ("selective", False), ("full", False), ("full", True)):
        loss, actual = gradients(make, 0.0, mode, autocast, host)
        assert torch.equal(loss, expected)
        assert [name for name, value in goal.items() if not torch.equal(actual[name], value)] == [], (mode, host)


@pytest.mark.parametrize("make", [llama, bert])
def test_checkpointed_layers_redraw_the_same_dropout(make: Any) -> None:
    expected, goal = gradients(make, 0.2, "none", False)
    for mode in ("selective", "full"):
        loss, actual = gradients(make, 0.2, mode, False)
        assert torch.equal(loss, expected)
        for name, value in goal.items():  # sums over branches may come in another order
            assert (actual[name] - value).abs().max() <= 1e-6 * value.abs().max().clamp(min=1e-3), (mode, name)


def test_selective_policy_saves_products_and_attention_without_dropout() -> None:
    kernels = torch.ops.aten
    flash, q = kernels._scaled_dot_product_flash_attention.default, torch.empty(1, 1, 2, 8)
    keep, again = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    assert recompute_policy(None, kernels.mm.default, q, q) == recompute_policy(None, kernels.addmm.default) == keep
    assert (
        recompute_policy(None, kernels.mul.Tensor, q, q) == recompute_policy(None, kernels._to_copy.default, q) == again
    )
    assert recompute_policy(None, flash, q, q, q) == recompute_policy(None, flash, q, q, q, 0.0, True) == keep
    assert recompute_policy(None, flash, q, q, q, 0.1, True) == again
    assert recompute_policy(None, flash, q, q, q, dropout_p=0.1) == again


def test_selective_policy_computes_the_second_product_of_an_adapter_again() -> None:
    product, inputs = torch.ops.aten.mm.default, torch.empty(3, 16)
    keep, again = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    for columns, expected in ((65, again), (64, keep)):
        assert recompute_policy(None, product, inputs, torch.empty(16, columns)) == expected
    assert recompute_policy(None, product, torch.empty(3, 256), torch.empty(256, 4096)) == keep
    with_bias = torch.ops.aten.addmm.default
    assert recompute_policy(None, with_bias, torch.empty(65), inputs, torch.empty(16, 65)) == again


class Storages(TorchDispatchMode):
    """Record the storages that the operations of a block create, while references to them exist."""

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


def held_after_forward(kind: str, layers: int, precision: str, mode: str, tokens: int, rank: int) -> tuple[int, Shape]:
    """Return the bytes saved for the backward pass, without weights and their casts, and the shape of the model.

    Above 0, `rank` is that of an adapter on all linear layers, which are frozen in 16 bits.
    """
    changes = {"num_hidden_layers": layers, "hidden_size": 64, "intermediate_size": 192, "num_key_value_heads": 2}
    config = AutoConfig.for_model(kind, **SIZES | changes, head_dim=16)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    if precision == "bf16_pure" or rank:
        model = model.bfloat16()
    share_casts(model)
    enable_recomputation(model, mode)
    if rank:
        add_adapter(model, rank)
    weights = list(model.parameters())
    with Storages() as storages, torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        output = model.model(input_ids=torch.ones(2, tokens // 2, dtype=torch.long), use_cache=False)
    gc.collect()
    own = {StorageWeakRef(weight.untyped_storage()).cdata for weight in weights}
    saved_bytes = sum(size for key, (seen, size) in storages.made.items() if not seen.expired() and key not in own)
    casts = sum(2 * w.numel() for name, w in model.model.named_parameters() if "proj" in name and w.requires_grad)
    assert output.last_hidden_state.requires_grad
    shape = Shape.of(config.to_dict())
    assert shape is not None
    return saved_bytes - casts * (precision == "bf16" and mode == "none"), shape


def add_adapter(model: Any, rank: int) -> None:
    """Put LoRA layers into a model, with inputs that are not cast, as ftcli has them under autocast."""
    from peft import LoraConfig, get_peft_model

    peft = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear", lora_dropout=0.0))
    for module in peft.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False  # type: ignore[assignment]


CELLS = [
    *((kind, precision, 0) for kind in ("llama", "qwen3") for precision in ("fp32", "bf16", "bf16_pure")),
    *((kind, "bf16", 4) for kind in ("llama", "qwen3")),
]


@pytest.mark.parametrize(("kind", "precision", "rank"), CELLS)
@pytest.mark.parametrize("mode", MODES)
def test_selective_layer_saves_the_estimated_bytes(mode: str, kind: str, precision: str, rank: int) -> None:
    tokens = 256
    (four, shape), (two, _) = (held_after_forward(kind, layers, precision, mode, tokens, rank) for layers in (4, 2))
    estimate = shape.activation_bytes(precision, mode, adapter=rank > 0, rank=rank)
    assert (four - two) / 2 / tokens == pytest.approx(estimate, rel=0.03)


def test_offload_activations_moves_large_values_but_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offloading, "MIN_OFFLOAD_BYTES", 40)
    host = activation_offloading.ActivationHost()
    weight = torch.nn.Parameter(torch.ones(4, 4))
    assert host.store(weight) is weight
    transposed = weight.t()
    assert host.store(transposed) is transposed
    small, large = torch.ones(9), torch.ones(10)
    assert host.store(small) is small
    stored = host.store(large)
    assert isinstance(stored, activation_offloading.HostActivation) and stored.copy is not large
    assert torch.equal(activation_offloading.load(stored), large)


def test_recompute_of_an_unsupported_model_is_refused() -> None:
    with pytest.raises(InputError, match="Linear does not support it"):
        enable_recomputation(torch.nn.Linear(2, 2), "full")
    enable_recomputation(torch.nn.Linear(2, 2), "none")
