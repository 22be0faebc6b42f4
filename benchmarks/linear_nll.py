"""Compare full and chunked logits of one head: time and peak memory of forward and backward, one JSON line each.

    python benchmarks/linear_nll.py --rows 16384 --hidden 2048 --vocabulary 128256 --dtype bfloat16
    python benchmarks/linear_nll.py --rows 1024 --hidden 576 --vocabulary 49152 --pieces 22 24 27    # on CPU

Weights are float32 under autocast, or have `--dtype` with `--pure`. Losses and gradient norms must agree. On GPUs the
largest chunks also run without the compiled kernel, and then without float32 sums too, to show the effect of each.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ftcli.models.kernels import linear_cross_entropy
from ftcli.models.losses import token_nll


def main() -> None:
    """Measure each variant. Full logits come last, because the peak host memory of a process never decreases."""
    parser = argparse.ArgumentParser()
    for name, size in {"rows": 1024, "hidden": 576, "vocabulary": 49152, "repeats": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument(
        "--pieces", type=int, nargs="*", default=[22, 24, 26, 27, 28], help="log2 of the number of logits per chunk"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--pure", action="store_true")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    weight_dtype = dtype if arguments.pure else torch.float32
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    hidden = torch.randn(arguments.rows, arguments.hidden, device=device, dtype=weight_dtype, requires_grad=True)
    weight = torch.nn.Parameter(
        torch.randn(arguments.vocabulary, arguments.hidden, device=device, dtype=weight_dtype) * 0.02
    )
    targets = torch.randint(0, arguments.vocabulary, (arguments.rows,), device=device)
    ours = lambda: linear_cross_entropy.linear_nll(hidden, weight, None, targets)  # noqa: E731
    compiled, eager, rounded_sums = (
        {"MIN_LOGITS_TO_COMPILE": 0},
        {"MIN_LOGITS_TO_COMPILE": 2**62},
        {"can_accumulate_in_float32": lambda kind, dtype: False},
    )
    variants: dict[str, tuple[dict[str, Any], Callable[[], Tensor]]] = {
        f"chunks of 2^{power}": ({"MAX_LOGITS_PER_CHUNK": 2**power} | compiled, ours) for power in arguments.pieces
    }
    if device == "cuda":
        variants["the largest, not compiled"] = (eager, ours)
        variants["the largest, not compiled, rounded sums"] = (eager | rounded_sums, ours)
    variants["full logits"] = ({}, lambda: token_nll(F.linear(hidden, weight), targets))
    if device == "cuda" and importlib.util.find_spec("liger_kernel") is not None:
        variants["Liger's fused linear cross-entropy"] = ({}, lambda: liger(hidden, weight, targets))
    for variant, (settings, nll) in variants.items():
        vars(linear_cross_entropy).update(settings)
        print(json.dumps({"way": variant, **measure(nll, hidden, weight, dtype, arguments.repeats)}), flush=True)


def liger(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the summed loss. Liger computes gradients of this sum only, so it has no per-token losses."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    loss: Tensor = liger_fused_linear_cross_entropy(hidden, weight, targets, reduction="sum")
    return loss


def measure(
    nll: Callable[[], Tensor], hidden: Tensor, weight: Tensor, dtype: torch.dtype, repeats: int
) -> dict[str, float]:
    """Return the shortest time of several repeats, after one warm-up."""
    on_gpu, seconds = hidden.is_cuda, []
    for _ in range(repeats + 1):
        hidden.grad = weight.grad = None
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        with torch.autocast(hidden.device.type, dtype=dtype, enabled=dtype != hidden.dtype):
            loss = nll().sum()
        loss.backward()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert hidden.grad is not None
    assert weight.grad is not None
    return {
        "seconds": round(min(seconds[1:]), 5),
        "peak_gib": round((torch.cuda.max_memory_allocated() if on_gpu else host) / 2**30, 3),
        "loss": float(loss.detach()) / len(hidden),
        "of_hidden": float(hidden.grad.norm()),
        "of_weight": float(weight.grad.norm()),
    }


if __name__ == "__main__":
    main()
