"""Find the character span of each assistant turn in a rendered conversation, and verify it.

A turn begins at the end of its prompt and ends with its end-of-turn token. The prompt must be a prefix of the rendered
text. The end of the answer is found by rendering the conversation again with a mark after every answer. Without the
marks, that rendering must be equal to the first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ftcli.data.chat.rendering import MARKS, Messages, Refusals, Template
from ftcli.data.chat.template_tracing import Span
from ftcli.runtime.errors import RowError

REASONING = ("reasoning_content", "reasoning", "thinking")
# Ways in which templates trim the white space after an answer.
TRIMS: tuple[Callable[[str], str], ...] = (str, str.rstrip, lambda text: text.rstrip("\n"))


class UntrainableTurn(RowError):
    """A turn that cannot be trained with this template. `kind` is the reason, by which hints.py selects a fix."""

    def __init__(self, index: int, what: str, kind: str) -> None:
        super().__init__(f"message {index + 1}: {what}")
        self.index, self.kind = index, kind


def find_turns(
    template: Template, messages: Messages, tools: list[Any] | None, text: str, selected: Sequence[int]
) -> dict[int, Span]:
    """Find the spans of assistant turns in the rendering of a conversation.

    Args:
        template: The chat template.
        messages: The conversation.
        tools: JSON schemas of its tools; None without tools.
        text: Its rendering.
        selected: Indices of the assistant's messages to find.

    Returns:
        Index -> span of characters.

    Raises:
        RowError: A span cannot be verified. The text contains the number of the message, counted from 1.
    """
    if not selected:
        return {}
    finder = _Finder(template, messages, tools, text)
    answers = finder.answer_ends(selected)
    spans = {index: (finder.start(index, answers[index]), finder.end(index, answers[index])) for index in selected}
    for index, span in spans.items():
        _require_complete(template, messages[index], index, text, span)
    return spans


def marked_turns(
    template: Template,
    messages: Messages,
    tools: list[Any] | None,
    text: str,
    marked: list[Span],
    selected: Sequence[int],
) -> dict[int, list[Span]]:
    """Assign the spans of the template's generation marks to messages.

    Args:
        template: The chat template.
        messages: The conversation.
        tools: JSON schemas of its tools; None without tools.
        text: Its rendering.
        marked: Spans between the template's generation marks.
        selected: Indices of the assistant's messages to find.

    Returns:
        Index -> one or more spans.

    Raises:
        RowError: A message has no marks, or its last span does not include its end token.
    """
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    try:
        spans = _spans_by_message(template, text, _Finder(template, messages, tools, text).answer_ends(answers), marked)
    except UntrainableTurn:
        if len(marked) != len(answers):
            raise
        spans = {index: [span] for index, span in zip(answers, marked, strict=True)}
    for index in selected:
        if index not in spans:
            problem = f"the chat template marks no text of it as generated, and {len(marked)} spans of other messages"
            raise UntrainableTurn(index, problem, "no marks")
        start, end = spans[index][-1]
        if not re.search(rf"(?:{template.added.pattern})\s*$", text[start:end]) or _ends_early(template, text, end):
            problem = "the chat template's generation marks leave out its end token, so a model would not learn to stop"
            raise UntrainableTurn(index, problem, "no end")
        _require_complete(template, messages[index], index, text, (spans[index][0][0], end))
    return {index: spans[index] for index in selected}


def _spans_by_message(template: Template, text: str, ends: dict[int, int], marked: list[Span]) -> dict[int, list[Span]]:
    """Return marked spans by message; `ends` is the end of the last character of each answer.

    A span of only added tokens directly after an answer is the end of that answer. Another span belongs to the next
    answer that ends inside or after it.
    """
    tokens = re.compile(rf"(?:\s*(?:{template.added.pattern}))*\s*")
    spans: dict[int, list[Span]] = {}
    for start, end in marked:
        before = [index for index, at in ends.items() if at <= start]
        following = [index for index, at in ends.items() if at > start]
        is_ending = before and tokens.fullmatch(text, ends[before[-1]], end)
        owner = before[-1] if is_ending or not following else following[0]
        spans.setdefault(owner, []).append((start, end))
    return spans


def _ends_early(template: Template, text: str, end: int) -> bool:
    """Return whether a span that ends at `end` includes only some tokens of an ending of several tokens."""
    ending = template.ending or ""
    splits = [token.end() for token in template.added.finditer(ending)][:-1]
    return any(text[:end].endswith(ending[:at].lstrip()) and text.startswith(ending[at:], end) for at in splits)


class _Finder:
    """Finds the turns of one conversation; `text` is its rendering."""

    def __init__(self, template: Template, messages: Messages, tools: list[Any] | None, text: str) -> None:
        self.template, self.messages, self.tools, self.text = template, messages, tools, text
        self.trim: Callable[[str], str] = str

    def answer_ends(self, selected: Sequence[int]) -> dict[int, int]:
        """Return the end of the last character of every selected message in the text."""
        letters = unused_letters(self.text)
        calls = {index: len(self.messages[index].get("tool_calls") or ()) for index in selected}
        marks = {index: (next(letters), [next(letters) for _ in range(calls[index])]) for index in selected}
        owners = {mark: index for index, (content, names) in marks.items() for mark in (content, *names)}
        names = {mark for _, names in marks.values() for mark in names}
        for self.trim in TRIMS:
            marked = self.template.render(self._with_marks(marks), self.tools)
            parts = re.split(f"([{''.join(owners)}])", marked)
            if "".join(parts[::2]) == self.text:
                break
        else:
            problem = "the chat template's text depends on the end of an answer, so that end cannot be found"
            raise UntrainableTurn(selected[0], problem, "differs")
        ends, end = {}, 0
        for part, mark in zip(parts[::2], parts[1::2], strict=False):
            end += len(part)
            # The last of several marks in a message counts. The name of a call may occur again in its result.
            if mark in owners:
                ends[owners[mark]] = end
            if mark in names:
                owners.pop(mark, None)
        for index in selected:
            if index not in ends:
                part = "assistant's text" if self.messages[index].get("content") else "message's tool calls"
                raise UntrainableTurn(index, f"the chat template leaves out the {part}", "left out")
        return ends

    def _with_marks(self, marks: dict[int, tuple[str, list[str]]]) -> Messages:
        """Return the messages with a mark after each answer."""
        return [
            with_mark(message, marks[index][0], self.trim, marks[index][1]) if index in marks else message
            for index, message in enumerate(self.messages)
        ]

    def end(self, index: int, answer: int) -> int:
        """Return the end of a turn's end-of-turn token, for an answer that ends at `answer`."""
        usual = self.template.ending
        if usual and self.text.startswith(usual, answer):
            return answer + len(usual)
        is_last = index == len(self.messages) - 1
        alone = self.text[answer:] if is_last else self._tail(index)
        if (ending := self.template.usual_end(alone)) is None:
            calls = bool(self.messages[index].get("tool_calls"))
            followed = self._followed(answer) if is_last else self.text[answer:]
            ending = self.template.shared_end(alone, followed, calls=calls)
            if ending is None and self.template.shared_end(alone, alone, calls=calls) is None:
                problem = "the chat template writes no end token after it, so a model would not learn to stop"
                raise UntrainableTurn(index, problem, "no end")
        if ending is None or not self.text.startswith(ending, answer):
            problem = "the chat template writes no end token after it if another message follows"
            raise UntrainableTurn(index, problem, "no end")
        return answer + len(ending)

    def _tail(self, index: int) -> str:
        """Return the text that the template writes after a message if it is the last one."""
        mark = next(unused_letters(self.text))
        turns = [*self.messages[:index], with_mark(self.messages[index], mark, self.trim)]
        return self.template.render(turns, self.tools).rpartition(mark)[2]

    def _followed(self, answer: int) -> str:
        """Return the text after the last answer if another message follows.

        It is the text without a following message if the template rejects that message, or changes earlier text for it.
        """
        following: dict[str, Any] = {"role": "user", "content": "a"}
        if calls := self.messages[-1].get("tool_calls"):
            name = calls[0].get("function", calls[0])["name"]
            following = {"role": "tool", "content": "a", "name": name, "tool_call_id": calls[0].get("id", "")}
        try:
            text = self.template.render([*self.messages, following], self.tools)
        except RowError:
            return self.text[answer:]
        return text[answer:] if text.startswith(self.text[:answer]) else self.text[answer:]

    def start(self, index: int, answer: int) -> int:
        """Return the end of the prompt for message `index`, whose answer ends at `answer`."""
        prompt = self.template.render(self.messages[:index], self.tools, prompt=True) if index else ""
        if prompt and self.text.startswith(prompt) and len(prompt) <= answer:
            return len(prompt)
        start = self._start_beside(index, answer, self._opening(index, prompt))
        if start is None:
            shown = f"it ends with {prompt[-40:]!r}" if prompt else "it is empty: there is no message before"
            problem = f"its prompt is not a prefix of the rendered conversation ({shown})"
            raise UntrainableTurn(index, problem + self._because(index), "prompt")
        return start

    def _because(self, index: int) -> str:
        """Return the reason why a prompt is not a prefix, if variables of the template are the reason."""
        variables = json.dumps(self.template.variables)
        if not index or not self.text.startswith(self._plain_prompt(index)):
            return ""
        if index == len(self.messages) - 1:
            return (
                f"; chat_template_kwargs {variables} contradict the answer: change the answer, or set a column "
                "chat_template_kwargs in this row"
            )
        return f"; chat_template_kwargs {variables} change the prompt, but not the text of earlier answers"

    def _plain_prompt(self, index: int) -> str:
        """Return the prompt for a message without variables."""
        with Refusals():
            text: str = self.template.tokenizer.apply_chat_template(
                self.messages[:index], tools=self.tools, tokenize=False, add_generation_prompt=True
            )
        return text

    def _opening(self, index: int, prompt: str) -> str:
        """Return the prompt from the text of its last message on; "" if that text is not in the prompt."""
        if index:
            before = str(self.messages[index - 1].get("content") or "").strip()
            at = prompt.rfind(before)
            return prompt[at:] if before and at >= 0 else ""
        extended = self.template.render(self.messages, self.tools, prompt=True)
        return extended[len(self.text) :] if extended.startswith(self.text) else ""

    def _start_beside(self, index: int, answer: int, opening: str) -> int | None:
        """Return the end of `opening` if only white space is between it and the answer; else None."""
        content = str(self.messages[index].get("content") or "")
        for shown in (content, content.rstrip(), content.strip(), content.lstrip()):
            begin = answer - len(shown)
            if not shown or not opening or not self.text.startswith(shown, begin):
                continue
            at = self.text.rfind(opening, 0, begin)
            if at >= 0 and not self.text[at + len(opening) : begin].strip():
                return at + len(opening)
        return None


def _require_complete(template: Template, message: dict[str, Any], index: int, text: str, span: Span) -> None:
    """Raise `RowError` if a part of a turn (its text, thinking, a call) is not rendered, or contains the end token.

    White space is not compared, because templates trim it.
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
            if template.ending_text and template.ending_text in part:
                raise RowError(
                    f"message {index + 1} contains the end token {template.ending_text!r}, which the chat template "
                    "also writes: remove it from the message"
                )


def _require_part(name: str, part: str, index: int, text: str, start: int, end: int) -> None:
    """Raise `UntrainableTurn` if a part of a turn is not rendered. It may begin in the prompt, such as <think>."""
    shown = text[max(0, start - len(part)) : end]
    if part not in shown and "".join(part.split()) not in "".join(shown.split()):  # the first comparison is faster
        raise UntrainableTurn(index, f"the chat template leaves out {name}", "left out")


def with_mark(
    message: dict[str, Any], mark: str, trim: Callable[[str], str], names: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return the message with a mark after its content, and after every name and text of its tool calls.

    `names` are the marks for the names of the calls, by default `mark`.
    """
    content, calls = message.get("content"), message.get("tool_calls")
    changed = dict(message)
    if content or not calls:
        changed["content"] = trim(content or "") + mark
    if calls:
        changed["tool_calls"] = [
            call | {"function": _marked_call(call["function"], mark, name)}
            if "function" in call
            else _marked_call(call, mark, name)
            for call, name in zip(calls, names or [mark] * len(calls), strict=True)
        ]
    return changed


def _marked_call(function: dict[str, Any], mark: str, name: str) -> dict[str, Any]:
    """Return a call with marks after its name and its arguments."""
    marked = {"name": function["name"] + name}
    if "arguments" in function:
        marked["arguments"] = _marked_texts(function["arguments"], mark)
    return function | marked


def _marked_texts(value: Any, mark: str) -> Any:
    """Return nested values with a mark after every text."""
    if isinstance(value, str):
        return value + mark
    if isinstance(value, dict):
        return {key: _marked_texts(item, mark) for key, item in value.items()}
    return [_marked_texts(item, mark) for item in value] if isinstance(value, list) else value


def unused_letters(text: str) -> Iterator[str]:
    """Yield characters for marks that do not occur in a text."""
    return (chr(code) for code in MARKS if chr(code) not in text)
