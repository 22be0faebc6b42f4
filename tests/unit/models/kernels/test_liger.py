"""Liger's kernels replace modules only in architectures for which their results were tested.

The package needs a GPU and Triton: here plain torch that keeps its contract stands in for it; tests/gpu has the real.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ftcli.launch.preflight import check_inputs
from ftcli.models.architectures import model_types_with
from ftcli.models.kernels.activation_checkpointing import enable_recomputation
from ftcli.models.kernels.liger import _Rotary, replace, use_liger
from ftcli.runtime import devices, patches, process_settings
from ftcli.runtime.errors import InputError
from ftcli.testing import save_hollow

from .test_document_attention import tiny
from .test_varlen_attention import recipe

calls: list[str] = []


def liger_rms_norm(x: Tensor, w: Tensor, eps: float, offset: float, casting_mode: str, in_place: bool) -> Tensor:
    calls.append("norm")
    assert not in_place
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * (offset + w) if casting_mode == "llama" else (normed * (offset + w)).to(x.dtype)


def liger_swiglu(a: Tensor, b: Tensor) -> Tensor:
    calls.append("swiglu")
    return F.silu(a) * b


def liger_geglu(a: Tensor, b: Tensor) -> Tensor:
    calls.append("geglu")
    return F.gelu(a, approximate="tanh") * b


class Rope(torch.autograd.Function):
    """Rotates where its arguments lie, as the kernel does: neither autograd nor a dispatch mode sees it written."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        for x in (q, k):
            rotate(x, cos, sin)
        return q, k

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        for x in gradients:
            rotate(x, cos, -sin)
        return *gradients, None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the halves of each head `[B, H, T, K]` against each other, by angles `[B, T, K]`."""
    values, c, s = x.detach().numpy(), cos.detach().numpy()[:, None], sin.detach().numpy()[:, None]
    left, right = np.split(values, 2, axis=-1)
    values[...] = values * c + np.concatenate((-right, left), axis=-1) * s


def liger_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, ids: None, unsqueeze_dim: int) -> Any:
    calls.append("rope")
    assert ids is None and unsqueeze_dim == 1
    return Rope.apply(q, k, cos, sin)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    name = "liger_kernel.transformers.functional"
    for part in ("liger_kernel", "liger_kernel.transformers", name):
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    for function in (liger_rms_norm, liger_swiglu, liger_geglu, liger_rope):
        monkeypatch.setattr(sys.modules[name], function.__name__, function, raising=False)
    monkeypatch.setattr(sys.modules["liger_kernel.transformers"], "functional", sys.modules[name], raising=False)
    real_find_spec = importlib.util.find_spec
    spec = importlib.util.spec_from_loader("liger_kernel", None)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda x, *rest: spec if x == "liger_kernel" else real_find_spec(x, *rest)
    )
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda x: "0.8.5" if x == "liger-kernel" else version(x))
    patches.clear_caches()
    yield
    process_settings.restore_all()
    monkeypatch.undo()
    patches.clear_caches()


def answer(model: Any) -> tuple[Tensor, Tensor]:
    """Return logits and the gradient of all weights."""
    ids = torch.randint(3, 97, (2, 11), generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    logits = model(ids, use_cache=False).logits
    (logits * torch.linspace(-1, 1, logits.shape[-1])).sum().backward()
    return logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("kind", model_types_with("liger_norm"))
def test_use_liger_leaves_results_unchanged(kind: str) -> None:
    model = tiny(kind)
    names, (logits, gradient) = list(model.state_dict()), answer(model)
    calls.clear()
    counts = replace(model, kind)
    actual = answer(model)
    assert counts["norms"] == sum(name.endswith("norm.weight") for name in names if "layernorm" not in name) + sum(
        name.endswith("layernorm.weight") for name in names
    )
    assert counts["gated MLPs"] == counts["rotary attentions"] == 3
    assert calls.count("norm") == counts["norms"] and len(calls) == counts["norms"] + 3
    assert list(model.state_dict()) == names
    torch.testing.assert_close(actual[0], logits, atol=1e-5, rtol=1e-5)
    assert float((actual[1] - gradient).norm() / gradient.norm()) < 1e-5


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_rope_in_place_keeps_tensors_of_the_backward_pass(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama").train()
    logits, gradient = answer(model)
    replace(model, "llama")
    enable_recomputation(model, mode)
    calls.clear()
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)  # the kernel is for tensors on GPUs alone
    actual = answer(model)
    assert calls.count("rope") == (3 if mode == "none" else 6)
    torch.testing.assert_close(actual[0], logits, atol=1e-5, rtol=1e-5)
    assert float((actual[1] - gradient).norm() / gradient.norm()) < 1e-5


@pytest.mark.usefixtures("installed")
def test_use_liger_leaves_other_models_of_the_process_unchanged() -> None:
    first, second = tiny("llama"), tiny("llama")
    use_liger(first, recipe("llama"), on_gpu=True)
    calls.clear()
    answer(second)
    assert not calls
    room = sys.modules[type(first.model.layers[0].self_attn).__module__]
    assert isinstance(room.apply_rotary_pos_emb, _Rotary)
    process_settings.restore_all()
    assert not isinstance(room.apply_rotary_pos_emb, _Rotary), "it holds for the process, so the end of a run ends it"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("kind", "requested", "on_gpu", "lines"),
    [
        ("llama", None, True, ["Liger kernels: 7 norms, 3 gated MLPs, 3 rotary attentions"]),
        ("llama", True, True, ["Liger kernels: 7 norms, 3 gated MLPs, 3 rotary attentions"]),
        ("llama", False, True, []),
        ("llama", None, False, []),
        ("llama", True, False, ["Liger kernels: none, there is no GPU"]),
        ("opt", None, True, []),
    ],
)
def test_use_liger_returns_lines_with_the_replaced_modules(
    kind: str, requested: bool | None, on_gpu: bool, lines: list[str]
) -> None:
    given = recipe(kind, model={"name": "x", "use_liger_kernel": requested})
    assert use_liger(tiny(kind), given, on_gpu=on_gpu) == lines
    assert use_liger(torch.nn.Linear(1, 1), recipe("x"), on_gpu=on_gpu) == []


def test_use_liger_on_request_without_package_or_support_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda x, *rest: None if x == "liger_kernel" else real_find_spec(x, *rest)
    )
    given = recipe("llama", model={"name": "x", "use_liger_kernel": True})
    with pytest.raises(InputError, match="use_liger_kernel: the package liger-kernel is not installed") as missing:
        use_liger(tiny("llama"), given, on_gpu=True)
    assert "pip install 'liger-kernel>=" in str(missing.value)
    with pytest.raises(InputError, match="models of type opt were not tested with them"):
        use_liger(tiny("opt"), given, on_gpu=True)
    save_hollow(tmp_path / "llama", model_type="llama")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    here = {"model": {"name": str(tmp_path / "llama"), "use_liger_kernel": True}}
    small_recipe = recipe("x", **here, data={"train": str(tmp_path / "rows.jsonl")})
    check_inputs(small_recipe)  # on this machine there is no GPU
    monkeypatch.setattr(devices, "count_gpus", lambda: 1)
    with pytest.raises(InputError, match="liger-kernel is not installed"):
        check_inputs(small_recipe)
    check_inputs(small_recipe, cpu=True)
