"""Compare `ftcli plan` with the measured lines of speed.jsonl, and write the table of errors.

    python benchmarks/plan_errors.py [--page docs/explanation/plan-accuracy.md]

Compared is the newest untraced line of ftcli per cell and label, with the settings, kernels and recomputation that its
log has. Lines with "host layers a second", which `ftcli doctor --bench` measures too, are planned for a host of that
speed. The table has the measured and the planned peak of allocated memory, and the median step. Below it, each
constant that comes from lines is estimated without one group of them, and that group is compared. Imports no torch.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parent
sys.path[:0] = [str(HOME), str(HOME.parent)]

from cells.cell import PAIRS  # noqa: E402
from cells.curves import gpu_of, log_of  # noqa: E402
from cells.shapes import configuration  # noqa: E402

from ftcli.config.plan import derive_plan  # noqa: E402
from ftcli.config.profile import load_profile  # noqa: E402
from ftcli.config.recipe import Recipe  # noqa: E402
from ftcli.models.estimates import step_time  # noqa: E402
from ftcli.models.estimates.memory_estimate import estimate_memory, has_fresh_gradients  # noqa: E402
from ftcli.models.estimates.shape import Shape, size_of_shape  # noqa: E402
from ftcli.models.estimates.step_time import StepTime, estimate_step  # noqa: E402
from ftcli.models.estimates.step_work import Kernels, Rows  # noqa: E402
from ftcli.runtime.gpus import HOST_RATE, PRODUCT_SHARE, find_gpu  # noqa: E402

FACTS = HOME / "speed.jsonl"
WHOLE = "whole on each GPU, so trained as under ddp"  # in the log of an adapter under fsdp
BEGIN, END = "<!-- plan errors: begin -->", "<!-- plan errors: end -->"
EARLIER = "before the move"  # in labels of a commit that ran beside a newer one
NEAR = 0.15  # the relative error that counts as near
PROFILE_GROUPS = {"single": "1 GPU, all weights", "ddp": "DDP", "fsdp": "FSDP2", "zero3": "ZeRO-3"}
CLASSIFIERS, ADAPTERS, FP8 = "classifiers", "LoRA and QLoRA", "fp8"
# Kernel profiles of ftcli in 16 bits, and the FLOPs of their matrix products: 6 (LoRA: 4) x weights x tokens. Left out
# are where-8b.txt, whose rows were not yet filled up to multiples of 16 tokens, and where-fp8.txt.
PROFILED = {
    "where-06b": 6 * 596.05e6 * 32768,
    "where-1b": 6 * 1235.81e6 * 16384,
    "where-1b-masters": 6 * 1235.81e6 * 16384,
    "where-ddp": 6 * 1235.81e6 * 16384,
    "where-lora": 4 * 7504.9e6 * 8192,
    "where-fsdp": 6 * 7504.9e6 * 8192,
    "where-zero3": 6 * 7504.9e6 * 8192,
}


@dataclass(frozen=True)
class Compared:
    """A measured line beside the plan: GiB and seconds."""

    number: int
    line: dict[str, Any]
    memory: float
    time: StepTime

    @property
    def errors(self) -> tuple[float, float]:
        """Relative errors of memory and step time; below 0 where the plan has less."""
        return (
            self.memory / self.line["peak allocated GiB"] - 1,
            self.time.total / self.line["step p50"] - 1,
        )

    @property
    def is_near(self) -> bool:
        """Whether both errors are within `NEAR`."""
        return all(abs(error) <= NEAR for error in self.errors)

    @property
    def group(self) -> str:
        """The group of the line in the check without one group."""
        cell = self.line["cell"]
        if cell["task"].endswith("classification"):
            return CLASSIFIERS
        if cell["lora"]:
            return ADAPTERS
        return FP8 if "precision=fp8" in self.line["settings"] else PROFILE_GROUPS[cell["profile"]]


@dataclass(frozen=True)
class Constant:
    """A constant of step_time.py that comes from groups of lines.

    Attributes:
        name: Its name.
        candidates: Values to choose from.
        groups: The groups that are left out, one at a time.
        by_shape: Whether the groups are shapes of models.
        lines: The groups of lines that the constant matters for.
        labels: Labels of lines that count; any label if empty.
    """

    name: str
    candidates: tuple[float, ...]
    groups: tuple[str, ...]
    by_shape: bool = False
    lines: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()

    def part(self, one: Compared) -> str:
        """Return the group of a line for this constant."""
        return str(one.line["cell"]["shape"]) if self.by_shape else one.group

    def covers(self, one: Compared) -> bool:
        """Return whether the constant matters for a line."""
        return one.group in self.lines and (not self.labels or one.line["label"] in self.labels)


CONSTANTS = [
    Constant(
        "NOT_HIDDEN",
        tuple(step / 20 for step in range(21)),
        ("DDP", "FSDP2", "ZeRO-3", FP8),
        lines=("DDP", "FSDP2", "ZeRO-3", FP8),
    ),
    Constant(
        "TORCH_ATTENTION",
        tuple(step / 50 for step in range(5, 40)),
        ("llama-3.2-1b", "qwen3-0.6b"),
        by_shape=True,
        lines=("1 GPU, all weights",),
        labels=("no extras", "ladder", "ladder, extras"),
    ),
    Constant(
        "HOST_LAYER",
        tuple(step / 10000 for step in range(8, 31)),
        ("bert-base", "vit-b16"),
        by_shape=True,
        lines=(CLASSIFIERS,),
    ),
]


def compared_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return (line number, line) of ftcli's untraced lines.

    Lines of pairs and of short rows that are not packed are left out: their micro-batches differ from step to step, and
    `plan` knows one size. So are lines without a patch, because `plan` assumes all patches, experiments, and lines of
    an earlier commit that ran beside a newer one.
    """
    lines = enumerate(map(json.loads, path.read_text().splitlines()), start=1)
    own = [(number, line) for number, line in lines if line["peer"] == "ftcli" and is_of_the_program(line)]
    return [(number, line) for number, line in own if line["task"] not in PAIRS and not line["cell"].get("median")]


def is_of_the_program(line: dict[str, Any]) -> bool:
    """Return whether a line was measured without a profiler, and with the program as its commit has it."""
    return not (
        line["traced"] or line.get("without") or line["label"].startswith("experiment") or EARLIER in line["label"]
    )


def newest_lines(path: Path = FACTS) -> list[tuple[int, dict[str, Any]]]:
    """Return (line number, line) of the newest line per cell and label, in the order of the file."""
    found = {json.dumps([line["cell"], line["label"]]): (number, line) for number, line in compared_lines(path)}
    return sorted(found.values())


def older_lines(path: Path = FACTS) -> list[tuple[int, dict[str, Any]]]:
    """Return the other lines, which newer versions or other settings of a cell have replaced."""
    newest = {number for number, _ in newest_lines(path)}
    return [(number, line) for number, line in compared_lines(path) if number not in newest]


def recipe_of(line: dict[str, Any]) -> Recipe:
    """Return the recipe of a line, with the recomputation that its log has."""
    cell, facts = line["cell"], log_of(line)
    settings = dict(setting.split("=", 1) for setting in line["settings"])
    mode = re.search(r"gradient_checkpointing (\w+)", facts)
    assert mode is not None
    global_size = cell["micro_size"] * cell["accumulation"] * cell["processes"]
    values: dict[str, Any] = {
        "task": cell["task"],
        "precision": settings.get("precision", cell["precision"]),
        "model": {"name": cell["shape"], "gradient_checkpointing": mode[1], "dropout": 0.0},
        "data": {"train": "rows.jsonl", "max_length": cell["length"], "packing": cell["task"] in ("sft", "pretrain")},
        "batch": {"global_size": global_size, "micro_size": cell["micro_size"]},
        "train": {"max_steps": line["steps"]},
        "optimizer": {"learning_rate": cell["learning_rate"]},
    }
    if cell["task"] == "image_classification":
        values["data"] = {"train": "rows", "workers": int(settings["data.workers"])}
    elif "data.workers" in settings:
        values["data"]["workers"] = int(settings["data.workers"])
    for name in ("activation_offloading", "embeddings_on_host"):
        if settings.get(f"model.{name}") == "true":
            values["model"][name] = True
    if cell["lora"]:
        values["adapter"] = {"type": "lora", "r": cell["lora"]}
    if cell.get("four_bit"):
        values["model"]["quantization"] = {"load_in_4bit": True}
    return Recipe.model_validate(values)


def rows_of(line: dict[str, Any]) -> Rows:
    """Return the lengths of a line's rows, as the cache of prepared rows has them."""
    cell, facts = line["cell"], log_of(line).replace(",", "")
    packed = re.search(r"(\d+) rows of (\d+) documents", facts)
    counts = re.search(r"(\d+) tokens (\d+) trained", facts)
    if packed is None or counts is None:
        return Rows(cell["length"], cell["length"])
    rows, documents = int(packed[1]), int(packed[2])
    tokens, trained = int(counts[1]), int(counts[2])
    return Rows(tokens / rows, step_time.LENGTH_SPREAD * tokens / documents, trained / tokens)


def compare(number: int, line: dict[str, Any]) -> Compared:
    """Return a line beside the plan."""
    cell, facts = line["cell"], log_of(line)
    recipe, shape = recipe_of(line), Shape.of(configuration(cell["shape"]))
    gpu = find_gpu(line["device"])
    assert shape is not None and gpu is not None
    if (layers := line.get("host layers a second")) is not None:
        gpu = replace(gpu, host=layers / HOST_RATE)
    size, plan = size_of_shape(shape, recipe), derive_plan(recipe, cell["processes"])
    shares = load_profile("ddp" if WHOLE in facts else cell["profile"]).shard_counts(cell["processes"])
    mode = recipe.model.gradient_checkpointing
    compiled = re.search(r"torch_compile: \d+ layers", facts) is not None
    kernels = Kernels(
        mode, compiled, "liger-kernel" in line["versions"], "flash_attention_4" in facts, "CUDA graphs:" in facts
    )
    memory = estimate_memory(
        recipe, size, shares, rows=cell["micro_size"], tokens=shape.patches or cell["length"], mode=mode,
        fused=compiled or kernels.liger, compiled=compiled, fresh_gradients=has_fresh_gradients(shares, plan),
        graphs=kernels.graphs,
    )  # fmt: skip
    time = estimate_step(recipe, size, shape, shares, plan, rows_of(line), kernels, gpu)
    return Compared(number, line, memory.total / 2**30, time)


def table(compared: list[Compared]) -> list[str]:
    """Return the errors of all lines as Markdown, and a summary."""
    head = "| line | cell | GPU | label | GiB measured | planned | error | ms measured | planned | error |"
    rows = [head, "|---" * 10 + "|"]
    for one in compared:
        memory, time = one.errors
        gib, step = one.line["peak allocated GiB"], one.line["step p50"]
        cells = [str(one.number), name_of(one.line), gpu_of(one.line), one.line["label"]]
        cells += [f"{gib:.1f}", f"{one.memory:.1f}", f"{memory:+.1%}"]
        cells += [f"{1000 * step:.0f}", f"{1000 * one.time.total:.0f}", f"{time:+.1%}"]
        rows.append(f"| {' | '.join(cells)} |")
    near = sum(one.is_near for one in compared)
    medians = [statistics.median(abs(one.errors[index]) for one in compared) for index in (0, 1)]
    each = [sum(abs(one.errors[index]) <= NEAR for one in compared) for index in (0, 1)]
    share = near / len(compared)
    return [
        f"Memory and time are both within {NEAR:.0%} for {near} of {len(compared)} lines ({share:.0%}). "
        f"Memory alone: {each[0]} lines, median error {medians[0]:.1%}. "
        f"Time alone: {each[1]} lines, median error {medians[1]:.1%}.",
        "",
        *rows,
    ]


def name_of(line: dict[str, Any]) -> str:
    """Return the name of a line's cell in a few words."""
    cell = line["cell"]
    adapter = f", LoRA r{cell['lora']}" if cell["lora"] else ""
    adapter += " on 4 bits" if cell.get("four_bit") else ""
    precision = "fp8" if "precision=fp8" in line["settings"] else cell["precision"]
    where = f"{cell['profile']} x{cell['processes']}"
    return f"{cell['shape']} {cell['micro_size']} x {cell['length']}, {cell['task']}{adapter}, {precision}, {where}"


def best_value(constant: Constant, lines: list[tuple[int, dict[str, Any]]]) -> float:
    """Return the value of a constant with the smallest median error of step times over some lines."""

    def median_error(value: float) -> float:
        with changed(constant, value):
            return statistics.median(abs(compare(*line).errors[1]) for line in lines)

    return min(constant.candidates, key=median_error)


@contextmanager
def changed(constant: Constant, value: float) -> Iterator[None]:
    """Set a constant of step_time.py for a while."""
    before = getattr(step_time, constant.name)
    setattr(step_time, constant.name, value)
    try:
        yield
    finally:
        setattr(step_time, constant.name, before)


def older(lines: list[Compared]) -> str:
    """Return a sentence about the lines that the table does not have."""
    near = sum(one.is_near for one in lines)
    medians = [statistics.median(abs(one.errors[index]) for one in lines) for index in (0, 1)]
    return (
        f"The file has {len(lines)} older lines of ftcli, of earlier versions or with other settings: other "
        f"recomputation, no compiled layers, offloading. For {near} of them, memory and time are both within "
        f"{NEAR:.0%}. Median errors are {medians[0]:.1%} (memory) and {medians[1]:.1%} (time)."
    )


def without_one_group(compared: list[Compared]) -> list[str]:
    """Return, as Markdown, the error of each group when a constant is estimated from the other groups."""
    rows = [
        "| constant | value | group left out | value from the others | its median error | lines |",
        "|---" * 6 + "|",
    ]
    for constant in CONSTANTS:
        for left in constant.groups:
            others = [(one.number, one.line) for one in compared if constant.covers(one) and constant.part(one) != left]
            own = [(one.number, one.line) for one in compared if constant.covers(one) and constant.part(one) == left]
            value = best_value(constant, others)
            with changed(constant, value):
                error = statistics.median(abs(compare(*line).errors[1]) for line in own)
            now = getattr(step_time, constant.name)
            rows.append(f"| `{constant.name}` | {now:g} | {left} | {value:g} | {error:.1%} | {len(own)} |")
    return rows


def profile_shares() -> list[str]:
    """Return, as Markdown, the rate of matrix products in each kernel profile beside the mean of the others."""
    found = {}
    for name, flops in PROFILED.items():
        text = (HOME / "where" / f"{name}.txt").read_text()
        spent = sum(float(ms) for ms in re.findall(r"% +([\d.]+) +[\d.]+ +nvjet", text)) / 1000
        found[name] = flops / spent / 989e12
    rows = ["| kernel profile | share of 989 TFLOP/s | mean of the others | difference |", "|---" * 4 + "|"]
    for name, share in found.items():
        mean = statistics.fmean(other for key, other in found.items() if key != name)
        rows.append(f"| `{name}.txt` | {share:.3f} | {mean:.3f} | {mean / share - 1:+.1%} |")
    return [*rows, "", f"The mean is {statistics.fmean(found.values()):.3f}; `PRODUCT_SHARE` is {PRODUCT_SHARE:g}."]


def report() -> str:
    """Return the errors and the checks of constants as Markdown."""
    compared = [compare(number, line) for number, line in newest_lines()]
    parts = [
        table(compared),
        ["", older([compare(number, line) for number, line in older_lines()])],
        ["", "### Constants without one group", "", *without_one_group(compared)],
        ["", "### The rate of matrix products", "", *profile_shares()],
    ]
    return "\n".join(line for part in parts for line in part)


def main() -> None:
    """Print the errors, or put them between the marks of a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path)
    page = parser.parse_args().page
    if page is None:
        print(report())
        return
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{report()}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
