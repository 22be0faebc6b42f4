"""Trace chat templates: render a template once per list of roles, and reuse the result as fixed text with slots.

The traced run uses placeholders as contents. A template may write, join and trim them. It may also test whether a
content contains, begins or ends with some text: the test returns False and becomes a condition. Any other operation
ends the trace. The result is valid for all contents that are not blank and meet the conditions, so thousands of
conversations with the same roles need one rendering.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NoReturn

from ftcli.runtime.patches import declare

MOST_SHAPES = 1000  # lists of roles in the cache
SEEN_ONCE = None

Span = tuple[int, int]  # characters [start, end) of a rendered text
Turns = list[dict[str, Any]]


@dataclass(frozen=True)
class Slot:
    """A place in a rendering for the content of a message."""

    message: int  # index of the message
    trims: tuple[tuple[str, tuple[str, ...]], ...] = ()  # (method of str, its arguments) that the template applies

    def value(self, content: str) -> str:
        """Return the trimmed content, as the template writes it."""
        for method, characters in self.trims:
            content = getattr(content, method)(*characters)
        return content


Condition = tuple[Slot, str, str]  # (slot, method of str that must return False for its value, argument)


@dataclass(frozen=True)
class TracedRendering:
    """The rendering of a list of roles: `texts[0] slots[0] texts[1] ... slots[-1] texts[-1]`.

    `turns` has one entry for each selected message: (number of its slot, characters of the turn before the slot,
    characters of the turn after it).
    """

    texts: tuple[str, ...]
    slots: tuple[Slot, ...]
    turns: tuple[tuple[int, int, int], ...]
    conditions: tuple[Condition, ...]

    def fill(self, contents: Sequence[str]) -> tuple[str, list[Span]] | None:
        """Insert contents into the slots.

        Args:
            contents: Content of each message.

        Returns:
            (text, spans of the selected turns); None if a content does not meet the conditions.
        """
        for slot, method, words in self.conditions:
            if getattr(slot.value(contents[slot.message]), method)(words):
                return None
        parts = [""] * (len(self.texts) + len(self.slots))
        parts[::2] = self.texts
        parts[1::2] = [
            slot.value(contents[slot.message]) if slot.trims else contents[slot.message] for slot in self.slots
        ]
        ends = list(accumulate(map(len, parts)))
        spans = [(ends[2 * slot] - before, ends[2 * slot + 1] + after) for slot, before, after in self.turns]
        return "".join(parts), spans


class TemplateTracer:
    """The traced renderings of one template. A list of roles is traced when it occurs for the second time.

    Args:
        source: Text of the template.
        variables: Values that the template reads besides messages: special tokens and `data.chat_template_kwargs`.
        ending: Text after an answer through its end-of-turn token; None if unknown.
        ending_text: Text that no answer may contain.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], ending: str | None, ending_text: str) -> None:
        self.ending, self.ending_text = ending or "", ending_text
        self._source, self._variables = source, variables
        self._known: dict[Any, TracedRendering | None | bool] = {}  # None: seen once; False: cannot be traced

    @functools.cached_property
    def _template(self) -> Any:
        """The template compiled for placeholders; None if it cannot be traced."""
        return _template_of_contents(self._source)

    def fill(self, turns: Turns, selected: Sequence[int]) -> tuple[str, dict[int, Span]] | None:
        """Render a conversation from the cache.

        Args:
            turns: The messages.
            selected: Indices of the messages whose spans are needed.

        Returns:
            (text, span of each selected message); None if the conversation must be rendered by the template.
        """
        traced = self._known.get(_shape(turns, selected))
        if not isinstance(traced, TracedRendering) or not _is_plain(turns):
            return None
        contents = [turn["content"] for turn in turns]
        if any(self.ending_text in contents[index] for index in selected):
            return None
        if (filled := traced.fill(contents)) is None:
            return None
        return filled[0], dict(zip(selected, filled[1], strict=True))

    def learn(self, turns: Turns, selected: Sequence[int], text: str, spans: Mapping[int, Span]) -> None:
        """Trace the roles of a rendered conversation, and keep the trace only if it gives the same text and spans.

        Args:
            turns: The messages.
            selected: Indices of the messages whose spans are known.
            text: The rendering by the template.
            spans: Span of each selected message.
        """
        shape = _shape(turns, selected)
        if not self.ending or not _is_plain(turns) or self._known.get(shape, SEEN_ONCE) is not SEEN_ONCE:
            return
        if shape not in self._known:
            if len(self._known) == MOST_SHAPES:
                self._known.clear()
            self._known[shape] = SEEN_ONCE
            return
        traced = self._trace(shape[0], selected)
        filled = traced and traced.fill([turn["content"] for turn in turns])
        if filled is None and traced is not None:
            return  # these contents do not meet the conditions
        is_same = filled == (text, [spans[index] for index in selected])
        self._known[shape] = traced if traced is not None and is_same else False

    def _trace(self, roles: tuple[str, ...], selected: Sequence[int]) -> TracedRendering | None:
        """Trace a list of roles. Returns None if the template's text depends on the contents of messages."""
        if self._template is None:
            return None
        conditions: list[Condition] = []
        try:
            texts, slots = self._run(roles, conditions, prompt=False)
            turns = []
            for index in selected:
                (slot,) = (number for number, slot in enumerate(slots) if slot.message == index)
                before = self._run(roles[:index], conditions, prompt=True) if index else ([""], [])
                turns.append(_turn(slot, texts, slots, before, self.ending))
        except Exception:  # the template may raise any exception for a placeholder; rendering reports real errors
            return None
        shown = {slot.message for slot in slots}
        if len(shown) < len(roles):
            return None  # encode.py refuses such conversations
        return TracedRendering(tuple(texts), tuple(slots), tuple(turns), tuple(dict.fromkeys(conditions)))

    def _run(self, roles: Sequence[str], conditions: list[Condition], *, prompt: bool) -> tuple[list[str], list[Slot]]:
        """Run the template on placeholders. Returns (texts, slots between them), and adds to the conditions."""
        slots: list[Slot] = []
        contents = [_Content((Slot(index),), conditions) for index in range(len(roles))]
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        environment = self._template.environment
        environment.finalize = functools.partial(_written, slots)
        rendered = self._template.render(
            messages=messages, tools=None, documents=None, add_generation_prompt=prompt, **self._variables
        )
        texts = rendered.split(HOLE)
        if len(texts) != len(slots) + 1:
            raise _Untraceable("the template writes the character that marks a slot")
        return texts, slots


def _shape(turns: Turns, selected: Sequence[int]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the key of a conversation in the cache."""
    return tuple([turn["role"] for turn in turns]), tuple(selected)


def _is_plain(turns: Turns) -> bool:
    """Return whether all messages have only a role and a content that is not blank."""
    return all(len(turn) == 2 and turn.get("content", "").strip() for turn in turns)


def _turn(
    slot: int, texts: list[str], slots: list[Slot], before: tuple[list[str], list[Slot]], ending: str
) -> tuple[int, int, int]:
    """Return (slot, characters before it, characters after it) of a turn.

    The turn begins at the end of its prompt and ends with the end-of-turn token. The prompt must be a prefix of the
    conversation.
    """
    prompt, prompt_slots = before
    is_prefix = prompt[:-1] == texts[:slot] and prompt_slots == slots[:slot] and texts[slot].startswith(prompt[-1])
    if not (prompt[-1] or prompt_slots) or not is_prefix or not texts[slot + 1].startswith(ending):
        raise _Untraceable("the prompt or the end of a turn differs from that in the conversation")
    return slot, len(texts[slot]) - len(prompt[-1]), len(ending)


TEMPLATES = declare(
    __name__,
    "template-environment",
    library="transformers",
    versions=">=5.17,<5.25",
    purpose="Compiles a chat template in transformers' own jinja2 environment, with other tests and filters",
    without="Every conversation is then rendered by its template, which takes longer, with the same tokens.",
    alternative="A separate jinja2 environment, which would have to follow every change in transformers.",
    apis=("transformers.utils.chat_template_utils:_compile_jinja_template",),
    measurement="Preparing 700 chats takes [0.33 s](../explanation/our-own-code.md#template-tracing) of processor "
    "time, without it 0.52 s. A step does not depend on it.",
)
HOLE = "\0"  # marks a slot in the output of a template


class _Untraceable(Exception):
    """A template used the content of a message in an unsupported way."""


class _Content:
    """The placeholder of a content for a template: `parts` are text and slots, `conditions` the results of its tests.

    It is not a str, so that every unsupported operation fails.
    """

    def __init__(self, parts: tuple[str | Slot, ...], conditions: list[Condition]) -> None:
        self.parts, self.conditions = parts, conditions

    def __add__(self, other: Any) -> _Content:
        return _Content(self.parts + _parts(other), self.conditions)

    def __radd__(self, other: Any) -> _Content:
        return _Content(_parts(other) + self.parts, self.conditions)

    def __bool__(self) -> bool:
        return True  # the content is not blank

    def __eq__(self, other: object) -> bool:
        if other is None or isinstance(other, bool) or (isinstance(other, str) and not other.strip()):
            return False
        raise _Untraceable("==")

    def __contains__(self, words: Any) -> bool:
        return self._test("__contains__", words)

    def startswith(self, words: Any) -> bool:
        return self._test("startswith", words)

    def endswith(self, words: Any) -> bool:
        return self._test("endswith", words)

    def strip(self, *characters: Any) -> _Content:
        return self._trimmed("strip", *characters)

    def lstrip(self, *characters: Any) -> _Content:
        return self._trimmed("lstrip", *characters)

    def rstrip(self, *characters: Any) -> _Content:
        return self._trimmed("rstrip", *characters)

    def _test(self, method: str, words: Any) -> bool:
        """Return False, and record the condition that the test is false."""
        if type(words) is not str or not words:
            raise _Untraceable(method)
        self.conditions.append((self._slot(), method, words))
        return False

    def _trimmed(self, method: str, *characters: Any) -> _Content:
        """Return the placeholder with one more trim."""
        if characters not in ((), ("\n",)):  # other characters could leave nothing of the content
            raise _Untraceable(method)
        slot = self._slot()
        return _Content((Slot(slot.message, (*slot.trims, (method, characters))),), self.conditions)

    def _slot(self) -> Slot:
        """Return the slot of a single content."""
        if len(self.parts) == 1 and isinstance(self.parts[0], Slot):
            return self.parts[0]
        raise _Untraceable("an operation on joined contents")

    def _refuse(self, *_: Any) -> NoReturn:
        raise _Untraceable("another operation")

    __hash__ = __str__ = __repr__ = __format__ = __len__ = __iter__ = __getitem__ = __int__ = __float__ = _refuse
    __index__ = __lt__ = __le__ = __gt__ = __ge__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _refuse
    __getattr__ = _refuse


def _parts(value: Any) -> tuple[str | Slot, ...]:
    """Return the parts of a text or placeholder."""
    if isinstance(value, _Content):
        return value.parts
    if type(value) is not str:
        raise _Untraceable("+")
    return (value,)


def _written(slots: list[Slot], value: Any) -> Any:
    """Return a value as output of a template, and add its slots to the list. This is jinja2's `finalize`."""
    if not isinstance(value, _Content):
        return value
    slots += [part for part in value.parts if isinstance(part, Slot)]
    return "".join(part if isinstance(part, str) else HOLE for part in value.parts)


def _template_of_contents(source: str) -> Any:
    """Compile a template for `_Content`. Returns None if it can read its own output, as with macros and blocks."""
    if not TEMPLATES.is_usable():
        return None
    from jinja2 import nodes
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template(source).environment.overlay(finalize=functools.partial(_written, []))
    tree = environment.parse(source)
    plain = (nodes.Output, nodes.For, nodes.If, nodes.Assign, nodes.Continue, nodes.Break)
    if any(not isinstance(statement, plain) for statement in tree.find_all(nodes.Stmt)):
        return None
    if any(loop.recursive for loop in tree.find_all(nodes.For)):
        return None
    harmless = ("defined", "undefined", "none", "mapping")
    tests, filters = environment.tests, environment.filters
    environment.tests = {name: test if name in harmless else _without_contents(test) for name, test in tests.items()}
    environment.tests["string"] = lambda value: isinstance(value, str | _Content)
    environment.filters = {name: _without_contents(function) for name, function in filters.items()}
    environment.filters["trim"] = lambda value, *more: _trim(filters["trim"], value, *more)
    return environment.from_string(source)


def _trim(trim: Callable[..., Any], value: Any, *characters: Any) -> Any:
    """Trim a placeholder by its own method, and other values by jinja2's filter."""
    return value.strip(*characters) if isinstance(value, _Content) else trim(value, *characters)


def _without_contents(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter or test that raises `_Untraceable` if an argument is a placeholder."""

    @functools.wraps(function)
    def guarded(*arguments: Any, **named: Any) -> Any:
        if any(isinstance(argument, _Content) for argument in (*arguments, *named.values())):
            raise _Untraceable(function.__name__)
        return function(*arguments, **named)

    return guarded
