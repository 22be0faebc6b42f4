"""Documents laid end to end give what each gives alone, on a GPU: every architecture offered, logits and gradients.

In bf16 torch's own variable-length kernel does it, or flash-attn where that is installed; in float32 the loop over
documents.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ftcli.attention import ARCHITECTURES, confine_to_documents
from ftcli.attention_kernels import FLASH, import_problem

from ..unit.test_attention import LENGTHS, documents, laid_end_to_end, tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
# Distances are relative to the norm: of the logits of each token, and of the gradient of all weights. Float32: from
# each document alone. Bfloat16: both are at a distance from float32, and that of documents in one row must not be
# more than so many times that of documents alone, which is the noise of the arithmetic.
MOST, TIMES = 1e-4, 3.0
LEAST = 0.5  # how far the logits of some token are where boundaries are ignored
# Soft-capping, sinks, and values narrower than keys: one document after the other in bf16 too.
WITHOUT_KERNEL = ("gemma2", "gpt_oss", "deepseek_v3")
# Which experts a token goes to may turn with the last bit of bfloat16, and then all of it.
WITH_EXPERTS = [kind for kind, what in ARCHITECTURES.items() if "experts" in what]
KERNEL = "torch_attn::_varlen_attn"
FLASH_ATTN = next((name for name in FLASH if torch.cuda.is_available() and import_problem(name) is None), None)


def run(model: Any, batches: list[dict[str, Any]], precision: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits `[T, V]` of all batches, one document after the other, and the gradient `[P]` of all weights."""
    model.zero_grad()
    with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
        logits = torch.cat([model(**batch).logits.flatten(0, 1).float() for batch in batches])
    draw = torch.Generator().manual_seed(2)
    (logits * torch.randn(logits.shape, generator=draw).to(logits.device)).sum().backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return logits.detach(), torch.cat([gradient.flatten() for gradient in gradients])


def apart(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the distance of each row from the wanted one, relative to its norm."""
    return (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)


def compare(kind: str, precision: str, device: str, chosen: str | None = "sdpa") -> dict[str, Any]:
    """Return how far documents in one row, and documents alone, are from float32; and whether the kernel was used."""
    from torch.profiler import ProfilerActivity, profile

    model, rows = tiny(kind).to(device), documents()
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
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_documents_in_one_row_give_logits_and_gradients_of_each_alone(kind: str, precision: str) -> None:
    found = compare(kind, precision, "cuda")
    logits, noise = found["logits"], found["noise of logits"]
    print(f"{kind} {precision}: {logits.median():.1e} {logits.max():.1e} {found}")
    assert found["ignored"] > LEAST, "boundaries that are ignored must show"
    assert found["kernel"] == (precision == "bf16" and kind not in WITHOUT_KERNEL)
    if precision == "fp32":
        assert float(logits.max()) < MOST and found["gradient"] < 10 * MOST
        return
    assert float(logits.median()) < TIMES * float(noise.median())
    if kind not in WITH_EXPERTS:
        assert float(logits.max()) < TIMES * float(noise.max())
        assert found["gradient"] < TIMES * found["noise of gradient"]


@pytest.mark.skipif(FLASH_ATTN is None, reason="needs flash-attn")
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3", "gemma3_text", "phi3"])
def test_flash_attn_gives_documents_what_torchs_kernel_gives_them(kind: str) -> None:
    found, torchs = compare(kind, "bf16", "cuda", None), compare(kind, "bf16", "cuda")
    print(f"{kind} {FLASH_ATTN}: {found}")
    assert not found["kernel"] and torchs["kernel"], "flash-attn was not taken"
    assert found["ignored"] > LEAST
    assert float(found["logits"].median()) < TIMES * float(found["noise of logits"].median())
    assert float(found["logits"].max()) < TIMES * float(found["noise of logits"].max())
    assert found["gradient"] < TIMES * found["noise of gradient"]
