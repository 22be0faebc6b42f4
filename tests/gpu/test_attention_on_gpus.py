"""Concatenated documents have the logits and gradients of single documents, on a GPU, in every supported architecture.

In bf16 torch's own variable-length kernel does it, or flash-attn where that is installed; in float32 the loop over
documents.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ftcli.models.architectures import model_types_with
from ftcli.models.kernels.document_attention import confine_to_documents
from ftcli.models.kernels.varlen_attention import (
    FLASH_KERNELS,
    TORCH_VARLEN,
    attend_documents,
    choose_kernel,
    import_problem,
)

from ..unit.models.kernels.test_document_attention import LENGTHS, PACKED, documents, laid_end_to_end, tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
# Distances are relative to the norm: of the logits of each token, and of the gradient of all weights. Float32: from
# each document alone. Bfloat16: both are at a distance from float32, and that of documents in one row must not be
# more than so many times that of documents alone, which is the noise of the arithmetic.
MOST, TIMES = 1e-4, 3.0
LEAST = 0.5  # how far the logits of some token are where boundaries are ignored
# Soft-capping, sinks, and values narrower than keys: one document after the other in bf16 too.
WITHOUT_KERNEL = ("gemma2", "gpt_oss", "deepseek_v3")
# Which experts a token goes to may turn with the last bit of bfloat16, and then all of it.
WITH_EXPERTS = model_types_with("has_experts")
KERNEL = "torch_attn::_varlen_attn"
FLASH_ATTN = next((name for name in FLASH_KERNELS if torch.cuda.is_available() and import_problem(name) is None), None)
NEEDS_FLASH = pytest.mark.skipif(FLASH_ATTN is None, reason="needs flash-attn")
# Heads of 64: flash-attn 4 is not used for narrower ones.
WIDE = {kind: {"head_dim": 64} for kind in ("llama", "mistral", "qwen3", "gemma3_text")} | {
    "phi3": {"hidden_size": 256}
}


def run(model: Any, batches: list[dict[str, Any]], precision: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits `[T, V]` of all batches, one document after the other, and the gradient `[P]` of all weights."""
    model.zero_grad()
    with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
        logits = torch.cat([model(**batch).logits.flatten(0, 1).float() for batch in batches])
    draw = torch.Generator().manual_seed(2)
    (logits * torch.randn(logits.shape, generator=draw).to(logits.device)).sum().backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return logits.detach(), torch.cat([gradient.flatten() for gradient in gradients])


def apart(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the distance of each row from the expected one, relative to its norm."""
    return (actual - expected).norm(dim=-1) / expected.norm(dim=-1)


def compare(
    kind: str, precision: str, device: str, chosen: str | None = "sdpa", sizes: dict[str, int] | None = None
) -> dict[str, Any]:
    """Return how far documents in one row, and documents alone, are from float32; and whether the kernel was used."""
    from torch.profiler import ProfilerActivity, profile

    model, rows = tiny(kind, **(sizes or {})).to(device), documents()
    on_device = [{"input_ids": row[None].to(device), "use_cache": False} for row in rows]
    ends = [laid_end_to_end(rows, lengths) for lengths in (LENGTHS, [sum(LENGTHS)])]
    flat, merged = ({k: v.to(device) if torch.is_tensor(v) else v for k, v in end.items()} for end in ends)
    exact, alone = run(model, on_device, "fp32"), run(model, on_device, precision)
    confine_to_documents(model, chosen)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        packed = run(model, [flat], precision)
    return {
        "logits": apart(packed[0], exact[0]),
        "noise of logits": apart(alone[0], exact[0]),
        "gradient": float(apart(packed[1], exact[1])),
        "noise of gradient": float(apart(alone[1], exact[1])),
        "ignored": float(apart(run(model, [merged], precision)[0], exact[0]).max()),
        "kernel": KERNEL in {event.key for event in seen.key_averages()},
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", PACKED)
def test_packed_attention_gives_logits_and_gradients_of_single_documents(kind: str, precision: str) -> None:
    actual = compare(kind, precision, "cuda")
    logits, noise = actual["logits"], actual["noise of logits"]
    print(f"{kind} {precision}: {logits.median():.1e} {logits.max():.1e} {actual}")
    assert actual["ignored"] > LEAST, "boundaries that are ignored must show"
    assert actual["kernel"] == (precision == "bf16" and kind not in WITHOUT_KERNEL)
    if precision == "fp32":
        assert float(logits.max()) < MOST and actual["gradient"] < 10 * MOST
        return
    assert float(logits.median()) < TIMES * float(noise.median())
    if kind not in WITH_EXPERTS:
        assert float(logits.max()) < TIMES * float(noise.max())
        assert actual["gradient"] < TIMES * actual["noise of gradient"]


@NEEDS_FLASH
@pytest.mark.parametrize("kind", WIDE)
def test_flash_attn_of_packed_documents_equals_torchs_kernel(kind: str) -> None:
    actual, torchs = (compare(kind, "bf16", "cuda", chosen, WIDE[kind]) for chosen in (None, "sdpa"))
    print(f"{kind} {FLASH_ATTN}: {actual}")
    assert not actual["kernel"] and torchs["kernel"], "flash-attn was not taken"
    assert actual["ignored"] > LEAST
    assert float(actual["logits"].median()) < TIMES * float(actual["noise of logits"].median())
    assert float(actual["logits"].max()) < TIMES * float(actual["noise of logits"].max())
    assert actual["gradient"] < TIMES * actual["noise of gradient"]


@pytest.mark.parametrize("flash", [False, pytest.param(True, marks=NEEDS_FLASH)])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
@pytest.mark.parametrize("size", [8, 16, 32, 64, 80, 96, 128, 192, 256])
def test_varlen_kernel_gives_each_document_its_gradient(
    size: int, heads: tuple[int, int], window: int | None, flash: bool
) -> None:
    """Documents of one token, of a few, of a tile and of more than two, for heads of every size it is chosen for."""
    kernel = choose_kernel(torch.device("cuda", 0), torch.bfloat16, size, size, flash=flash)
    if kernel is None or (flash and kernel == TORCH_VARLEN):
        pytest.skip(f"{kernel} does heads of {size}")
    lengths = [1, 3, 70, 128, 1, 300, 17, 64]
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    torch.manual_seed(size)
    drawn = [torch.randn(1, n, sum(lengths), size).bfloat16() for n in (heads[0], heads[1], heads[1], heads[0])]
    upstream = drawn.pop().transpose(1, 2).cuda()
    inputs = [tensor.cuda().requires_grad_() for tensor in drawn]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    actual = attend_documents(kernel, *inputs, bounds.cuda(), max(lengths), None, window)
    parts = []
    for start, end in pairwise(bounds.tolist()):
        mask = torch.ones(end - start, end - start, dtype=torch.bool, device="cuda").tril()
        mask = mask if window is None else mask.triu(1 - window)
        part = (tensor[:, :, start:end] for tensor in exact)
        parts.append(F.scaled_dot_product_attention(*part, attn_mask=mask, enable_gqa=True).transpose(1, 2))
    expected = torch.cat(parts, dim=1)
    gradients = torch.autograd.grad(actual, inputs, upstream)
    wanted_gradients = torch.autograd.grad(expected, exact, upstream.double())
    for name, a, b in zip(
        ("output", "of query", "of key", "of value"), (actual, *gradients), (expected, *wanted_gradients), strict=True
    ):
        far = float((a.detach().double() - b.detach()).norm() / b.detach().norm())
        assert far < 2e-2, f"{kernel}, {name}: {far:.1e} from float64"  # bfloat16 rounds by 4e-3 at most
