"""Compare optimizer steps over the weights of a shape: torch's fused AdamW and ftcli's AdamW in bfloat16.

    python benchmarks/adamw_step.py --shape llama-3.2-1b
    python benchmarks/adamw_step.py --shape tiny        # on CPU, without compilation

Prints one JSON line for each variant: milliseconds of a step on the device and on the host, bytes moved per element,
and the resulting bandwidth. `flat` passes one-dimensional weights to the compiled formula. The kernel then accepts any
length and reads one element at a time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from random_model import SHAPES

from ftcli.models.kernels.fused import Fused
from ftcli.training.optim import adamw_bf16

REPEATS = 10
IN_ROWS = adamw_bf16._in_rows


def main() -> None:
    """Measure each variant on weights of the same sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    sizes = sizes_of(parser.parse_args().shape)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    fused, compiled = {"fused": device == "cuda"}, Fused(adamw_bf16.update)
    variants: dict[str, tuple[int, torch.dtype, Any, Any, dict[str, Any]]] = {
        "torch, float32": (28, torch.float32, torch.optim.AdamW, None, fused),
        "torch, bfloat16 (loses updates)": (14, torch.bfloat16, torch.optim.AdamW, None, fused),
        "ours": (22, torch.bfloat16, adamw_bf16.AdamWBf16, (compiled, IN_ROWS), {}),
        "ours, flat": (22, torch.bfloat16, adamw_bf16.AdamWBf16, (Fused(adamw_bf16.update), lambda x: x.view(-1)), {}),
        "ours, eager": (22, torch.bfloat16, adamw_bf16.AdamWBf16, (adamw_bf16.update, IN_ROWS), {}),
    }
    for variant, (moved, dtype, make, functions, options) in variants.items():
        if functions is not None:
            adamw_bf16._step, adamw_bf16._in_rows = functions
        weights = [torch.nn.Parameter(torch.randn(size, device=device, dtype=dtype)) for size in sizes]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer = make([{"params": weights}], lr=1e-4, **options)
        whole, host = milliseconds(optimizer.step, device)
        elements = sum(weight.numel() for weight in weights)
        result = {"weights": len(weights), "elements": elements, "step_ms": whole, "host_ms": host}
        result |= {"bytes_an_element": moved, "tb_a_second": round(elements * moved / whole / 1e9, 3)}
        print(json.dumps({"way": variant, **result, "problem": getattr(adamw_bf16._step, "problem", None)}), flush=True)
        del optimizer, weights, weight


def sizes_of(shape: str) -> list[tuple[int, ...]]:
    """Return the sizes of the trained tensors of a shape; a tied head is not counted."""
    from transformers import AutoModelForCausalLM

    kind, sizes = SHAPES[shape]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(kind(**{"tie_word_embeddings": True, **sizes}))
    return [tuple(parameter.shape) for parameter in model.parameters()]


def milliseconds(step: Callable[[], Any], device: str) -> tuple[float, float]:
    """Return the shortest (device, host) milliseconds of several steps, after three warm-up steps."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    best = [float("inf")] * 2
    for number in range(3 + REPEATS):
        wait()
        began = time.perf_counter()
        step()
        launched = time.perf_counter() - began
        wait()
        done = time.perf_counter() - began
        if number >= 3:
            best = [min(before, now) for before, now in zip(best, (done, launched), strict=True)]
    return round(1000 * best[0], 3), round(1000 * best[1], 3)


if __name__ == "__main__":
    main()
