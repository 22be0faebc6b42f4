"""Losses of pairs: value and gradient against the papers in float64, extreme margins, options, and TRL's functions.

The transcriptions below are written from the papers with probabilities and odds, not with log-sigmoids, and each on
one pair of Python numbers. Gradients of the transcriptions are central differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ftcli.runtime.errors import InputError
from ftcli.tasks.shared.preference_losses import (
    PairLogps,
    implicit_rewards,
    log1mexp,
    log_odds,
    match_ranks,
)
from ftcli.tasks.shared.preference_options import PREFERENCE_LOSSES, Bounds, loss_options

from ....support.trl_trainer import trl_attributes

# One pair of numbers: lp of both answers under the policy, then under the reference, then both numbers of tokens.
Pair = tuple[float, float, float, float, float, float]


def preferred(strength: float) -> float:
    """Return the Bradley-Terry probability that the first of two wins whose rewards differ by `strength`."""
    return math.exp(strength / 2) / (math.exp(strength / 2) + math.exp(-strength / 2))


def odds(mean_logp: float) -> float:
    return math.exp(mean_logp) / (1 - math.exp(mean_logp))


def bernoulli_divergence(p: float, q: float) -> float:
    """Return KL((p, 1 - p) || (q, 1 - q))."""
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def dpo_likelihood(pair: Pair, beta: float) -> float:
    """Return p*(y_w > y_l) of DPO's preference model: a ratio of powers of likelihood ratios."""
    w, l, rw, rl, _, _ = pair  # noqa: E741
    chosen, rejected = (math.exp(w) / math.exp(rw)) ** beta, (math.exp(l) / math.exp(rl)) ** beta
    return chosen / (chosen + rejected)


def paper_sigmoid(pair: Pair, beta: float, label_smoothing: float) -> float:
    p = dpo_likelihood(pair, beta)
    return -(math.log(p) * (1 - label_smoothing) + math.log(1 - p) * label_smoothing)


def paper_robust(pair: Pair, beta: float, label_smoothing: float) -> float:
    p, e = dpo_likelihood(pair, beta), label_smoothing
    return math.log(p ** (e - 1) * (1 - p) ** e) / (1 - 2 * e)


def paper_hinge(pair: Pair, beta: float) -> float:
    p = dpo_likelihood(pair, beta)
    return max(0.0, 1 - math.log(p / (1 - p)))


def paper_ipo(pair: Pair, beta: float) -> float:
    w, l, rw, rl, nw, nl = pair  # noqa: E741
    h = math.log((math.exp(w - rw)) ** (1 / nw) * (math.exp(rl - l)) ** (1 / nl))
    return (h - 0.5 / beta) ** 2


def paper_exo_pair(pair: Pair, beta: float, label_smoothing: float) -> float:
    return bernoulli_divergence(dpo_likelihood(pair, beta), 1 - label_smoothing)


def paper_nca_pair(pair: Pair, beta: float) -> float:
    w, l, rw, rl, _, _ = pair  # noqa: E741
    is_model = [preferred(beta * (lp - ref)) for lp, ref in ((w, rw), (l, rl))]
    return -math.log(is_model[0]) - sum(0.5 * math.log(1 - each) for each in is_model)


def paper_bco_pair(pair: Pair, beta: float) -> float:
    w, l, rw, rl, _, _ = pair  # noqa: E741
    return -math.log(preferred(beta * (w - rw)) * (1 - preferred(beta * (l - rl))))


def paper_sppo_hard(pair: Pair, beta: float) -> float:
    w, l, rw, rl, _, _ = pair  # noqa: E741
    eta = 1 / beta
    return sum((lp - ref - eta * (p - 0.5)) ** 2 for lp, ref, p in ((w, rw, 1.0), (l, rl, 0.0)))


def paper_apo_zero(pair: Pair, beta: float) -> float:
    w, l, rw, rl, _, _ = pair  # noqa: E741
    return 1 + preferred(beta * (l - rl)) - preferred(beta * (w - rw))


def paper_apo_down(pair: Pair, beta: float) -> float:
    w, _, rw, _, _, _ = pair
    return 1 + preferred(beta * (w - rw)) - dpo_likelihood(pair, beta)


def paper_discopop(pair: Pair, beta: float, tau: float) -> float:
    p = dpo_likelihood(pair, beta)
    odds_of_pair = p / (1 - p)
    gate = 1 / (1 + odds_of_pair ** (-1 / tau))
    return (1 - gate) * math.log(1 + 1 / odds_of_pair) + gate / odds_of_pair


def paper_sigmoid_norm(pair: Pair, beta: float) -> float:
    w, l, rw, rl, nw, nl = pair  # noqa: E741
    chosen, rejected = math.exp(w - rw) ** (beta / nw), math.exp(l - rl) ** (beta / nl)
    return math.log((chosen + rejected) / chosen)


def paper_simpo(pair: Pair, beta: float, gamma: float) -> float:
    w, l, _, _, nw, nl = pair  # noqa: E741
    chosen, rejected = math.exp(w) ** (beta / nw), math.exp(l) ** (beta / nl)
    return math.log(1 + rejected / chosen * math.exp(gamma))


def paper_cpo(pair: Pair, beta: float, label_smoothing: float) -> float:
    w, l, _, _, nw, nl = pair  # noqa: E741
    return paper_sigmoid((w, l, 0.0, 0.0, nw, nl), beta, label_smoothing)


def paper_orpo(pair: Pair, beta: float) -> float:
    w, l, _, _, nw, nl = pair  # noqa: E741
    return beta * math.log(1 + odds(l / nl) / odds(w / nw))


PAPERS: dict[str, tuple[Callable[..., float], dict[str, float]]] = {
    "sigmoid": (paper_sigmoid, {"beta": 0.1, "label_smoothing": 0.2}),
    "robust": (paper_robust, {"beta": 0.3, "label_smoothing": 0.1}),
    "hinge": (paper_hinge, {"beta": 0.2}),
    "ipo": (paper_ipo, {"beta": 0.4}),
    "exo_pair": (paper_exo_pair, {"beta": 0.3, "label_smoothing": 0.01}),
    "nca_pair": (paper_nca_pair, {"beta": 0.2}),
    "bco_pair": (paper_bco_pair, {"beta": 0.2}),
    "sppo_hard": (paper_sppo_hard, {"beta": 0.3}),
    "apo_zero": (paper_apo_zero, {"beta": 0.2}),
    "apo_down": (paper_apo_down, {"beta": 0.2}),
    "discopop": (paper_discopop, {"beta": 0.1, "tau": 0.4}),
    "sigmoid_norm": (paper_sigmoid_norm, {"beta": 2.0}),
    "simpo": (paper_simpo, {"beta": 2.0, "gamma": 0.7}),
    "cpo": (paper_cpo, {"beta": 0.2, "label_smoothing": 0.1}),
    "orpo": (paper_orpo, {"beta": 0.4}),
}
# Both signs of every difference, unequal lengths, one answer of a single token.
PAIRS: list[Pair] = [
    (-7.1, -9.3, -8.2, -8.0, 5, 9),
    (-12.4, -3.3, -10.0, -4.1, 8, 1),
    (-2.5, -2.5, -2.5, -2.5, 3, 3),
    (-0.9, -21.0, -6.0, -11.5, 2, 13),
]


def pair_tensors(pairs: list[Pair], dtype: torch.dtype = torch.float64, *, has_reference: bool = True) -> PairLogps:
    columns = torch.tensor(pairs, dtype=dtype).T
    chosen, rejected = (columns[row].clone().requires_grad_() for row in (0, 1))
    references = (columns[2], columns[3]) if has_reference else (None, None)
    return PairLogps(chosen, rejected, columns[4].long(), columns[5].long(), *references)


def slopes(function: Callable[..., float], pair: Pair, options: dict[str, float]) -> tuple[float, float]:
    """Return central differences of a transcription for both log-probabilities of the policy."""
    step, results = 1e-6, []
    for place in (0, 1):
        high, low = list(pair), list(pair)
        high[place] += step
        low[place] -= step
        results.append((function(tuple(high), **options) - function(tuple(low), **options)) / (2 * step))
    return results[0], results[1]


@pytest.mark.parametrize("name", PAPERS)
def test_loss_of_a_pair_equals_the_paper_in_value_and_gradient(name: str) -> None:
    paper, options = PAPERS[name]
    loss = PREFERENCE_LOSSES[name]
    pairs = pair_tensors(PAIRS, has_reference=loss.needs_reference)
    parts = loss.function(pairs, **options)
    parts.sum().backward()
    assert parts.dtype == torch.float64
    expected = torch.tensor([paper(pair, **options) for pair in PAIRS], dtype=torch.float64)
    torch.testing.assert_close(parts.detach(), expected, rtol=1e-12, atol=1e-12)
    gradients = torch.stack([pairs.chosen.grad, pairs.rejected.grad]).T
    reference = torch.tensor([slopes(paper, pair, options) for pair in PAIRS], dtype=torch.float64)
    torch.testing.assert_close(gradients, reference, rtol=1e-7, atol=1e-8)


def test_every_loss_of_the_table_has_a_transcription() -> None:
    assert PREFERENCE_LOSSES.keys() == PAPERS.keys() | {"aot"}


def test_sigmoid_with_a_margin_asks_for_a_larger_difference() -> None:
    pairs = pair_tensors(PAIRS)
    margin = torch.tensor([0.5, 0.0, 1.5, 2.0], dtype=torch.float64)
    raised = PairLogps(
        pairs.chosen,
        pairs.rejected,
        pairs.chosen_tokens,
        pairs.rejected_tokens,
        pairs.ref_chosen,
        pairs.ref_rejected,
        margin,
    )
    actual = PREFERENCE_LOSSES["sigmoid"].function(raised, beta=0.1, label_smoothing=0.0)
    expected = [
        math.log(1 + math.exp(m) / (p / (1 - p)))
        for m, p in zip(margin.tolist(), (dpo_likelihood(pair, 0.1) for pair in PAIRS), strict=True)
    ]
    torch.testing.assert_close(actual.detach(), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
@pytest.mark.parametrize("lengths", [(100, 100), (1, 4000), (0, 0)])
def test_extreme_log_probabilities_give_finite_values_and_gradients(
    name: str, dtype: torch.dtype, lengths: tuple[int, int]
) -> None:
    far = [(0.0, -9000.0), (-9000.0, 0.0), (-1e-9, -1e-9), (0.0, 0.0), (-5000.0, -5000.0)]
    pairs = [(w, l, rw, rl, *lengths) for w, l in far for rw, rl in far]  # noqa: E741
    loss = PREFERENCE_LOSSES[name]
    given = pair_tensors(pairs, dtype, has_reference=loss.needs_reference)
    options: dict[str, Any] = loss_options(name, {}, "task_options")
    if loss.needs_ranks:
        options["matched"] = torch.linspace(-9000, 9000, len(pairs))
    parts = loss.function(given, **options)
    parts.sum().backward()
    assert parts.dtype == torch.float32 and parts.shape == (len(pairs),)
    assert parts.isfinite().all()
    assert given.chosen.grad is not None and given.rejected.grad is not None
    assert given.chosen.grad.isfinite().all() and given.rejected.grad.isfinite().all()


@pytest.mark.parametrize("name", sorted(set(PREFERENCE_LOSSES) - {"aot"}))
def test_parts_of_a_pair_do_not_depend_on_the_other_pairs(name: str) -> None:
    loss, options = PREFERENCE_LOSSES[name], loss_options(name, {}, "task_options")
    whole = loss.function(pair_tensors(PAIRS), **options)
    alone = [loss.function(pair_tensors([pair]), **options) for pair in PAIRS]
    assert torch.equal(whole, torch.cat(alone))


@pytest.mark.parametrize(
    "name", [name for name, loss in PREFERENCE_LOSSES.items() if loss.needs_reference and not loss.needs_ranks]
)
def test_a_loss_that_needs_a_reference_is_refused_without_one(name: str) -> None:
    pairs = pair_tensors(PAIRS, has_reference=False)
    with pytest.raises(ValueError, match="reference model"):
        PREFERENCE_LOSSES[name].function(pairs, **loss_options(name, {}, "task_options"))


def test_aot_equals_the_sorted_form_of_the_paper() -> None:
    pairs, beta = pair_tensors(PAIRS), 0.3
    differences = pairs.chosen - pairs.rejected
    reference = pairs.ref_chosen - pairs.ref_rejected
    matched = match_ranks(differences, reference)
    actual = PREFERENCE_LOSSES["aot"].function(pairs, beta=beta, label_smoothing=0.0, matched=matched)
    actual.sum().backward()
    values = sorted(pair[0] - pair[1] for pair in PAIRS), sorted(rw - rl for _, _, rw, rl, *_ in PAIRS)
    expected = sum(math.log(1 + math.exp(-beta * (own - other))) for own, other in zip(*values, strict=True))
    assert actual.sum().item() == pytest.approx(expected, rel=1e-12)
    # The slope of each pair is that of its own place in the sorted list.
    assert pairs.chosen.grad is not None
    ranks = sorted(range(len(PAIRS)), key=lambda index: PAIRS[index][0] - PAIRS[index][1])
    for rank, index in enumerate(ranks):
        slope = -beta * (1 - preferred(beta * (values[0][rank] - values[1][rank])))
        assert pairs.chosen.grad[index].item() == pytest.approx(slope, rel=1e-9)


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=12), st.randoms())
def test_match_ranks_is_a_permutation_that_keeps_the_order(values: list[float], random: Any) -> None:
    policy = torch.tensor(values)
    reference = torch.tensor(random.sample(range(len(values)), len(values)), dtype=torch.float32)
    matched = match_ranks(policy, reference)
    assert sorted(matched.tolist()) == sorted(reference.tolist())
    order = policy.argsort(stable=True)
    assert matched[order].tolist() == sorted(reference.tolist())


def test_aot_of_micro_batches_adds_up_to_that_of_the_step() -> None:
    pairs = pair_tensors(PAIRS)
    matched = match_ranks(pairs.chosen - pairs.rejected, pairs.ref_chosen - pairs.ref_rejected)
    options = {"beta": 0.1, "label_smoothing": 0.1}
    whole = PREFERENCE_LOSSES["aot"].function(pairs, matched=matched, **options)
    alone = [
        PREFERENCE_LOSSES["aot"].function(pair_tensors([pair]), matched=matched[index : index + 1], **options)
        for index, pair in enumerate(PAIRS)
    ]
    assert torch.equal(whole, torch.cat(alone))


@given(st.floats(-700, -1e-6))
def test_log1mexp_is_exact_on_both_sides_of_its_switch(value: float) -> None:
    number = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    actual = log1mexp(number)
    actual.backward()
    expected = math.log1p(-math.exp(value)) if value < -0.5 else math.log(-math.expm1(value))
    assert actual.item() == pytest.approx(expected, rel=1e-13, abs=1e-300)
    assert number.grad is not None
    assert number.grad.item() == pytest.approx(1 / -math.expm1(-value) if value > -700 else 0, rel=1e-12)


def test_log_odds_of_certain_and_of_impossible_answers_are_finite() -> None:
    values = torch.tensor([0.0, -1e-12, -1e-3, -1.0, -90.0, -1e4], requires_grad=True)
    actual = log_odds(values)
    actual.sum().backward()
    assert actual.isfinite().all() and values.grad is not None and values.grad.isfinite().all()
    assert actual.tolist() == sorted(actual.tolist(), reverse=True)
    assert actual[3].item() == pytest.approx(math.log(odds(-1.0)), rel=1e-6)
    assert actual[5].item() == -1e4


def test_rewards_are_without_gradient_and_need_no_reference() -> None:
    pairs = pair_tensors(PAIRS)
    chosen, rejected = implicit_rewards(pairs, 0.1)
    assert not chosen.requires_grad and not rejected.requires_grad
    assert chosen.tolist() == pytest.approx([0.1 * (w - rw) for w, _, rw, *_ in PAIRS])
    chosen, rejected = implicit_rewards(pair_tensors(PAIRS, has_reference=False), 0.1)
    assert rejected.tolist() == pytest.approx([0.1 * pair[1] for pair in PAIRS])


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("sigmoyd", {}, "no preference loss 'sigmoyd'"),
        ("ipo", {"label_smoothing": 0.1}, "the loss ipo has no option label_smoothing"),
        (
            "robust",
            {"label_smoothing": 0.5},
            "label_smoothing of the loss robust is 0.5; it must be at least 0 and below 0.5",
        ),
        ("exo_pair", {"label_smoothing": 0.0}, "it must be above 0 and below 0.5"),
        ("sigmoid", {"beta": 0.0}, "beta of the loss sigmoid is 0; it must be above 0"),
        ("sigmoid", {"beta": math.nan}, "beta of the loss sigmoid is nan"),
        ("discopop", {"tau": 1.5}, "tau of the loss discopop is 1.5"),
    ],
)
def test_options_out_of_bounds_are_refused(name: str, given: dict[str, float], words: str) -> None:
    with pytest.raises(InputError) as refused:
        loss_options(name, given, "task_options.loss")
    (problem,) = refused.value.problems
    assert words in problem.what and problem.where == "task_options.loss"


def test_options_that_are_not_given_have_their_default() -> None:
    assert loss_options("simpo", {"beta": 2.5}, "x") == {"beta": 2.5, "gamma": 1.0}
    for name, loss in PREFERENCE_LOSSES.items():
        defaults = loss_options(name, {}, "x")
        assert defaults.keys() == loss.options.keys()
        assert all(loss.options[option].holds(value) for option, value in defaults.items())


def test_the_page_lists_every_loss_with_its_options_and_whether_it_has_a_reference() -> None:
    page = Path(__file__).parents[4] / "docs" / "explanation" / "preference-losses.md"
    rows = [[cell.strip() for cell in line.split(" | ")] for line in page.read_text(encoding="utf-8").splitlines()]
    listed = {row[0].strip("| `"): row[2:4] for row in rows if len(row) == 5}
    for name, loss in PREFERENCE_LOSSES.items():
        options = ", ".join(f"{option} ({bounds.default:g})" for option, bounds in loss.options.items())
        assert listed[name] == [options, "yes" if loss.needs_reference else "no"]


def test_bounds_are_open_above_and_closed_below_where_they_include_it() -> None:
    bounds = Bounds(0.0, high=0.5, includes_low=True)
    assert bounds.holds(0.0) and bounds.holds(0.49) and not bounds.holds(0.5) and not bounds.holds(-0.1)
    assert not Bounds(0.1).holds(math.inf)


# --- TRL's own functions, where TRL can be imported ------------------------------------------------------------------

TOKENS = 6  # of each row, prompt included
TRL_LOSSES = sorted(set(PREFERENCE_LOSSES) - {"simpo", "cpo", "orpo"})


class Table(torch.nn.Module):
    """Log-probabilities of tokens from a table, as TRL asks a model for them. Its weights are the log-probabilities."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.log_probs = torch.nn.Parameter(values)

    def forward(self, labels: Tensor, **_: Any) -> Any:
        zeros = torch.zeros_like(self.log_probs)
        logps = torch.where(labels[:, 1:] == -100, zeros, self.log_probs)
        return SimpleNamespace(log_probs=logps, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


def answer_mask() -> Tensor:
    """Return `[2P, TOKENS]`: chosen rows, then rejected rows, all with two tokens of prompt and unequal answers."""
    lengths = torch.tensor([4, 2, 3, 1, 2, 4])
    places = torch.arange(TOKENS)[None]
    return ((places >= 2) & (places < 2 + lengths[:, None])).long()


@pytest.mark.parametrize("name", TRL_LOSSES)
def test_loss_equals_that_of_trl_on_the_same_batch(name: str, trl: Any) -> None:
    from trl.trainer.dpo_trainer import DPOTrainer

    loss, mask = PREFERENCE_LOSSES[name], answer_mask()
    generator = torch.Generator().manual_seed(1)
    values = -3 * torch.rand(6, TOKENS - 1, generator=generator, dtype=torch.float64)
    reference = -3 * torch.rand(6, generator=generator, dtype=torch.float64) - 4
    # TRL smooths labels of `robust`, `exo_pair` and `aot`; its `sigmoid` has no smoothing.
    given = {"beta": 0.3} | ({"label_smoothing": 0.1} if name in ("robust", "exo_pair", "aot") else {})
    options: dict[str, Any] = loss_options(name, given, "task_options")
    theirs = Table(values.clone())
    trainer = SimpleNamespace(
        **trl_attributes(),
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        use_weighting=False,
        loss_types=[name],
        loss_weights=[1.0],
        beta=options["beta"],
        label_smoothing=options.get("label_smoothing", 0.0),
        args=SimpleNamespace(discopop_tau=options.get("tau", 0.05)),
    )
    ref_chosen, ref_rejected = reference.chunk(2)
    inputs = {
        "input_ids": torch.ones(6, TOKENS, dtype=torch.int64),
        "attention_mask": torch.ones(6, TOKENS, dtype=torch.int64),
        "completion_mask": mask,
        "ref_chosen_logps": ref_chosen,
        "ref_rejected_logps": ref_rejected,
    }
    their_loss = DPOTrainer._compute_loss(trainer, theirs, inputs, False)
    their_loss.backward()

    ours = values.clone().requires_grad_()
    chosen, rejected = (ours * mask[:, 1:]).sum(1).chunk(2)
    pairs = PairLogps(chosen, rejected, *mask.sum(1).chunk(2), ref_chosen, ref_rejected)
    if loss.needs_ranks:
        options["matched"] = match_ranks(chosen - rejected, ref_chosen - ref_rejected)
    our_loss = loss.function(pairs, **options).mean()
    our_loss.backward()
    torch.testing.assert_close(our_loss, their_loss, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(ours.grad, theirs.log_probs.grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["simpo", "cpo", "orpo"])
def test_loss_without_reference_equals_that_of_trl_per_pair(name: str, trl: Any) -> None:
    from trl.experimental.cpo.cpo_trainer import CPOTrainer
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    pairs = pair_tensors(PAIRS, torch.float32, has_reference=False)
    accelerator = SimpleNamespace(device="cpu")
    means = [lp.detach() for lp in pairs.mean_logps()]
    options = loss_options(name, {"beta": 0.5}, "task_options")
    if name == "orpo":
        losses, *_ = ORPOTrainer.odds_ratio_loss(SimpleNamespace(beta=0.5, accelerator=accelerator), *means)
        expected = -losses  # TRL subtracts it
    else:
        trainer = SimpleNamespace(
            beta=0.5,
            alpha=0.0,
            label_smoothing=0.0,
            accelerator=accelerator,
            simpo_gamma=options.get("gamma"),
            loss_type="simpo" if name == "simpo" else "sigmoid",
        )
        logps = means if name == "simpo" else [pairs.chosen.detach(), pairs.rejected.detach()]
        expected, *_ = CPOTrainer.cpo_loss(trainer, *logps)
    torch.testing.assert_close(
        PREFERENCE_LOSSES[name].function(pairs, **options).detach(), expected, rtol=2e-6, atol=1e-6
    )


def test_losses_of_trl_are_not_finite_where_ours_are(trl: Any) -> None:
    """Show the two numerical differences that docs/explanation/preference-losses.md names."""
    from trl.experimental.orpo.orpo_trainer import log1mexp as trl_log1mexp

    logits = torch.tensor([-100.0])  # as TRL's DPOTrainer writes discopop
    theirs = -torch.nn.functional.logsigmoid(logits) * (1 - torch.sigmoid(logits / 0.05))
    theirs = theirs + torch.exp(-logits) * torch.sigmoid(logits / 0.05)
    ours = PREFERENCE_LOSSES["discopop"].function(
        pair_tensors([(-200.0, -100.0, -100.0, -100.0, 9, 9)], torch.float32), beta=1.0, tau=0.05
    )
    assert theirs.isnan().all() and ours.item() == pytest.approx(100.0)

    theirs, ours = (torch.tensor([-1e-8], requires_grad=True) for _ in range(2))
    trl_log1mexp(theirs).sum().backward()
    log1mexp(ours).sum().backward()
    assert theirs.grad is not None and theirs.grad.isnan().all()
    assert ours.grad is not None and ours.grad.isfinite().all()
