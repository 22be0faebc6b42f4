"""Token ids back to text: whole characters, exact marks, and no control characters."""

from __future__ import annotations

import pytest

from ftcli.data.chat.text_spans import decode_spans, joined, shorten
from ftcli.runtime.terminal import visible
from ftcli.tasks.protocol import Span
from ftcli.testing import tiny_tokenizer

NASTY = "世界 👨‍👩‍👧 שלום e\u0301 \x1b[31m\x00\x9b \u202e\t\r\n\ufffd\ufffd世\ufffd end"


@pytest.fixture(scope="module")
def tokenizer() -> object:
    return tiny_tokenizer()  # one token for each byte


def metaspace_tokenizer() -> object:
    """Return a tokenizer whose decoder drops the space before the first token of a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<s>": 0, "</s>": 1, "▁good": 2, "▁day": 3, "s": 4}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    raw.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")


def test_decode_spans_splits_no_character(tokenizer) -> None:
    spans = decode_spans(tokenizer, tokenizer("né世👩").input_ids)
    assert [span.text for span in spans] == ["n", "é", "世", "👩"]
    assert [len(span.ids) for span in spans] == [1, 2, 3, 4]


def test_decode_spans_contain_every_token_once_and_the_whole_text(tokenizer) -> None:
    ids = tokenizer(NASTY).input_ids
    spans = decode_spans(tokenizer, ids)
    assert [id_ for span in spans for id_ in span.ids] == ids
    assert "".join(span.text for span in spans) == NASTY


def test_decode_spans_separate_trained_and_untrained_tokens(tokenizer) -> None:
    ids = tokenizer("a世b").input_ids
    trained = [False, False, True, True, True]  # the mask begins inside the character
    spans = decode_spans(tokenizer, ids, trained)
    assert [flag for span in spans for flag in [span.is_trained] * len(span.ids)] == trained
    assert [id_ for span in spans for id_ in span.ids] == ids
    assert spans[0].text == "a" and spans[-1].text.endswith("b")


def test_decode_spans_keep_multi_byte_characters_whole() -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"</s>": 256, "x": 257}
    raw = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="</s>"))
    raw.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>")
    text = "世\ufffd\ufffd👩x"
    spans = decode_spans(tokenizer, [*text[:-1].encode(), 257])
    assert "".join(span.text for span in spans) == text
    assert [span.text for span in spans if span.text.isprintable() and "\ufffd" not in span.text] == ["世", "👩", "x"]


def test_decode_spans_of_a_row_cut_inside_a_character_ends_with_a_replacement_character(tokenizer) -> None:
    assert decode_spans(tokenizer, tokenizer("a世").input_ids[:-1])[-1].text == "\ufffd"


def test_decode_spans_separate_special_tokens_from_equal_text(tokenizer) -> None:
    like_one = tokenizer.convert_tokens_to_ids(list("<|im_end|>"))
    spans = joined(decode_spans(tokenizer, [0, *like_one, 1]))
    assert [(span.text, span.is_special) for span in spans] == [
        ("<|im_start|>", True),
        ("<|im_end|>", False),
        ("<|im_end|>", True),
    ]


def test_spaces_between_words_stay_where_a_decoder_drops_the_first() -> None:
    spans = decode_spans(metaspace_tokenizer(), [0, 2, 3, 4, 3, 1])
    assert [span.text for span in spans] == ["<s>", " good", " day", "s", " day", "</s>"]


def test_control_and_format_characters_become_visible() -> None:
    assert visible("\x1b]0;x\x07\x9b \u202e \u2028 \ufeff \U000e0067\t\r\x7f") == (
        r"\x1b]0;x\x07\x9b \u202e \u2028 \ufeff \U000e0067\t\r\x7f"
    )
    assert visible("👨\u200d👩 世界 שלום e\u0301\n") == "👨\u200d👩 世界 שלום e\u0301\n"


def test_shorten_of_a_long_row_cuts_the_middle_and_counts_its_tokens() -> None:
    spans = [Span(letter, index >= 6, False, (index,)) for index, letter in enumerate("abcdefghij")]
    short = shorten(spans, 5)
    assert "".join(span.text for span in short.head) == "abc" and "".join(span.text for span in short.tail) == "ij"
    assert (short.tokens, short.trained) == (5, 2)
    assert shorten(spans, 10).head == spans and shorten(spans, None).tokens == 0
