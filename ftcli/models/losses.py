"""Losses as sums in float32, and the one change made to a causal model: its forward returns them itself.

Shapes: B rows, T positions, H hidden, V vocabulary, N trained positions of a micro-batch. Every parameter is
touched inside the prepared module's own call; outside it the head would be a shard, or bypass DDP's reducer.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ftcli.models.architectures import LINEAR, architecture_of
from ftcli.models.kernels.linear_cross_entropy import linear_nll
from ftcli.models.kernels.linear_regularizers import NAMES, linear_regularized, regularized_rows
from ftcli.models.router_loss import WITHOUT_ROUTER_LOSS
from ftcli.models.structure import base_model_of
from ftcli.runtime.patches import declare

# Logits that are turned to float32 at once: 2^27 elements are 512 MiB. More are computed in chunks, which the backward
# pass computes again.
FLOAT32_LOGITS_AT_ONCE = 2**27

CAUSAL_LOSS = declare(
    __name__,
    "causal-loss",
    library="transformers",
    versions=">=5.17,<5.25",
    purpose="Replaces the forward of a causal model and of its head, so that they return losses of trained positions",
    without="Causal models are refused.",
    alternative="The model's `loss_function`, which needs the logits of all positions.",
    apis=("transformers:PreTrainedModel.get_output_embeddings", "transformers:LlamaForCausalLM.forward.logits_to_keep"),
    required=True,
    measurement="[43.0 ms](../explanation/kernels.md#the-loss-without-whole-logits) and 2.1 GiB for 16,384 tokens of "
    "a 1B shape on one H200, 78.8 ms and 9.7 GiB with whole logits.",
)


def cross_entropy_rows(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the negative log-likelihood `[N]` float32 of `targets [N]` under `logits [N, V]`; -100 gives 0."""
    return F.cross_entropy(logits.float(), targets, reduction="none", ignore_index=-100)


def token_nll(logits: Tensor, targets: Tensor, loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy_rows) -> Tensor:
    """Return `loss` of all rows, made from at most `FLOAT32_LOGITS_AT_ONCE` elements of logits at a time."""
    rows = max(1, FLOAT32_LOGITS_AT_ONCE // logits.shape[-1])
    if logits.shape[0] <= rows:
        return loss(logits, targets)
    chunks = zip(logits.split(rows), targets.split(rows), strict=True)
    return torch.cat([_again_backward(loss, chunk, target) for chunk, target in chunks])


def _again_backward(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    result: Tensor = checkpoint(function, *tensors, use_reentrant=False)
    return result


def return_token_nll(model: nn.Module, *, regularizers: bool = False) -> None:
    """Change a causal model in place so that `model(**batch, positions=..., targets=...)` returns {"nll": [N]}.

    With `regularizers` it also returns "uniform" and "squared_log_z", each `[N]`, for label smoothing and z-loss
    (kernels/linear_regularizers.py).

    `positions [N]` index the flattened `[B * T]` hidden states that predict `targets [N]`. The head runs on these
    positions only, so there are no logits of prompts or padding. If the head is a plain linear layer of a known model,
    its forward returns the negative log-likelihoods, and logits are computed in chunks. Otherwise all N rows of logits
    are computed by transformers' forward. Without `targets`, the model returns its usual output. Parameter names do
    not change.

    The model may be called several times before one backward pass, and again while a call is in progress: each call
    has its own positions and targets.
    """
    CAUSAL_LOSS.require()
    inner = base_model_of(model)
    head = inner.get_output_embeddings()
    forward, head_forward = inner.forward, head.forward
    is_known, after = _is_known(inner, head), after_head(inner.config)
    taken = inspect.signature(forward).parameters
    without_router_loss = {name: value for name, value in WITHOUT_ROUTER_LOSS.items() if name in taken}
    calls = _Calls()

    def head_at_positions(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        call = calls.innermost()
        if call is None:
            return head_forward(hidden, *args, **kwargs)
        rows = hidden.flatten(0, -2)[call.positions]
        if is_known:
            losses = linear_regularized if regularizers else linear_nll
            return losses(rows, head.weight, head.bias, call.targets, after)
        return head_forward(rows, *args, **kwargs)

    def nll(*args: Any, positions: Tensor | None = None, targets: Tensor | None = None, **kwargs: Any) -> Any:
        if positions is None or targets is None:
            with calls.enter(None):
                return forward(*args, **kwargs)
        call = _HeadCall(positions, targets)

        def keep_output(module: nn.Module, inputs: Any, output: Tensor) -> None:
            if calls.innermost() is call:
                call.output = output

        # The newest hook comes after those of backends, and before what the model does to logits.
        hook = head.register_forward_hook(keep_output)
        try:
            with calls.enter(call):
                logits = forward(*args, use_cache=False, **(without_router_loss | kwargs)).logits
        finally:
            hook.remove()
        if not is_known:
            return by_name(token_nll(logits, targets, regularized_rows if regularizers else cross_entropy_rows))
        if after is None and logits is not call.output:
            raise RuntimeError(f"{type(inner).__name__} changes its logits after the head, which ftcli did not expect")
        return by_name(call.output)

    def by_name(values: Tensor | None) -> dict[str, Any]:
        if values is None or not regularizers:
            return {"nll": values}
        return dict(zip(NAMES, values.unbind(-1), strict=True))

    head.forward = head_at_positions
    inner.forward = nll


@dataclass(eq=False)
class _HeadCall:
    """What one call of the model asks of the head: positions and targets `[N]`; `output` is what the head returned."""

    positions: Tensor
    targets: Tensor
    output: Tensor | None = None


class _Calls(threading.local):
    """The calls of one model that are in progress in this thread, the innermost last; None: a call without targets."""

    def __init__(self) -> None:
        self._stack: list[_HeadCall | None] = []

    def innermost(self) -> _HeadCall | None:
        """Return the call in progress; None if the head must return logits."""
        return self._stack[-1] if self._stack else None

    @contextmanager
    def enter(self, call: _HeadCall | None) -> Iterator[None]:
        """Make `call` the innermost call inside the block."""
        self._stack.append(call)
        try:
            yield
        finally:
            self._stack.pop()


def after_head(config: Any) -> Callable[[Tensor], Tensor] | None:
    """Return the function that a model of this configuration applies to its head's output; None if there is none."""
    name = architecture_of(config.model_type).head
    setting = None if name in (None, LINEAR) else getattr(config, name)
    if setting is None:
        return None
    if name == "final_logit_softcapping":
        return lambda logits: torch.tanh(logits / setting) * setting
    return (lambda logits: logits / setting) if name == "logits_scaling" else (lambda logits: logits * setting)


def _is_known(inner: Any, head: Any) -> bool:
    """Return whether the model's logits are the output of a plain linear layer, followed by `after_head`.

    Heads with an adapter, in 4 bits, or with separately trained rows are other modules.
    """
    return type(head) is nn.Linear and architecture_of(inner.config.model_type).head is not None
