"""Say in words what limits the traced steps, and which keys of recipe and profile would help. Pure functions.

Gains are estimates from the measured shares. They name the part of a step, or of the time per row, that would be saved.
They do not add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

MOST_EXPOSED = 0.20  # above this share of exposed communication, remedies are listed
MOST_DATA, MOST_IDLE, MOST_OPTIMIZER = 0.05, 0.20, 0.15
LEAST_GAIN = 0.01  # remedies with a smaller gain are left out
UNEVEN = 0.10  # of a step: one rank has more work than the others


@dataclass(frozen=True)
class Setting:
    """The settings of a traced run that remedies depend on.

    Attributes:
        gathers_weights: Whether ranks hold shards of the weights and gather them for each micro-batch.
        change_to_gather_once: Key and value of the profile by which weights are gathered once for a micro-batch, or
            None.
        processes: Number of ranks.
        accumulation: Micro-batches of a step on one rank.
        micro_size: Rows of a micro-batch.
        precision: Of the recipe.
        adapter: Type of the adapter; None without one.
        evens_rows: Whether the recipe sets data.packing or data.group_by_length.
        workers: Loader processes.
        compiled: Whether layers are compiled.
        on_gpu: Whether the ranks use GPUs.
    """

    gathers_weights: bool
    change_to_gather_once: str | None
    processes: int
    accumulation: int
    micro_size: int
    precision: str
    adapter: str | None
    evens_rows: bool
    workers: int
    compiled: bool
    on_gpu: bool


@dataclass(frozen=True)
class Remedy:
    """A change that would help.

    Attributes:
        change: The change, with the key of the recipe or profile.
        gain: Estimated part of a step that it saves, from 0 to 1.
        note: What else the change does.
    """

    change: str
    gain: float
    note: str

    def __str__(self) -> str:
        return f"{self.change}: up to {self.gain:.0%} of a step; {self.note}"


def own_work(shares: Mapping[str, float]) -> float:
    """Return the share of a step in which a rank does not wait in exposed communication."""
    return 1 - shares["exposed"]


def slowest(shares: Mapping[int, Mapping[str, float]]) -> tuple[int, float]:
    """Return the rank with the most own work, and how much more than the rank with the least, as a share of a step.

    All ranks take the same time for a step. The slowest one waits least for the others.
    """
    rank = max(shares, key=lambda rank: (own_work(shares[rank]), -rank))
    return rank, own_work(shares[rank]) - min(map(own_work, shares.values()))


def communication_remedies(shares: Sequence[Mapping[str, float]], gather: float, setting: Setting) -> list[Remedy]:
    """Return the remedies for exposed communication, that with the largest gain first.

    Args:
        shares: The shares of each rank.
        gather: Share of the time of collectives that gathers weights.
        setting: The settings of the run.
    """
    transfer = min(share["exposed"] for share in shares)  # the rank that waits least for others
    waiting = fmean(share["exposed"] for share in shares) - transfer
    found = _communication_remedies(transfer, waiting, gather, setting)
    return sorted((remedy for remedy in found if remedy.gain >= LEAST_GAIN), key=lambda remedy: -remedy.gain)


def _communication_remedies(transfer: float, waiting: float, gather: float, setting: Setting) -> Iterator[Remedy]:
    if not setting.evens_rows:
        yield Remedy(
            "recipe: data.group_by_length: true, or data.packing: true",
            waiting,
            "ranks have equal work and wait less for each other; the rows of a step change",
        )
    if setting.gathers_weights and setting.accumulation > 1:
        yield Remedy(
            f"recipe: batch.micro_size: {setting.micro_size * setting.accumulation}",
            transfer * (1 - 1 / setting.accumulation),
            f"weights and gradients travel once per step instead of {setting.accumulation} times; needs more memory",
        )
    yield Remedy(
        "recipe: batch.global_size: twice the value",
        transfer / 2,
        "gradients travel for twice as many rows (the gain is per row); the loss curve changes",
    )
    if setting.gathers_weights:
        yield Remedy(
            "profile: ddp (or zero2), if `ftcli plan` says that it fits",
            transfer * gather,
            "weights are not gathered; needs more memory",
        )
    if setting.change_to_gather_once is not None:
        yield Remedy(
            f"profile: {setting.change_to_gather_once}",
            transfer * gather / 2,
            "weights are gathered once per micro-batch; needs memory for all weights in the backward pass",
        )
    if setting.gathers_weights and setting.precision == "fp32":
        yield Remedy(
            "recipe: precision: bf16",
            transfer / 2,
            "weights and gradients travel in 16 bits, and compute is faster on GPUs; the loss curve changes",
        )
    if setting.adapter is None:
        yield Remedy(
            "recipe: adapter.type: lora",
            transfer * (1 - gather),
            "only the gradients of the adapter travel; another training",
        )


def verdict(
    shares: Mapping[int, Mapping[str, float]], gather: float, setting: Setting
) -> tuple[list[str], list[Remedy]]:
    """Return sentences on what limits the steps, and the remedies for exposed communication.

    Args:
        shares: The shares by rank.
        gather: Share of the time of collectives that gathers weights, as a mean over ranks.
        setting: The settings of the run.

    Returns:
        Sentences, and remedies if communication is above `MOST_EXPOSED`.
    """
    mean = {name: fmean(share[name] for share in shares.values()) for name in next(iter(shares.values()))}
    lines, remedies = [], []
    if setting.processes > 1:
        line = f"communication: {mean['exposed']:.0%} of a step is exposed, {mean['hidden']:.0%} is hidden"
        if mean["exposed"] > MOST_EXPOSED:
            remedies = communication_remedies(list(shares.values()), gather, setting)
            lines.append(f"{line}. More than {MOST_EXPOSED:.0%} is exposed. Remedies, the largest gain first:")
        else:
            lines.append(f"{line}. At most {MOST_EXPOSED:.0%} exposed is normal")
        lines += _describe_slowest(shares)
    lines += _other_limits(mean, setting)
    return lines, remedies


def _describe_slowest(shares: Mapping[int, Mapping[str, float]]) -> list[str]:
    if len(shares) < 2:
        return []
    rank, more = slowest(shares)
    work = f"its own work takes {more:.0%} of a step more than that of the fastest rank"
    if more < UNEVEN:
        return [f"ranks: rank {rank} is the slowest, but {work}, which is little"]
    hint = "If it is always the same rank, run `ftcli doctor` on its machine"
    return [f"ranks: rank {rank} is the slowest: {work}, which waits for it. {hint}"]


def _other_limits(mean: Mapping[str, float], setting: Setting) -> Iterator[str]:
    """Yield a sentence for each other part above its bound, and for steps that compute most of the time."""
    if mean["data"] > MOST_DATA:
        more = f"data.workers: {max(2, setting.workers * 2)} loads rows beside the training"
        yield f"data: {mean['data']:.0%} of a step waits for rows. recipe: {more}"
    if mean["idle"] > MOST_IDLE:
        device = "the GPU waits for Python" if setting.on_gpu else "Python runs between operators"
        keys = [] if setting.compiled or not setting.on_gpu else ["model.torch_compile: true"]
        keys += [f"batch.micro_size: above {setting.micro_size}"] if setting.accumulation > 1 else []
        keys += [] if keys else ["batch.global_size and batch.micro_size: larger (the loss curve changes)"]
        yield f"host: {mean['idle']:.0%} of a step {device}. recipe: {'; '.join(keys)}"
    if mean["optimizer"] > MOST_OPTIMIZER:
        hint = "batch.global_size: larger, so that there are fewer updates per row (the loss curve changes)"
        lora = "; adapter.type: lora trains fewer weights" if setting.adapter is None else ""
        yield f"optimizer: {mean['optimizer']:.0%} of a step. recipe: {hint}{lora}"
    if mean["compute"] + mean["hidden"] > 0.5:
        hint = "; precision: bf16 is faster on GPUs (the loss curve changes)" if setting.precision == "fp32" else ""
        yield f"compute: {mean['compute'] + mean['hidden']:.0%} of a step. The kernels below are the limit{hint}"
