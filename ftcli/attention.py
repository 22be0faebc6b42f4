"""Attention confined to documents: several of them laid end to end in one row, none of which sees another.

Where documents begin and end travels as the model's attention mask, in compressed form: `[1, 1, 1, D + 1]` int32
bounds, which transformers hands through to every attention layer as it is. So a model cannot lose it on the way, and
one that reads it as an ordinary mask fails at once. Knows no task; torch is imported inside functions, because
`ftcli check` asks here which architectures are supported.
Shapes: B rows, H heads, T tokens, D documents, K features of a head.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

from .errors import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .recipe import Recipe

NAME = "documents"  # as transformers knows our attention function

# model_type -> what its attention has beyond plain causal attention with positions. A test holds each entry: logits
# of documents laid end to end equal those of each by itself. What is not here is refused.
ARCHITECTURES = {
    "llama": "grouped heads",
    "mistral": "sliding window",
    "mixtral": "sliding window, experts",
    "qwen2": "windows in some layers",
    "qwen2_moe": "experts",
    "qwen3": "normed queries and keys, windows in some layers",
    "qwen3_moe": "experts",
    "gemma": "wide heads",
    "gemma2": "soft-capping, windows in every second layer",
    "gemma3_text": "windows, two rotary bases",
    "phi": "partial rotary",
    "phi3": "fused projections, sliding window",
    "gpt2": "learned positions",
    "gpt_neox": "partial rotary",
    "smollm3": "layers without positions",
    "olmo": "plain",
    "olmo2": "normed queries and keys",
    "olmo3": "windows in some layers",
    "granite": "scaled scores",
    "gpt_oss": "sinks, windows in every second layer, experts",
    "starcoder2": "sliding window",
    "cohere2": "windows, layers without positions",
    "glm4": "partial rotary",
    "deepseek_v3": "latent heads, experts",
    "opt": "learned positions",
}
DYNAMIC_ROTARY = ("dynamic", "longrope")  # rotary scalings that look at the longest row of the micro-batch


def is_flash(attn_implementation: str | None) -> bool:
    """Say whether an attention kernel is one of flash-attn's, which transformers gives document bounds itself."""
    name = attn_implementation or ""
    return name.startswith("flash_attention") or "flash-attn" in name


def is_flat(recipe: Recipe) -> bool:
    """Say whether the rows of a training micro-batch are laid end to end instead of padded."""
    return recipe.data.packing or recipe.data.padding_free


def check_attention(recipe: Recipe, task: Any) -> None:
    """Raise `InputError` where rows cannot be streamed, or laid end to end.

    Looks at the configuration of a local model only.
    """
    from .rows import model_folder

    if recipe.data.streaming and not getattr(task, "packs", False):
        told = f"data.streaming: the rows of task {recipe.task} are not documents of a language model"
        raise InputError(told, hint="set data.streaming to false")
    if not is_flat(recipe):
        return
    key = "data.packing" if recipe.data.packing else "data.padding_free"
    if not getattr(task, "packs", False):
        told = f"{key}: the rows of task {recipe.task} are not documents of a language model"
        raise InputError(told, hint=f"set {key} to false")
    chosen = recipe.model.attn_implementation
    if chosen is not None and not is_flash(chosen):
        raise InputError(
            f"model.attn_implementation: {chosen} cannot keep documents in one row apart ({key})",
            hint=f"delete that line, name a flash_attention kernel, or set {key} to false",
        )
    folder = model_folder(recipe.model.name)
    if folder is not None and (folder / "config.json").is_file():
        check_architecture(json.loads((folder / "config.json").read_text()), recipe)


def check_architecture(config: dict[str, Any], recipe: Recipe) -> None:
    """Raise `InputError` for the configuration of a model whose rows cannot be laid end to end exactly."""
    if not is_flat(recipe):
        return
    key = "data.packing" if recipe.data.packing else "data.padding_free"
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise InputError(
            f"{key}: documents in one row are not known to stay apart in a model of type {kind}",
            hint=f"set {key} to false; supported: {', '.join(sorted(ARCHITECTURES))}",
        )
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if (scaling := rotary.get("rope_type", rotary.get("type"))) in DYNAMIC_ROTARY:
        longest = config.get("original_max_position_embeddings") or rotary.get("original_max_position_embeddings")
        longest = longest or config.get("max_position_embeddings", 0)
        if recipe.data.max_length > longest:
            raise InputError(
                f"{key}: rotary positions of type {scaling} depend on the longest row of a micro-batch when it has "
                f"more than {longest} tokens",
                hint=f"set data.max_length to {longest} at most, or {key} to false",
            )


def document_bounds(lengths: list[int], attn_implementation: str | None) -> dict[str, Any]:
    """Return what tells a model where the documents of its one row begin and end, in its kernel's form."""
    import torch

    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    longest = {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    if is_flash(attn_implementation):
        return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, **longest}
    return {"attention_mask": bounds[None, None, None, :], **longest}


def confine_to_documents(model: nn.Module) -> None:
    """Let a transformers model use `attend` in place of its own attention; padded rows give what they gave before."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # without one of our name models would get no mask at all
    inner: Any = model
    if hasattr(model, "get_base_model"):
        inner = inner.get_base_model()
    inner.set_attn_implementation(NAME)
    if inner.config._attn_implementation != NAME:  # transformers only warns
        told = f"data.packing: the attention of {type(inner).__name__} cannot be replaced"
        raise InputError(told, hint="set data.packing and data.padding_free to false")


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    max_length_q: int | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Return `[B, T, H, K]` and no weights, from `[B, H, T, K]`; transformers' contract of an attention function.

    With bounds in place of a mask each document attends to itself alone, within its sliding window. One kernel does
    all of them on CUDA. Elsewhere, and for what that kernel lacks (float32, dropout, soft-capping, sinks), they run
    one by one: that is the arithmetic of a single row, in the time of the documents' own squares, where a
    block-diagonal mask would take the time and memory of the whole row's square. On a GPU the loop waits once a
    layer for the bounds.
    """
    extras: dict[str, Any] = {"dropout": dropout, "scaling": scaling, "softcap": softcap, "s_aux": s_aux}
    if not _holds_bounds(attention_mask):
        return _attend_whole(module, query, key, value, attention_mask, **extras, **rest)
    assert attention_mask is not None
    if softcap is None and s_aux is None and dropout == 0.0 and _has_kernel(query, key, value):
        bounds, longest = attention_mask.flatten(), max_length_q or query.shape[2]
        return _attend_varlen(query, key, value, bounds, longest, scaling, sliding_window), None
    found = []
    for start, end in pairwise(attention_mask.flatten().tolist()):  # on CUDA: a device sync
        q, k, v = (tensor[:, :, start:end] for tensor in (query, key, value))
        found.append(_attend_whole(module, q, k, v, _window(end - start, sliding_window, q), **extras, **rest)[0])
    import torch

    return torch.cat(found, dim=1), None


def _holds_bounds(attention_mask: Tensor | None) -> bool:
    import torch

    return attention_mask is not None and attention_mask.dtype == torch.int32


def _attend_whole(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **extras: Any
) -> tuple[Tensor, None]:
    """Attend as transformers' sdpa does, and also where there is soft-capping or a sink, which that one refuses."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    softcap, sinks = extras.pop("softcap"), extras.pop("s_aux")
    if softcap is None and sinks is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **extras)
    dropout = extras["dropout"] if module.training else 0.0
    return _attend_eager(query, key, value, attention_mask, extras["scaling"], softcap, sinks, dropout), None


def _attend_eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
) -> Tensor:
    """Return attention `[B, T, H, K]` with its scores in full: soft-capped (Gemma 2), with sinks `[H]` (gpt-oss)."""
    import torch

    groups, length, seen = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None and length > 1:
        mask = torch.ones(length, seen, dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)[..., :seen]
    weights = torch.nn.functional.dropout(weights, dropout) if dropout else weights
    return (weights @ value.to(weights.dtype)).transpose(1, 2).contiguous()


def _window(length: int, sliding_window: int | None, like: Tensor) -> Tensor | None:
    """Return the mask `[1, 1, T, T]` of a document that is longer than its layer's window; None: plain causal."""
    import torch

    if sliding_window is None or length <= sliding_window:
        return None
    causal = torch.ones(length, length, dtype=torch.bool, device=like.device).tril()
    return causal.triu(1 - sliding_window)[None, None]


def _has_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Say whether torch's own variable-length kernel can do it: half precision on a GPU that has it, equal heads.

    It is FlashAttention 2: for compute capability 8.0 and above, with K a multiple of 8, up to 256.
    """
    import torch

    size = query.shape[-1]
    if not query.is_cuda or size > 256 or size % 8 or not size == key.shape[-1] == value.shape[-1]:
        return False
    if torch.version.cuda is not None and torch.cuda.get_device_capability(query.device) < (8, 0):
        return False
    return _half(query) in (torch.float16, torch.bfloat16) and "window_size" in _varlen_keywords()


def _half(query: Tensor) -> Any:
    """Return the dtype that attention computes in: autocast's where it is on, as for torch's own attention."""
    import torch

    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query.dtype


@cache
def _varlen_keywords() -> set[str]:
    """Return what torch's kernel takes: windows and scaling came after its first version, grouped heads later."""
    import importlib.util
    import inspect

    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return set()
    from torch.nn.attention.varlen import varlen_attn

    return set(inspect.signature(varlen_attn).parameters)


def _attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """Return attention `[1, T, H, K]` of all documents by torch.nn.attention.varlen; no device sync.

    Its window counts the tokens before the own one, transformers' counts that one too.
    """
    from torch.nn.attention.varlen import varlen_attn

    groups = query.shape[1] // key.shape[1]
    grouped: dict[str, Any] = {}
    if groups > 1 and "enable_gqa" in _varlen_keywords():
        grouped = {"enable_gqa": True}
    elif groups > 1:
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    q, k, v = (tensor[0].transpose(0, 1).to(_half(query)) for tensor in (query, key, value))
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    out: Any = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scaling, window_size=window, **grouped)
    return cast("Tensor", out[None])
