"""MLPs in tiles of tokens give the gradients of whole MLPs, and a recomputed layer then needs much less memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import AutoConfig

from ftcli.models.adapters import add_adapter
from ftcli.models.architectures import ARCHITECTURES, architecture_of
from ftcli.models.estimates import memory_estimate
from ftcli.models.estimates.memory_estimate import tiles_of_pass
from ftcli.models.kernels import tiled_mlp, unread_outputs
from ftcli.models.kernels.activation_checkpointing import enable_recomputation
from ftcli.models.kernels.compile import compile_layers
from ftcli.models.kernels.document_attention import confine_to_documents, document_bounds
from ftcli.models.kernels.norm_casts import share_casts
from ftcli.models.kernels.tiled_mlp import tile, tile_mlps
from ftcli.models.structure import layers_of

from .test_compile import compiled_recipe
from .test_document_attention import tiny
from .test_varlen_attention import recipe

TILED = [kind for kind, row in ARCHITECTURES.items() if row.tiles_mlp]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_estimate, "TILE_TOKENS", 16)


def train(
    model: Any, *, tiled: bool, autocast: bool = False, rows: int = 2, length: int = 44
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the gradients of a recomputed model, and check that tiles were made where expected."""
    enable_recomputation(model.train(), "full")
    lines = tile_mlps(model, recipe("llama"), "tiled") if tiled else []
    assert lines == ["MLPs in tiles of tokens: 3, in long forward passes"] * tiled
    ids = torch.randint(3, 90, (rows, length), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(3)
    for _ in range(2):  # two micro-batches
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    return loss.detach(), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def largest_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Return the largest difference of two sets of gradients, each relative to the largest value of its tensor."""
    assert list(left) == list(right)
    return max(
        float((left[name] - value).abs().max() / value.abs().max().clamp(min=1e-6)) for name, value in right.items()
    )


def test_tiles_of_pass_are_few_and_not_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert [tiles_of_pass(tokens) for tokens in (1, 2048, 2049, 4096, 32_768, 10**6)] == [1, 1, 2, 2, 16, 64]
    monkeypatch.setattr(memory_estimate, "TILE_TOKENS", 16)
    for tokens in (32, 33, 88, 127, 128, 1000, 1001):
        tiles = list(tiled_mlp._tiles(tokens))
        sizes = [end - begin for begin, end in tiles]
        assert sum(sizes) == tokens and len(tiles) <= tiles_of_pass(tokens)
        assert all(size % 16 == 0 for size in sizes[:-1]) and [begin for begin, _ in tiles[1:]] == [
            end for _, end in tiles[:-1]
        ]


@pytest.mark.parametrize("kind", TILED)
def test_tiled_mlp_has_the_gradients_of_the_whole_one(kind: str) -> None:
    torch.manual_seed(0)
    whole = train(tiny(kind).double(), tiled=False)
    torch.manual_seed(0)
    loss, gradients = train(tiny(kind).double(), tiled=True)
    assert torch.equal(loss, whole[0])
    # The norms of Gemma compute in float32, and so do the sums of the gradients of their weights.
    assert largest_difference(gradients, whole[1]) < (1e-6 if kind.startswith("gemma") else 1e-12)
    assert any("mlp" in name for name in gradients)


def adapted(kind: str = "llama", dropout: float = 0.0) -> Any:
    """Return a model with an adapter that changes its outputs."""
    torch.manual_seed(0)
    section = {"type": "lora", "r": 4, "lora_alpha": 8, "lora_dropout": dropout}
    precision = "fp32" if dropout else "bf16"
    model = add_adapter(tiny(kind), recipe(kind, precision=precision, adapter=section), keep=[], task_type=None)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return model


@pytest.mark.parametrize("autocast", [False, True])
def test_tiled_mlp_with_an_adapter_has_the_gradients_of_the_whole_one(autocast: bool) -> None:
    results = []
    for tiled in (False, True):
        model = adapted()
        share_casts(model)
        results.append(train(model, tiled=tiled, autocast=autocast))
    assert torch.equal(results[0][0], results[1][0])
    assert largest_difference(results[1][1], results[0][1]) < (2e-2 if autocast else 2e-6)
    assert all(gradient.dtype == torch.float32 for gradient in results[1][1].values())


def test_tiled_mlp_with_dropout_draws_the_same_numbers_twice() -> None:
    _, gradients = train(adapted(dropout=0.3), tiled=True)
    kept = adapted(dropout=0.3).train()  # the same tiles without recomputation: autograd stores the masks
    for layer in layers_of(kept):
        layer.mlp.forward = partial(in_pieces, layer.mlp.forward)
    ids = torch.randint(3, 90, (2, 44), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(3)
    for _ in range(2):
        kept(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    expected = {name: one.grad for name, one in kept.named_parameters() if one.grad is not None}
    assert largest_difference(gradients, expected) < 1e-5


def in_pieces(forward: Any, hidden: Tensor) -> Tensor:
    """Compute an MLP of `hidden` `[B, T, H]` in the tiles of `_TiledMlp`."""
    flat = hidden.reshape(1, -1, hidden.shape[-1])
    pieces = [forward(flat[:, begin:end]) for begin, end in tiled_mlp._tiles(flat.shape[1])]
    return torch.cat(pieces, dim=1).reshape(hidden.shape)


def test_layer_that_reads_the_output_of_its_mlp_gets_nan_unless_the_output_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, right = train(tiny("gemma2"), tiled=True)
    assert all(value.isfinite().all() for value in right.values())
    monkeypatch.setitem(ARCHITECTURES, "gemma2", replace(ARCHITECTURES["gemma2"], norms_outputs=False))
    _, wrong = train(tiny("gemma2"), tiled=True)
    assert any(value.isnan().any() for value in wrong.values())


def tokens_of(module: nn.Module) -> list[int]:
    """Return a list to which each call of a module adds its number of tokens."""
    tokens: list[int] = []
    module.register_forward_hook(lambda _module, inputs, _output: tokens.append(inputs[0].shape[:-1].numel()))
    return tokens


def test_recomputed_layer_computes_its_mlp_once() -> None:
    counts: dict[bool, int] = {}
    for tiled in (False, True):
        model = tiny("llama")
        tokens = [tokens_of(layer.mlp.gate_proj) for layer in model.model.layers]
        train(model, tiled=tiled)
        counts[tiled] = sum(map(sum, tokens))
    assert counts[True] == counts[False] == 2 * 2 * 3 * 88, "two micro-batches, forward and again, 3 layers, 88 tokens"


def test_hooks_of_gradients_fire_once_for_each_backward_pass() -> None:
    model, fired = tiny("llama"), dict[str, int]()
    for name, parameter in model.named_parameters():

        def count(_: Tensor, name: str = name) -> None:
            fired[name] = fired.get(name, 0) + 1

        parameter.register_post_accumulate_grad_hook(count)
    train(model, tiled=True)
    assert set(fired.values()) == {2}, "two micro-batches"


def test_casts_cached_by_autocast_keep_their_gradient() -> None:
    """A forward pass of tiles must not leave a cast without gradient to a short pass in the same block."""
    model = adapted().train()
    enable_recomputation(model, "full")
    tile_mlps(model, recipe("llama"), "tiled")
    ids = torch.arange(3, 23)[None]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(input_ids=ids.repeat(4, 1), use_cache=False)
        mlp = layers_of(model)[0].mlp
        mlp(torch.ones(1, 8, 32, requires_grad=True)).sum().backward()
    assert all(parameter.grad is not None for parameter in mlp.parameters() if parameter.requires_grad)


def test_gradients_of_16_bit_weights_are_added_up_in_float32() -> None:
    mlp = tiny("llama").model.layers[0].mlp.bfloat16().train()
    hidden = torch.randn(1, 4096, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    mlp(hidden).sum().backward()
    whole = mlp.down_proj.weight.grad.clone()
    mlp.zero_grad()
    exact = tiny("llama").model.layers[0].mlp
    exact.load_state_dict({name: value.float() for name, value in mlp.state_dict().items()})
    exact(hidden.float()).sum().backward()
    tile(nn.Identity(), mlp)
    mlp(hidden).sum().backward()
    goal = exact.down_proj.weight.grad
    errors = [float((found.float() - goal).norm()) for found in (mlp.down_proj.weight.grad, whole)]
    assert errors[0] < 1.2 * errors[1]


def bytes_of_backward(tokens: int, *, tiled: bool) -> int:
    """Return the most bytes that a step of a recomputed layer has allocated at once, by the allocator's events."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 224, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = tiny("llama", **sizes, num_hidden_layers=1).train()
    enable_recomputation(model, "full")
    if tiled:
        tile_mlps(model, recipe("llama"), "tiled")
    layer, hidden = model.model.layers[0], torch.randn(1, tokens, 64, requires_grad=True)
    layer.self_attn.forward = lambda hidden_states, **_: (layer.self_attn.v_proj(hidden_states).repeat(1, 1, 2), None)
    with torch.profiler.profile(profile_memory=True) as recorded:
        layer(hidden).sum().backward()
    allocated = peak = 0
    for event in sorted(recorded.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    return peak


def test_recomputed_layer_with_tiles_needs_half_the_memory_as_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_estimate, "TILE_TOKENS", 256)
    by_token = {
        tiled: (bytes_of_backward(4096, tiled=tiled) - bytes_of_backward(2048, tiled=tiled)) / 2048
        for tiled in (False, True)
    }
    print(by_token)
    assert by_token[True] < 0.5 * by_token[False]


def test_tiles_leave_short_passes_and_evaluation_alone() -> None:
    model, shapes = tiny("llama").train(), list[list[int]]()
    tile_mlps(model, recipe("llama"), "tiled")
    model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda _m, args, _o: shapes.append(list(args[0].shape)))
    ids = torch.arange(3, 19)[None]  # 16 tokens
    model(ids, use_cache=False)
    model(ids.repeat(2, 1), use_cache=False)
    with torch.no_grad():
        model(ids.repeat(2, 1), use_cache=False)
        model.eval()(ids.repeat(2, 1), use_cache=False)
    assert shapes == [[1, 16, 32], [1, 16, 32], [1, 16, 32], [2, 16, 32], [2, 16, 32]]


@pytest.mark.parametrize("kind", ["mixtral", "phi", "cohere", "gpt2"])
def test_tile_mlps_leaves_other_feed_forwards_alone(kind: str) -> None:
    assert not architecture_of(kind).tiles_mlp
    model = torch.nn.Module()
    model.config = AutoConfig.for_model(kind)
    assert "tokens: none" in tile_mlps(model, recipe(kind), "tiled")[0]


def test_tile_mlps_in_other_modes_with_hooks_or_in_fp8_does_nothing() -> None:
    model = tiny("llama")
    for mode in ("none", "selective", "full"):
        assert tile_mlps(model, recipe("llama"), mode) == []
    for values, hooks in (({}, True), ({"precision": "fp8"}, False)):
        assert "tokens: none" in tile_mlps(model, recipe("llama", **values), "tiled", has_hooks=hooks)[0]
    assert "forward" not in vars(model.model.layers[0].mlp)


def test_compiled_tiles_have_the_gradients_of_whole_layers_and_one_graph_for_all_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # graphs without C++
    torch._dynamo.reset()
    counters.clear()
    left_out: list[int] = []
    unread = unread_outputs._unread
    monkeypatch.setattr(unread_outputs, "_unread", lambda x, n: (left_out.append(x.shape[-2]), unread(x, n))[1])
    models = [adapted().train() for _ in range(2)]
    for model in models:
        confine_to_documents(model)
        enable_recomputation(model, "full")
    tile_mlps(models[1], compiled_recipe("llama"), "tiled")
    compile_layers(models[1], compiled_recipe("llama"), "full")
    graphs = []
    for documents in ([30, 10], [7, 9], [50, 13], [64, 63], [5], [90, 77], [12, 100]):
        found = []
        for model in models:
            ids = torch.arange(3, 3 + sum(documents))[None] % 90
            positions = torch.cat([torch.arange(length) for length in documents])[None]
            row = {"input_ids": ids, "position_ids": positions, "use_cache": False}
            model(**row, **document_bounds(documents, None)).logits.square().mean().backward()
            found.append({name: one.grad.clone() for name, one in model.named_parameters() if one.requires_grad})
        assert largest_difference(found[1], found[0]) < 1e-4
        tokens = sum(documents)
        assert sum(left_out) >= 3 * tokens and (len(left_out) > 3) == (tokens > 16), "each tile, or a short pass"
        left_out.clear()
        graphs.append(int(counters["stats"]["unique_graphs"]))
    assert graphs[0] > 0 and graphs[2:] == [graphs[2]] * 5, graphs
