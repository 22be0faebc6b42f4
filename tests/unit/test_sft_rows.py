"""Rows of sft to ids and masks: what the options do, and plain completions. A tiny model's tokenizer, no model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ftcli import testing
from ftcli.errors import InputError
from ftcli.recipe import Recipe
from ftcli.tasks import build_task
from ftcli.tasks.protocol import RowError
from ftcli.tasks.tokens import encode_completion

from .chat_tables import brackets, build_tokenizer

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}] * 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    testing.save_tiny_causal(folder)
    return folder


def task(model: Path, **options: Any) -> Any:
    values = {
        "task": "sft",
        "task_options": options,
        "model": {"name": str(model)},
        "data": {"train": "rows.jsonl"},
        "batch": {"global_size": 4},
        "train": {"max_steps": 1},
        "optimizer": {"learning_rate": 1e-3},
    }
    return build_task(Recipe.model_validate(values))


def shown(sft: Any, row: dict[str, Any]) -> str:
    (found,) = sft.encode(row, {})
    return brackets(sft.tokenizer, found["input_ids"], found["trained"])


@pytest.mark.parametrize(
    ("train_on", "expected"),
    [
        ("assistant", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Yo<|im_end|>⟧\n" * 2),
        (
            "last",
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Yo<|im_end|>⟧\n",
        ),
        ("all", "⟦" + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n" * 2 + "⟧"),
    ],
)
def test_train_on_says_which_turns_are_trained(model: Path, train_on: str, expected: str) -> None:
    assert shown(task(model, train_on=train_on), {"messages": TURNS}) == expected


def test_train_on_all_trains_the_prompt_of_a_plain_completion_too(model: Path) -> None:
    row = {"prompt": "1 + 1 =", "completion": " 2"}
    assert shown(task(model, chat="never"), row) == "1 + 1 =⟦ 2<|im_end|>⟧"
    assert shown(task(model, chat="never", train_on="all"), row) == "⟦1 + 1 = 2<|im_end|>⟧"


def test_a_template_from_a_file_replaces_the_tokenizers_and_is_saved_and_fingerprinted(
    model: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    file = tmp_path / "mine.jinja"
    file.write_text(
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    own, other = task(model), task(model, chat_template=str(file))
    assert shown(other, {"prompt": "Hi", "completion": "Yo"}) == "u:Hi<|im_end|>a:⟦Yo<|im_end|>⟧"
    assert own.fingerprint() != other.fingerprint()
    other.save_processor(str(tmp_path / "saved"))
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == file.read_text()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "task_options.chat_template: cannot read"),
        (b"\xff\xfe", "it is not UTF-8 text"),
        (b"{% for m in messages %}\n{{ m.content }", "task_options.chat_template is not a Jinja template"),
    ],
)
def test_a_template_file_that_is_none_is_told_before_a_row_is_read(
    model: Path, tmp_path: Path, content: bytes | None, told: str
) -> None:
    file = tmp_path / "mine.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError, match=told):
        task(model, chat_template=str(file))


def test_a_template_that_refuses_the_probe_may_still_render_rows(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(
        "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}" + testing.CHAT_TEMPLATE
    )
    sft = task(model, chat_template=str(file))
    told = shown(sft, {"messages": [{"role": "system", "content": "S"}, *TURNS[:2]]})
    assert told.endswith("<|im_start|>assistant\n⟦Yo<|im_end|>⟧\n")
    with pytest.raises(RowError, match="chat template refuses it: system first"):
        sft.encode({"messages": TURNS}, {})


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"messages": TURNS[:1]}, "no message is the assistant's"),
        ({"messages": TURNS, "tools": "{no"}, "`tools`: not JSON"),
        ({"messages": TURNS, "tools": {"name": "clock"}}, "`tools` must be a list of JSON schemas"),
        ({"messages": TURNS, "tools": '[{"name": "clock"}]'}, "has tools, and the chat template has no place for them"),
    ],
)
def test_rows_that_would_lose_something_are_refused(model: Path, row: dict[str, Any], told: str) -> None:
    with pytest.raises(RowError, match=told):
        task(model).encode(row, {})


def test_a_plain_completion_has_one_beginning_and_one_end_token() -> None:
    tokenizer = build_tokenizer("<s> </s> bos=<s> eos=</s>", "")
    for prompt in ("Hi", "<s>Hi"):
        for completion in (" you", " you</s>"):
            found = encode_completion(tokenizer, prompt, completion)
            assert brackets(tokenizer, *found) == "<s>Hi⟦ you</s>⟧"


def test_a_completion_is_tokenised_behind_its_prompt_and_alone_where_a_token_would_be_half_of_each() -> None:
    tokenizer = build_tokenizer("<s> </s> bos=<s> eos=</s>", "")
    joined = tokenizer("Hello", add_special_tokens=False)["input_ids"]
    assert len(joined) == 1
    assert brackets(tokenizer, *encode_completion(tokenizer, "Hel", "lo")) == "<s>Hel⟦lo</s>⟧"
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    ids, _ = encode_completion(tokenizer, "Hi!", "you")  # alone it would be " you"
    assert tokenizer.decode(ids) == "<s> Hi!you</s>"
