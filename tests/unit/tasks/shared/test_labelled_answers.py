"""Labelled answers with their mismatched partners: tokens, batches, and a KTO loss that no micro size changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ftcli import testing
from ftcli.data.formats import convert
from ftcli.data.preference_formats import split_pair
from ftcli.models.kernels.document_attention import confine_to_documents
from ftcli.models.losses import return_token_nll
from ftcli.runtime.errors import InputError, RowError
from ftcli.tasks.shared.labelled_answers import (
    collate_labelled,
    encode_labelled,
    mismatched_sides,
    own_sides,
    prompt_numbers,
)
from ftcli.tasks.shared.mismatched import mismatched_partners
from ftcli.tasks.shared.pairs import model_inputs, pair_weights, side_sums
from ftcli.tasks.shared.unpaired_losses import kto, kto_baseline

from ....support.chat_tables import brackets

USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return testing.tiny_tokenizer()


def encode(tokenizer: Any, *rows: dict[str, Any], length: int = 64, policy: str = "truncate") -> list[Any]:
    return encode_labelled(tokenizer, rows, as_chat=False, variables={}, length=length, policy=policy)


def shown(tokenizer: Any, side: dict[str, Any]) -> str:
    return brackets(tokenizer, side["input_ids"], side["trained"])


def test_encode_labelled_returns_the_own_and_the_mismatched_answer(tokenizer: Any) -> None:
    row = {"prompt": "p", "completion": " own", "mismatched": " other one", "label": True, "weight": 2.0}
    ((prepared,),) = encode(tokenizer, row)
    assert shown(tokenizer, own_sides([prepared])[0]) == "p⟦ own<|im_end|>⟧"
    assert shown(tokenizer, mismatched_sides([prepared])[0]) == "p⟦ other one<|im_end|>⟧"
    assert (prepared["label"], prepared["items"], prepared["weight"]) == (True, 1, 2.0)


def test_messages_and_split_pairs_become_labelled_rows(tokenizer: Any) -> None:
    chats = [{"role": "assistant", "content": text} for text in ("Yo", "No")]
    rows = split_pair(convert({"chosen": [USER, chats[0]], "rejected": [USER, chats[1]]}, ("compared",)))
    assert prompt_numbers(rows).tolist() == [0, 0]
    (chosen,), (rejected,) = encode(tokenizer, *rows)
    head = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert shown(tokenizer, own_sides([chosen])[0]) == f"{head}⟦Yo<|im_end|>⟧\n"
    assert shown(tokenizer, own_sides([rejected])[0]) == f"{head}⟦No<|im_end|>⟧\n"
    assert (chosen["label"], rejected["label"]) == (True, False)
    assert mismatched_sides([chosen])[0]["input_ids"] == []


def test_prompt_numbers_differ_for_different_tools() -> None:
    rows = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "a", "tools": [{}]}, {"prompt": "a"}]
    assert prompt_numbers(rows).tolist() == [0, 1, 2, 0]


def test_long_answers_are_cut_or_dropped_and_mismatched_ones_are_always_cut(tokenizer: Any) -> None:
    row = {"prompt": "p", "completion": " own", "mismatched": " other one", "label": False}
    ((prepared,),) = encode(tokenizer, row, length=7, policy="drop")
    assert "cut" not in prepared and shown(tokenizer, mismatched_sides([prepared])[0]) == "p⟦ other⟧"
    ((prepared,),) = encode(tokenizer, row, length=3)
    assert prepared["cut"] and prepared["items"] == 1 and prepared["own_length"] == 3
    assert encode(tokenizer, row, length=3, policy="drop") == [[]]
    ((prepared,),) = encode(tokenizer, row | {"prompt": "long"}, length=4)
    assert prepared["cut"] and prepared["items"] == 0
    with pytest.raises(InputError, match="split makes several rows"):
        encode(tokenizer, row, policy="split")


def test_encode_labelled_refuses_only_the_invalid_row(tokenizer: Any) -> None:
    good = {"prompt": "p", "completion": "own", "label": True}
    bad = {"prompt": [USER], "completion": [{"role": "assistant", "content": ""}], "label": True}
    prepared = encode(tokenizer, good, bad)
    assert not isinstance(prepared[0], RowError)
    assert isinstance(prepared[1], RowError) and "message 2 of the assistant is empty" in str(prepared[1])


def test_a_mismatched_answer_may_come_from_a_row_of_another_shape(tokenizer: Any) -> None:
    text = {"prompt": "Hi", "completion": "own", "label": True, "mismatched": [{"role": "assistant", "content": "x"}]}
    chat = {"prompt": [USER], "completion": text["mismatched"], "label": True, "mismatched": "own"}
    head = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    (first,), (second,) = encode(tokenizer, text, chat)
    assert shown(tokenizer, mismatched_sides([first])[0]) == f"{head}⟦x<|im_end|>⟧\n"
    assert shown(tokenizer, mismatched_sides([second])[0]) == f"{head}⟦own<|im_end|>⟧\n"


def test_a_batch_has_labels_and_weights(tokenizer: Any) -> None:
    rows = [
        {"prompt": "p", "completion": "own", "label": True, "weight": 0.5},
        {"prompt": "p", "completion": "b", "label": False},
    ]
    prepared = [row for (row,) in encode(tokenizer, *rows)]
    prepared[1] |= {"items": 0, "trained": [False] * len(prepared[1]["trained"])}
    batch = collate_labelled(prepared, own_sides(prepared), 1, is_flat=False, attn_implementation=None)
    assert batch["is_desirable"].tolist() == [True, False]
    assert pair_weights(batch).tolist() == [0.5, 0.0]
    assert batch["side_tokens"].tolist() == [4, 0]
    assert model_inputs(batch).keys() == {"input_ids", "attention_mask", "positions", "targets"}


@pytest.mark.parametrize("is_flat", [False, True])
def test_kto_with_its_baseline_does_not_depend_on_the_micro_size(tokenizer: Any, is_flat: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    texts = ["a", "bb ccc", "d" * 9, "ee", "f g h", "iiii"]
    rows: list[dict[str, Any]] = [
        {"prompt": f"q{number // 2}", "completion": f" {text}", "label": number % 2 == 0}
        for number, text in enumerate(texts)
    ]
    partners = mismatched_partners(prompt_numbers(rows), seed=0)[0]
    for row, partner in zip(rows, partners, strict=True):
        row["mismatched"] = rows[partner]["completion"]
    prepared = [row for (row,) in encode(tokenizer, *rows)]
    model: Any = AutoModelForCausalLM.from_pretrained(testing.save_tiny_causal(tmp_path), dtype=torch.float32)
    if is_flat:
        confine_to_documents(model)
    return_token_nll(model)
    # References that differ from the policy, more for longer answers.
    references = [[-6.0 * sum(side["trained"]) for side in sides(prepared)] for sides in (own_sides, mismatched_sides)]

    def log_ratios(sides: Any, start: int, micro: int, reference: list[float]) -> tuple[torch.Tensor, Any]:
        some = prepared[start : start + micro]
        batch = collate_labelled(some, sides(some), 1, is_flat=is_flat, attn_implementation=None)
        lp = -side_sums(model(**model_inputs(batch))["nll"], batch)
        return lp - torch.tensor(reference[start : start + micro]), batch

    losses = []
    for micro in (1, 2, 3, 6):
        starts = range(0, len(rows), micro)
        with torch.no_grad():
            total = sum(log_ratios(mismatched_sides, start, micro, references[1])[0].sum() for start in starts)
        baseline = kto_baseline(torch.as_tensor(total), len(rows))
        model.zero_grad()
        loss = 0.0
        for start in starts:
            ratios, batch = log_ratios(own_sides, start, micro, references[0])
            part = kto(ratios, batch["is_desirable"], beta=0.1, baseline=baseline) * pair_weights(batch)
            (part.sum() / len(rows)).backward()
            loss += part.sum().item() / len(rows)
        gradient = torch.cat([weight.grad.flatten() for weight in model.parameters()])
        losses.append((baseline.item(), loss, gradient))
    assert losses[0][0] != 0
    for baseline, loss, gradient in losses[1:]:
        assert np.isclose(baseline, losses[0][0], rtol=1e-5) and np.isclose(loss, losses[0][1], rtol=1e-5)
        torch.testing.assert_close(gradient, losses[0][2], rtol=1e-4, atol=1e-7)
