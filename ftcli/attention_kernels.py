"""Which kernel does the attention of documents laid end to end, and the call of it: flash-attn's, torch's, or none.

Knows tensors, their dtypes and the device, and neither models nor tasks. No call waits for the device.
Shapes: H heads, T tokens, D documents, K features of a head.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Collection
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

TORCH = "torch varlen"  # torch.nn.attention.varlen, which is FlashAttention 2
# transformers' name -> least compute capability, the first that is too new, features of a head. The newest comes first:
# at a Llama-3.2-1B shape on an H200 flash_attention_4 was 7 % ahead of torch's kernel. Its gradients of heads of 8, 16
# and 80 were wrong there (4.0.0b36: as far from the right ones as these are long), its outputs right: so it is given
# heads of the sizes whose gradients were compared, and no others.
FLASH: dict[str, tuple[tuple[int, int], tuple[int, int], Collection[int]]] = {
    "flash_attention_4": ((9, 0), (12, 0), (64, 96, 128)),
    "flash_attention_3": ((9, 0), (10, 0), range(8, 257, 8)),
    "flash_attention_2": ((8, 0), (99, 0), range(8, 257, 8)),
}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that attention computes in on a GPU: autocast's where it is on, as for torch's own attention."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else dtype


@cache
def kernel_for(device: torch.device, dtype: torch.dtype, key_size: int, value_size: int, *, flash: bool) -> str | None:
    """Return the name of the kernel for heads of so many features, computed in `dtype`; None: there is none.

    It takes half precision on an NVIDIA GPU of compute capability 8.0 and above (or AMD's, with torch), and K a
    multiple of 8. `flash` allows flash-attn's packages. Which packages are there does not change while we run.
    """
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return None
    if key_size != value_size or key_size % 8:
        return None
    capability = torch.cuda.get_device_capability(device) if torch.version.cuda is not None else None
    if flash and capability is not None:
        for name, (least, beyond, sizes) in FLASH.items():
            if least <= capability < beyond and key_size in sizes and import_problem(name) is None:
                return name
    if key_size <= 256 and "window_size" in _varlen_keywords() and (capability is None or capability >= (8, 0)):
        return TORCH
    return None


@cache
def import_problem(name: str) -> str | None:
    """Return why a kernel of flash-attn cannot be used, in one line; None: it can.

    A package that is there and cannot be imported (its own packages lack, it was built for another torch) is told
    from one that is not there by the words "cannot be imported".
    """
    from transformers import modeling_flash_attention_utils as flash
    from transformers.utils import import_utils

    if not getattr(import_utils, f"is_flash_attn_{name[-1]}_available")():
        return f"{name} is not installed"
    try:
        flash.lazy_import_flash_attention(name)
    except Exception as error:  # noqa: BLE001 - compiled packages fail in many ways
        return f"{name} is installed and cannot be imported: {type(error).__name__}: {str(error).splitlines()[0]}"
    return None


def attend_documents(
    kernel: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """Return attention `[1, T, H, K]` of all documents at once, from `[1, H, T, K]` and their bounds `[D + 1]` int32.

    Keys and values may have fewer heads than queries: every kernel here knows groups, so nothing is repeated.
    """
    dtype = compute_dtype(query.dtype)
    q, k, v = (tensor.transpose(1, 2).to(dtype) for tensor in (query, key, value))
    if kernel == TORCH:
        return _by_torch(q, k, v, bounds, longest, scaling, sliding_window)
    return _by_flash(kernel, q, k, v, bounds, longest, scaling, sliding_window)


def _by_torch(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """Its window counts the tokens before the own one, transformers' counts that one too.

    torch 2.12 and later want to be told of groups; before, the kernel took them as they came.
    """
    from torch.nn.attention.varlen import varlen_attn

    more: dict[str, Any] = {"window_size": (-1 if sliding_window is None else sliding_window - 1, 0)}
    if q.shape[2] != k.shape[2] and "enable_gqa" in _varlen_keywords():
        more["enable_gqa"] = True
    out: Any = varlen_attn(q[0], k[0], v[0], bounds, bounds, longest, longest, scale=scaling, **more)
    return cast("Tensor", out[None])


def _by_flash(
    kernel: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    longest: int,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """Through transformers, which knows how each version wants to be called; with all lengths given it never waits."""
    from transformers.modeling_flash_attention_utils import _flash_attention_forward

    documents: dict[str, Any] = {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    out: Tensor = _flash_attention_forward(
        q,
        k,
        v,
        None,
        query_length=q.shape[1],
        is_causal=True,
        softmax_scale=scaling,
        sliding_window=sliding_window,
        attn_implementation=kernel,
        **documents,
    )
    return out


@cache
def _varlen_keywords() -> frozenset[str]:
    """Return what torch's kernel takes: windows and scaling came after its first version, grouped heads later."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return frozenset()
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)
