"""What a token costs, by the usual definition of model FLOPs utilisation (MFU), and what a device could do.

6 N of every weight that is multiplied with (all but input embeddings that are no head), and 12 L H d s^2 for the
attention of each document of s tokens: no causal discount, no recomputation (PaLM, arXiv 2204.02311, appendix B;
torchtitan counts the same, by rows instead of documents). Frozen weights have no gradient of their own: 4 N.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PEAK = {"H100": 989e12, "H200": 989e12}  # dense bfloat16, FLOP/s


def weights_of(folder: Path) -> dict[str, int]:
    """Return name -> size of every weight in a model's safetensors files, read from their headers."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        found |= {name: math.prod(told["shape"]) for name, told in header.items() if name != "__metadata__"}
    return found


def multiplied(weights: dict[str, int]) -> int:
    """Return N: the weights without embeddings that are looked up only. A tied one is the head, and counts once."""
    has_head = any(name.startswith("lm_head") for name in weights)
    is_decoder = any("embed_tokens" in name for name in weights)
    looked_up = "embed_tokens" if is_decoder and has_head else "\0" if is_decoder else "embeddings."
    kept = {name: size for name, size in weights.items() if looked_up not in name or "patch" in name}
    return sum(kept.values())


def flops(model: Path, tokens: int, squares: int, *, lora: int = 0) -> float:
    """Return the FLOPs of training `tokens` tokens in documents whose lengths squared add up to `squares`."""
    config = json.loads((model / "config.json").read_text())
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    attention = 12 * config["num_hidden_layers"] * heads * width * squares
    counted = multiplied(weights_of(model))
    linear = 4 * counted + 6 * adapter_size(config, lora) if lora else 6 * counted
    return float(linear * tokens + attention)


def adapter_size(config: dict[str, Any], r: int) -> int:
    """Return the weights of a LoRA adapter of rank r on all linear layers of a Llama-like model."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    queries, keys = heads * width, config["num_key_value_heads"] * width
    sides: Iterable[tuple[int, int]] = (
        (hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden),
        (hidden, inner), (hidden, inner), (inner, hidden),
    )  # fmt: skip
    return int(config["num_hidden_layers"]) * r * sum(a + b for a, b in sides)


def peak_of(device: str) -> float | None:
    """Return the dense bfloat16 peak of a device in FLOP/s; None for one that is not known."""
    return next((peak for name, peak in PEAK.items() if name in device), None)
