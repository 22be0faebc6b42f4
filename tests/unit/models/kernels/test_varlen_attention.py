"""Which kernel does the attention of documents, and that flash-attn's are called as their own contract says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import modeling_flash_attention_utils
from transformers.utils import import_utils

from ftcli.config.plan import derive_plan
from ftcli.config.recipe import Recipe
from ftcli.hardware import interface
from ftcli.models.kernels.document_attention import (
    DOCUMENT_ATTENTION_TORCH,
    attend,
    confine_to_documents,
    describe_attention,
    prefers_flat,
)
from ftcli.models.kernels.varlen_attention import TORCH_VARLEN, attend_documents, choose_kernel, import_problem

from ....support.recipes import minimal_values
from .test_document_attention import tiny

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    choose_kernel.cache_clear()
    import_problem.cache_clear()
    yield
    choose_kernel.cache_clear()
    import_problem.cache_clear()
    modeling_flash_attention_utils._loaded_implementation = None


@pytest.fixture
def gpu_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch report an H100. No kernel runs in these tests."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.fixture
def hopper(gpu_here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also remove the run of an earlier test, which was on the CPU."""
    monkeypatch.setattr("accelerate.state.is_initialized", lambda: False)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, None]:
    """Do what flash-attn 4 says of its function of this name, `[T, H, K]` in and out, in plain torch."""
    assert causal and isinstance(max_seqlen_q, int) and isinstance(max_seqlen_k, int)
    assert cu_seqlens_q is not None and cu_seqlens_k is cu_seqlens_q and cu_seqlens_q.dtype == torch.int32
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    out = []
    for start, end in pairwise(cu_seqlens_q.tolist()):
        one = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
        mask = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        if window_size[0] is not None:
            mask = mask.triu(-window_size[0])
        output = F.scaled_dot_product_attention(*one, attn_mask=mask, scale=softmax_scale, enable_gqa=True)
        out.append(output[0].transpose(0, 1))
    return torch.cat(out), None


def install(monkeypatch: pytest.MonkeyPatch, *versions: int) -> None:
    """Make packages of flash-attn's that are our plain torch."""
    for version in (2, 3, 4):
        for module in (import_utils, modeling_flash_attention_utils):
            monkeypatch.setattr(module, f"is_flash_attn_{version}_available", lambda known=version in versions: known)
    for name in [{4: "flash_attn.cute", 3: "flash_attn_interface"}[version] for version in versions]:
        for part in {name, name.partition(".")[0]}:
            monkeypatch.setitem(sys.modules, part, ModuleType(part))
        for function in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"):
            monkeypatch.setattr(sys.modules[name], function, flash_attn_varlen_func, raising=False)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("sizes", "dtype", "flash", "expected"),
    [
        ((128, 128), torch.bfloat16, True, "flash_attention_4"),
        ((256, 256), torch.bfloat16, True, "flash_attention_3"),
        ((32, 32), torch.bfloat16, True, "flash_attention_3"),
        ((128, 128), torch.bfloat16, False, TORCH_VARLEN),
        ((64, 64), torch.float32, True, None),
        ((192, 128), torch.bfloat16, True, None),
        ((12, 12), torch.bfloat16, True, None),
        ((264, 264), torch.float16, True, None),
    ],
)
def test_kernel_for_returns_the_newest_suitable_kernel(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int], dtype: torch.dtype, flash: bool, expected: str | None
) -> None:
    install(monkeypatch, 3, 4)
    assert choose_kernel(GPU, dtype, *sizes, flash=flash) == expected


@pytest.mark.usefixtures("hopper")
def test_kernel_for_without_flash_attn_is_torchs_and_none_on_older_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_kernel(GPU, torch.bfloat16, 64, 64, flash=True) == TORCH_VARLEN
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    choose_kernel.cache_clear()
    assert choose_kernel(GPU, torch.float16, 64, 64, flash=True) is None
    assert choose_kernel(torch.device("cpu"), torch.bfloat16, 64, 64, flash=True) is None


@pytest.mark.usefixtures("hopper")
def test_choose_attention_with_a_broken_package_skips_it_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (import_utils, modeling_flash_attention_utils):
        monkeypatch.setattr(module, "is_flash_attn_4_available", lambda: True)
    assert choose_kernel(GPU, torch.bfloat16, 64, 64, flash=True) == TORCH_VARLEN
    model = tiny("llama").to(torch.bfloat16)
    confine_to_documents(model)
    lines = describe_attention(model, recipe("llama"), flat=True, device_type="cuda")
    assert lines[0] == "attention: torch varlen, all documents at once"
    assert lines[1].startswith("flash_attention_4 is installed and cannot be imported: ModuleNotFoundError: ")
    assert len(lines) == 2


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("version", [3, 4])
def test_flash_attn_gets_bounds_lengths_and_windows_in_its_own_terms(
    monkeypatch: pytest.MonkeyPatch, version: int, window: int | None
) -> None:
    install(monkeypatch, version)
    torch.manual_seed(0)
    bounds = torch.tensor([0, 3, 4, 13], dtype=torch.int32)
    query, key, value = (torch.randn(1, heads, 13, 8) for heads in (4, 2, 2))
    module = torch.nn.Identity()
    module.is_causal, module.num_key_value_groups = True, 2  # type: ignore[assignment]
    more: dict[str, Any] = {"scaling": 0.3, "sliding_window": window}
    one_by_one, _ = attend(module, query, key, value, bounds[None, None, None], max_length_q=9, **more)
    at_once = attend_documents(f"flash_attention_{version}", query, key, value, bounds, 9, 0.3, window)
    torch.testing.assert_close(at_once, one_by_one)


def recipe(name: str, **changes: Any) -> Recipe:
    values: dict[str, Any] = minimal_values(precision="bf16", model={"name": name}, data={"train": "rows.jsonl"})
    return Recipe.model_validate({**values, **changes})


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("llama", {}, True),
        ("gemma2", {}, False),  # soft-capped: no kernel
        ("deepseek_v3", {}, False),  # values narrower than keys
        ("llama", {"precision": "fp32"}, False),
        ("llama", {"data": {"train": "rows.jsonl", "padding_free": False}}, False),
        ("llama", {"model": {"name": "x", "attn_implementation": "eager"}}, False),
        ("llama", {"model": {"name": "x", "attn_implementation": "sdpa"}}, True),
        ("gemma2", {"data": {"train": "rows.jsonl", "packing": True}}, True),  # set in the recipe
        ("bloom", {}, False),  # not in the table
    ],
)
@pytest.mark.usefixtures("hopper")
def test_is_best_flat_is_true_with_a_kernel_for_it(kind: str, changes: dict[str, Any], expected: bool) -> None:
    assert prefers_flat(tiny(kind), recipe(kind, **changes)) == expected


def test_choose_attention_on_cpu_is_padded_unless_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not prefers_flat(tiny("llama"), recipe("llama"))
    assert prefers_flat(tiny("llama"), recipe("llama", data={"train": "rows.jsonl", "padding_free": True}))


@pytest.mark.usefixtures("gpu_here")
def test_is_best_flat_depends_on_the_device_of_the_run() -> None:
    """The machine has a GPU, and the run before had another device."""
    given, model = recipe("llama"), tiny("llama")
    results = []
    for cpu in (True, False, True):
        place = interface.build(given, derive_plan(given, 1, 1), cpu=cpu, trackers=[], folder=None)
        results.append((place.accelerator.device.type, prefers_flat(model, given)))
    assert results == [("cpu", False), ("cuda", True), ("cpu", False)]


def test_describe_attention_log_names_the_kernel() -> None:
    model = tiny("llama")
    small_recipe = recipe("llama", model={"name": "x", "attn_implementation": "sdpa"})
    assert describe_attention(model, small_recipe, flat=False, device_type="cpu") == ["attention: sdpa"]
    confine_to_documents(model, "sdpa")
    assert model.config._attn_implementation == DOCUMENT_ATTENTION_TORCH
    assert describe_attention(model, small_recipe, flat=True, device_type="cpu") == [
        "attention: one document after the other"
    ]
    assert describe_attention(torch.nn.Linear(1, 1), small_recipe, flat=True, device_type="cpu") == []
