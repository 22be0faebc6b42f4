"""Define the speed goals of ftcli as ratios between lines of one file, and compare them with measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .curves import apart, within

SPEED = "tokens a second a GPU"
RUN = 900.0  # most seconds between two lines of one run; a machine is used for a few calls of ten minutes
COMPARED = ("ftcli", "unsloth", "torchtitan")  # peers whose line is compared with ours where no reference was measured
Side = tuple[str, str]  # peer and label of a line
PLAIN, EXTRAS = ("ftcli", "no extras"), ("ftcli", "extras")
NO_FLASH, FP8 = ("ftcli", "extras, no flash-attn"), ("ftcli", "fp8, no flash-attn")
BARE, FLASH, TRL, TITAN = ("bare", ""), ("bare", "flash-attn-4"), ("trl", ""), ("torchtitan", "")


@dataclass(frozen=True)
class Goal:
    """A goal: the speed of `ours` is at least `least` times that of `theirs`.

    `where` has the fields of both lines, `there` further fields of the other line.
    """

    what: str
    where: dict[str, Any]
    ours: Side
    theirs: Side
    least: float
    there: dict[str, Any] = field(default_factory=dict)


SMALL = {"shape": "llama-3.2-1b", "length": 4096, "profile": "single", "task": "pretrain", "lora": 0}
LARGE = {"shape": "llama-3.1-8b", "task": "pretrain"}
PURE, MASTERS = {"precision": "bf16_pure"}, {"precision": "bf16"}
QWEN = {"shape": "qwen3-0.6b", "length": 4096, **PURE}
FSDP, ZERO = (LARGE | MASTERS | {"length": 8192, "profile": name, "lora": 0} for name in ("fsdp", "zero3"))
SHARDS = (4, 2)  # numbers of GPUs; the goals were set for four
DDP = SMALL | MASTERS | {"profile": "ddp"}
OF_FSDP = {"profile": "fsdp"}
SLOWLY = {"learning_rate": 1e-6}  # at 5e-6, random weights amplify the rounding of 8 bits
TWO, FOUR = {"processes": 2}, {"processes": 4}
FULL = {"steps": 25}  # the reference of 1B under DDP has so many steps
ALONE = {"profile": "single", "processes": 1}
LORA = LARGE | {"length": 4096, "lora": 16, "micro_size": 2}
QLORA = LORA | {"four_bit": True}
AGAIN = "recomputed"  # label of lines with activation checkpointing
INPUTS_ON_HOST = "recomputed, inputs on the host"
ON_HOST = "recomputed, inputs and embeddings on the host"
HOST_TABLE = "recomputed, embeddings on the host"  # Unsloth's label; its inputs of layers are on the host too
H100 = ("ftcli", "H100")  # label of lines of two H100s, without flash-attn
NO_LIGER = "H100, without Liger"  # Liger's loss fails in shards
SMALLEST = {"shape": "qwen3-0.6b", "length": 4096, "task": "pretrain", "lora": 0} | MASTERS
THREE = {"shape": "llama-3.2-3b", "length": 8192, "task": "pretrain", "lora": 0} | MASTERS
BERT = {"shape": "bert-base", "task": "text_classification", "profile": "single"}
VIT = {"shape": "vit-b16", "task": "image_classification", "profile": "single"}
DEFAULTS, TRAINER = ("hf-trainer-default", ""), ("hf-trainer", "")
GRAPHS = ("hf-trainer", "compiled, CUDA graphs")
LONG = {"steps": 200}
DPO, SORTED = ("trl-dpo", ""), {"settings": ["sort=1"]}
PAIRS = {"task": "preference", "profile": "single"}  # the trainer has the pairs of a step sorted by length
LARGE_PURE = LARGE | PURE | {"length": 4096, "lora": 0}

AS_WRITTEN, LOOP = ("ftcli", "as init writes it"), ("loop", "")
SHORT = {"shape": "qwen3-0.6b", "length": 4096, "median": 250, "task": "sft", "lora": 0} | MASTERS
SHORTER = SHORT | {"length": 1024}  # with longer rows, 16 x 1 needs more than the 140 GiB of an H200
SHORT_LORA = {"shape": "llama-3.1-8b", "length": 4096, "median": 330, "task": "sft", "lora": 16} | MASTERS

GOALS = [
    Goal("0.6B short rows, of the plainest loop, 8 x 2", SHORT, AS_WRITTEN, LOOP, 2.0, {"accumulation": 2}),
    Goal("0.6B shorter rows, of the plainest loop, 16 x 1", SHORTER, AS_WRITTEN, LOOP, 1.3, {"accumulation": 1}),
    Goal("0.6B short rows, of the plainest loop, 4 x 4", SHORT, AS_WRITTEN, LOOP, 2.0, {"accumulation": 4}),
    Goal("0.6B short rows, of the bare loop with Liger", SHORT, AS_WRITTEN, BARE, 1.3, {"accumulation": 1}),
    Goal("8B LoRA short rows, of TRL at its best", SHORT_LORA, ("ftcli", "compiled"), TRL, 1.5),
    Goal("8B LoRA short rows, not compiled, of TRL at its best", SHORT_LORA, ("ftcli", "with Liger"), TRL, 1.3),
    Goal("8B LoRA short rows, no extra package, of TRL at its best", SHORT_LORA, AS_WRITTEN, TRL, 1.0),
    Goal("8B LoRA short rows, no extra package, of TRL's defaults", SHORT_LORA, AS_WRITTEN, ("trl-default", ""), 4.0),
    Goal("8B LoRA short rows, of Unsloth", SHORT_LORA, ("ftcli", "compiled"), ("unsloth", ""), 1.5),
    Goal("8B LoRA short rows, no extra package, of Unsloth", SHORT_LORA, AS_WRITTEN, ("unsloth", ""), 1.0),
    Goal("1B bf16_pure, no extra package, of TRL's defaults", SMALL | PURE, PLAIN, ("trl-default", ""), 4.0),
    Goal("1B bf16_pure, no extra package, of the bare loop with Liger", SMALL | PURE, PLAIN, BARE, 1.0),
    Goal("1B bf16_pure, of TRL at its best", SMALL | PURE, EXTRAS, TRL, 1.15),
    Goal("1B bf16_pure, of the bare loop with flash-attn-4", SMALL | PURE, EXTRAS, FLASH, 1.05),
    Goal("1B float32 weights, of the bare loop with flash-attn-4", SMALL | MASTERS, EXTRAS, FLASH, 1.10),
    Goal("8B bf16_pure, of TRL at its best", LARGE_PURE, EXTRAS, TRL, 1.10),
    Goal("8B LoRA, of TRL at its best", LORA, EXTRAS, TRL, 1.15),
    Goal("8B LoRA, of Unsloth", LORA, EXTRAS, ("unsloth", ""), 1.15),
    Goal("8B QLoRA, of Unsloth", QLORA, EXTRAS, ("unsloth", ""), 1.15),
    Goal(
        "8B QLoRA, one row, recomputed, of Unsloth",
        QLORA | {"micro_size": 1},
        ("ftcli", AGAIN),
        ("unsloth", AGAIN),
        1.1,
    ),
    Goal(
        "8B QLoRA, one row, recomputed, inputs on the host, of Unsloth",
        QLORA | {"micro_size": 1},
        ("ftcli", INPUTS_ON_HOST),
        ("unsloth", AGAIN),
        1.1,
    ),
    Goal(
        "8B QLoRA, one row, recomputed, inputs and embeddings on the host, of Unsloth",
        QLORA | {"micro_size": 1},
        ("ftcli", ON_HOST),
        ("unsloth", AGAIN),
        1.1,
    ),
    *(
        Goal(f"8B {name}, {rows}, no flash-attn 4, of Unsloth", where | {"micro_size": size}, ours, theirs, 1.15)
        for name, where, rows, size, ours, theirs in (
            ("LoRA", LORA, "one row", 1, NO_FLASH, ("unsloth", "")),
            ("LoRA", LORA, "2 rows", 2, NO_FLASH, ("unsloth", "")),
            ("LoRA", LORA, "4 rows", 4, NO_FLASH, ("unsloth", "")),
            ("LoRA", LORA, "8 rows, recomputed", 8, ("ftcli", AGAIN), ("unsloth", AGAIN)),
            ("LoRA", LORA, "8 rows, in tiles", 8, ("ftcli", "tiled, inputs on the host"), ("unsloth", AGAIN)),
            ("LoRA", LORA, "8 rows, inputs on the host", 8, ("ftcli", INPUTS_ON_HOST), ("unsloth", AGAIN)),
            ("QLoRA", QLORA, "one row", 1, NO_FLASH, ("unsloth", "")),
            ("QLoRA", QLORA, "4 rows", 4, NO_FLASH, ("unsloth", "")),
            ("QLoRA", QLORA, "8 rows, on the host what can be", 8, ("ftcli", ON_HOST), ("unsloth", HOST_TABLE)),
        )
    ),
    Goal("1B in fp8, no flash-attn 4, of bf16", SMALL | MASTERS | SLOWLY, FP8, NO_FLASH, 1.0),
    Goal("0.6B bf16_pure, of TRL at its best", QWEN, EXTRAS, TRL, 1.6),
    Goal("0.6B bf16_pure, of the bare loop", QWEN, EXTRAS, BARE, 1.05),
    Goal("1B DDP x2, per GPU, of one GPU alone", DDP | {"processes": 2}, EXTRAS, EXTRAS, 0.98, ALONE),
    Goal("1B DDP x4, per GPU, of one GPU alone", DDP | {"processes": 4}, EXTRAS, EXTRAS, 0.97, ALONE),
    Goal("1B DDP x2, no flash-attn 4, per GPU, of one GPU alone", DDP | TWO | FULL, NO_FLASH, NO_FLASH, 0.98, ALONE),
    *(
        goal
        for n in SHARDS
        for goal in (
            Goal(f"8B x8192 FSDP2 x{n}, of the bare loop", FSDP | {"processes": n}, EXTRAS, FLASH, 1.05),
            Goal(f"8B x8192 FSDP2 x{n}, of TRL at its best", FSDP | {"processes": n}, EXTRAS, TRL, 1.5),
            Goal(f"8B x8192 FSDP2 x{n}, of torchtitan", FSDP | {"processes": n}, EXTRAS, TITAN, 0.97),
            Goal(
                f"8B x8192 FSDP2 x{n} in fp8, of ftcli in bf16", FSDP | {"processes": n}, ("ftcli", "fp8"), EXTRAS, 1.2
            ),
            Goal(f"8B x8192 ZeRO-3 x{n}, of ftcli under FSDP2", ZERO | {"processes": n}, EXTRAS, EXTRAS, 0.97, OF_FSDP),
        )
    ),
    *(
        goal
        for gpus, count in (("two H200s", TWO), ("four H200s", FOUR))
        for goal in (
            Goal(f"8B x8192 FSDP2, {gpus}, no flash-attn 4, of torchtitan", FSDP | count, NO_FLASH, TITAN, 1.05),
            Goal(f"8B x8192 FSDP2, {gpus}, no flash-attn 4, in fp8, of bf16", FSDP | count, FP8, NO_FLASH, 1.2),
            Goal(
                f"8B x8192 ZeRO-3, {gpus}, no flash-attn 4, of FSDP2", ZERO | count, NO_FLASH, NO_FLASH, 0.97, OF_FSDP
            ),
        )
    ),
    Goal("1B DDP, two H100s, per GPU, of one", DDP | {"processes": 2}, H100, H100, 0.97, ALONE),
    Goal("1B DDP, two H100s, of the bare loop", DDP | {"processes": 2}, H100, ("bare", "H100"), 1.1),
    Goal("8B LoRA DDP, two H100s, per GPU, of one", LORA | {"profile": "ddp"}, H100, H100, 0.97, ALONE),
    Goal("8B LoRA FSDP2, two H100s, of DDP", LORA | {"profile": "fsdp"}, H100, H100, 0.97, {"profile": "ddp"}),
    Goal("8B LoRA ZeRO-3, two H100s, of DDP", LORA | {"profile": "zero3"}, H100, H100, 0.97, {"profile": "ddp"}),
    Goal("8B LoRA FSDP2, two H100s, of the bare loop", LORA | {"profile": "fsdp"}, H100, ("bare", NO_LIGER), 1.1),
    Goal("8B LoRA FSDP2, two H100s, of TRL", LORA | {"profile": "fsdp"}, H100, ("trl", NO_LIGER), 1.1),
    Goal("3B x8192 FSDP2, two H100s, of the bare loop", THREE | {"profile": "fsdp"}, H100, ("bare", "H100"), 1.1),
    Goal("3B x8192 FSDP2, two H200s, of the bare loop", THREE | {"profile": "fsdp"}, NO_FLASH, BARE, 1.1),
    Goal("3B x8192 FSDP2, two H200s, of TRL at its best", THREE | {"profile": "fsdp"}, NO_FLASH, TRL, 1.1),
    *(
        Goal(f"{name} x4096 ZeRO-3, two H100s, of FSDP2", where | {"profile": "zero3"}, H100, H100, 0.97, OF_FSDP)
        for name, where in (
            ("0.6B", SMALLEST),
            ("1B", MASTERS | {"shape": "llama-3.2-1b", "length": 4096, "task": "pretrain", "lora": 0}),
        )
    ),
    Goal("3B x8192 ZeRO-3, two H100s, of FSDP2", THREE | {"profile": "zero3"}, H100, H100, 0.97, OF_FSDP),
    *(
        Goal(f"{name} ZeRO-3, two H200s, of FSDP2", where | {"profile": "zero3"}, NO_FLASH, NO_FLASH, 0.97, OF_FSDP)
        for name, where in (
            ("135M x4096", MASTERS | {"shape": "smollm2-135m", "length": 4096, "task": "pretrain", "lora": 0}),
            ("0.6B x4096", SMALLEST | TWO),
            ("1B x4096", DDP | TWO),
            ("3B x8192", THREE),
        )
    ),
    Goal(
        "8B QLoRA FSDP2, one row, recomputed, two H200s, of DDP",
        QLORA | {"profile": "fsdp", "micro_size": 1},
        ("ftcli", AGAIN),
        ("ftcli", AGAIN),
        0.97,
        {"profile": "ddp"},
    ),
    Goal(
        "8B QLoRA FSDP2, two H200s, of DDP", QLORA | {"profile": "fsdp"}, NO_FLASH, NO_FLASH, 0.97, {"profile": "ddp"}
    ),
    Goal("BERT-base, of the example script's defaults", BERT, PLAIN, DEFAULTS, 1.5),
    Goal("ViT-B/16, of the example script's defaults", VIT, PLAIN, DEFAULTS, 1.5),
    Goal("BERT-base, 200 steps, of the Trainer with good settings", BERT | LONG, PLAIN, TRAINER, 1.15),
    Goal("ViT-B/16, 200 steps, of the Trainer with good settings", VIT | LONG, PLAIN, TRAINER, 1.15),
    Goal("BERT-base, 200 steps, of the Trainer with CUDA graphs", BERT | LONG, PLAIN, GRAPHS, 1.15),
    Goal("ViT-B/16, 200 steps, of the Trainer with CUDA graphs", VIT | LONG, PLAIN, GRAPHS, 1.15),
    *(
        Goal(
            f"{name} DPO, of TRL in the same micro-batches, sorted", PAIRS | {"shape": shape}, EXTRAS, DPO, 1.5, SORTED
        )
        for name, shape in (("0.6B", "qwen3-0.6b"), ("1B", "llama-3.2-1b"))
    ),
]


def untraced(lines: Sequence[dict[str, Any]], where: dict[str, Any], side: Side) -> list[dict[str, Any]]:
    """Return the untraced lines of a peer and a label with these fields and all patches, the newest last.

    Older lines lack the field `four_bit`; their frozen weights were not in 4 bits.
    """
    where = {"four_bit": False} | where
    fits = [
        {"four_bit": False} | line
        for line in lines
        if (line["peer"], line["label"]) == side and not line["traced"] and not line.get("without")
    ]
    return sorted((line for line in fits if where.items() <= line.items()), key=lambda line: float(line["time"]))


def is_one_run(line: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two lines were measured in one run on one kind of GPU. Only then their ratio counts."""
    return abs(line["time"] - other["time"]) < RUN and bool(line["device"] == other["device"])


def nearest(line: dict[str, Any], others: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the line of the same run and kind of GPU that is nearest in time; None without one."""
    same = [other for other in others if is_one_run(line, other)]
    return min(same, key=lambda other: abs(other["time"] - line["time"]), default=None)


def side_by_side(
    ours: list[dict[str, Any]], theirs: list[dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the newest line of ours that has a line of theirs in its run, with the nearest of these; None without."""
    for own in reversed(ours):
        if other := nearest(own, theirs):
            return own, other
    return None


def judge(lines: Sequence[dict[str, Any]]) -> list[tuple[Goal, float | None, str]]:
    """Return each goal with its measured ratio (None: not measured) and a verdict.

    A line with the field `spoiled`, which is written by hand and has the reason as its value, does not count.
    """
    results: list[tuple[Goal, float | None, str]] = []
    for goal in GOALS:
        of_us = untraced(lines, goal.where, goal.ours)
        of_them = untraced(lines, goal.where | goal.there, goal.theirs)
        if not of_us or not of_them:
            results.append((goal, None, f"not measured: {theirs_name(goal) if of_us else 'ftcli'}"))
            continue
        if (pair := side_by_side(of_us, of_them)) is None:
            results.append((goal, None, "does not count: not measured in one run on one kind of GPU"))
            continue
        ours, theirs = pair
        ratio = ours[SPEED] / theirs[SPEED]
        verdict = "reached" if ratio >= goal.least else "missed"
        if "agrees" not in ours and theirs["peer"] in COMPARED and rows_of(theirs) == rows_of(ours):
            ours = ours | {"agrees": within(apart(ours, theirs))}  # without a reference, its two lines are compared
        if "agrees" not in ours:
            verdict = "does not count: no reference was measured"
        elif not ours["agrees"]:
            verdict = "does not count: ftcli's curve differs from the reference"
        elif spoiled := ours.get("spoiled") or theirs.get("spoiled"):
            verdict = f"does not count: {spoiled}"
        elif theirs.get("agrees") is False:
            verdict += "; the other's curve differs from the reference"
        results.append((goal, ratio, verdict))
    return results


def rows_of(line: dict[str, Any]) -> tuple[int, ...]:
    """Return the fields that decide which rows a step has: two lines with other rows have other curves."""
    return tuple(line[name] for name in ("steps", "processes", "micro_size", "accumulation"))


def theirs_name(goal: Goal) -> str:
    """Return the peer and label that a goal compares ftcli with."""
    peer, label = goal.theirs
    return f"{peer} ({label})" if label else peer
