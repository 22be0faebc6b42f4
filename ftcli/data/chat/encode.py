"""Encode conversations as token ids and masks of trained tokens, with the tokenizer's chat template.

The ids equal those of `apply_chat_template(tokenize=True)`. The mask is computed from positions, not from the values of
tokens, because the padding token may be the end token. `turn_spans.py` finds the turns in the text. A conversation that
cannot be encoded exactly is a `RowError`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, Literal, NamedTuple

from ftcli.data.chat.foreign_text import require_own_text
from ftcli.data.chat.hints import RefusedConversation, suggest_fixes
from ftcli.data.chat.message_checks import checked_messages, turn_weights
from ftcli.data.chat.omissions import require_all_messages
from ftcli.data.chat.rendering import Messages, Refusals, Template
from ftcli.data.chat.template_tracing import Span
from ftcli.data.chat.template_variables import require_jinja
from ftcli.data.chat.training_templates import read_template
from ftcli.data.chat.turn_spans import REASONING, UntrainableTurn, find_turns, marked_turns
from ftcli.runtime.errors import RowError

TrainOn = Literal["assistant", "last", "all"]
Encoded = tuple[list[int], list[bool]]  # (token ids, whether each token is trained)
UNUSED_WEIGHTS = "has messages with weights other than 0 and 1, which this task does not use"
Weighted = tuple[list[int], list[bool], list[float] | None]  # and the weight of each token; None: all have weight 1


class Plan(NamedTuple):
    """Which characters of a text are trained.

    Attributes:
        outside: Whether text outside the spans is trained. The opposite holds inside spans, unless they have weights.
        spans: Characters [start, end).
        weights: Weight of each span, 0 for an untrained one; None: no message has a weight.
    """

    outside: bool
    spans: list[Span]
    weights: list[float] | None = None


def encode_conversation(
    tokenizer: Any,
    messages: Any,
    *,
    tools: list[Any] | None = None,
    train_on: TrainOn = "assistant",
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Encoded:
    """Encode one conversation. The arguments are those of `encode_conversations` for one conversation.

    Returns:
        (token ids, whether each token is trained).

    Raises:
        RowError: The conversation cannot be encoded exactly.
    """
    (result,) = encode_conversations(
        tokenizer, [messages], tools=[tools], train_on=train_on, chat_template_kwargs=[chat_template_kwargs or {}]
    )
    if isinstance(result, RowError):
        raise result
    return result


def encode_conversations(
    tokenizer: Any,
    conversations: Sequence[Any],
    *,
    tools: Sequence[list[Any] | None] | None = None,
    train_on: TrainOn = "assistant",
    chat_template_kwargs: Sequence[Mapping[str, Any]] | None = None,
) -> list[Encoded | RowError]:
    """Encode many conversations. All texts are tokenized in one call.

    A trained turn begins at the end of its prompt and ends with its end-of-turn token. A token across the start of the
    turn is not trained if its characters inside the turn are white space, and is a `RowError` otherwise. Text in a
    message that is equal to a special token becomes that token, as in `apply_chat_template`.

    Args:
        tokenizer: A fast tokenizer with a chat template.
        conversations: Lists of OpenAI messages. Content in several text parts is joined, and null keys are ignored.
        tools: JSON schemas of the tools of each conversation; None for a conversation without tools.
        train_on: "assistant": all turns of the assistant; "last": the last message, if it is the assistant's; "all":
            every token. A message's key `train: true | false` overrides this, and is not passed to the template.
        chat_template_kwargs: Variables of the template for each conversation.

    Returns:
        (token ids, whether each token is trained) for each conversation, or its `RowError`. A conversation whose
        messages have weights other than 0 and 1 gives a `RowError` too.
    """
    weighted = encode_weighted(
        tokenizer, conversations, tools=tools, train_on=train_on, chat_template_kwargs=chat_template_kwargs
    )
    return [result if isinstance(result, RowError) else _without_weights(result) for result in weighted]


def _without_weights(result: Weighted) -> Encoded | RowError:
    ids, trained, weights = result
    return (ids, trained) if weights is None else RowError(UNUSED_WEIGHTS)


def encode_weighted(
    tokenizer: Any,
    conversations: Sequence[Any],
    *,
    tools: Sequence[list[Any] | None] | None = None,
    train_on: TrainOn = "assistant",
    chat_template_kwargs: Sequence[Mapping[str, Any]] | None = None,
) -> list[Weighted | RowError]:
    """Encode many conversations, whose messages may have the key `weight`: the factor of the loss of their tokens.

    Args:
        tokenizer: As in `encode_conversations`.
        conversations: As in `encode_conversations`.
        tools: As in `encode_conversations`.
        train_on: As in `encode_conversations`.
        chat_template_kwargs: As in `encode_conversations`.

    Returns:
        (token ids, whether each token is trained, the weight of each token or None) for each conversation, or its
        `RowError`. Weights are None unless a message of a trained turn has one.
    """
    template = _template(tokenizer, str(tokenizer.chat_template))
    results: list[Any] = []
    all_tools, kwargs = tools or [None] * len(conversations), chat_template_kwargs or [{}] * len(conversations)
    for messages, schemas, variables in zip(conversations, all_tools, kwargs, strict=True):
        try:
            results.append(_render(template.using(variables), messages, schemas, train_on))
        except RowError as error:
            results.append(error)
    rendered = [result for result in results if not isinstance(result, RowError)]
    encoded = iter(_encode(tokenizer, rendered))
    return [result if isinstance(result, RowError) else next(encoded) for result in results]


def _encode(tokenizer: Any, rendered: list[tuple[str, Plan]]) -> list[Weighted | RowError]:
    """Tokenize rendered texts, and mark the tokens that their plans train.

    The result for a text whose turns cannot be marked exactly is its `RowError`.
    """
    if not rendered:
        return []
    texts = [text for text, _ in rendered]
    batch = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False)
    results: list[Weighted | RowError] = []
    for (text, plan), ids, encoding in zip(rendered, batch["input_ids"], batch.encodings, strict=True):
        try:
            results.append((ids, *_mask(text, encoding.offsets, plan)))
        except RowError as error:
            results.append(error)
    return results


def load_template(tokenizer: Any, path: str) -> None:
    """Set the chat template of a tokenizer.

    Args:
        tokenizer: The tokenizer.
        path: A file with a Jinja template, or the name of a shipped template.

    Raises:
        InputError: There is no such template, or the file is not Jinja.
    """
    from jinja2 import TemplateError

    tokenizer.chat_template = read_template(path)
    require_jinja(tokenizer.chat_template, path)
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError):
        return  # the template rejects this probe conversation, but may accept the conversations of the rows


def trained_ends(tokenizer: Any, variables: Mapping[str, Any] | None = None) -> frozenset[int]:
    """Return the ids of the tokens that end a trained answer or tool call; an empty set without a chat template.

    Args:
        tokenizer: The tokenizer.
        variables: Values of the template's variables.
    """
    if not tokenizer.chat_template:
        return frozenset()
    try:
        with Refusals():  # a tokenizer may have several templates without a default
            stops = _template(tokenizer, str(tokenizer.chat_template)).using(variables or {}).stops
    except RowError:
        return frozenset()
    return frozenset(int(tokenizer.convert_tokens_to_ids(token)) for token in stops)


@lru_cache(maxsize=2)
def _template(tokenizer: Any, source: str) -> Template:
    """Return the cached `Template` of a tokenizer. The argument `source` is part of the key of the cache."""
    return Template(tokenizer)


def _render(template: Template, messages: Any, tools: list[Any] | None, train_on: TrainOn) -> tuple[str, Plan]:
    """Render one conversation. Returns its text and the plan of its trained characters."""
    turns, train_flags = checked_messages(messages)
    weights = turn_weights(messages, train_flags)
    tools = tools or None
    if tools and not template.takes_tools(tools):
        raise RowError("has tools, but the chat template does not support tools")
    selected = _select_turns(turns, train_flags, train_on, weights)
    if train_on != "all" and not any(turn["role"] == "assistant" for turn in turns):
        raise RowError("has no message of the assistant, so nothing would be trained")
    if not tools and (filled := template.tracer.fill(turns, selected)) is not None:
        text, spans = filled
        return text, _plan(train_on, {index: [spans[index]] for index in selected}, weights)
    try:
        text, spans_of = _find_spans(template, turns, tools, selected)
    except UntrainableTurn as error:
        refused = RefusedConversation(turns, tools, selected, train_on)
        raise RowError(f"{error}; {suggest_fixes(template, refused, error, _find_spans)}") from None
    if not tools and all(len(several) == 1 for several in spans_of.values()):
        template.tracer.learn(turns, selected, text, {index: several[0] for index, several in spans_of.items()})
    return text, _plan(train_on, {index: spans_of[index] for index in selected}, weights)


def _plan(train_on: str, spans_of: dict[int, list[Span]], weights: dict[int, float]) -> Plan:
    """Return the plan of a text whose selected turns have these spans."""
    spans = [span for several in spans_of.values() for span in several]
    if not weights.keys() & spans_of.keys():
        return Plan(train_on == "all", spans)
    other = 0.0 if train_on == "all" else 1.0  # of selected turns without a weight
    by_span = [weights.get(index, other) for index, several in spans_of.items() for _ in several]
    return Plan(train_on == "all", spans, by_span)


def _find_spans(
    template: Template, turns: Messages, tools: list[Any] | None, selected: Sequence[int]
) -> tuple[str, dict[int, list[Span]]]:
    """Return (text of a conversation, spans of the selected turns); raise `RowError` if a span is not exact."""
    if selected and template.has_marks(tools):
        text, marked = template.render_marked(turns, tools)
        spans = marked_turns(template, turns, tools, text, marked, selected)
    else:
        text = template.render(turns, tools)
        spans = {index: [span] for index, span in find_turns(template, turns, tools, text, selected).items()}
    require_all_messages(template, turns, tools, text, selected)
    require_own_text(template, turns, tools, text, spans)
    return text, spans


def _select_turns(
    turns: Messages, train_flags: list[bool | None], train_on: TrainOn, weights: Mapping[int, float]
) -> list[int]:
    """Return the indices of the turns to find: the trained turns, or with `all` the untrained and weighted ones."""
    selected = []
    for index, (turn, train_flag) in enumerate(zip(turns, train_flags, strict=True)):
        assistant = turn["role"] == "assistant"
        if not assistant and train_flag is None:
            continue
        if not assistant and train_flag is not None and train_flag != (train_on == "all"):
            flag = str(train_flag).lower()
            raise RowError(f"message {index + 1} has train: {flag}, which only messages of the assistant can have")
        default = train_on == "all" or (assistant and (train_on == "assistant" or index == len(turns) - 1))
        trained = default if train_flag is None else train_flag
        if (trained == (train_on == "all") and not (trained and index in weights)) or not assistant:
            continue
        if (
            trained
            and not turn.get("content", "").strip()
            and not any(turn.get(key, "").strip() for key in REASONING)
            and "tool_calls" not in turn
        ):
            raise RowError(
                f"message {index + 1} of the assistant is empty; give the message a text, or exclude it from "
                "training with `train: false`"
            )
        selected.append(index)
    return selected


def _mask(text: str, offsets: list[tuple[int, int]], plan: Plan) -> tuple[list[bool], list[float] | None]:
    """Return (whether each token is trained, its weight); `offsets` are the characters [start, end) of each token."""
    outside, spans, span_weights = plan
    mask = [outside] * len(offsets)
    weights = None if span_weights is None else [1.0] * len(offsets)
    for number, (start, end) in enumerate(spans):
        first, last = bisect_right(offsets, start, key=itemgetter(1)), bisect_left(offsets, end, key=itemgetter(0))
        # Offsets of a token may omit its leading white space, which begins at the end of the token before.
        begin = min(offsets[first][0], offsets[first - 1][1] if first else 0)
        if begin < start:
            stop = offsets[first][1]
            if text[start:stop].strip():
                raise RowError(
                    f"the token {text[begin:stop]!r} contains the end of a prompt and the start of an answer, so "
                    "the answer cannot be trained alone; use a template whose prompt ends in a special token or a line "
                    "break"
                )
            first += 1
        mask[first:last] = [not outside] * (last - first)
        if weights is not None and span_weights is not None:
            mask[first:last] = [span_weights[number] > 0] * (last - first)
            weights[first:last] = [span_weights[number]] * (last - first)
    return mask, weights
