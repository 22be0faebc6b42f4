"""Rows of one or two texts: the tokens of the tokenizer, the columns of public data sets, and long texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ftcli import testing
from ftcli.config.recipe import Recipe
from ftcli.data.cache import prepare_rows
from ftcli.launch.preflight import check_inputs, describe_formats
from ftcli.runtime.errors import InputError
from ftcli.task_contract import TaskCase
from ftcli.tasks.build import build_task
from ftcli.tasks.shared.text_pairs import tokenize_texts
from ftcli.tiny_models import tiny_tokenizer

from ....support.recipes import minimal_values


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT whose tokenizer ends each of two texts with a token, and tells them apart."""
    folder = testing.save_tiny_encoder(tmp_path_factory.mktemp("model"))
    names = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer = AutoTokenizer.from_pretrained(folder, model_input_names=names)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <|im_end|>", pair="$A <|im_end|> $B:1 <|im_end|>:1", special_tokens=[("<|im_end|>", 1)]
    )
    tokenizer.save_pretrained(folder)
    return folder


def recipe_of(model: Path, file: Path | str, task: str = "text_classification", **data: Any) -> Recipe:
    return Recipe.model_validate(
        minimal_values(task, model={"name": str(model)}, data={"train": str(file), "max_length": 16} | data)
    )


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


PAIRS = [
    {"text": "good", "text_pair": "bye", "label": "yes"},
    {"text": "hello " * 9, "text_pair": "a", "label": "no"},
    {"text": "a", "text_pair": "hello " * 9, "label": "no"},
    {"text": "hello " * 9, "text_pair": "good " * 9, "label": "no"},
    {"text": "bye", "text_pair": "good", "label": "yes"},
]


def test_encode_of_two_texts_equals_the_tokenizer_and_the_model_gets_both(model: Path, tmp_path: Path) -> None:
    recipe = recipe_of(model, write(tmp_path / "a.jsonl", PAIRS))
    case = TaskCase(recipe)
    tokenizer = AutoTokenizer.from_pretrained(model)
    expected = [tokenizer(row["text"], row["text_pair"], truncation=True, max_length=16) for row in PAIRS]
    rows = list(prepare_rows(recipe, case.task).train)
    assert [row["input_ids"] for row in rows] == [row["input_ids"] for row in expected]
    batch = case.task.collate(rows)
    padded = tokenizer.pad([dict(row) for row in expected], return_tensors="pt")
    assert torch.equal(batch["token_type_ids"], padded["token_type_ids"])
    logits = case.model(**case.task.probe(batch)).logits
    assert torch.equal(logits, case.model(**padded).logits)
    batch["token_type_ids"] = torch.zeros_like(batch["token_type_ids"])
    assert not torch.allclose(logits, case.model(**case.task.probe(batch)).logits)


@pytest.mark.parametrize(
    ("first", "second", "data"),
    [
        ("premise", "hypothesis", {}),
        ("sentence1", "sentence2", {}),
        ("question", "answer", {}),
        ("a", "b", {"columns": {"text": "a", "text_pair": "b"}}),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_prepare_rows_with_the_column_names_of_public_pairs_uses_both_texts(
    model: Path, tmp_path: Path, first: str, second: str, data: Any, suffix: str
) -> None:
    path = tmp_path / f"rows.{suffix}"
    if suffix == "csv":
        path.write_text(f"{first},{second},label,idx\n1.50,007,yes,1\n2,3,no,2\n")
    else:
        rows = [("1.50", "007", "yes", 1), ("2", "3", "no", 2)]
        write(path, [dict(zip((first, second, "label", "idx"), row, strict=True)) for row in rows])
    recipe = recipe_of(model, path, **data)
    check_inputs(recipe)
    assert describe_formats(recipe) == {"data.train": f"{path}: text, label, text_pair (not used: idx)"}
    prepared = prepare_rows(recipe, build_task(recipe))
    assert AutoTokenizer.from_pretrained(model).decode(prepared.train[0]["input_ids"]) == "1.50<|im_end|>007<|im_end|>"
    assert prepared.log_lines[0].startswith("data.train rows: text, label, text_pair (not used: idx), 2 rows")


def test_prepare_rows_without_a_second_text_or_with_two_pairs_is_refused(model: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [PAIRS[0], {"text": "a", "text_pair": " ", "label": "no"}])
    recipe = recipe_of(model, path)
    with pytest.raises(InputError, match=r"row 2 of .*a\.jsonl: has no text_pair, the second of its two texts"):
        prepare_rows(recipe, build_task(recipe))
    names = ("premise", "hypothesis", "question1", "question2", "label")
    recipe = recipe_of(model, write(tmp_path / "b.jsonl", [dict.fromkeys(names, "a")]))
    with pytest.raises(InputError, match="has several columns of texts: premise, hypothesis and question1, question2"):
        check_inputs(recipe)


def test_prepare_rows_with_a_blank_text_names_the_column_of_the_source(model: Path, tmp_path: Path) -> None:
    rows = [{"premise": "good", "hypothesis": "a", "label": "yes"}, {"premise": "a", "hypothesis": " ", "label": "no"}]
    recipe = recipe_of(model, write(tmp_path / "a.jsonl", rows))
    with pytest.raises(InputError, match=r"row 2 .*has no text_pair, .*\(text_pair is its column hypothesis\)"):
        prepare_rows(recipe, build_task(recipe))
    rows = [{"body": "", "label": "yes"}, {"body": "a", "label": "no"}]
    recipe = recipe_of(model, write(tmp_path / "b.jsonl", rows), columns={"text": "body"})
    with pytest.raises(InputError, match=r"row 1 .*has no text \(text is its column body\)"):
        prepare_rows(recipe, build_task(recipe))
    recipe = recipe_of(model, write(tmp_path / "c.jsonl", [{"text": 1.5, "label": "yes"}, *rows]))
    with pytest.raises(InputError, match=r"row 1 .*`text` is the number 1.5: write it as text, in quotes"):
        prepare_rows(recipe, build_task(recipe))


def test_prepare_rows_names_unused_columns_of_other_tasks(tmp_path: Path) -> None:
    image = testing.save_tiny_vit(tmp_path / "vit")
    pixels = str(tmp_path / "a.png")
    from PIL import Image

    Image.new("RGB", (16, 16)).save(pixels)
    rows = [{"image": pixels, "label": label, "caption": "a"} for label in ("cat", "dog")]
    recipe = recipe_of(image, write(tmp_path / "a.jsonl", rows), "image_classification")
    (line,) = prepare_rows(recipe, build_task(recipe)).log_lines
    assert line.startswith("data.train a: image, label (not used: caption), 2 rows")


WORDS = st.lists(st.sampled_from(["hello", " ", "good\n", "äö", "🙂", "<|im_end|>", "aaaaaaaa"]), max_size=400)


def joining_tokenizer(side: str) -> Any:
    """Return a tokenizer that ends each of two texts with a token and cuts them on one side."""
    tokenizer = tiny_tokenizer()
    tokenizer.truncation_side = side
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <|im_end|>", pair="$A <|im_end|> $B:1 <|im_end|>:1", special_tokens=[("<|im_end|>", 1)]
    )
    return tokenizer


class Watched:
    """A tokenizer that keeps the number of characters that it reads, and the most that it has to cut."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.read, self.cut = inner, 0, 0

    def __call__(self, *texts: str, **options: Any) -> Any:
        size = sum(map(len, texts))
        self.read += size
        self.cut = max(self.cut, size * options.get("truncation", False))
        return self.inner(*texts, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("characters", ["🙂x", "x🙂", "xx"])  # of 4 tokens and of 1
@pytest.mark.parametrize("sizes", [(10, 200), (40, 50), (60, 60), (61, 60), (60, 61), (300, 5)])
def test_tokenize_texts_gives_the_odd_token_to_the_longer_of_two_texts(
    sizes: tuple[int, int], characters: str, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftcli.tasks.shared.text_pairs.CHARACTERS_PER_TOKEN", 2)  # so that these texts are long ones
    monkeypatch.setattr("ftcli.tasks.shared.text_pairs.LEAST_CHARACTERS", 0)
    tokenizer = joining_tokenizer(side)
    texts = [character * size for character, size in zip(characters, sizes, strict=True)]
    for whole in (texts, texts[::-1]):
        row, _ = tokenize_texts(tokenizer, whole, 9)
        assert row["input_ids"] == tokenizer(*whole, truncation=True, max_length=9)["input_ids"]


def test_tokenize_texts_of_two_long_texts_gives_the_tokenizer_short_parts_to_cut() -> None:
    tokenizer = Watched(joining_tokenizer("right"))
    row, is_cut = tokenize_texts(tokenizer, ["hello " * 7_000, "good " * 40_000], 511)
    assert (len(row["input_ids"]), is_cut, row["input_ids"].index(1)) == (511, True, 254)
    assert 1_000 < tokenizer.cut < 10_000  # it returns all pairs of pieces of what it cuts


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("length", [4, 6, 8, 16, 24, 60])
def test_tokenize_texts_with_a_word_that_is_unknown_because_it_is_long_equals_the_tokenizer(
    length: int, side: str
) -> None:
    words = WordPiece({"[UNK]": 0, "a": 1, "##a": 2, "b": 3}, unk_token="[UNK]", max_input_chars_per_word=100)
    backend = Tokenizer(words)
    backend.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", truncation_side=side)
    for text in ("a" * 150 + " b", "b " + "a" * 300, "a" * 99 + " b"):
        row, is_cut = tokenize_texts(tokenizer, [text], length)
        assert row["input_ids"] == tokenizer(text, truncation=True, max_length=length)["input_ids"]
        assert is_cut == (len(tokenizer(text)["input_ids"]) > length)


@settings(max_examples=60, deadline=None)
@given(WORDS, st.none() | WORDS, st.integers(4, 12), st.sampled_from(["left", "right"]))
def test_tokenize_texts_of_any_length_equals_the_tokenizer(
    first: list[str], second: list[str] | None, length: int, side: str
) -> None:
    tokenizer = joining_tokenizer(side)
    texts = ["".join(words) for words in (first, second) if words is not None]
    with pytest.MonkeyPatch.context() as patch:  # so that these texts are long ones
        patch.setattr("ftcli.tasks.shared.text_pairs.CHARACTERS_PER_TOKEN", 2)
        patch.setattr("ftcli.tasks.shared.text_pairs.LEAST_CHARACTERS", 0)
        row, is_cut = tokenize_texts(tokenizer, texts, length)
    assert row["input_ids"] == tokenizer(*texts, truncation=True, max_length=length)["input_ids"]
    assert is_cut == (len(tokenizer(*texts)["input_ids"]) > length)


def test_tokenize_texts_of_a_long_text_reads_a_part_of_it() -> None:
    tokenizer = Watched(tiny_tokenizer())
    row, is_cut = tokenize_texts(tokenizer, ["hello " * 10**6], 8)
    assert (len(row["input_ids"]), is_cut) == (8, True)
    assert tokenizer.read < 10_000
    tokenizer.read = 0
    assert tokenize_texts(tokenizer, ["hello " * 10**6, "good"], 8)[1]
    assert tokenizer.read < 10_000
    tokenizer.read = 0
    row, is_cut = tokenize_texts(tokenizer, ["hello " * 10**6, "good"], 9)  # an odd number, but one text is whole
    assert (len(row["input_ids"]), is_cut) == (9, True)
    assert tokenizer.read < 10_000
    tokenizer.read = 0
    row, is_cut = tokenize_texts(tokenizer, ["hello " * 10**5, "good " * 10**6], 8)  # an even number: none is longer
    assert (len(row["input_ids"]), is_cut) == (8, True)
    assert tokenizer.read < 10_000
