"""Compute the FLOPs of training, by the usual definition of model FLOPs utilisation (MFU), and the peak of a device.

Each token costs 6 N, where N counts all weights in matrix products (not embeddings that are only looked up). The
attention of a document of s tokens costs 12 L H d s^2, without a causal discount and without recomputation (PaLM, arXiv
2204.02311, appendix B; torchtitan counts the same, by row instead of by document). Frozen weights cost 4 N.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from ftcli.models.estimates.shape import Shape
from ftcli.runtime.gpus import PRODUCT_SHARE, find_gpu


def weights_of(folder: Path) -> dict[str, int]:
    """Return name -> size of every weight in a model's safetensors files, read from their headers."""
    sizes: dict[str, int] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        sizes |= {name: math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return sizes


def multiplied(weights: dict[str, int]) -> int:
    """Return N: the number of weights without embeddings that are only looked up. A tied embedding counts once."""
    has_head = any(name.startswith("lm_head") for name in weights)
    is_decoder = any("embed_tokens" in name for name in weights)
    looked_up = "embed_tokens" if is_decoder and has_head else "\0" if is_decoder else "embeddings."
    kept = {name: size for name, size in weights.items() if looked_up not in name or "patch" in name}
    return sum(kept.values())


def flops(model: Path, tokens: int, squares: int, *, lora: int = 0) -> float:
    """Return the FLOPs of training `tokens` tokens. `squares` is the sum of squared document lengths."""
    config = json.loads((model / "config.json").read_text())
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    attention = 12 * config["num_hidden_layers"] * heads * width * squares
    counted = multiplied(weights_of(model))
    linear = 4 * counted + 6 * adapter_size(config, lora) if lora else 6 * counted
    return float(linear * tokens + attention)


def adapter_size(config: dict[str, Any], r: int) -> int:
    """Return the number of weights of a LoRA adapter of rank r on all linear layers of a model with a known shape."""
    shape = Shape.of(config)
    assert shape is not None
    return shape.adapter_weights(r)


def peak_of(device: str) -> float | None:
    """Return the dense bfloat16 peak of a device in FLOP/s; None for an unknown device."""
    gpu = find_gpu(device)
    return None if gpu is None or "bf16" not in gpu.products else gpu.products["bf16"] / PRODUCT_SHARE
