"""Compare the curves of lines with their reference, and describe a line in one sentence."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

REFERENCES = ("bare", "hf-trainer", "trl-dpo")  # for language models, for classifiers, for pairs
STAND_INS = ("loop", "trl")  # where no reference was measured
REFERENCE_VALUES = {"precision": ("bf16_pure", "bf16"), "profile": ("zero3", "fsdp")}  # field -> (value, reference's)
LOSS, NORM = 2e-2, 5e-2  # relative tolerances: rounding and kernels explain these in a few dozen steps of bfloat16


def read(path: Path) -> list[dict[str, Any]]:
    """Return all lines of a file of results. Older lines have `told` instead of `details`."""
    lines = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    return [{"details" if name == "told" else name: value for name, value in line.items()} for line in lines]


def log_of(line: dict[str, Any]) -> str:
    """Return the log lines of a line of ftcli; older ones have other names."""
    return " ".join(line["told"]["facts"] if "told" in line else line["details"]["log_lines"])


def gpu_of(line: dict[str, Any]) -> str:
    """Return the short name of a line's GPU, such as H200."""
    return str(line["device"]).removeprefix("NVIDIA ").split()[0]


def apart(line: dict[str, Any], reference: dict[str, Any]) -> dict[str, float]:
    """Return the largest relative differences of losses and gradient norms of two lines of one cell."""
    return {
        name: max(_relative(a, b) for a, b in zip(line[name], reference[name], strict=False))
        for name in ("losses", "grad norms")
    }


def _relative(value: float, reference: float) -> float:
    """Return the relative difference of two values; infinity if one of them is NaN."""
    difference = abs(value / reference - 1) if reference else abs(value)
    return math.inf if math.isnan(difference) else difference


def compare(line: dict[str, Any], lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the differences of a line from the newest reference among `lines`; an empty dictionary without one.

    Lines in bf16_pure are compared with float32 weights, because bf16_pure should save memory without changing the
    curve. Lines under ZeRO-3 are compared with FSDP2, because DeepSpeed's own bf16 follows another curve.
    """
    masters = line["cell"] | {
        name: other for name, (own, other) in REFERENCE_VALUES.items() if line["cell"][name] == own
    }
    same_length = [other for other in lines if other["steps"] == line["steps"]]  # rows depend on the number of steps
    references = (  # the first may be missing
        _references(same_length, masters)
        or _references(same_length, line["cell"])
        or _references(same_length, line["cell"], STAND_INS)
    )
    is_plain = line["peer"] in REFERENCES and not line["settings"] and line["cell"] == masters
    if is_plain or not references or line == references[-1]:
        return {}
    differences = apart(line, references[-1])
    return {"apart": differences, "agrees": within(differences)}


def within(differences: dict[str, float]) -> bool:
    """Return whether the differences of two curves are within the tolerances."""
    return differences["losses"] <= LOSS and differences["grad norms"] <= NORM


def _references(
    lines: list[dict[str, Any]], cell: dict[str, Any], peers: tuple[str, ...] = REFERENCES
) -> list[dict[str, Any]]:
    """Return the reference lines of a cell: those without settings, or all if each has settings."""
    untraced = [line for line in lines if line["peer"] in peers and line["cell"] == cell and not line["traced"]]
    return [line for line in untraced if not line["settings"]] or untraced


def judged(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return all lines, each compared again with the newest reference among them."""
    plain = [{name: value for name, value in line.items() if name not in ("apart", "agrees")} for line in lines]
    return [line | compare(line, plain) for line in plain]


def sentence(line: dict[str, Any]) -> str:
    """Return a line of results as one sentence."""
    mfu = f"{line['TFLOP/s']:.3g} TFLOP/s" if line["MFU"] is None else f"MFU {100 * line['MFU']:.1f} %"
    where = f"{line['shape']} x{line['length']}, {line['profile']} x{line['processes']}, micro {line['micro_size']}"
    named = " ".join([line["peer"], *line["settings"], *([f"({line['label']})"] if line["label"] else [])])
    text = (
        f"{named}: {where}, {line['precision']}: {line['tokens a second a GPU']:.0f} tokens/s a GPU "
        f"({line['trained tokens a second a GPU']:.0f} trained), {mfu}, step p50 {1000 * line['step p50']:.1f} ms "
        f"(p95 {1000 * line['step p95']:.1f}), {line['peak allocated GiB']:.1f} GiB, first step after "
        f"{line['first step']:.0f} s, loss {line['losses'][0]:.4f} to {line['losses'][-1]:.4f}"
    )
    if "apart" not in line:
        return text
    differences = line["apart"]
    verdict = "" if line["agrees"] else ": DOES NOT AGREE"
    return (
        f"{text}; from the reference: loss {differences['losses']:.1e}, norm {differences['grad norms']:.1e}{verdict}"
    )
