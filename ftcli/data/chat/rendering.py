"""Render conversations with a tokenizer's chat template, and find the end-of-turn token of answers.

The end of a turn is the text that the template writes after an answer, with and without a following message. It is
found by rendering a probe conversation both ways.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property, lru_cache
from os.path import commonprefix
from typing import Any

from ftcli.data.chat.template_tracing import Span, TemplateTracer
from ftcli.data.chat.template_variables import QUESTION, texts_of, unread
from ftcli.runtime.errors import RowError

Messages = list[dict[str, Any]]

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Printable letters that repr and JSON do not escape, and that no template handles specially: CJK extension B.
MARKS = range(0x20000, 0x2A6E0)
_MARK = chr(MARKS[0])
_SYSTEM = {"role": "system", "content": "a"}
_ANSWERED = {"role": "assistant", "content": f"b{_MARK}"}
_CALL_ID = "call00001"  # Mistral's templates require nine letters or digits
_CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "type": "function",
            "id": _CALL_ID,
            "function": {"name": "f", "arguments": {"a": f"b{_MARK}"}},
        }
    ],
}
_RESULT = {"role": "tool", "name": "f", "tool_call_id": _CALL_ID, "content": "c"}


class Template:
    """A tokenizer's chat template with its end-of-turn tokens.

    `ending` is the text after a plain answer through its end-of-turn token `stop`. Both are None if the template writes
    no such token, or if it depends on the conversation.
    """

    def __init__(self, tokenizer: Any, variables: Mapping[str, Any] | None = None) -> None:
        self.tokenizer, self.variables = tokenizer, dict(variables or {})
        added = {str(token): token.special for token in tokenizer.added_tokens_decoder.values() if str(token).strip()}
        self.added, self.special = any_of(added), any_of([token for token, special in added.items() if special])
        self._run = re.compile(rf"(?:\s*(?:{self.added.pattern}))+")
        self.ending = self._usual_ending()
        self.stop = self._last_token(self.ending) if self.ending else None
        source = tokenizer.get_chat_template(None, None) if tokenizer.chat_template else ""
        known = {**tokenizer.special_tokens_map, **self.variables}
        self.tracer = TemplateTracer(source, known, self.ending, self.ending_text)
        self.fixes: dict[Any, list[str]] = {}  # shape of a conversation -> working fixes; see hints.py

    def using(self, variables: Mapping[str, Any]) -> Template:
        """Return the template with values of its variables.

        Args:
            variables: Name -> value.

        Raises:
            RowError: The template never reads a variable, or JSON cannot represent a value.
        """
        try:
            return _using(self, json.dumps(variables, sort_keys=True)) if variables else self
        except TypeError as error:  # columns may contain dates
            raise RowError(f"`chat_template_kwargs` has a value that JSON cannot represent: {error}") from None

    def render(self, messages: Messages, tools: list[Any] | None, *, prompt: bool = False) -> str:
        """Render a conversation as text.

        Args:
            messages: The messages.
            tools: JSON schemas of the tools; None without tools.
            prompt: Whether to append the generation prompt for the next answer.

        Raises:
            RowError: The template rejects the conversation, for instance a system message.
        """
        with Refusals():
            text: str = self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompt, **self.variables
            )
        return text

    def takes_tools(self, tools: list[Any]) -> bool:
        """Return whether the template supports tools."""
        return "tools" in self.tokenizer.get_chat_template(None, tools)

    def has_marks(self, tools: list[Any] | None) -> bool:
        """Return whether the template marks the assistant's text with {% generation %}."""
        return GENERATION.search(self.tokenizer.get_chat_template(None, tools)) is not None

    def render_marked(self, messages: Messages, tools: list[Any] | None) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and the spans between the template's generation marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        with Refusals():
            rendered: Any = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=self.tokenizer.get_chat_template(None, tools),
                return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, **self.variables},
            )
        (text,), (spans,) = rendered
        return text, [(start, end) for start, end in spans]

    @property
    def ending_text(self) -> str:
        """The text that no answer may contain because it would end the turn early; "" if unknown."""
        ending = (self.ending or "").strip()
        return self.stop if self.stop and self._run.fullmatch(ending) else ending

    @cached_property
    def stops(self) -> frozenset[str]:
        """The tokens that end a trained turn: a plain answer, and a tool call if it has another end."""
        tokens = {self.stop} if self.stop else set()
        alone, followed = self._tail(_CALLED), self._tail(_CALLED, _RESULT)
        if alone is not None and not self.usual_end(alone):
            ending = self.shared_end(alone, alone if followed is None else followed, calls=True)
            tokens |= {self._last_token(ending)} if ending else set()
        return frozenset(tokens)

    def usual_end(self, alone: str) -> str | None:
        """Return the text after an answer through the token that ends a plain answer; None without that token."""
        for usual in ((self.ending or "").strip(), self.stop):
            if usual and (at := alone.find(usual)) >= 0:
                return alone[: at + len(usual)]
        return None

    def shared_end(self, alone: str, followed: str, *, calls: bool) -> str | None:
        """Return the text after an answer through its end-of-turn token.

        Args:
            alone: Text after the answer if it is the last message.
            followed: Text after the same answer if another message follows.
            calls: Whether the answer calls tools. Text of the template then follows the answer, and only special tokens
                end the turn.

        Returns:
            A prefix of `alone`; None if there is no end-of-turn token.
        """
        shared = commonprefix([alone, followed])
        if not calls:
            return self._through_end(shared)
        special = list(self.special.finditer(shared))
        return shared[: special[-1].end()] if special else None

    def _usual_ending(self) -> str | None:
        """Return the text after a plain answer through its end-of-turn token."""
        alone, followed = self._tail(_ANSWERED), self._tail(_ANSWERED, QUESTION)
        if alone is None:
            return None
        shared = alone if followed is None else commonprefix([alone, followed])
        return self._through_end(shared) or self._through_end(alone, most=1)

    def _tail(self, answer: dict[str, Any], following: dict[str, Any] | None = None) -> str | None:
        """Return the text after the answer of a probe conversation; None if the template rejects it.

        Some templates reject a conversation without a system message.
        """
        turns = [QUESTION, answer, *([following] if following else [])]
        for messages in (turns, [_SYSTEM, *turns]):
            try:
                return self.render(messages, None).rpartition(_MARK)[2]
            except RowError:
                continue
        return None

    def _through_end(self, text: str, most: int | None = None) -> str | None:
        """Return a text through its first run of added tokens.

        The run begins at the start of the text, else at the first special token. It ends with the end-of-sequence
        token, or after `most` tokens.
        """
        start = 0
        if not self._run.match(text):
            if not (first := self.special.search(text)):
                return None
            start = first.start()
        eos, end = self.tokenizer.eos_token, start
        for number, token in enumerate(self.added.finditer(text, start), start=1):
            if text[end : token.start()].strip():
                break
            end = token.end()
            if token.group() == eos or number == most:
                break
        return text[:end]

    def _last_token(self, text: str) -> str:
        """Return the last added token in a text."""
        return [token.group() for token in self.added.finditer(text)][-1]


@lru_cache(maxsize=64)
def _using(template: Template, variables: str) -> Template:
    """Return the cached template with other variables; `variables` is JSON."""
    values = json.loads(variables)
    if problems := unread(values, texts_of(template.tokenizer.chat_template), "chat_template_kwargs"):
        raise RowError(problems[0].what)
    return Template(template.tokenizer, values)


class Refusals:
    """A context that converts exceptions of a template's code into a `RowError`."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        from jinja2 import TemplateError

        if isinstance(error, TemplateError | TypeError | ValueError | LookupError | AttributeError):
            raise RowError(f"the model's chat template rejects it: {error}") from None


def any_of(words: Any) -> re.Pattern[str]:
    """Return a pattern that matches any of some words, longer words first. Without words it never matches.

    Args:
        words: The words, as an iterable of texts.
    """
    return re.compile("|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)) or "(?!)")
