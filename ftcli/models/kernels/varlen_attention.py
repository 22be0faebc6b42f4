"""Choose and call the variable-length attention kernel for flat rows: flash-attn's, torch's, or none.

No call waits for the device. Shapes: H heads, T tokens, D documents, K features of a head.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Collection
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from ftcli.runtime.patches import declare

TORCH_VARLEN = "torch varlen"  # torch.nn.attention.varlen, an implementation of FlashAttention 2
# transformers' name -> lowest compute capability, first unsupported capability, supported features of a head. The
# fastest kernel comes first. flash_attention_4 (4.0.0b36) returns wrong gradients for heads of 8, 16 and 80 features,
# so only sizes with tested gradients are listed.
FLASH_KERNELS: dict[str, tuple[tuple[int, int], tuple[int, int], Collection[int]]] = {
    "flash_attention_4": ((9, 0), (12, 0), (64, 96, 128)),
    "flash_attention_3": ((9, 0), (10, 0), range(8, 257, 8)),
    "flash_attention_2": ((8, 0), (99, 0), range(8, 257, 8)),
}

FLASH_CALLS = "transformers.modeling_flash_attention_utils"
FLASH_ATTENTION = declare(
    __name__,
    "flash-attention-calls",
    library="transformers",
    versions=">=5.17,<5.25",
    purpose="Calls the packages of flash-attn through transformers' own wrapper, with the bounds of all documents",
    without="Packed rows then use torch's variable-length attention.",
    alternative='`ALL_ATTENTION_FUNCTIONS["flash_attention_2"]`, which computes bounds from position ids and waits for '
    "the device.",
    apis=(
        f"{FLASH_CALLS}:lazy_import_flash_attention",
        *(
            f"{FLASH_CALLS}:_flash_attention_forward.{name}"
            for name in (
                "cu_seq_lens_q",
                "cu_seq_lens_k",
                "max_length_q",
                "max_length_k",
                "softmax_scale",
                "sliding_window",
                "attn_implementation",
                "is_causal",
                "query_length",
            )
        ),
    ),
    measurement="241.9 ms a step, without it 258.9 ms, 38.2 GiB both times: flash-attn 4, 1B, 4 rows of 4,096 tokens, "
    "one H200. The second line has `attn_implementation: sdpa`, which chooses the same attention as a run without "
    "the patch.",
)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of attention on a GPU: the autocast dtype if autocast is on, as in torch's own attention."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else dtype


@cache
def choose_kernel(
    device: torch.device, dtype: torch.dtype, key_size: int, value_size: int, *, flash: bool
) -> str | None:
    """Return the name of the fastest usable kernel; None if there is none. The result is cached.

    Kernels need 16-bit values, a multiple of 8 features, and an NVIDIA GPU of compute capability 8.0 or higher (or an
    AMD GPU, with torch).

    Args:
        device: Device of the tensors.
        dtype: Dtype of the computation.
        key_size: Features of a query or key head.
        value_size: Features of a value head.
        flash: Whether flash-attn's packages may be used.
    """
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return None
    if key_size != value_size or key_size % 8:
        return None
    capability = torch.cuda.get_device_capability(device) if torch.version.cuda is not None else None
    if flash and capability is not None:
        for name, (lowest, unsupported, sizes) in FLASH_KERNELS.items():
            if lowest <= capability < unsupported and key_size in sizes and import_problem(name) is None:
                return name
    if key_size <= 256 and "window_size" in _torch_varlen_parameters() and (capability is None or capability >= (8, 0)):
        return TORCH_VARLEN
    return None


@cache
def import_problem(name: str) -> str | None:
    """Return why a kernel of flash-attn cannot be used, in one line; None if it can.

    The words "cannot be imported" mark a package that is installed but broken: a dependency is missing, or it was built
    for another version of torch.

    Args:
        name: transformers' name of the kernel.
    """
    from transformers import modeling_flash_attention_utils as flash
    from transformers.utils import import_utils

    if not getattr(import_utils, f"is_flash_attn_{name[-1]}_available")():
        return f"{name} is not installed"
    if not FLASH_ATTENTION.is_usable():
        return f"{name} is installed and is not used: {FLASH_ATTENTION.problem()}"
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
    """Compute causal attention inside each of several documents with one kernel.

    Args:
        kernel: The result of `choose_kernel`.
        query: `[1, H, T, K]`.
        key: `[1, heads, T, K]`; grouped heads are supported without repeating them.
        value: Like `key`.
        bounds: `[D + 1]` int32, the first token of each document, and T.
        longest: Tokens of the longest document.
        scaling: Factor of the scores; None is `K ** -0.5`.
        sliding_window: Tokens that a token attends to, including itself; None for all.

    Returns:
        `[1, T, H, K]`.
    """
    dtype = compute_dtype(query.dtype)
    q, k, v = (tensor.transpose(1, 2).to(dtype) for tensor in (query, key, value))
    if kernel == TORCH_VARLEN:
        return _run_torch_varlen(q, k, v, bounds, longest, scaling, sliding_window)
    return _run_flash_attention(kernel, q, k, v, bounds, longest, scaling, sliding_window)


def _run_torch_varlen(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """Call torch's kernel. Its window excludes the token itself; that of transformers includes it.

    torch 2.12 and later have a switch for grouped heads; earlier versions always accept them.
    """
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"window_size": (-1 if sliding_window is None else sliding_window - 1, 0)}
    if q.shape[2] != k.shape[2] and "enable_gqa" in _torch_varlen_parameters():
        options["enable_gqa"] = True
    out: Any = varlen_attn(q[0], k[0], v[0], bounds, bounds, longest, longest, scale=scaling, **options)
    return cast("Tensor", out[None])


def _run_flash_attention(
    kernel: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    longest: int,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """Call a kernel of flash-attn through transformers, whose wrapper has the signature of each version.

    With all lengths given, the wrapper does not wait for the device.
    """
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
def _torch_varlen_parameters() -> frozenset[str]:
    """Return the argument names of torch's kernel, which differ between versions; empty without the kernel."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return frozenset()
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)
