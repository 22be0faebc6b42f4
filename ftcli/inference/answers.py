"""Define prompts and answers, and check the length of prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ftcli.data.chat.prompt import PromptInput, decode_text
from ftcli.models.token_ids import check_prompt_ids
from ftcli.runtime.errors import InputError


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt of evaluate.generate with its token ids."""

    prompt: Prompt
    ids: list[int]


def remaining_positions(config: Any, ids: Sequence[int]) -> int | None:
    """Return how many tokens a model can generate after a prompt.

    Args:
        config: The model's configuration.
        ids: Token ids of the prompt.

    Returns:
        The number of tokens, below 0 for a prompt that is too long; None if the model has no limit.
    """
    positions: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return None if positions is None else positions - len(ids)


def check_prompt_lengths(config: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Check that the model has positions for every prompt and its answer, and an embedding for every token.

    Args:
        config: The model's configuration.
        prompts: Token ids of the prompts.
        max_new_tokens: Largest number of tokens of an answer.

    Raises:
        InputError: A prompt is too long; the message names the first one. Or a token has no embedding.
    """
    check_prompt_ids(config, prompts)
    for number, ids in enumerate(prompts, start=1):
        remaining = remaining_positions(config, ids)
        if remaining is not None and remaining < max_new_tokens:
            raise InputError(
                f"prompt {number} has {len(ids)} tokens; with {max_new_tokens} new tokens it exceeds the "
                f"{len(ids) + remaining} positions of the model",
                hint="shorten the prompt, or lower the number of new tokens",
            )


def build_answer(tokenizer: Any, prompt: Prompt, ids: Sequence[int], ends: Iterable[int]) -> Answer:
    """Return the answer of generated tokens.

    Args:
        tokenizer: The model's tokenizer.
        prompt: The prompt that is answered.
        ids: Generated tokens, including the end token if there is one.
        ends: Tokens that end an answer.
    """
    ended = bool(ids) and ids[-1] in ends
    own = ids[:-1] if ended else ids
    return Answer(prompt, decode_text(tokenizer, own), len(own), ended)


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        content: A text, or the messages of a conversation.
        reference: The answer in the data, which is printed next to the model's answer; None without one.
        tools: Tools for the chat template.
        chat_template_kwargs: Variables of the chat template for this prompt.
    """

    content: PromptInput
    reference: str | None = None
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """Further arguments of `encode_prompt` (`tools`, `chat_template_kwargs`); usually empty."""
        options = {"tools": self.tools, "chat_template_kwargs": self.chat_template_kwargs}
        return {name: value for name, value in options.items() if value}

    @property
    def last_text(self) -> str:
        """The text, or that of the last message."""
        return self.content if isinstance(self.content, str) else str(self.content[-1].get("content") or "")


@dataclass(frozen=True)
class Answer:
    """A model's answer to one prompt.

    Attributes:
        prompt: The prompt.
        text: The answer without special tokens.
        tokens: Number of tokens, without the end token.
        ended: Whether the model ended the answer; False if it was cut at the largest number of tokens.
    """

    prompt: Prompt
    text: str
    tokens: int
    ended: bool

    def as_dict(self) -> dict[str, Any]:
        """Return the answer as JSON values."""
        values = {"prompt": self.prompt.content, "answer": self.text, "tokens": self.tokens, "ended": self.ended}
        return values if self.prompt.reference is None else values | {"reference": self.prompt.reference}
