"""Losses as sums: against float64 values, in chunks and whole, and inside a causal model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ftcli.models import losses
from ftcli.testing import save_tiny_causal


def test_token_nll_equals_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(37, 11) * 4, torch.randint(0, 11, (37,))
    expected = torch.logsumexp(logits.double(), 1) - logits.double().gather(1, targets[:, None])[:, 0]
    assert torch.allclose(losses.token_nll(logits, targets).double(), expected, atol=1e-6)
    monkeypatch.setattr(losses, "FLOAT32_LOGITS_AT_ONCE", 55)  # five rows at a time
    assert torch.equal(losses.token_nll(logits, targets), losses.cross_entropy_rows(logits, targets))


def test_token_nll_in_chunks_has_the_gradient_of_full_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(20, 7, requires_grad=True), torch.randint(0, 7, (20,))
    (whole,) = torch.autograd.grad(losses.token_nll(logits, targets).sum(), logits)
    monkeypatch.setattr(losses, "FLOAT32_LOGITS_AT_ONCE", 21)
    (chunked,) = torch.autograd.grad(losses.token_nll(logits, targets).sum(), logits)
    assert torch.equal(whole, chunked)


def test_cross_entropy_rows_of_a_masked_target_are_zero() -> None:
    logits = torch.randn(3, 5)
    nll = losses.cross_entropy_rows(logits, torch.tensor([1, -100, 2]))
    assert nll[1] == 0
    assert nll[0] > 0


def test_token_nll_without_targets_gives_a_differentiable_zero() -> None:
    logits = torch.randn(0, 5, requires_grad=True)
    total = losses.token_nll(logits, torch.zeros(0, dtype=torch.long)).sum()
    total.backward()
    assert total == 0


@pytest.mark.parametrize("tied", [True, False])
def test_model_losses_equal_those_of_its_logits(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    folder = save_tiny_causal(tmp_path / "model", tied=tied)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.randint(2, 259, (2, 9))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    plain = model(input_ids=ids, attention_mask=mask).logits
    positions, targets = torch.tensor([0, 3, 10, 12]), torch.tensor([5, 7, 9, 11])
    names = [name for name, _ in model.named_parameters()]
    losses.return_token_nll(model)
    nll = model(input_ids=ids, attention_mask=mask, positions=positions, targets=targets)["nll"]
    assert torch.allclose(nll, losses.cross_entropy_rows(plain.flatten(0, 1)[positions], targets), atol=1e-5)
    assert torch.allclose(model(input_ids=ids, attention_mask=mask).logits, plain, atol=1e-6)
    assert [name for name, _ in model.named_parameters()] == names


def test_token_nll_computes_the_head_only_for_targets(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(save_tiny_causal(tmp_path / "model"))
    losses.return_token_nll(model)
    rows: list[int] = []
    model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: rows.append(output.shape[0]))
    ids = torch.randint(2, 259, (2, 9))
    model(input_ids=ids, positions=torch.tensor([1, 2, 3]), targets=torch.tensor([4, 4, 4]))
    assert rows == [3]
