"""Rows of sft to ids and masks: what the options do, and plain completions. A tiny model's tokenizer, no model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ftcli import testing
from ftcli.cache import prepare_rows
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


def task(model: Path, *, train: str = "rows.jsonl", data: dict[str, Any] | None = None, **options: Any) -> Any:
    values = {
        "task": "sft",
        "task_options": options,
        "model": {"name": str(model)},
        "data": {"train": train} | (data or {}),
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


@pytest.mark.parametrize("more", [{"system": "Be kind."}, {"tools": [{"type": "function", "function": {"name": "f"}}]}])
def test_a_text_row_with_what_only_a_chat_holds_is_refused_where_there_are_no_chats(
    model: Path, more: dict[str, Any]
) -> None:
    plain = task(model, chat="never")
    with pytest.raises(RowError, match="has what only a chat holds"):
        plain.encode({"prompt": "p", "completion": "c"} | more, {})


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


TOOLS_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def parts(role: str, *texts: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts]} | more


def calling(**arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": arguments}}]}


def test_tools_parts_and_what_is_not_to_be_trained_reach_the_mask_from_a_file(model: Path, tmp_path: Path) -> None:
    (tmp_path / "tools.jinja").write_text(TOOLS_TEMPLATE)
    weather = {"type": "function", "function": {"name": "weather"}}
    rows = [
        {
            "messages": [
                parts("user", "Hel", "lo"),
                calling(city="Oslo"),
                parts("tool", "rain"),
                parts("assistant", "Wet"),
            ],
            "tools": [weather],
        },
        {
            "messages": [parts("user", "a"), calling(days=2), parts("tool", "b"), parts("assistant", "c", train=False)],
            "tools": [weather],
        },
        {
            "messages": [
                parts("user", "d"),
                parts("assistant", "no", weight=0),
                parts("user", "e"),
                parts("assistant", "f"),
            ]
        },
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    sft = task(model, train=str(path), chat_template=str(tmp_path / "tools.jinja"))
    prepared = prepare_rows(sft.recipe, sft)
    found = [brackets(sft.tokenizer, row["input_ids"], row["trained"]) for row in prepared.train]
    system = '{"name": "weather"}\n'
    assert found == [
        f"{system}<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
        '⟦{"name": "weather", "arguments": {"city": "Oslo"}}<|im_end|>⟧\n'
        "<|im_start|>tool\nrain<|im_end|>\n<|im_start|>assistant\n⟦Wet<|im_end|>⟧\n",
        f"{system}<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
        '⟦{"name": "weather", "arguments": {"days": 2}}<|im_end|>⟧\n'
        "<|im_start|>tool\nb<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n",
        "<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\nno<|im_end|>\n"
        "<|im_start|>user\ne<|im_end|>\n<|im_start|>assistant\n⟦f<|im_end|>⟧\n",
    ]
    assert [row["items"] for row in prepared.train] == [sum(row["trained"]) for row in prepared.train]


MIXED: list[dict[str, Any]] = [
    {"messages": TURNS},
    {"messages": [TURNS[0]]},  # nobody answers
    {"prompt": "p", "completion": "c"},
    {"messages": [{"role": "bot", "content": "x"}]},
    {"prompt": "p", "completion": " "},
    {"messages": TURNS * 9},  # too long
    {"messages": [TURNS[0], {"role": "assistant", "content": "no", "train": False}]},
]


@pytest.mark.parametrize("truncation", ["truncate", "drop", "split"])
@pytest.mark.parametrize("options", [{}, {"chat": "never"}, {"train_on": "last"}, {"train_on": "all"}])
def test_many_rows_at_once_give_what_each_gives_alone(model: Path, options: dict[str, Any], truncation: str) -> None:
    sft = task(model, data={"max_length": 100, "truncation": truncation}, **options)
    found = sft.encode_rows(MIXED, {})
    told = 0
    for row, together in zip(MIXED, found, strict=True):
        if isinstance(together, RowError):
            told += 1
            with pytest.raises(RowError, match=re.escape(str(together))):
                sft.encode(row, {})
        else:
            assert sft.encode(row, {}) == together
    assert told == (2 if options.get("train_on") == "all" else 3)


def test_rows_that_are_told_keep_their_numbers_among_those_encoded_at_once(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"messages": TURNS}] * 300
    for number in (3, 255, 256, 280):
        rows[number] = {"messages": [TURNS[0]]}
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    sft = task(model, train=str(path), data={"max_bad_rows": 4})
    told = prepare_rows(sft.recipe, sft).told
    assert told[1].endswith(
        "were left out: 4, 256, 257, 281; no message is the assistant's, so nothing would be trained"
    )
