"""Tokens within stretches of a text, from ids alone: many texts at once give what each gives alone, or None."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftcli.token_bytes import TokenBytes

from .test_chat import CHATML, word_tokenizer


@pytest.fixture(scope="module")
def backend() -> Any:
    return word_tokenizer(CHATML, [("a", "b"), ("Ċ", "Ġ"), ("Ã", "©")]).backend_tokenizer


def ids_of(backend: Any, texts: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.text("abé🙂\n ", min_size=1, max_size=12), min_size=1, max_size=7), data=st.data())
def test_tokens_are_inside_where_their_offsets_are(backend: Any, texts: list[str], data: st.DataObject) -> None:
    spans = []
    for text in texts:
        start = data.draw(st.integers(0, len(text) - 1))
        spans.append([(start, data.draw(st.integers(start + 1, len(text))))])
    found = TokenBytes(backend).inside(ids_of(backend, texts), texts, spans)
    for text, ((start, end),), inside in zip(texts, spans, found, strict=True):
        offsets = backend.encode(text, add_special_tokens=False).offsets
        if any(begin < start < stop for begin, stop in offsets):
            assert inside is None
        elif "🙂" not in text:  # its four tokens have one offset
            assert inside == [begin < end and stop > start for begin, stop in offsets]


def test_ids_that_are_not_a_texts_bytes_are_told_among_others_that_are(backend: Any) -> None:
    texts = ["ab", "b a", "é", "abba", "\n \n", "x", "ab"]
    ids = ids_of(backend, texts)
    ids[2], ids[5] = ids[1], []
    found = TokenBytes(backend).inside(ids, texts, [[(0, len(text))] for text in texts])
    assert [index for index, each in enumerate(found) if each is None] == [2, 5]
    assert all(each == [True] * len(ids[index]) for index, each in enumerate(found) if each is not None)


def test_bytes_of_one_text_among_the_tokens_of_the_next_are_seen(backend: Any) -> None:
    assert TokenBytes(backend).inside(ids_of(backend, ["b", "bb"]), ["bb", "b"], [[], []]) == [None, None]


def test_a_text_without_tokens_and_no_text_at_all_are_no_errors(backend: Any) -> None:
    assert TokenBytes(backend).inside([], [], []) == []
    assert TokenBytes(backend).inside([[]], [""], [[]]) == [[]]
