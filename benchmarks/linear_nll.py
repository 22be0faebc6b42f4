"""Whole logits against pieces, for one head: seconds and peak memory of forward and backward, one JSON line a way.

    python benchmarks/linear_nll.py --rows 16384 --hidden 2048 --vocabulary 128256 --dtype bfloat16
    python benchmarks/linear_nll.py --rows 1024 --hidden 576 --vocabulary 49152 --pieces 22 24 27    # on CPU

Weights are float32 under autocast, or all of `--dtype` with `--pure`. Losses and gradient norms must agree. On GPUs the
largest pieces are also made without the compiled kernel, and then without sums in float32 too: what each saves.
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

from ftcli import linear_nll as room
from ftcli.losses import token_nll


def main() -> None:
    """Measure whole logits last: a process's peak on the host never falls."""
    asked = argparse.ArgumentParser()
    for name, size in {"rows": 1024, "hidden": 576, "vocabulary": 49152, "repeats": 3}.items():
        asked.add_argument(f"--{name}", type=int, default=size)
    asked.add_argument("--pieces", type=int, nargs="*", default=[22, 24, 26, 27, 28], help="log2 of logits at once")
    asked.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    asked.add_argument("--pure", action="store_true")
    given = asked.parse_args()
    dtype = getattr(torch, given.dtype)
    held = dtype if given.pure else torch.float32
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    hidden = torch.randn(given.rows, given.hidden, device=device, dtype=held, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(given.vocabulary, given.hidden, device=device, dtype=held) * 0.02)
    targets = torch.randint(0, given.vocabulary, (given.rows,), device=device)
    ours = lambda: room.linear_nll(hidden, weight, None, targets)  # noqa: E731
    fast, never, slow = {"WORTH": 0}, {"WORTH": 2**62}, {"adds_in_float32": lambda kind, dtype: False}
    ways: dict[str, tuple[dict[str, Any], Callable[[], Tensor]]] = {
        f"pieces of 2^{power}": ({"PIECE": 2**power} | fast, ours) for power in given.pieces
    }
    if device == "cuda":
        ways["the largest, not compiled"] = (never, ours)
        ways["the largest, not compiled, sums rounded"] = (never | slow, ours)
    ways["whole logits"] = ({}, lambda: token_nll(F.linear(hidden, weight), targets))
    if device == "cuda" and importlib.util.find_spec("liger_kernel") is not None:
        ways["Liger's fused linear cross-entropy"] = ({}, lambda: liger(hidden, weight, targets))
    for way, (settings, nll) in ways.items():
        vars(room).update(settings)
        print(json.dumps({"way": way, **measure(nll, hidden, weight, dtype, given.repeats)}), flush=True)


def liger(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the summed loss; its gradients are those of this sum alone, so it cannot give per-token losses."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    loss: Tensor = liger_fused_linear_cross_entropy(hidden, weight, targets, reduction="sum")
    return loss


def measure(
    nll: Callable[[], Tensor], hidden: Tensor, weight: Tensor, dtype: torch.dtype, repeats: int
) -> dict[str, float]:
    """Return the best of several repeats, after one that does not count."""
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
