"""Rows of sft to ids and masks: what the options do, and plain completions. A tiny model's tokenizer, no model."""

from __future__ import annotations

import json
import re
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ftcli import testing
from ftcli.config.recipe import Recipe
from ftcli.data.cache import prepare_rows
from ftcli.runtime.errors import InputError, RowError
from ftcli.tasks.build import build_task
from ftcli.tasks.shared.batches import encode_completion

from ...support.chat_tables import brackets, build_tokenizer
from ...support.recipes import minimal_values

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}] * 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    testing.save_tiny_causal(folder)
    return folder


def task(model: Path, *, train: str = "rows.jsonl", data: dict[str, Any] | None = None, **options: Any) -> Any:
    values = minimal_values(
        task_options=options, model={"name": str(model)}, data={"train": train} | (data or {}), batch={"global_size": 4}
    )
    return build_task(Recipe.model_validate(values))


def shown(sft: Any, row: dict[str, Any]) -> str:
    (prepared,) = sft.encode(row, {})
    return brackets(sft.tokenizer, prepared["input_ids"], prepared["trained"])


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
def test_encode_with_train_on_trains_the_selected_turns(model: Path, train_on: str, expected: str) -> None:
    assert shown(task(model, train_on=train_on), {"messages": TURNS}) == expected


@pytest.mark.parametrize("more", [{"system": "Be kind."}, {"tools": [{"type": "function", "function": {"name": "f"}}]}])
def test_sft_with_a_text_row_with_what_only_a_chat_holds_is_refused_where_there_are_no_chats(
    model: Path, more: dict[str, Any]
) -> None:
    plain = task(model, chat="never")
    with pytest.raises(RowError, match="has parts that need a chat template"):
        plain.encode({"prompt": "p", "completion": "c"} | more, {})


def test_train_on_all_trains_the_prompt_of_a_plain_completion_too(model: Path) -> None:
    row = {"prompt": "1 + 1 =", "completion": " 2"}
    assert shown(task(model, chat="never"), row) == "1 + 1 =⟦ 2<|im_end|>⟧"
    assert shown(task(model, chat="never", train_on="all"), row) == "⟦1 + 1 = 2<|im_end|>⟧"


def test_sft_with_a_template_from_a_file_replaces_the_tokenizers_and_is_saved_and_fingerprinted(
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
    ("content", "message"),
    [
        (None, "task_options.chat_template: cannot read"),
        (b"\xff\xfe", "it is not UTF-8 text"),
        (b"{% for m in messages %}\n{{ m.content }", "task_options.chat_template is not a Jinja template"),
    ],
)
def test_template_file_that_is_none_is_refused_before_reading_rows(
    model: Path, tmp_path: Path, content: bytes | None, message: str
) -> None:
    file = tmp_path / "mine.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError, match=message):
        task(model, chat_template=str(file))


def test_sft_with_a_template_that_refuses_the_probe_may_still_render_rows(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(
        "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}" + testing.CHAT_TEMPLATE
    )
    sft = task(model, chat_template=str(file))
    message = shown(sft, {"messages": [{"role": "system", "content": "S"}, *TURNS[:2]]})
    assert message.endswith("<|im_start|>assistant\n⟦Yo<|im_end|>⟧\n")
    with pytest.raises(RowError, match="chat template rejects it: system first"):
        sft.encode({"messages": TURNS}, {})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": TURNS[:1]}, "has no message of the assistant"),
        ({"messages": TURNS, "tools": "{no"}, "`tools`: not JSON"),
        ({"messages": TURNS, "tools": {"name": "clock"}}, "`tools` must be a list of JSON schemas"),
        (
            {"messages": TURNS, "tools": '[{"name": "clock"}]'},
            "the chat template does not support tools",
        ),
    ],
)
def test_encode_of_a_row_with_unused_content_is_refused(model: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=message):
        task(model).encode(row, {})


def test_encode_completion_with_a_plain_completion_has_one_beginning_and_one_end_token() -> None:
    tokenizer = build_tokenizer("<s> </s> bos=<s> eos=</s>", "")
    for prompt in ("Hi", "<s>Hi"):
        for completion in (" you", " you</s>"):
            encoded = encode_completion(tokenizer, prompt, completion)
            assert brackets(tokenizer, *encoded) == "<s>Hi⟦ you</s>⟧"


def test_encode_completion_tokenizes_behind_the_prompt_or_alone_if_a_token_would_span_both() -> None:
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
    texts = [brackets(sft.tokenizer, row["input_ids"], row["trained"]) for row in prepared.train]
    system = '{"name": "weather"}\n'
    assert texts == [
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
    actual = sft.encode_rows(MIXED, {})
    message = 0
    for row, together in zip(MIXED, actual, strict=True):
        if isinstance(together, RowError):
            message += 1
            with pytest.raises(RowError, match=re.escape(str(together))):
                sft.encode(row, {})
        else:
            assert sft.encode(row, {}) == together
    assert message == (2 if options.get("train_on") == "all" else 3)


def test_encode_rows_in_a_batch_names_the_numbers_of_bad_rows(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"messages": TURNS}] * 300
    for number in (3, 255, 256, 280):
        rows[number] = {"messages": [TURNS[0]]}
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    sft = task(model, train=str(path), data={"max_bad_rows": 4})
    message = prepare_rows(sft.recipe, sft).log_lines
    assert message[1].endswith(
        "were left out: 4, 256, 257, 281; has no message of the assistant, so nothing would be trained"
    )


def test_metrics_of_a_run_that_diverges_are_infinite_without_a_warning(model: Path) -> None:
    assert task(model).metrics({"loss": np.array([2e4]), "items": np.array([2.0])}) == {"loss": 1e4, "perplexity": inf}
