"""Ranked and scored answers: prepared rows, refusals, and batches whose losses no micro size changes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ftcli import testing
from ftcli.data.formats import convert
from ftcli.runtime.errors import InputError, RowError
from ftcli.tasks.shared.pairs import WEIGHT_UNIT
from ftcli.tasks.shared.reward_losses import ranking, regression
from ftcli.tasks.shared.scored_answers import (
    answers_of,
    collate_answers,
    encode_ranked,
    encode_scored,
    losses_of_rows,
    model_inputs,
    scored_positions,
)

NAMES = ("helpful", "verbose")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return testing.tiny_tokenizer()


def ranked(tokenizer: Any, *rows: dict[str, Any], length: int = 64, policy: str = "truncate") -> list[Any]:
    given = [convert(row, ("ranked",)) for row in rows]
    return encode_ranked(tokenizer, given, as_chat=False, variables={}, length=length, policy=policy)


def scored(tokenizer: Any, *rows: dict[str, Any], length: int = 64, policy: str = "truncate") -> list[Any]:
    given = [convert(row, ("scored",)) for row in rows]
    return encode_scored(tokenizer, given, NAMES, as_chat=True, variables={}, length=length, policy=policy)


def texts(tokenizer: Any, row: dict[str, Any]) -> list[str]:
    return [tokenizer.decode(answer["input_ids"]) for answer in answers_of([row])]


def test_ranked_answers_are_one_row_with_their_lengths(tokenizer: Any) -> None:
    ((prepared,),) = ranked(
        tokenizer, {"prompt": "p", "responses": [" a", " bb", " c"], "ranks": [2, 1, 3], "weight": 3}
    )
    assert texts(tokenizer, prepared) == ["p a<|im_end|>", "p bb<|im_end|>", "p c<|im_end|>"]
    assert (prepared["lengths"], prepared["ranks"], prepared["items"], prepared["weight"]) == (
        [4, 5, 4],
        [2.0, 1.0, 3.0],
        1,
        3.0,
    )


def test_a_ranked_row_of_which_some_answers_are_cut_is_left_out(tokenizer: Any) -> None:
    row = {"prompt": "p", "responses": [" a", " bb"], "ranks": [1, 2]}
    assert ranked(tokenizer, row, length=4) == [[]]
    ((prepared,),) = ranked(tokenizer, row, length=3)
    assert prepared["cut"] and prepared["lengths"] == [3, 3] and prepared["items"] == 1
    assert ranked(tokenizer, row, length=3, policy="drop") == [[]]
    with pytest.raises(InputError, match="split makes several rows"):
        ranked(tokenizer, row, policy="split")


@pytest.mark.parametrize(
    ("responses", "ranks", "length", "items"),
    [
        ([" aab", " aac"], [1, 2], 4, 0),  # both are "p aa"
        ([" aab", " aac", " aad"], [1, 1, 2], 4, 0),
        ([" aab", " aac", " b", " c"], [1, 1, 2, 3], 3, 1),  # "p a" twice, with one rank
        ([" a", " b"], [1, 2], 1, 0),  # only the prompt is left
    ],
)
def test_ranked_answers_that_are_equal_or_gone_after_truncation_have_no_item(
    responses: list[str], ranks: list[int], length: int, items: int, tokenizer: Any
) -> None:
    ((prepared,),) = ranked(tokenizer, {"prompt": "p", "responses": responses, "ranks": ranks}, length=length)
    assert prepared["cut"] and prepared["items"] == items


def test_a_scored_answer_of_which_nothing_is_left_has_no_item(tokenizer: Any) -> None:
    row = {"prompt": "p" * 30, "completion": "a", "score": 1.0}
    ((prepared,),) = encode_scored(
        tokenizer,
        [convert(row, ("scored",))],
        ("score",),
        as_chat=False,
        variables={},
        length=20,
        policy="truncate",
    )
    assert prepared["cut"] and prepared["items"] == 0


def test_answers_with_the_same_tokens_and_different_ranks_are_refused(tokenizer: Any) -> None:
    # The tokenizer adds the end of a turn to a text without one.
    row = {"prompt": "p", "responses": [" a", " b", " a<|im_end|>"], "ranks": [1, 2, 3]}
    (prepared,) = ranked(tokenizer, row)
    assert "responses 1 and 3 have the same tokens and different ranks" in str(prepared)


def test_a_response_that_cannot_be_encoded_is_named(tokenizer: Any) -> None:
    user, answers = {"role": "user", "content": "Hi"}, [{"role": "assistant", "content": text} for text in ("a", "")]
    (prepared,) = ranked(tokenizer, {"prompt": [user], "responses": [[answer] for answer in answers], "ranks": [1, 2]})
    assert isinstance(prepared, RowError) and str(prepared).startswith(
        "response 2: message 2 of the assistant is empty"
    )


def test_scored_answers_have_a_number_for_each_attribute(tokenizer: Any) -> None:
    row = {"prompt": "p", "completion": "a", "attributes": {"verbose": 1, "helpful": None}}
    ((prepared,),) = scored(tokenizer, row)
    assert texts(tokenizer, prepared) == ["<|im_start|>user\np<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"]
    assert math.isnan(prepared["scores"][0]) and prepared["scores"][1] == 1.0
    ((without,),) = scored(tokenizer, row | {"attributes": {"verbose": 1, "witty": None}})
    assert repr(without) == repr(prepared)
    refused = scored(tokenizer, row | {"attributes": {"witty": 1}}, row | {"attributes": {"verbose": None, "x": 1}})
    assert "has scores for witty; the attributes are helpful, verbose" in str(refused[0])
    assert isinstance(refused[1], RowError)


@pytest.mark.parametrize("is_flat", [False, True])
def test_rankings_in_micro_batches_add_up_to_those_of_the_step(tokenizer: Any, is_flat: bool) -> None:
    rows = [
        {"prompt": "p", "responses": ["a", "bb", "ccc"], "ranks": [2, 1, 2]},
        {"prompt": "q", "responses": ["d", "e"], "ranks": [1, 2]},
        {"prompt": "r", "responses": ["f", "g", "h", "i"], "ranks": [4, 3, 2, 1]},
    ]
    prepared = [row for (row,) in ranked(tokenizer, *rows)]
    prepared.append(prepared[0] | {"items": 0})

    def loss(some: list[dict[str, Any]]) -> float:
        batch = collate_answers(some, 1, is_flat=is_flat, attn_implementation=None)
        # A score that depends on the last tokens alone.
        ids = batch["input_ids"].flatten()[batch["last_positions"] - 1]
        return float(ranking(ids.double().sin(), batch["better"], batch["worse"], batch["shares"]).sum())

    whole = loss(prepared)
    assert whole == pytest.approx(sum(loss([row]) for row in prepared), rel=1e-6)
    assert loss(prepared[3:]) == 0.0


def test_a_batch_of_scores_counts_what_is_known(tokenizer: Any) -> None:
    given = [{"helpful": 2, "verbose": None}, {"helpful": 1, "verbose": 3}, {"helpful": 5, "verbose": 5}]
    prepared = [
        row for (row,) in scored(tokenizer, *({"prompt": "p", "completion": "a", "attributes": each} for each in given))
    ]
    prepared[2] |= {"items": 0}
    batch = collate_answers(prepared, 1, is_flat=False, attn_implementation=None)
    assert losses_of_rows(batch).tolist() == [1, 2, 0] and batch["weight_units"].tolist() == [
        WEIGHT_UNIT,
        WEIGHT_UNIT,
        0,
    ]
    parts = regression(torch.zeros(3, 2), batch["scores"])
    assert parts.tolist() == [[4.0, 0.0], [1.0, 9.0], [0.0, 0.0]]
    assert model_inputs(batch).keys() == {"input_ids", "attention_mask"}


@pytest.mark.parametrize("is_flat", [False, True])
def test_a_score_is_at_the_last_token_that_is_not_padding_as_in_transformers(is_flat: bool) -> None:
    answers = [{"input_ids": [7, 5, 1, 1]}, {"input_ids": [1, 1]}, {"input_ids": [4, 1, 6]}]
    starts = [0, 4, 6] if is_flat else [0, 4, 8]
    expected = [start + place for start, place in zip(starts, (1, 0, 2), strict=True)]
    assert scored_positions(answers, 1, is_flat=is_flat).tolist() == expected
