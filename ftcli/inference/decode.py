"""Generate tokens for batches of prompts, for `ftcli generate`, `ftcli chat` and the samples of a run.

transformers' `generate` is not used for four reasons. It reads sampling settings from the model's files, which are not
in the recipe. It draws from the global random generator. It calls a module inside the prepared model. It stops when one
rank has finished, although ranks with sharded weights must run equally many forward passes.
Shapes: B rows, T positions, V vocabulary.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ftcli.data.chat.encode import trained_ends
from ftcli.models.router_loss import WITHOUT_ROUTER_LOSS
from ftcli.models.structure import base_model_of
from ftcli.runtime.seeds import seed_of

READ_PADDING = ("rwkv", "recurrent_gemma")  # model types
PADDING_ROW = -1  # number of a row without an answer, with which this process runs as many passes as the others


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are selected.

    Attributes:
        max_new_tokens: Largest number of tokens of an answer.
        temperature: Divisor of the logits; 0 selects the most likely token.
        top_p: Probability of the nucleus from which a token is sampled.
        seed: Seed of the sampling.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


def forward_names(model: nn.Module) -> frozenset[str]:
    """Return the parameter names of a causal model's forward; with an adapter, of its base model."""
    return frozenset(inspect.signature(type(base_model_of(model)).forward).parameters)


def leaves_out_padding(model: nn.Module) -> bool:
    """Return whether a model's answer to a prompt is the same with padding on the left, as in a batch.

    The recurrent layers of some models read padding too: they ignore the mask.
    """
    return getattr(getattr(base_model_of(model), "config", None), "model_type", None) not in READ_PADDING


def end_tokens(tokenizer: Any, model: Any) -> frozenset[int]:
    """Return the tokens that end an answer.

    They are the end tokens of the tokenizer and of the model's generation configuration. The tokens with which the chat
    template ends a trained answer or tool call are added.
    """
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    tokens = configured if isinstance(configured, list) else [configured]
    return trained_ends(tokenizer) | {int(token) for token in (tokenizer.eos_token_id, *tokens) if token is not None}


def decode(
    model: Callable[..., Any],
    names: Collection[str],
    prompts: Sequence[Sequence[int]],
    choice: SamplingOptions,
    *,
    ends: Collection[int],
    pad: int,
    device: torch.device,
    numbers: Sequence[int] | None = None,
    should_continue: Callable[[bool], bool] = bool,
) -> Iterator[list[int | None]]:
    """Generate one token per step for a batch of prompts.

    The draws of a row depend on (seed, number of the row, step) only.

    Args:
        model: The model, or a function with the arguments of its forward.
        names: Parameter names of the forward (`forward_names`).
        prompts: Token ids of B prompts.
        choice: How tokens are selected.
        ends: Tokens that end an answer.
        pad: Id of the padding token.
        device: Device of the model.
        numbers: Number of each row; `PADDING_ROW` for rows without an answer. None counts from 0.
        should_continue: Called before each forward pass with whether a row of this process is unfinished; returns
            whether to run the pass. Ranks with sharded weights must run equally many passes.

    Yields:
        The next token of each of the B rows, including its end token; None for finished rows.
    """
    numbers = range(len(prompts)) if numbers is None else numbers
    ids, mask = (tensor.to(device) for tensor in pad_left(prompts, pad))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    is_open = [number != PADDING_ROW for number in numbers]
    cache = None
    for step in range(choice.max_new_tokens):
        if not should_continue(any(is_open)):
            return
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        inputs |= {"use_cache": "past_key_values" in names, "past_key_values": cache, "logits_to_keep": 1}
        inputs |= WITHOUT_ROUTER_LOSS
        with torch.no_grad():
            output = model(**{name: value for name, value in inputs.items() if name in names})
        cache = getattr(output, "past_key_values", None)
        tokens = sample_tokens(output.logits[:, -1], choice, numbers, step)
        yield [token if row_is_open else None for token, row_is_open in zip(tokens, is_open, strict=True)]
        is_open = [row_is_open and token not in ends for token, row_is_open in zip(tokens, is_open, strict=True)]
        newest = torch.tensor(tokens, device=device)[:, None]  # [B, 1]
        mask = torch.cat([mask, torch.ones_like(newest)], dim=1)
        next_positions = positions[:, -1:] + 1
        if cache is None:  # a model without a cache (recurrent layers) reads all tokens again
            ids, positions = torch.cat([ids, newest], dim=1), torch.cat([positions, next_positions], dim=1)
        else:
            ids, positions = newest, next_positions


def sample_tokens(logits: Tensor, choice: SamplingOptions, numbers: Sequence[int], step: int) -> list[int]:
    """Select one token per row: the most likely one, or by nucleus sampling (Holtzman et al. 2020, section 3.1).

    The nucleus is the smallest set of most likely tokens whose probabilities sum to at least `top_p`.

    Args:
        logits: `[B, V]`.
        choice: How tokens are selected.
        numbers: Number of each row, for the seed.
        step: Number of tokens generated before, for the seed.
    """
    if choice.temperature == 0:
        return [int(token) for token in logits.argmax(-1).tolist()]
    selected = []
    for row, number in zip((logits.double().cpu() / choice.temperature).softmax(-1), numbers, strict=True):
        probabilities, tokens = row.sort(descending=True, stable=True)
        nucleus = probabilities * (probabilities.cumsum(0) - probabilities < choice.top_p)
        cumulative = nucleus.cumsum(0)
        draw = random.Random(seed_of(choice.seed, number + 1, step)).random() * cumulative[-1]
        selected.append(int(tokens[min(int((cumulative <= draw).sum()), len(tokens) - 1)]))
    return selected


def pad_left(rows: Sequence[Sequence[int]], value: int) -> tuple[Tensor, Tensor]:
    """Return token ids padded on the left with `value`, and their attention mask, both `[B, T]` int64."""
    longest = max(len(row) for row in rows)
    ids = [[value] * (longest - len(row)) + list(row) for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids), torch.tensor(mask)
