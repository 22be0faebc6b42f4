"""One optimizer step over a shape's weights: torch's fused AdamW against AdamW in bfloat16, one JSON line a way.

    python benchmarks/adamw_step.py --shape llama-3.2-1b
    python benchmarks/adamw_step.py --shape tiny        # on CPU, where nothing is compiled

Milliseconds of a step on the device, those the host needs to ask for it, bytes an element that must be moved, and the
bandwidth that comes of both. `flat` gives the compiled formula weights without rows: a kernel of any length that knows
no multiple of its length, and so reads one element at a time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from random_model import SHAPES

from ftcli import adamw_bf16 as room
from ftcli.fused import Fused

REPEATS = 10
IN_ROWS = room._in_rows


def main() -> None:
    """Measure every way on the same weights."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--shape", choices=SHAPES, required=True)
    sizes = sizes_of(asked.parse_args().shape)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    fused, compiled = {"fused": device == "cuda"}, Fused(room.update)
    ways: dict[str, tuple[int, torch.dtype, Any, Any, dict[str, Any]]] = {
        "torch, float32": (28, torch.float32, torch.optim.AdamW, None, fused),
        "torch, bfloat16 (loses updates)": (14, torch.bfloat16, torch.optim.AdamW, None, fused),
        "ours": (22, torch.bfloat16, room.AdamWBf16, (compiled, IN_ROWS), {}),
        "ours, flat": (22, torch.bfloat16, room.AdamWBf16, (Fused(room.update), lambda x: x.view(-1)), {}),
        "ours, eager": (22, torch.bfloat16, room.AdamWBf16, (room.update, IN_ROWS), {}),
    }
    for way, (moved, dtype, make, parts, options) in ways.items():
        if parts is not None:
            room._step, room._in_rows = parts
        weights = [torch.nn.Parameter(torch.randn(size, device=device, dtype=dtype)) for size in sizes]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer = make([{"params": weights}], lr=1e-4, **options)
        whole, host = milliseconds(optimizer.step, device)
        elements = sum(weight.numel() for weight in weights)
        found = {"weights": len(weights), "elements": elements, "step_ms": whole, "host_ms": host}
        found |= {"bytes_an_element": moved, "tb_a_second": round(elements * moved / whole / 1e9, 3)}
        print(json.dumps({"way": way, **found, "problem": getattr(room._step, "problem", None)}), flush=True)
        del optimizer, weights, weight


def sizes_of(shape: str) -> list[tuple[int, ...]]:
    """Return the sizes of the trained tensors of a shape; a tied head is none."""
    from transformers import AutoModelForCausalLM

    kind, sizes = SHAPES[shape]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(kind(**{"tie_word_embeddings": True, **sizes}))
    return [tuple(parameter.shape) for parameter in model.parameters()]


def milliseconds(step: Callable[[], Any], device: str) -> tuple[float, float]:
    """Return the best of several steps, after three that do not count: until it is done, and until it is asked for."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    best = [float("inf")] * 2
    for number in range(3 + REPEATS):
        wait()
        began = time.perf_counter()
        step()
        asked = time.perf_counter() - began
        wait()
        done = time.perf_counter() - began
        if number >= 3:
            best = [min(before, now) for before, now in zip(best, (done, asked), strict=True)]
    return round(1000 * best[0], 3), round(1000 * best[1], 3)


if __name__ == "__main__":
    main()
