"""`ftcli chat` and `ftcli generate` in a terminal: a real pseudo-terminal, and a tiny model."""

from __future__ import annotations

import _thread
import io
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ftcli.cli.chat import Conversation, _answer, converse
from ftcli.inference.answers import Prompt
from ftcli.inference.decode import SamplingOptions
from ftcli.inference.generator import TextGenerator, load_generator
from ftcli.inference.prompts import collect_prompts, read_prompts
from ftcli.runtime.errors import InputError
from ftcli.runtime.terminal import Style, printable
from ftcli.testing import save_tiny_causal, tiny_tokenizer

from ..data.chat.test_template_variables import ROWS, THINKING, recipe_of

CTRL_C, EARLY = "\x03", "\x03 after a token that is no text yet"
Talk = Callable[..., tuple[Conversation, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_talker(tmp_path_factory.mktemp("talk") / "model", "c", "d")


def save_talker(folder: Path, one: str, other: str) -> Path:
    """Write a model that says one of two tokens, each time the one whose logit is above 0, and never stops."""
    from transformers import AutoModelForCausalLM

    save_tiny_causal(folder, tied=False)
    (folder / "chat_template.jinja").write_text(THINKING)
    talker, ids = AutoModelForCausalLM.from_pretrained(folder), tiny_tokenizer().convert_tokens_to_ids([one, other])
    with torch.no_grad():
        row = talker.lm_head.weight[ids[0]].clone()
        talker.lm_head.weight.zero_()
        talker.lm_head.weight[ids[0]], talker.lm_head.weight[ids[1]] = row, -row
    talker.save_pretrained(folder)
    return folder


@pytest.fixture
def talk(model: Path, monkeypatch: pytest.MonkeyPatch) -> Talk:
    """Return a function that types lines at a terminal, each once the mark of a question is there."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("NO_COLOR", raising=False)

    decodes, made = threading.Event(), TextGenerator._answer

    def answer_of(self: TextGenerator, *values: Any) -> Any:
        decodes.set()
        return made(self, *values)

    monkeypatch.setattr(TextGenerator, "_answer", answer_of)

    def type_in(*lines: str, target: Path = model, **options: Any) -> tuple[Conversation, str]:
        decodes.clear()
        master, slave = os.openpty()
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            stream = os.fdopen(os.dup(slave), mode, encoding="utf-8", errors="surrogateescape")
            monkeypatch.setattr(f"sys.{name}", stream)
        shown = bytearray()

        def wait_for(pattern: bytes, start: int) -> None:
            end = time.monotonic() + 120
            while not re.search(pattern, bytes(shown[start:])) and time.monotonic() < end:
                time.sleep(0.01)

        def read() -> None:
            while chunk := os.read(master, 4096):
                shown.extend(chunk)

        def write() -> None:
            done = 0
            for line in [*lines, "\x04"]:
                if line in (CTRL_C, EARLY):
                    # readline writes escape sequences after the question: only letters are text of the answer.
                    if line == CTRL_C:
                        wait_for(rb"\n(\x1b\[\S+?[hl]|\r)*[cd]", done)
                    else:
                        assert decodes.wait(120)
                    _thread.interrupt_main()
                    continue
                wait_for(rb"> (\x01\x1b\[0m\x02)?$", done)
                done = len(shown)
                os.write(master, os.fsencode(line if line == "\x04" else f"{line}\n"))

        for work in (read, write):
            threading.Thread(target=work, daemon=True).start()
        answers = converse(target, cpu=True, **options)
        time.sleep(0.05)
        return answers, shown.decode("utf-8", "replace").replace("\r\n", "\n").replace("\x01", "").replace("\x02", "")

    return type_in


def test_chat_marks_questions_and_wraps_dim_notes(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, shown = talk("hello", "/undo", "/foo", " /foo", max_new_tokens=4)
    question, answer = answers.turns
    assert question["content"] == "/foo" and len(answer["content"]) == 4
    assert "\x1b[1m> \x1b[0mhello\n" in shown
    assert f"/foo\n{answer['content']}\n\x1b[2mstopped at 4 tokens (--max-new-tokens)\x1b[0m\n" in shown
    assert "\x1b[2m0 questions are left\x1b[0m" in shown and "\x1b[2mno command /foo\x1b[0m" in shown
    assert max(len(line) for line in shown.replace("\x1b[2m", "").replace("\x1b[0m", "").split("\n")[1:4]) <= 60
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in talk("hello", max_new_tokens=4)[1].partition("is ready")[2]


def test_chat_interrupted_answer_stays_in_the_conversation(talk: Talk) -> None:
    answers, shown = talk("hello", CTRL_C, max_new_tokens=1900)
    question, answer = answers.turns
    assert question["content"] == "hello" and 0 < len(answer["content"]) < 1900
    assert "stopped; the answer so far is kept, /undo removes it" in shown


def test_chat_interrupted_right_after_a_piece_is_shown_keeps_the_piece(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Screen(io.StringIO):
        def flush(self) -> None:
            if self.getvalue() in ("c", "d"):
                raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdout", screen := Screen())
    conversation = Conversation()
    _answer(load_generator(model, cpu=True, converses=True), conversation, "hello", SamplingOptions(max_new_tokens=4))
    assert [turn["content"] for turn in conversation.turns] == ["hello", screen.getvalue().strip()]


def test_chat_interrupted_before_the_answer_drops_the_question(talk: Talk, tmp_path: Path) -> None:
    stammerer = save_talker(tmp_path / "half", "ð", "ñ")  # bytes f0 and f1, each the first of a character's four
    answers, shown = talk("hello", EARLY, target=stammerer, max_new_tokens=1900)
    assert answers.turns == [] and "stopped before the first token; the question is removed" in shown


def test_gradients_are_there_again_when_an_answer_is_stopped_at_any_moment(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left out, the next training in this process has no gradient: seen once in many runs of these tests."""
    leave = torch.no_grad.__exit__

    def stopped(block: Any, *error: Any) -> None:
        if sys._getframe(1).f_code.co_name == "decode":  # where Python would have raised it, before anything is undone
            raise KeyboardInterrupt
        leave(block, *error)

    monkeypatch.setattr(torch.no_grad, "__exit__", stopped)
    answers, shown = talk("hello", max_new_tokens=4)
    try:
        assert answers.turns == [] and "stopped before the first token" in shown
        assert torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)


def test_chat_line_with_a_leading_space_is_a_question(talk: Talk) -> None:
    answers, _ = talk(" /quit", "/quit", "hello", max_new_tokens=2)
    assert [turn["content"] for turn in answers.turns[::2]] == ["/quit"]


def test_chat_with_invalid_bytes_replaces_them_before_tokenizing(talk: Talk) -> None:
    answers, _ = talk("h\udcffi", max_new_tokens=2)
    assert answers.turns[0]["content"] == "h\ufffdi"
    assert collect_prompts(["h\udcff\udcfei"])[0].content == "h\ufffd\ufffdi"


def test_chat_with_all_positions_used_prints_a_message(talk: Talk, model: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    shutil.copytree(model, small)
    config = json.loads((small / "config.json").read_text()) | {"max_position_embeddings": 64}
    (small / "config.json").write_text(json.dumps(config))
    answers, shown = talk("hello", "and then?", target=small, max_new_tokens=512)
    assert len(answers.turns) == 2
    message = " ".join(re.sub(r"\x1b\[\d*m", "", shown).split())
    assert "tokens (the context length of the model: /undo, or /reset)" in message
    assert "the conversation has more tokens than the model has positions" in message


def test_chat_prints_no_terminal_escape_codes_of_an_answer() -> None:
    class Terminal(io.StringIO):
        encoding = "UTF-8"

        def isatty(self) -> bool:
            return True

    class Ascii(io.StringIO):
        encoding = "ascii"

    text = "a\tb\n\x1b[2J\x07\u202ec ü 😀"
    assert printable(text, Terminal()) == "a\tb\n\\x1b[2J\\x07\\u202ec ü 😀"
    assert printable(text, io.StringIO()) == text
    assert printable(text, Ascii()).endswith("c \\xfc \\U0001f600")
    assert Style(width=20).wrap("one two three four five") == ["one two three four", "  five"]


def test_chat_prints_a_character_of_several_tokens_when_complete(model: Path) -> None:
    writer = load_generator(model, cpu=True)
    ids = writer.tokenizer("é 👩‍👧!")["input_ids"]  # one token for each byte
    lines = [writer._answer(Prompt("q"), ids[:end]).text for end in range(1, len(ids) + 1)]
    assert lines[-1] == "é 👩‍👧!" and "\ufffd" in lines[0]


def test_chat_with_a_model_without_a_template_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "plain")
    (tmp_path / "plain" / "config.json").write_text("{}")  # of no model: to load it would fail
    with pytest.raises(InputError, match="has no chat template"):
        load_generator(tmp_path / "plain", cpu=True, converses=True)


def test_load_writer_uses_template_variables_of_the_recipe_unless_given(model: Path, tmp_path: Path) -> None:
    recipe = recipe_of(model, ROWS, chat_template_kwargs={"thinking": False})
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text(json.dumps(recipe.model_dump(mode="json", exclude_none=True)))
    (run / "final").symlink_to(model)

    def rendered(target: Path, prompt: Prompt, **given: Any) -> str:
        writer = load_generator(target, cpu=True, chat_template_kwargs=given)
        return str(writer.tokenizer.decode(writer._encode(prompt)))

    on = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    off = f"{on}-"
    assert rendered(run, Prompt("q")) == off
    assert rendered(run, Prompt("q"), thinking=True) == on == rendered(model, Prompt("q"))
    assert rendered(model, Prompt("q"), thinking=False) == off
    (tmp_path / "p.jsonl").write_text('{"prompt": "q", "chat_template_kwargs": {"thinking": true}}\n')
    (own,) = read_prompts(tmp_path / "p.jsonl", key="--file")
    assert rendered(run, own) == on
    for target in (run, model):
        with pytest.raises(InputError, match="--chat-template-kwargs: the chat template never reads thinkin"):
            load_generator(target, cpu=True, chat_template_kwargs={"thinkin": True})
    (tmp_path / "p.jsonl").write_text('{"prompt": "q", "tools": [{"type": "function"}]}\n')
    (tooled,) = read_prompts(tmp_path / "p.jsonl", key="--file")
    with pytest.raises(InputError, match="does not support tools"):
        rendered(run, tooled)


@pytest.mark.parametrize(("ended", "note"), [(True, ""), (False, "; an answer was stopped")])
def test_save_notes_an_answer_that_was_stopped_and_refuses_an_empty_one(
    ended: bool, note: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    talk = Conversation()
    talk.add("hi", "hello", ended=True)
    talk.add("and", "", ended=ended)
    with pytest.raises(InputError, match="an answer is empty"):
        talk.save("t.jsonl")
    talk.command("/undo")
    talk.add("and", "more", ended=ended)
    assert talk.save("t.jsonl").startswith(f"appended to t.jsonl: 4 turns{note}")
    talk.command("/undo")
    assert talk.save("t.jsonl") == "appended to t.jsonl: 2 turns"
