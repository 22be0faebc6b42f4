"""Encode prompts as token ids, and decode token ids to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ftcli.data.chat.template_variables import check_variables, texts_of, variables_of
from ftcli.runtime.errors import InputError

PromptInput = str | list[dict[str, Any]]  # a user message (or text to continue), or a whole conversation


def encode_prompt(
    tokenizer: Any,
    prompt: PromptInput,
    *,
    as_chat: bool = True,
    tools: list[Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Encode a prompt as token ids, with the tokenizer's chat template up to the start of the answer.

    Args:
        tokenizer: The tokenizer.
        prompt: A user message or a conversation. Text is encoded without template and without end token if there is no
            template or `as_chat` is false.
        as_chat: Whether to use the chat template for text.
        tools: JSON schemas of tools for the template.
        chat_template_kwargs: Variables of the template.

    Returns:
        The token ids.

    Raises:
        InputError: A conversation needs a template and there is none, the template rejects the prompt or never reads a
            variable, or the prompt is empty.
    """
    if isinstance(prompt, str) and not (as_chat and tokenizer.chat_template):
        if tools or chat_template_kwargs:
            raise InputError(
                "a prompt of plain text has tools or chat_template_kwargs, which only a chat template reads",
                hint="remove them, or use a model with a chat template",
            )
        ids = list(tokenizer(prompt)["input_ids"])
        ids = ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids
        if not ids:
            raise InputError("a prompt is empty", hint="write at least one word")
        return ids
    if not tokenizer.chat_template:
        raise InputError(
            "the tokenizer has no chat template, so it cannot render a conversation",
            hint="use plain text: `ftcli generate ... --prompt TEXT` without --system",
        )
    from jinja2 import TemplateError

    variables = dict(chat_template_kwargs or {})
    texts = texts_of(tokenizer.chat_template)
    check_variables(variables, texts, "chat_template_kwargs")
    if tools and "tools" not in (variables_of(texts) or {"tools"}):
        raise InputError("a prompt has tools, but the chat template does not support tools", hint="remove `tools`")
    options = {"tokenize": True, "add_generation_prompt": True, "return_dict": False, "tools": tools, **variables}
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        return list(tokenizer.apply_chat_template(turns, **options))
    except TemplateError as error:
        raise InputError(f"the model's chat template rejects a prompt: {error}") from None


def decode_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decode an answer without special tokens, and strip surrounding white space.

    Args:
        tokenizer: The tokenizer.
        ids: Token ids of the answer.
    """
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text.strip()
