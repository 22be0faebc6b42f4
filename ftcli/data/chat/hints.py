"""Suggest fixes for a conversation that its chat template cannot train. Each is tried on the conversation first.

The fixes are ftcli's training templates, variables of the template, and another selection of turns.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ftcli.data.chat.foreign_text import KIND
from ftcli.data.chat.rendering import Messages, Template
from ftcli.data.chat.template_variables import WITH_EACH, texts_of, variables_of
from ftcli.data.chat.training_templates import TrainingTemplate, training_templates
from ftcli.data.chat.turn_spans import UntrainableTurn
from ftcli.runtime.errors import RowError

_PROBE = [{"role": "user", "content": "a"}]


MOST_VARIABLES = 12  # variables of a template to try, in the order of their names
MOST_FIXES = 3  # fixes in one message
FALLBACKS = {  # reason -> fix if no other fix works
    "no end": "use a template that ends every answer with a token (task_options.chat_template)",
    "left out": "use a template that includes it (task_options.chat_template)",
    KIND: "use a template that writes it outside of the turn (task_options.chat_template)",
}
DEFAULT_FALLBACK = "use a template whose prompts are prefixes of the conversation (task_options.chat_template)"

# (template, messages, tools, indices of the turns to find); raises `RowError` if a turn is not found.
Attempt = Callable[[Template, Messages, "list[Any] | None", Sequence[int]], Any]


@dataclass(frozen=True)
class RefusedConversation:
    """A conversation that cannot be trained."""

    turns: Messages
    tools: list[Any] | None
    selected: Sequence[int]  # indices of the turns to find
    train_on: str  # task_options.train_on

    def shape(self) -> Any:
        """Return a key that is equal for conversations with the same fixes."""
        roles = frozenset(turn["role"] for turn in self.turns)
        keys = frozenset(key for turn in self.turns for key in turn)
        thinks = any("</think>" in turn.get("content", "") for turn in self.turns)
        return roles, keys, thinks, bool(self.tools), len(self.selected) > 1, self.train_on


def suggest_fixes(template: Template, refused: RefusedConversation, error: UntrainableTurn, attempt: Attempt) -> str:
    """Suggest fixes for a conversation that a template cannot train.

    The result for conversations of the same shape is cached in the template.

    Args:
        template: The template.
        refused: The conversation.
        error: The reason.
        attempt: Function that finds the turns, or raises `RowError`.

    Returns:
        The fixes as the end of a sentence.
    """
    shape = (error.kind, *refused.shape())
    if shape not in template.fixes:
        tries = _tries(template, refused, error, attempt)
        template.fixes[shape] = [fix for fix, run in tries if _works(run)][:MOST_FIXES]
    return ", or ".join(template.fixes[shape]) or FALLBACKS.get(error.kind, DEFAULT_FALLBACK)


def _tries(
    template: Template, refused: RefusedConversation, error: UntrainableTurn, attempt: Attempt
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield (fix, function that raises `RowError` if the fix does not work)."""
    turns, tools, selected = refused.turns, refused.tools, refused.selected
    index, kind = error.index, error.kind

    def with_template(make: Callable[..., Template], *args: Any) -> Callable[[], Any]:
        def run() -> None:
            other = make(*args)
            if tools and not other.takes_tools(tools):
                raise RowError("has tools, but the template does not support tools")
            attempt(other, turns, tools, selected)

        return run

    for name, value in _values(template):
        fix = f"set data.chat_template_kwargs: {_shown({name: value})}"
        yield fix, with_template(Template, template.tokenizer, {**template.variables, name: value})
    if template.variables:
        fix = f"remove chat_template_kwargs {json.dumps(template.variables)}"
        yield fix, with_template(Template, template.tokenizer)
    for shipped, needed in fitting_templates(template.tokenizer):
        options = f", with data.chat_template_kwargs: {_shown(needed)}" if needed else ""
        fix = f"use ftcli's training template for this format (task_options.chat_template: {shipped.name}{options})"
        yield fix, with_template(_with_source, template, shipped.source, needed)
    if kind in (KIND, "no end") and turns[index].get("tool_calls") and turns[index].get("content"):
        alone = [turn | {"content": ""} if number == index else turn for number, turn in enumerate(turns)]
        fix = "remove the text of the message, which has tool calls too"
        yield fix, partial(attempt, template, alone, tools, selected)
    last = len(turns) - 1
    if refused.train_on == "assistant" and last in selected and len(selected) > 1:
        fix = "train on the last answer only (task_options.train_on: last)"
        yield fix, partial(attempt, template, turns, tools, [last])
        fix = "set task_options.train_on: last, and write one row for every answer, which ends with that answer"
        cut = [partial(attempt, template, turns[: end + 1], tools, [end]) for end in selected]
        yield fix, lambda: [run() for run in cut]
    if refused.train_on != "all" and len(selected) > 1:
        fix = "set `train: false` on the message"
        yield fix, partial(attempt, template, turns, tools, [other for other in selected if other != index])


def _works(attempt: Callable[[], Any]) -> bool:
    """Return whether a fix raises no exception."""
    try:
        attempt()
    except Exception:  # the code of a template may raise any exception for a value that it does not expect
        return False
    return True


def _values(template: Template) -> Iterator[tuple[str, bool]]:
    """Yield the variables of a template that have no value yet, each as true and as false."""
    known = variables_of(texts_of(template.tokenizer.chat_template)) or ()
    names = sorted(name for name in known if name not in WITH_EACH and not name.endswith("_token"))
    for name in names[:MOST_VARIABLES]:
        for value in (True, False):
            if name not in template.variables:
                yield name, value


def _shown(variables: dict[str, Any]) -> str:
    """Return variables as text for a message."""
    return "{" + ", ".join(f"{name}: {json.dumps(value)}" for name, value in variables.items()) + "}"


def _with_source(template: Template, source: str, needed: dict[str, Any]) -> Template:
    """Return another template of the same tokenizer, with its needed variables and all current ones that it reads."""
    tokenizer = copy.copy(template.tokenizer)
    tokenizer.chat_template = source
    known = variables_of((source,)) or frozenset()
    variables = {name: value for name, value in template.variables.items() if name in known}
    return Template(tokenizer, {**needed, **variables})


def fitting_templates(tokenizer: Any) -> list[tuple[TrainingTemplate, dict[str, Any]]]:
    """Return the shipped templates for the format of a tokenizer.

    A template fits if the tokenizer has all of its tokens, and if both render the same prompt for a first answer.

    Args:
        tokenizer: A tokenizer with a chat template.

    Returns:
        (template, variables with which it fits).
    """
    from ftcli.data.chat.rendering import Refusals
    from ftcli.runtime.errors import RowError

    def prompt_of(source: str | None, **variables: Any) -> str | None:
        try:
            with Refusals():
                text: str = tokenizer.apply_chat_template(
                    _PROBE, tokenize=False, add_generation_prompt=True, chat_template=source, **variables
                )
        except RowError:
            return None
        return text

    prompt, added = prompt_of(None), {str(token) for token in tokenizer.added_tokens_decoder.values()}
    fitting = []
    for shipped in training_templates().values():
        if not prompt or not added.issuperset(shipped.tokens):
            continue
        names = sorted((variables_of((shipped.source,)) or frozenset()).difference(WITH_EACH))
        choices: list[dict[str, Any]] = [{}, *({name: value} for name in names for value in (True, False))]
        fitting += [(shipped, kwargs) for kwargs in choices if prompt_of(shipped.source, **kwargs) == prompt][:1]
    return fitting
