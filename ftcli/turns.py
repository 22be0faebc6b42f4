"""Where each assistant's turn stands in the text that a chat template renders: character spans, verified or refused.

A turn starts where the prompt ends that the model is given to answer here, and ends with its end-of-turn token. The
first is a prefix of the rendered text; the second follows the answer, whose end is found by rendering once more with
a mark behind every answer: without the marks that rendering must be the same text, or nothing is believed. Knows
templates and text, neither token ids nor tasks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from .skeletons import Skeletons, Span
from .tasks.protocol import RowError
from .template_variables import texts_of, unread

Messages = list[dict[str, Any]]

REASONING = ("reasoning_content", "reasoning", "thinking")
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Printable letters (repr and JSON leave them alone) that no template treats apart: ideographs of extension B.
MARKS = range(0x20000, 0x2A6E0)
# How templates cut the white space behind an answer.
TRIMS: tuple[Callable[[str], str], ...] = (str, str.rstrip, lambda text: text.rstrip("\n"))


class Template:
    """A tokenizer's chat template, and what ends a turn in it."""

    def __init__(self, tokenizer: Any, variables: Mapping[str, Any] | None = None) -> None:
        self.tokenizer, self.variables = tokenizer, dict(variables or {})
        added = {str(token): token.special for token in tokenizer.added_tokens_decoder.values() if str(token).strip()}
        self.added, self.special = _any_of(added), _any_of([token for token, special in added.items() if special])
        self.ending = self._usual_ending()
        source = tokenizer.get_chat_template(None, None) if tokenizer.chat_template else ""
        self.skeletons = Skeletons(source, {**tokenizer.special_tokens_map, **self.variables}, self.ending)

    def using(self, variables: Mapping[str, Any]) -> Template:
        """Return the template with values of its variables; raises `RowError` for one that it never reads."""
        try:
            return _using(self, json.dumps(variables, sort_keys=True)) if variables else self
        except TypeError as error:  # columns may hold dates, which a reader of JSON makes of text
            raise RowError(f"`chat_template_kwargs` has a value that is none of JSON: {error}") from None

    def render(self, messages: Messages, tools: list[Any] | None, *, prompt: bool = False) -> str:
        """Return the text of a conversation; with `prompt`, up to where the assistant answers next.

        Raises `RowError` for what the template refuses, for instance a system turn that it does not know.
        """
        with _refusals():
            text: str = self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompt, **self.variables
            )
        return text

    def takes_tools(self, tools: list[Any]) -> bool:
        """Say whether the template has a place for tools at all."""
        return "tools" in self.tokenizer.get_chat_template(None, tools)

    def has_marks(self, tools: list[Any] | None) -> bool:
        """Say whether the template itself marks what the assistant writes ({% generation %})."""
        return GENERATION.search(self.tokenizer.get_chat_template(None, tools)) is not None

    def render_marked(self, messages: Messages, tools: list[Any] | None) -> tuple[str, list[Span]]:
        """Return the text and the spans between the template's own generation marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        with _refusals():
            found: Any = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=self.tokenizer.get_chat_template(None, tools),
                return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, **self.variables},
            )
        (text,), (spans,) = found
        return text, [(start, end) for start, end in spans]

    def _usual_ending(self) -> str | None:
        """Return what follows a plain answer up to its end-of-turn token; None when the template tells only per row."""
        mark = chr(MARKS[0])
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": f"b{mark}"}]
        try:
            tail = self.render(turns, None).rpartition(mark)[2]
        except RowError:
            return None
        found = re.match(rf"\s*(?:{self.added.pattern})", tail) or self.special.search(tail)
        return tail[: found.end()] if found else None

    def ending_of(self, tail: str) -> str | None:
        """Return the part of `tail` (template text behind an answer) that ends with the end-of-turn token."""
        if self.ending and (at := tail.find(self.ending.strip())) >= 0:
            return tail[: at + len(self.ending.strip())]
        found = re.match(rf"\s*(?:{self.added.pattern})", tail) or self.special.search(tail)
        return tail[: found.end()] if found else None


@lru_cache(maxsize=64)
def _using(template: Template, variables: str) -> Template:
    """Return a template with other variables, found once; `variables` is JSON."""
    given = json.loads(variables)
    if problems := unread(given, texts_of(template.tokenizer.chat_template), "chat_template_kwargs"):
        raise RowError(problems[0].what)
    return Template(template.tokenizer, given)


class _refusals:
    """Turns whatever a template raises on a conversation into a `RowError`: templates are programs of others."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        from jinja2 import TemplateError

        if isinstance(error, TemplateError | TypeError | ValueError | LookupError | AttributeError):
            raise RowError(f"the model's chat template refuses it: {error}") from None


def find_turns(
    template: Template, messages: Messages, tools: list[Any] | None, text: str, wanted: Sequence[int]
) -> dict[int, Span]:
    """Return the span in `text` of every message in `wanted` (indices of the assistant's).

    Raises `RowError` naming the message (counted from 1) whose span cannot be shown to be right.
    """
    if not wanted:
        return {}
    finder = _Finder(template, messages, tools, text)
    answers = finder.answer_ends(wanted)
    spans = {index: (finder.start(index, answers[index]), finder.end(index, answers[index])) for index in wanted}
    for index, span in spans.items():
        _require_sound(template, messages[index], index, text, span)
    return spans


def marked_turns(template: Template, messages: Messages, text: str, marked: list[Span]) -> dict[int, Span]:
    """Return the spans of the template's own marks by message; raises `RowError` where they do not fit the messages."""
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if len(marked) != len(answers):
        raise RowError(
            f"the chat template marks {len(marked)} turns as generated and the conversation has {len(answers)} of the "
            "assistant's"
        )
    spans = dict(zip(answers, marked, strict=True))
    for index, (start, end) in spans.items():
        if not re.search(rf"(?:{template.added.pattern})\s*$", text[start:end]):
            raise RowError(
                f"message {index + 1}: the chat template's generation marks leave out its end token, "
                "so a model would not learn to stop"
            )
        _require_sound(template, messages[index], index, text, (start, end))
    return spans


class _Finder:
    """One conversation under one template: `text` is its rendering."""

    def __init__(self, template: Template, messages: Messages, tools: list[Any] | None, text: str) -> None:
        self.template, self.messages, self.tools, self.text = template, messages, tools, text
        self.trim: Callable[[str], str] = str

    def answer_ends(self, wanted: Sequence[int]) -> dict[int, int]:
        """Return, for every wanted message, where its last written character ends in the text."""
        marks = dict(zip(wanted, _unused(self.text), strict=False))
        owners = {mark: index for index, mark in marks.items()}
        for self.trim in TRIMS:
            marked = self.template.render(self._with_marks(marks), self.tools)
            pieces = re.split(f"([{''.join(owners)}])", marked)
            if "".join(pieces[::2]) == self.text:
                break
        else:
            raise RowError(
                f"message {wanted[0] + 1}: the chat template renders answers differently by what they end with, so "
                "the end of its answers cannot be found"
            )
        found, end = {}, 0
        for piece, mark in zip(pieces[::2], pieces[1::2], strict=False):
            end += len(piece)
            found[owners[mark]] = end  # of several marks in one message the last counts
        for index in wanted:
            if index not in found:
                raise RowError(f"message {index + 1}: the chat template does not show what the assistant wrote")
        return found

    def _with_marks(self, marks: dict[int, str]) -> Messages:
        return [
            _with_mark(message, marks[index], self.trim) if index in marks else message
            for index, message in enumerate(self.messages)
        ]

    def end(self, index: int, answer: int) -> int:
        """Return where a turn's end-of-turn token ends, for an answer that ends at `answer`."""
        usual = self.template.ending
        if usual and self.text.startswith(usual, answer):
            return answer + len(usual)
        tail = self.text[answer:] if index == len(self.messages) - 1 else self._tail(index)
        ending = self.template.ending_of(tail)
        if ending is None:
            raise RowError(
                f"message {index + 1}: the chat template writes no end token after it, so a model would not learn to "
                "stop; task_options.chat_template takes a template that does"
            )
        if not self.text.startswith(ending, answer):
            raise RowError(
                f"message {index + 1}: the chat template gives it no end of its own when another message follows"
            )
        return answer + len(ending)

    def _tail(self, index: int) -> str:
        """Return what the template writes behind a message when it is the last."""
        mark = next(_unused(self.text))
        turns = [*self.messages[:index], _with_mark(self.messages[index], mark, self.trim)]
        return self.template.render(turns, self.tools).rpartition(mark)[2]

    def start(self, index: int, answer: int) -> int:
        """Return where the prompt ends that the model is given to write message `index`."""
        prompt = self.template.render(self.messages[:index], self.tools, prompt=True) if index else ""
        if prompt and self.text.startswith(prompt) and len(prompt) <= answer:
            return len(prompt)
        found = self._start_beside(index, answer, self._opening(index, prompt))
        if found is None:
            asks = f"ends with {prompt[-40:]!r}" if prompt else "cannot be rendered, as nothing stands before it"
            raise RowError(
                f"message {index + 1}: the prompt that asks for it ({asks}) is not how the chat template goes on in "
                f"the whole conversation; {self._way_out(index)}"
            )
        return found

    def _way_out(self, index: int) -> str:
        """Return what to do about a message whose prompt is no prefix, and why where variables are the reason."""
        last_only = "train on the last turn only (task_options.train_on: last)"
        variables = json.dumps(self.template.variables)
        if not index or not self.text.startswith(self._plain_prompt(index)):
            return f"{last_only}, or give a template that does not rewrite (task_options.chat_template)"
        if index == len(self.messages) - 1:
            return (
                f"chat_template_kwargs {variables} say one thing and the answer shows another: change the answer, or "
                "give this row a column chat_template_kwargs of its own"
            )
        return (
            f"chat_template_kwargs {variables} change the prompt and not what is shown of an earlier answer, so no row "
            f"can train it as it is asked for: {last_only}; to train every answer, give a row for each, cut behind it. "
            "Or leave these variables out, or give a template that shows them in every answer "
            "(task_options.chat_template)"
        )

    def _plain_prompt(self, index: int) -> str:
        """Return the prompt for a message as it is without variables."""
        with _refusals():
            text: str = self.template.tokenizer.apply_chat_template(
                self.messages[:index], tools=self.tools, tokenize=False, add_generation_prompt=True
            )
        return text

    def _opening(self, index: int, prompt: str) -> str:
        """Return the end of a prompt, from the text of the last message before it on; "" if that is not to be had."""
        if index:
            before = str(self.messages[index - 1].get("content") or "").strip()
            at = prompt.rfind(before)
            return prompt[at:] if before and at >= 0 else ""
        asked = self.template.render(self.messages, self.tools, prompt=True)
        return asked[len(self.text) :] if asked.startswith(self.text) else ""

    def _start_beside(self, index: int, answer: int, opening: str) -> int | None:
        """Return where `opening` ends if it stands right before the answer, with only white space between."""
        content = str(self.messages[index].get("content") or "")
        for shown in (content, content.rstrip(), content.strip(), content.lstrip()):
            begin = answer - len(shown)
            if not shown or not opening or not self.text.startswith(shown, begin):
                continue
            at = self.text.rfind(opening, 0, begin)
            if at >= 0 and not self.text[at + len(opening) : begin].strip():
                return at + len(opening)
        return None


def _require_sound(template: Template, message: dict[str, Any], index: int, text: str, span: Span) -> None:
    """Raise `RowError` when a part of what the assistant wrote (thinking, a call) is not rendered, or ends the turn.

    White space is not compared, because templates cut it.
    """
    parts = [("its text", message.get("content")), *((f"its `{key}`", message.get(key)) for key in REASONING)]
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        parts.append(("a call's name", function["name"]))
        if isinstance(function.get("arguments"), str):
            parts.append(("a call's arguments (given as text; try an object)", function["arguments"]))
    for name, part in parts:
        if isinstance(part, str):
            _require_part(name, part, index, text, *span)
            if template.ending and template.ending.strip() in part:
                raise RowError(
                    f"message {index + 1} spells the end token {template.ending.strip()!r} itself, and the chat "
                    "template writes one: take it out of the text"
                )


def _require_part(name: str, part: str, index: int, text: str, start: int, end: int) -> None:
    if text.find(part, max(0, start - len(part)), end) >= 0:
        return  # what a prompt already says, an opened <think> for instance, may stand before the span
    if "".join(part.split()) not in "".join(text[max(0, start - len(part)) : end].split()):
        raise RowError(
            f"message {index + 1}: the chat template leaves out {name}; set `train: false` on the message, train on "
            "the last turn only (task_options.train_on), or give a template that shows it (task_options.chat_template)"
        )


def _with_mark(message: dict[str, Any], mark: str, trim: Callable[[str], str]) -> dict[str, Any]:
    """Return the message with a mark behind its content, and behind every name and text of its tool calls."""
    content, calls = message.get("content"), message.get("tool_calls")
    changed = dict(message)
    if content or not calls:
        changed["content"] = trim(content or "") + mark
    if calls:
        changed["tool_calls"] = [
            call | {"function": _marked_call(call["function"], mark)}
            if "function" in call
            else _marked_call(call, mark)
            for call in calls
        ]
    return changed


def _marked_call(function: dict[str, Any], mark: str) -> dict[str, Any]:
    marked = {key: _marked_texts(function[key], mark) for key in ("name", "arguments") if key in function}
    return function | marked


def _marked_texts(value: Any, mark: str) -> Any:
    if isinstance(value, str):
        return value + mark
    if isinstance(value, dict):
        return {key: _marked_texts(item, mark) for key, item in value.items()}
    return [_marked_texts(item, mark) for item in value] if isinstance(value, list) else value


def _unused(text: str) -> Iterator[str]:
    return (chr(code) for code in MARKS if chr(code) not in text)


def _any_of(words: Any) -> re.Pattern[str]:
    """Return a pattern for any of the words, the longest first; none: it never matches."""
    return re.compile("|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)) or "(?!)")
