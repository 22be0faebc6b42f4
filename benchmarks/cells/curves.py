"""Does a curve follow the reference's? And a line of facts as one sentence. Knows lines of facts only."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

REFERENCES = ("bare", "hf-trainer")  # of language models, of classifiers
ELSEWHERE = {"precision": ("bf16_pure", "bf16"), "profile": ("zero3", "fsdp")}  # field -> its value, the reference's
LOSS, NORM = 2e-2, 5e-2  # of the value, relative: what kernels and roundings explain in a few dozen steps of bfloat16


def read(path: Path) -> list[dict[str, Any]]:
    """Return all lines of a file of facts."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def apart(line: dict[str, Any], reference: dict[str, Any]) -> dict[str, float]:
    """Return the largest relative differences of losses and gradient norms of two lines of one cell."""
    return {
        name: max(_relative(a, b) for a, b in zip(line[name], reference[name], strict=False))
        for name in ("losses", "grad norms")
    }


def _relative(value: float, wanted: float) -> float:
    """Return the relative difference; NaN where a value is not known counts as infinitely far."""
    found = abs(value / wanted - 1) if wanted else abs(value)
    return math.inf if math.isnan(found) else found


def compare(line: dict[str, Any], lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how far a line is from the newest reference among `lines`; an empty answer where there is none.

    What trains in bfloat16 alone must still follow the curve of float32 weights: that is what it saves memory on. So
    must what DeepSpeed trains in shards, whose own bf16 has another curve: that of the same rows under FSDP2.
    """
    masters = line["cell"] | {name: other for name, (own, other) in ELSEWHERE.items() if line["cell"][name] == own}
    references = _references(lines, masters) or _references(lines, line["cell"])  # it may not fit, or not be there
    is_plain = line["peer"] in REFERENCES and not line["settings"] and line["cell"] == masters
    if is_plain or not references or line == references[-1]:
        return {}
    found = apart(line, references[-1])
    return {"apart": found, "agrees": found["losses"] <= LOSS and found["grad norms"] <= NORM}


def _references(lines: list[dict[str, Any]], cell: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the lines that others of a cell are compared with; another kernel only where there is no plain one."""
    those = [line for line in lines if line["peer"] in REFERENCES and line["cell"] == cell and not line["traced"]]
    return [line for line in those if not line["settings"]] or those


def judged(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return all lines, each compared with the newest reference among them, whatever was known when it was written."""
    plain = [{name: value for name, value in line.items() if name not in ("apart", "agrees")} for line in lines]
    return [line | compare(line, plain) for line in plain]


def told_of(line: dict[str, Any]) -> str:
    """Return a line of facts in words."""
    mfu = f"{line['TFLOP/s']:.3g} TFLOP/s" if line["MFU"] is None else f"MFU {100 * line['MFU']:.1f} %"
    where = f"{line['shape']} x{line['length']}, {line['profile']} x{line['processes']}, micro {line['micro_size']}"
    named = " ".join([line["peer"], *line["settings"], *([f"({line['label']})"] if line["label"] else [])])
    told = (
        f"{named}: {where}, {line['precision']}: {line['tokens a second a GPU']:.0f} tokens/s a GPU "
        f"({line['trained tokens a second a GPU']:.0f} trained), {mfu}, step p50 {1000 * line['step p50']:.1f} ms "
        f"(p95 {1000 * line['step p95']:.1f}), {line['peak allocated GiB']:.1f} GiB, first step after "
        f"{line['first step']:.0f} s, loss {line['losses'][0]:.4f} to {line['losses'][-1]:.4f}"
    )
    if "apart" not in line:
        return told
    far = line["apart"]
    verdict = "" if line["agrees"] else ": DOES NOT AGREE"
    return f"{told}; from the reference: loss {far['losses']:.1e}, norm {far['grad norms']:.1e}{verdict}"
