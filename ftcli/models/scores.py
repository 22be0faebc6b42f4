"""Score concatenated documents: replace the forward of a causal model with a score head.

transformers scores the last token of each row that is not padding. A flat batch has one row with many documents, so
the positions of their last tokens are passed to the model. Shapes: A documents, H hidden, K scores of each.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ftcli.models.structure import base_model_of
from ftcli.runtime.errors import InputError
from ftcli.runtime.patches import declare

DOCUMENT_SCORES = declare(
    __name__,
    "document-scores",
    library="transformers",
    versions=">=5.17,<5.25",
    purpose="Replaces the forward of a causal model with a score head, so that it scores concatenated documents",
    without="Rows that are scored cannot be packed.",
    alternative="Padded rows, for which the forward is transformers' own.",
    apis=("transformers:LlamaForSequenceClassification.forward.attention_mask",),
    required=True,
)
HEAD = "score"  # name of the head in causal models of transformers


def score_documents(model: nn.Module) -> None:
    """Change a model in place so that `model(**batch, score_positions=[A])` returns {"scores": [A, K]}.

    The positions index the flattened hidden states. Called without them, the model answers as before. Names of
    parameters do not change. All weights are used inside the prepared model's own call.

    Args:
        model: A model with a score head on the hidden states of its base model, with or without an adapter.

    Raises:
        InputError: The model has another head.
    """
    DOCUMENT_SCORES.require()
    inner: Any = base_model_of(model)
    base_name = inner.base_model_prefix
    if not hasattr(inner, HEAD) or not hasattr(inner, base_name):
        raise InputError(
            f"{type(inner).__name__} has no head that scores concatenated documents",
            hint="set data.packing and data.padding_free to false",
        )
    forward = inner.forward

    def scores(*args: Any, score_positions: Tensor | None = None, **kwargs: Any) -> Any:
        if score_positions is None:
            return forward(*args, **kwargs)
        hidden = getattr(inner, base_name)(*args, use_cache=False, **kwargs).last_hidden_state  # [1, S, H]
        return {"scores": getattr(inner, HEAD)(hidden.flatten(0, -2)[score_positions])}

    inner.forward = scores
