"""Losses of preference pairs by the names that a recipe has for them: their options, and what each of them needs.

Defaults are those of the papers that have one; `beta` is 0.1 otherwise, as in DPO's experiments. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any

from ftcli.runtime.errors import InputError, Problem, nearest, shortened
from ftcli.tasks.shared import preference_losses as losses

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Bounds:
    """An option of a loss: the default value, and the open or closed interval of valid values."""

    default: float
    low: float = 0.0
    high: float = inf
    includes_low: bool = False

    def holds(self, value: float) -> bool:
        """Return whether a value is in the interval; NaN is not, the upper end is not."""
        return self.low < value < self.high or (self.includes_low and value == self.low)

    def __str__(self) -> str:
        floor = f"at least {self.low:g}" if self.includes_low else f"above {self.low:g}"
        return floor + ("" if self.high == inf else f" and below {self.high:g}")


@dataclass(frozen=True)
class PreferenceLoss:
    """One loss by its name in a recipe.

    Attributes:
        function: Takes `PairLogps` and the options by name; returns `[P]`.
        options: The options that it takes.
        needs_reference: Whether it reads log-probabilities of a reference model.
        takes_margin: Whether it uses a column `margin`.
        needs_ranks: Whether it needs `match_ranks` over all pairs of the step, as `matched`.
        adds_likelihood: Whether its paper adds the negative log-likelihood of the chosen answers.
        compares_means: Whether it compares means over tokens without a reference. Rewards are then reported as such
            means, as TRL reports them.
    """

    function: Callable[..., Tensor]
    options: Mapping[str, Bounds] = field(default_factory=dict)
    needs_reference: bool = True
    takes_margin: bool = False
    needs_ranks: bool = False
    adds_likelihood: bool = False
    compares_means: bool = False


BETA = {"beta": Bounds(0.1)}
SMOOTHED = BETA | {"label_smoothing": Bounds(0.0, high=0.5, includes_low=True)}

PREFERENCE_LOSSES: dict[str, PreferenceLoss] = {
    "sigmoid": PreferenceLoss(losses.sigmoid, SMOOTHED, takes_margin=True),
    "robust": PreferenceLoss(losses.robust, SMOOTHED),
    "hinge": PreferenceLoss(losses.hinge, BETA),
    "ipo": PreferenceLoss(losses.ipo, BETA),
    "exo_pair": PreferenceLoss(losses.exo_pair, BETA | {"label_smoothing": Bounds(1e-3, high=0.5)}),
    "nca_pair": PreferenceLoss(losses.nca_pair, BETA),
    "bco_pair": PreferenceLoss(losses.bco_pair, BETA),
    "sppo_hard": PreferenceLoss(losses.sppo_hard, {"beta": Bounds(1e-3)}),
    "apo_zero": PreferenceLoss(losses.apo_zero, BETA),
    "apo_down": PreferenceLoss(losses.apo_down, BETA),
    "discopop": PreferenceLoss(losses.discopop, {"beta": Bounds(0.05), "tau": Bounds(0.05, high=1.0)}),
    "sigmoid_norm": PreferenceLoss(losses.sigmoid_norm, {"beta": Bounds(5.0)}),
    "simpo": PreferenceLoss(
        losses.simpo,
        {"beta": Bounds(2.0), "gamma": Bounds(1.0, includes_low=True)},
        needs_reference=False,
        compares_means=True,
    ),
    "cpo": PreferenceLoss(losses.cpo, SMOOTHED, needs_reference=False, adds_likelihood=True),
    "orpo": PreferenceLoss(losses.orpo, BETA, needs_reference=False, adds_likelihood=True, compares_means=True),
    "aot": PreferenceLoss(losses.aot, SMOOTHED, needs_ranks=True),
}

# Methods -> the loss that they train with, for hints. The nearest of the names above can be that of another method.
METHODS = {"dpo": "sigmoid", "cdpo": "sigmoid", "rpo": "sigmoid", "slic": "hinge", "exo": "exo_pair", "nca": "nca_pair"}
METHODS |= {"bco": "bco_pair", "sppo": "sppo_hard", "apo": "apo_zero"}


WEIGHT = "weight"  # option that every loss has


def check_losses_are_mappings(losses: Any) -> None:
    """Check that a recipe's losses have options by name, before their values are read.

    Args:
        losses: The value of the recipe: losses by name.

    Raises:
        InputError: A loss does not exist.
        ValueError: A loss is named without its options, or has another value than a mapping. The message has an example
            with its first option, and the options that it knows.
    """
    names = losses if isinstance(losses, list) else [losses]
    named = losses if isinstance(losses, Mapping) else {name: None for name in names if isinstance(name, str)}
    for name, given in named.items():
        if isinstance(given, Mapping):
            continue
        if name not in PREFERENCE_LOSSES:
            loss_options(str(name), {}, "")
        value = "has no options" if given is None else f"is {shortened(str(given))}"
        known = PREFERENCE_LOSSES[name].options
        option, bounds = next(iter(known.items()))
        raise ValueError(
            f"{name} {value}; a loss needs a mapping of its options, such as "
            f"`losses: {{{name}: {{{option}: {bounds.default:g}}}}}`; {name} has {', '.join([*known, WEIGHT])}"
        )


def loss_options(name: str, given: Mapping[str, float], where: str) -> dict[str, float]:
    """Return the value of every option of a loss: those given, and the defaults of the others.

    Args:
        name: A key of `PREFERENCE_LOSSES`.
        given: Options of the recipe.
        where: The key of the recipe, for messages.

    Raises:
        InputError: For an unknown loss, an option that the loss does not take, or a value out of bounds.
    """
    if name not in PREFERENCE_LOSSES:
        known_as = METHODS.get(name.lower())
        hint = f"the loss of {name} is '{known_as}'" if known_as else nearest(name, PREFERENCE_LOSSES)
        hint = hint or f"one of {', '.join(PREFERENCE_LOSSES)}"
        raise InputError(f"no preference loss '{name}'", where, hint)
    known = PREFERENCE_LOSSES[name].options
    problems = [
        Problem(
            f"the loss {name} has no option {option}", where, nearest(option, known) or f"it has {', '.join(known)}"
        )
        for option in given
        if option not in known
    ]
    problems += [
        Problem(f"{option} of the loss {name} is {given[option]:g}; it must be {bounds}", where)
        for option, bounds in known.items()
        if option in given and not bounds.holds(given[option])
    ]
    if problems:
        raise InputError(problems)
    return {option: given.get(option, bounds.default) for option, bounds in known.items()}
