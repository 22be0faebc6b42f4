"""Pairs of answers: tokens and masks of both sides, refusals, batches, row sums, and the loss of a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, concatenate_datasets
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ftcli import testing
from ftcli.data.encode import encode_source, encoded_files
from ftcli.data.formats import convert
from ftcli.data.packing import lengths_of, pack
from ftcli.models.kernels.document_attention import confine_to_documents
from ftcli.models.losses import return_token_nll
from ftcli.runtime.errors import InputError, RowError
from ftcli.tasks.shared.pairs import (
    WEIGHT_UNIT,
    blank_pair,
    collate_pairs,
    encode_answers,
    encode_pairs,
    fit_pair,
    model_inputs,
    pair_logps,
    pair_weights,
    side_layout,
    side_sums,
    sides_of,
    weight_units,
)
from ftcli.tasks.shared.preference_options import PREFERENCE_LOSSES, loss_options

from ....support.chat_tables import brackets

USER, AGAIN = {"role": "user", "content": "Hi"}, {"role": "user", "content": "And?"}
GOOD, BAD = {"role": "assistant", "content": "Yo"}, {"role": "assistant", "content": "No way"}
HEAD = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return testing.tiny_tokenizer()


def encode(
    tokenizer: Any, *rows: dict[str, Any], length: int = 64, policy: str = "truncate", **options: Any
) -> list[Any]:
    pairs = [convert(row, ("compared",)) for row in rows]
    return encode_pairs(
        tokenizer, pairs, **{"as_chat": True, "variables": {}, "length": length, "policy": policy, **options}
    )


def shown(tokenizer: Any, row: dict[str, Any]) -> tuple[str, str]:
    left, right = (brackets(tokenizer, side["input_ids"], side["trained"]) for side in sides_of([row]))
    return left, right


def test_the_answers_of_messages_are_trained_and_the_prompt_is_not(tokenizer: Any) -> None:
    row = {"chosen": [USER, GOOD, AGAIN, GOOD], "rejected": [USER, GOOD, AGAIN, BAD], "margin": 0.5}
    (((actual,)),) = encode(tokenizer, row)
    prompt = f"{HEAD}Yo<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    assert shown(tokenizer, actual) == (f"{prompt}⟦Yo<|im_end|>⟧\n", f"{prompt}⟦No way<|im_end|>⟧\n")
    assert actual["items"] == 1 and actual["margin"] == 0.5


def test_every_turn_of_a_longer_answer_is_trained(tokenizer: Any) -> None:
    ((actual,),) = encode(tokenizer, {"chosen": [USER, GOOD, AGAIN, GOOD], "rejected": [USER, BAD]})
    left, right = shown(tokenizer, actual)
    assert left == f"{HEAD}⟦Yo<|im_end|>⟧\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n⟦Yo<|im_end|>⟧\n"
    assert right == f"{HEAD}⟦No way<|im_end|>⟧\n"


def test_text_becomes_turns_where_there_are_chats_and_stays_text_elsewhere(tokenizer: Any) -> None:
    row = {"prompt": "Hi", "chosen": " Yo", "rejected": " No way"}
    ((chat,),) = encode(tokenizer, row)
    assert shown(tokenizer, chat)[0] == f"{HEAD}⟦ Yo<|im_end|>⟧\n"
    ((plain,),) = encode(tokenizer, row, as_chat=False)
    assert shown(tokenizer, plain) == ("Hi⟦ Yo<|im_end|>⟧", "Hi⟦ No way<|im_end|>⟧")


def test_encode_pairs_equals_encoding_one_by_one(tokenizer: Any) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "Hi", "chosen": "Yo", "rejected": "No way"},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": [USER | {"content": None}], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": "Q: a\nA: b", "rejected": "Q: a\nA: c"},
    ]
    together = encode(tokenizer, *rows)
    alone = [encode(tokenizer, row)[0] for row in rows]
    assert [repr(each) for each in together] == [repr(each) for each in alone]
    assert isinstance(together[2], RowError) and "`chosen`: message 1 has no text" in str(together[2])


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"chosen": "yes", "rejected": "no"}, "has no prompt"),
        ({"chosen": "yes", "rejected": "no", "system": "be kind"}, "has no prompt"),
        ({"prompt": [USER, GOOD | {"train": True}, AGAIN], "chosen": [GOOD], "rejected": [BAD]}, "message 2 has train"),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [GOOD | {"train": False}]}, "same tokens"),
    ],
)
def test_a_pair_that_cannot_be_compared_is_refused_by_row(tokenizer: Any, row: dict[str, Any], words: str) -> None:
    (actual,) = encode(tokenizer, row)
    assert isinstance(actual, RowError) and words in str(actual)


def test_texts_without_a_prompt_are_pairs_where_none_is_needed(tokenizer: Any) -> None:
    ((actual,),) = encode(tokenizer, {"chosen": "yes", "rejected": "no"}, needs_prompt=False)
    left, right = shown(tokenizer, actual)
    assert left.replace("⟦", "").replace("⟧", "") == "yes<|im_end|>"
    assert right.replace("⟦", "").replace("⟧", "") == "no<|im_end|>"


def test_messages_without_a_chat_template_are_refused(tokenizer: Any) -> None:
    bare = testing.tiny_tokenizer()
    bare.chat_template = None
    (actual,) = encode_answers(bare, [{"prompt": [USER], "answer": [GOOD]}], as_chat=True, variables={})
    assert isinstance(actual, RowError) and "no chat template" in str(actual)


@pytest.mark.parametrize("as_chat", [True, False])
def test_text_with_what_only_a_chat_holds_is_refused_where_there_are_no_chats(tokenizer: Any, as_chat: bool) -> None:
    row = convert({"prompt": "p", "chosen": "a", "rejected": "b", "system": "Be kind."}, ("compared",))
    (actual,) = encode_answers(tokenizer, [{**row, "answer": row["chosen"]}], as_chat=as_chat, variables={})
    if as_chat:
        assert "Be kind." in tokenizer.decode(actual[0])
    else:
        assert isinstance(actual, RowError) and "has parts that need a chat template" in str(actual)


def side(length: int, first: int, start: int = 0) -> tuple[list[int], list[bool]]:
    return list(range(start, start + length)), [place >= first for place in range(length)]


def test_fit_pair_keeps_what_fits_with_its_split_point() -> None:
    (row,) = fit_pair(side(5, 3), side(7, 3, start=100), 7, "truncate")
    assert row["chosen_length"] == 5 and len(row["input_ids"]) == 12 and row["items"] == 1 and "cut" not in row
    assert row["trained"] == [False] * 3 + [True] * 2 + [False] * 3 + [True] * 4


@pytest.mark.parametrize("policy", ["truncate", "drop"])
def test_fit_pair_leaves_a_pair_out_of_which_one_side_is_cut(policy: str) -> None:
    assert fit_pair(side(5, 3), side(7, 3, start=100), 6, policy) == []
    assert fit_pair(side(7, 3), side(5, 3, start=100), 6, policy) == []


def test_fit_pair_cuts_both_sides_or_drops_them() -> None:
    (row,) = fit_pair(side(9, 3), side(8, 3, start=100), 6, "truncate")
    assert row["cut"] and row["items"] == 1 and row["chosen_length"] == 6 and len(row["input_ids"]) == 12
    assert fit_pair(side(9, 3), side(8, 3, start=100), 6, "drop") == []


def test_fit_pair_trains_nothing_where_an_answer_is_cut_away_or_both_become_equal() -> None:
    (row,) = fit_pair(side(9, 6), side(9, 3, start=100), 6, "truncate")
    assert row["cut"] and row["items"] == 0 and "never_trained" not in row
    (row,) = fit_pair(side(9, 3), side(8, 3), 6, "truncate")
    assert row["cut"] and row["items"] == 0 and "never_trained" not in row
    (row,) = fit_pair(side(9, 3), side(9, 9, start=100), 6, "truncate")  # a second answer without trained tokens
    assert row["cut"] and row["items"] == 0 and row["never_trained"]


def test_fit_pair_refuses_to_split() -> None:
    with pytest.raises(InputError, match="split makes several rows"):
        fit_pair(side(9, 3), side(8, 3), 6, "split")


def test_weights_are_whole_units() -> None:
    assert weight_units(1.0) == WEIGHT_UNIT and weight_units(0.5) * 2 == WEIGHT_UNIT and weight_units(2.0**-16) == 1


PAIR_ROWS = st.lists(
    st.tuples(st.integers(1, 6), st.integers(0, 6), st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=5
)


def prepared(shapes: list[tuple[int, int, int, int]]) -> list[dict[str, Any]]:
    """Return pairs of (tokens of prompt, of answer) for both sides."""
    rows = []
    for number, (prompt, answer, other_prompt, other_answer) in enumerate(shapes):
        ids = [3 + (7 * number + place) % 90 for place in range(prompt + answer + other_prompt + other_answer)]
        trained = [False] * prompt + [True] * answer + [False] * other_prompt + [True] * other_answer
        rows.append(
            {"input_ids": ids, "trained": trained, "chosen_length": prompt + answer, "items": 1, "training": True}
        )
    return rows


@given(PAIR_ROWS, st.booleans())
def test_side_sums_add_up_the_tokens_of_each_side(shapes: list[tuple[int, int, int, int]], is_flat: bool) -> None:
    rows = prepared(shapes)
    batch = collate_pairs(rows, 0, is_flat=is_flat, attn_implementation=None)
    values = torch.arange(1.0, 1 + batch["targets"].numel(), dtype=torch.float64)
    counts = [count for _, chosen, _, rejected in shapes for count in (chosen, rejected)]
    assert batch["side_tokens"].tolist() == counts
    bounds = np.cumsum([0, *counts])
    expected = [values[a:b].sum().item() for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    assert side_sums(values, batch).tolist() == expected
    assert len(set(batch["side_slots"].tolist())) == len(values)
    assert int(batch["is_chosen"].sum()) == sum(counts[::2])


def test_side_sums_give_each_value_the_gradient_of_its_side() -> None:
    rows = prepared([(2, 3, 2, 1), (1, 2, 4, 2)])
    batch = side_layout(sides_of(rows))
    values = torch.zeros(8, requires_grad=True)
    side_sums(values, batch).backward(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64))
    assert values.grad is not None and values.grad.tolist() == [1, 1, 1, 2, 3, 3, 4, 4]


def test_side_sums_of_long_answers_keep_the_smallest_difference_of_their_tokens() -> None:
    batch = side_layout(sides_of(prepared([(1, 900, 1, 900)])))
    values = torch.full((1800,), 5.5)
    values[7] += 5e-7  # the next float32; float32 sums near 5000 are 5e-4 apart
    chosen, rejected = side_sums(values, batch).tolist()
    assert chosen - rejected == float(values[7]) - 5.5 > 0


def test_given_log_probabilities_of_a_reference_are_not_rounded() -> None:
    row = prepared([(1, 2, 1, 2)])[0] | {"ref_chosen_logps": -4951.0000123, "ref_rejected_logps": -1.0}
    batch = collate_pairs([row], 0, is_flat=False, attn_implementation=None)
    assert batch["ref_chosen_logps"].tolist() == [-4951.0000123]


def test_a_batch_has_weights_and_given_numbers_of_its_pairs() -> None:
    rows = prepared([(2, 3, 2, 1), (1, 2, 4, 2), (1, 1, 1, 1)])
    rows[0] |= {"weight": 0.5, "margin": 1.5, "ref_chosen_logps": -3.0, "ref_rejected_logps": -4.0}
    rows[2] = blank_pair(rows[2] | {"margin": 9.0})
    batch = collate_pairs(rows, 0, is_flat=False, attn_implementation=None)
    assert batch["weight_units"].tolist() == [WEIGHT_UNIT // 2, WEIGHT_UNIT, 0]
    assert pair_weights(batch).tolist() == [0.5, 1.0, 0.0]
    assert batch["margin"].tolist() == [1.5, 0.0, 0.0]
    pairs = pair_logps(torch.ones(8), batch)
    assert pairs.chosen.tolist() == [-3.0, -2.0, 0.0] and pairs.rejected_tokens.tolist() == [1, 2, 0]
    assert pairs.ref_chosen is not None and pairs.ref_chosen.tolist() == [-3.0, 0.0, 0.0]
    assert model_inputs(batch).keys() == {"input_ids", "attention_mask", "positions", "targets"}


@given(PAIR_ROWS)
def test_packing_by_the_sum_of_both_sides_keeps_pairs_whole(shapes: list[tuple[int, int, int, int]]) -> None:
    rows = prepared(shapes)
    lengths = np.array([len(row["input_ids"]) for row in rows])
    bins = pack(lengths, 30)
    for index in range(len(bins)):
        batch = collate_pairs([rows[number] for number in bins[index]], 0, is_flat=True, attn_implementation=None)
        assert batch["side_tokens"].numel() == 2 * len(bins[index])
        assert batch["input_ids"].shape[1] <= 32  # 30 tokens, rounded up to whole tiles


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return testing.save_tiny_causal(tmp_path_factory.mktemp("model"))


def tiny_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


SHAPES = [(4, 5, 4, 2), (2, 1, 2, 9), (6, 3, 6, 3), (1, 4, 1, 7)]
REFERENCE = [[-30.0, -12.0], [-6.0, -51.0], [-17.0, -18.0], [-22.0, -40.0]]


def logps_from_logits(model: Any, rows: list[dict[str, Any]]) -> Tensor:
    """Return lp of every side `[P, 2]`, each side alone in one plain forward pass."""
    logps = []
    for each in sides_of(rows):
        ids = torch.tensor(each["input_ids"])[None]
        logs = model(input_ids=ids).logits[0].log_softmax(-1)
        logps.append(sum(logs[place - 1, ids[0, place]] for place in range(1, ids.shape[1]) if each["trained"][place]))
    return torch.stack(logps).view(-1, 2)


@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("name", ["sigmoid", "orpo"])
def test_loss_and_every_gradient_equal_those_of_sides_one_by_one(
    name: str, is_flat: bool, micro: int, model_folder: Path
) -> None:
    rows = prepared(SHAPES)
    for row, (chosen, rejected) in zip(rows, REFERENCE, strict=True):
        row |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    options = loss_options(name, {"beta": 0.3}, "x")

    plain = tiny_model(model_folder)
    lps, ref = logps_from_logits(plain, rows), torch.tensor(REFERENCE)
    if name == "sigmoid":
        scores = 0.3 * ((lps - ref)[:, 0] - (lps - ref)[:, 1])
        expected = (1 + (-scores).exp()).log().sum() / len(rows)
    else:
        tokens = torch.tensor([[chosen, rejected] for _, chosen, _, rejected in SHAPES])
        p = (lps / tokens).exp()
        odds = p / (1 - p)
        expected = 0.3 * (1 + odds[:, 1] / odds[:, 0]).log().sum() / len(rows)
    expected.backward()

    model = tiny_model(model_folder)
    if is_flat:
        confine_to_documents(model)
    return_token_nll(model)
    total = 0.0
    for start in range(0, len(rows), micro):
        batch = collate_pairs(rows[start : start + micro], 0, is_flat=is_flat, attn_implementation=None)
        pairs = pair_logps(model(**model_inputs(batch))["nll"], batch)
        loss = (PREFERENCE_LOSSES[name].function(pairs, **options) * pair_weights(batch)).sum() / len(rows)
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(expected.item(), rel=1e-5)
    for (weight, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=weight)


class PairTask:
    """The part of a task that prepares rows."""

    def __init__(self, tokenizer: Any, length: int) -> None:
        self.tokenizer, self.length = tokenizer, length

    def encode(self, row: dict[str, Any], facts: dict[str, Any]) -> list[dict[str, Any]]:
        pair = convert({name: value for name, value in row.items() if value is not None}, ("compared",))
        (actual,) = encode_pairs(
            self.tokenizer, [pair], as_chat=False, variables={}, length=self.length, policy="truncate"
        )
        if isinstance(actual, RowError):
            raise actual
        return actual


def test_pairs_that_are_left_out_are_counted_by_row(tokenizer: Any, tmp_path: Path) -> None:
    long = "long " * 20
    rows = Dataset.from_list(
        [
            {"prompt": "p", "chosen": "yes", "rejected": "no", "margin": None},
            {"prompt": "p", "chosen": "yes", "rejected": "yes", "margin": None},  # equal
            {"prompt": "p", "chosen": "yes", "rejected": long, "margin": 0.5},  # one side is cut
            {"prompt": "p", "chosen": f"a {long}", "rejected": f"b {long}", "margin": 0.5},  # both are cut
            {"prompt": long, "chosen": "yes", "rejected": "no", "margin": None},  # nothing of the answers is left
            {"prompt": "p", "chosen": "yes", "rejected": "no", "margin": float("nan")},
            {"prompt": None, "chosen": "yes", "rejected": "no", "margin": None},  # different prompts
        ]
    )
    task: Any = PairTask(tokenizer, 16)
    counts = encode_source(task, rows, np.arange(7), {}, tmp_path / "rows", title="x", most_bad=9, processes=1)
    assert (counts.rows, counts.documents, counts.items, counts.dropped) == (7, 2, 2, 1)
    assert (counts.cut, counts.untrained, counts.untrained_cut) == (2, 1, 1)
    assert [number for number, _ in counts.bad] == [1, 5, 6]
    prepared_rows = concatenate_datasets([Dataset.from_file(str(path)) for path in encoded_files(tmp_path / "rows")])
    assert lengths_of(prepared_rows).tolist() == [len("pyes") + len("pno") + 2, 32]
    assert prepared_rows["chosen_length"][:] == [5, 16] and prepared_rows["margin"][:] == [None, 0.5]
    batch = collate_pairs([prepared_rows[0], prepared_rows[1]], 0, is_flat=False, attn_implementation=None)
    assert batch["side_tokens"].tolist() == [4, 3, 15, 15] and batch["margin"].tolist() == [0.0, 0.5]
