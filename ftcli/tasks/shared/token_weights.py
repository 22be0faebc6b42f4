"""Weights of rows and turns, label smoothing and z-loss: what language-model tasks share.

A weight is the factor of a token's loss: the weight of its row times that of its turn. The mean stays one over all
trained tokens, so the gradient of a row does not depend on the weights of other rows in its step. A token with weight 0
is neither trained nor counted. Shape: N trained tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ftcli.tasks.protocol import Batch, Row, Term
from ftcli.tasks.shared.batches import fit

if TYPE_CHECKING:
    from torch import Tensor


LabelSmoothing = Annotated[
    float,
    Field(
        ge=0,
        lt=1,
        allow_inf_nan=False,
        description="Share e of a uniform distribution over the vocabulary in the target of each token: the loss is "
        "(1 - e) times the negative log-likelihood plus e times the mean of -log p over the vocabulary. "
        "Evaluations report the negative log-likelihood.",
    ),
]
ZLoss = Annotated[
    float,
    Field(
        ge=0,
        allow_inf_nan=False,
        description="Weight of the mean of (log Z)^2, which pulls the logarithm of the softmax denominator towards 0. "
        "PaLM uses 1e-4.",
    ),
]
NLL, UNIFORM, Z_LOSS = "nll", "uniform", "z_loss"  # names of terms
OUTPUTS = {NLL: "nll", UNIFORM: "uniform", Z_LOSS: "squared_log_z"}  # term -> output of the model


def regularizer_terms(options: Any) -> dict[str, Term]:
    """Return the terms of a loss with label smoothing or z-loss; empty without both.

    The first term is the negative log-likelihood. The formulas are in models/kernels/linear_regularizers.py.

    Args:
        options: Options of a task. A missing one is 0.
    """
    smoothing, z_loss = (getattr(options, name, 0.0) for name in ("label_smoothing", "z_loss"))
    if not smoothing and not z_loss:
        return {}
    terms = {NLL: Term(1.0 - smoothing)}
    if smoothing:
        terms[UNIFORM] = Term(smoothing)
    if z_loss:
        terms[Z_LOSS] = Term(z_loss)
    return terms


def weight_column(example: Mapping[str, Any]) -> dict[str, float]:
    """Return {"weight": w} of a converted row; empty without a weight."""
    return {"weight": example["weight"]} if "weight" in example else {}


def fit_weighted(
    example: Mapping[str, Any],
    ids: list[int],
    trained: list[bool],
    length: int,
    policy: str,
    turn_weights: list[float] | None = None,
) -> list[Row]:
    """Return the rows of `batches.fit`, with the weight of a converted row. A row with weight 0 trains nothing.

    Args:
        example: The converted row.
        ids: As in `fit`, and so are the other arguments.
        trained: As in `fit`.
        length: As in `fit`.
        policy: As in `fit`.
        turn_weights: As in `fit`.
    """
    weight = weight_column(example)
    rows = [row | weight for row in fit(ids, trained, length, policy, turn_weights)]
    if weight.get("weight") != 0:
        return rows
    return [row | {"trained": [False] * len(row["trained"]), "items": 0, "has_no_weight": True} for row in rows]


def without_weights(batch: Batch) -> tuple[Batch, Tensor | None]:
    """Return the part of a batch that the model is called with, and the weights `[N]` float32 or None."""
    if "weights" not in batch:
        return batch, None
    return {name: value for name, value in batch.items() if name != "weights"}, batch["weights"]


def weigh(values: Tensor, weights: Tensor | None) -> Tensor:
    """Return values of trained tokens `[N]` times their weights; None: the values themselves."""
    return values if weights is None else values * weights


def describe_weights(row: Row) -> dict[str, str]:
    """Return the weight of a prepared row and those of its turns, for a preview; empty without weights."""
    facts = {}
    if row.get("weight") is not None:
        facts["weight"] = f"{row['weight']:g}"
    if row.get("turn_weights") is not None:
        pairs = zip(row["trained"], row["turn_weights"], strict=True)
        counts: dict[float, int] = {}
        for trained, weight in pairs:
            if trained:
                counts[weight] = counts.get(weight, 0) + 1
        facts["weights of turns"] = ", ".join(f"{weight:g} ({count} tokens)" for weight, count in counts.items())
    return facts
