"""Check that every trained tensor receives a gradient.

A wrong freeze, an unused head or a detached part of the graph raises no error; it only makes the result worse. The
check reads the optimizer's moments, which every backend has and every checkpoint stores. Without a gradient they are
exactly zero, or after a resume exactly the decayed values. So one check at one step of each launch is enough. The names
of the trained tensors are recorded when the run is prepared. This module is independent of the backend.

SGD without momentum stores no gradient, so there is no check. The momentum of SGD includes the weight decay, so a
decayed tensor seems to have a gradient. `Hardware.missing` knows those without one, except under ZeRO.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ftcli.hardware.gradient_clipping import norms_of
from ftcli.hardware.optimizer_state import MOMENTS, MOMENTUM
from ftcli.models.architectures import EXPERT_MODULES
from ftcli.runtime.errors import RunError
from ftcli.runtime.log import log_line

if TYPE_CHECKING:
    from torch import nn

    from ftcli.config.recipe import Recipe
    from ftcli.training.run import Run


Norms = dict[tuple[str, int], float]  # (tensor, start of its shard) -> 2-norm of the first moment on this process

CHECKED_AFTER_STEPS = 20  # of a launch; a shorter launch is checked after its last step
ROUNDING = 5e-6  # relative error of a float32 moment that decayed for `CHECKED_AFTER_STEPS` steps
MAX_TENSORS_NAMED = 8
ELEMENTS_AT_ONCE = 2**26  # of moments whose norms are computed together
UNUSED = (
    "Is a part of the model not used, or detached from the loss? If this is intended, name the modules in the task's "
    "`sparse`, or set faults.missing_gradient: warn"
)
NEW_ROWS = "trainable_tokens_delta"  # peft's name of the rows of new tokens


@dataclass(frozen=True)
class Resumed:
    """State of a run directly after it was resumed.

    Attributes:
        step: Number of steps that were done.
        skipped: Number of those steps that did not change the weights.
        moments: Norms of the first moments on this process.
    """

    step: int
    skipped: int
    moments: Norms

    @classmethod
    def of(cls, run: Run) -> Resumed:
        """Return the state of a run that has just loaded a checkpoint. Waits for the device."""
        return cls(run.first_step, skipped_steps(run), first_moments(run))


def check_still_trained(run: Run, weights: list[nn.Parameter]) -> None:
    """Check that no trained tensor was frozen since the run was prepared. Reads no values of tensors.

    Args:
        run: The run.
        weights: The parameters of `Hardware.trained`.

    Raises:
        RunError: `requires_grad` of a trained tensor is False. On every process.
    """
    if all(weight.requires_grad for weight in weights):
        return
    names = run.hardware.trained_shapes(run.model)
    changed = [name for name, weight in zip(names, weights, strict=True) if not weight.requires_grad]
    raise RunError(
        f"{len(changed)} of {len(names)} trained tensors do not require a gradient any more: {_list_names(changed)}. "
        "What is trained is decided when the run is prepared (a task freezes parameters in `finish_model`). "
        "To compute without the adapter use `with ftcli.disable_adapter(model):`, not peft's own method, which changes "
        "requires_grad"
    )


def check_gradients(run: Run, step: int) -> None:
    """Check once in each launch that all trained tensors receive gradients. A collective at that one step.

    A new run is checked after step 20, or after its last step if it is shorter. A resumed run is checked after 20
    further steps. A run with a single update is not checked, because LoRA's A has no gradient before B has changed.
    Tensors that may rarely get a gradient are left out: those of modules in `EXPERT_MODULES` or in the task's `sparse`,
    embeddings of new tokens, and the bias of a single score, which cancels where scores are only compared.

    Args:
        run: The run.
        step: Number of the step that was just done.

    Raises:
        RunError: Tensors have no gradient. With `faults.missing_gradient: warn` they are logged instead.
    """
    if not _stores_gradients(run.recipe):
        return
    if step == min(CHECKED_AFTER_STEPS, run.steps) and step - skipped_steps(run) >= 2:
        _report_missing(run, _with_gradient(run), step)
    elif run.resumed is not None and step == run.resumed.step + CHECKED_AFTER_STEPS:
        seen = _changed(run, run.resumed)
        if any(run.hardware.ranks.collect(bool(seen))):  # a loss of exactly zero changes no moment
            _report_missing(run, seen, CHECKED_AFTER_STEPS)


def _stores_gradients(recipe: Recipe) -> bool:
    """Return whether the optimizer's state shows which tensors had gradients."""
    return recipe.optimizer.name != "sgd" or recipe.optimizer.momentum > 0


def skipped_steps(run: Run) -> int:
    """Return the number of steps that did not change the weights: bad ones, and overflows under fp16."""
    scale = run.hardware.loss_scale
    return len(run.guard.record) + (0 if scale is None else scale.skipped)


def rare_module_names(task: Any) -> set[str]:
    """Return the names of modules that not every row uses: those of experts, and those in the task's `sparse`.

    Args:
        task: The task of the run.
    """
    return {*EXPERT_MODULES, *getattr(task, "sparse", ())}


def _report_missing(run: Run, seen: set[str], steps: int) -> None:
    """Stop the run or warn if no process has seen a gradient of some tensors. A collective."""
    shapes = run.hardware.trained_shapes(run.model)
    names, weights = list(shapes), run.hardware.trained(run.model)
    never = [run.hardware.missing.never_had(weight) for weight in weights]
    found = [int(name in seen and not missing) for name, missing in zip(names, never, strict=True)]
    counts = run.hardware.ranks.sum_later(found)()
    rare_modules = rare_module_names(run.task)
    model = run.hardware.unwrap(run.model)
    dead = [
        name
        for name, n in zip(names, counts, strict=True)
        if not n
        and rare_modules.isdisjoint(name.split("."))
        and not _is_rare(model, name)
        and not (name.endswith(".bias") and shapes[name] == [1])  # of a single score
    ]
    if not dead:
        return
    message = f"{len(dead)} of {len(names)} trained tensors had no gradient in {steps} steps: {_list_names(dead)}"
    if run.recipe.faults.missing_gradient == "stop":
        raise RunError(f"{message}. {UNUSED}")
    if run.hardware.ranks.is_main:
        log_line(message)


@contextmanager
def name_unused_tensors(run: Run) -> Iterator[None]:
    """Raise `RunError` with names instead of torch's error if ddp waits for gradients of tensors without one.

    DistributedDataParallel notices such tensors at the forward pass after the first step, long before
    `check_gradients` does. Its error has their numbers among the trained tensors.
    """
    try:
        yield
    except RuntimeError as error:
        found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        if found is None:
            raise
        names = list(run.hardware.trained_shapes(run.model))
        dead = [names[int(number)] for number in found[1].split() if int(number) < len(names)]
        message = f"{len(dead)} of {len(names)} trained tensors had no gradient in a step: {_list_names(dead)}"
        raise RunError(f"{message}. {UNUSED}") from error


def _list_names(names: list[str]) -> str:
    """Return names with commas, at most `MAX_TENSORS_NAMED` of them."""
    more = f" and {len(names) - MAX_TENSORS_NAMED} more" if len(names) > MAX_TENSORS_NAMED else ""
    return f"{', '.join(names[:MAX_TENSORS_NAMED])}{more}"


def _is_rare(model: nn.Module, name: str) -> bool:
    """Return whether a tensor holds the rows of new tokens of an embedding, not those of a head."""
    owner, separator, _ = name.partition(f".{NEW_ROWS}")
    return bool(separator) and isinstance(getattr(model.get_submodule(owner), "base_layer", None), torch.nn.Embedding)


@torch.no_grad()
def first_moments(run: Run) -> Norms:
    """Return the 2-norm of each shard's first moment on this process; waits for the device."""
    norms = _norms_of_moments(run, (MOMENTS[0], MOMENTUM), 2.0, torch.float64)
    return {(name, start): norm for name, start, norm in norms}


def _norms_of_moments(
    run: Run, kinds: Collection[str], order: float, dtype: torch.dtype
) -> Iterator[tuple[str, int, float]]:
    """Yield a norm of each moment on this process: name and start of its shard, and the norm. Waits for the device.

    Many small tensors share one operation. Moments of 8 bits are unpacked for this, so not all are kept.
    """
    places: list[tuple[str, int]] = []
    tensors: list[torch.Tensor] = []
    norms: list[torch.Tensor] = []
    elements = 0
    for shard in run.hardware.state_shards(run.model, run.optimizer):
        found = [tensor for kind in kinds if (tensor := shard.tensors.get(kind)) is not None and tensor.numel()]
        places += [(shard.name, shard.start)] * len(found)
        tensors += found
        elements += sum(tensor.numel() for tensor in found)
        if elements >= ELEMENTS_AT_ONCE:
            norms.append(norms_of(tensors, order, dtype))
            tensors, elements = [], 0
    if tensors:
        norms.append(norms_of(tensors, order, dtype))
    values = torch.cat(norms).tolist() if norms else []
    yield from ((*place, value) for place, value in zip(places, values, strict=True))


def _changed(run: Run, resumed: Resumed) -> set[str]:
    """Return the names of tensors with a gradient on this process since the run was resumed.

    Without a gradient the first moment is unchanged, or has decayed once for each update.
    """
    section = run.recipe.optimizer
    rate = section.momentum if section.name == "sgd" else section.betas[0]
    decay = rate ** (CHECKED_AFTER_STEPS - (skipped_steps(run) - resumed.skipped))
    changed = set()
    for (name, start), norm in first_moments(run).items():
        before = resumed.moments.get((name, start), 0.0)
        if min(abs(norm - before), abs(norm - decay * before)) > ROUNDING * decay * before:
            changed.add(name)
    return changed


@torch.no_grad()
def _with_gradient(run: Run) -> set[str]:
    """Return the names of tensors that have a nonzero moment on this rank."""
    largest = _norms_of_moments(run, (*MOMENTS, MOMENTUM), math.inf, torch.float32)
    return {name for name, _, value in largest if value != 0}
