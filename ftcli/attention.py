"""Attention confined to documents: several of them laid end to end in one row, none of which sees another.

Where documents begin and end travels as the model's attention mask, in compressed form: `[1, 1, 1, D + 1]` int32
bounds, which transformers hands through to every attention layer as it is. So a model cannot lose it on the way, and
one that reads it as an ordinary mask fails at once. Knows no task; torch is imported inside functions, because
`ftcli check` asks here which architectures are supported.
Shapes: B rows, H heads, T tokens, D documents, K features of a head.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from .base_model import base_model_of
from .errors import InputError
from .memory import Shape
from .model_files import json_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .recipe import Recipe

NAME = "documents"  # as transformers knows our attention function
BY_TORCH = "documents_by_torch"  # the same with PyTorch's kernels alone; "sdpa" in a name is refused for gpt-oss

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
    """Say whether a recipe asks that the rows of a training micro-batch are laid end to end instead of padded."""
    return recipe.data.packing or recipe.data.padding_free is True


def is_best_flat(model: nn.Module, recipe: Recipe) -> bool:
    """Say whether rows are better laid end to end, where the recipe leaves it open: a kernel does it, exactly.

    A mask would take the time and memory of the square of the longest row, and no flash kernel takes one.
    """
    import torch
    from accelerate.state import AcceleratorState, is_initialized

    if recipe.data.packing or recipe.data.padding_free is not None:
        return is_flat(recipe)
    inner = base_model_of(model)
    on_gpu = AcceleratorState().device.type == "cuda" if is_initialized() else torch.cuda.is_available()
    if not on_gpu or recipe.model.attn_implementation not in (None, "sdpa"):
        return False
    return _problem(inner.config.to_dict(), recipe, "") is None and document_kernel(inner, recipe, "cuda") is not None


def check_attention(recipe: Recipe, task: Any) -> None:
    """Raise `InputError` where rows cannot be streamed, or laid end to end, or a kernel cannot do the model's heads.

    Looks at the configuration of a local model only.
    """
    from .rows import model_folder

    folder = model_folder(recipe.model.name)
    config, asks = None, is_flat(recipe) or is_flash(recipe.model.attn_implementation)
    if asks and folder is not None and (folder / "config.json").is_file():
        config = json_of(folder / "config.json", (folder / "config.json").read_bytes())
        check_heads(config, recipe)

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
    if chosen not in (None, "sdpa") and not is_flash(chosen):
        raise InputError(
            f"model.attn_implementation: {chosen} cannot keep documents in one row apart ({key})",
            hint=f"delete that line, name sdpa or a flash_attention kernel, or set {key} to false",
        )
    if config is not None:
        check_architecture(config, recipe)


def check_heads(config: dict[str, Any], recipe: Recipe) -> None:
    """Raise `InputError` where the kernel that a recipe names is wrong for heads of this model's size, or too small."""
    chosen, shape = recipe.model.attn_implementation, Shape.of(config)
    if chosen is None or not chosen.startswith("flash_attention") or shape is None:
        return
    from .attention_kernels import FLASH

    size = shape.attention // shape.heads
    *_, sizes = FLASH.get(chosen, (None, None, [size]))
    if size not in sizes:
        told = f"{sizes[0]} to {sizes[-1]}" if isinstance(sizes, range) else ", ".join(map(str, sizes))
        raise InputError(
            f"model.attn_implementation: {chosen} does heads of {told} features; those of this model have {size}",
            hint="delete that line, and the best kernel that can do them is taken",
        )


def check_architecture(config: dict[str, Any], recipe: Recipe) -> None:
    """Raise `InputError` for the configuration of a model whose rows cannot be laid end to end exactly."""
    if not is_flat(recipe):
        return
    problem = _problem(config, recipe, "data.packing" if recipe.data.packing else "data.padding_free")
    if problem is not None:
        raise problem


def _problem(config: dict[str, Any], recipe: Recipe, key: str) -> InputError | None:
    """Return why rows of a model of this configuration cannot be laid end to end, as `key` asks; None: they can."""
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        return InputError(
            f"{key}: documents in one row are not known to stay apart in a model of type {kind}",
            hint=f"set {key} to false; supported: {', '.join(sorted(ARCHITECTURES))}",
        )
    if config.get("use_bidirectional_attention") or config.get("is_causal") is False:
        told = f"{key}: this model's attention is not causal, and that of documents in one row is"
        return InputError(told, hint=f"set {key} to false")
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if (scaling := rotary.get("rope_type", rotary.get("type"))) in DYNAMIC_ROTARY:
        longest = config.get("original_max_position_embeddings") or rotary.get("original_max_position_embeddings")
        longest = longest or config.get("max_position_embeddings", 0)
        if recipe.data.max_length > longest:
            return InputError(
                f"{key}: rotary positions of type {scaling} depend on the longest row of a micro-batch when it has "
                f"more than {longest} tokens",
                hint=f"set data.max_length to {longest} at most, or {key} to false",
            )
    return None


def document_bounds(lengths: list[int], attn_implementation: str | None) -> dict[str, Any]:
    """Return what tells a model where the documents of its one row begin and end, in its kernel's form."""
    import torch

    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    longest = {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    if is_flash(attn_implementation):
        return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, **longest}
    return {"attention_mask": bounds[None, None, None, :], **longest}


def confine_to_documents(model: nn.Module, attn_implementation: str | None = None) -> None:
    """Let a transformers model use `attend` in place of its own attention; padded rows give what they gave before.

    The best kernel there is does it, or under sdpa the best of PyTorch's own.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attend)
    AttentionInterface.register(BY_TORCH, partial(attend, flash=False))
    for name in (NAME, BY_TORCH):
        AttentionMaskInterface.register(name, sdpa_mask)  # without one of our name models would get no mask at all
    wanted = BY_TORCH if attn_implementation == "sdpa" else NAME
    inner = base_model_of(model)
    inner.set_attn_implementation(wanted)
    if inner.config._attn_implementation != wanted:  # transformers only warns
        told = f"data.packing: the attention of {type(inner).__name__} cannot be replaced"
        raise InputError(told, hint="set data.packing and data.padding_free to false")


def document_kernel(model: Any, recipe: Recipe, device_type: str) -> str | None:
    """Return the kernel that `attend` will use for documents in one row of a transformers model; None: none can."""
    import torch

    from .attention_kernels import kernel_for
    from .hardware.precision import COMPUTE

    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    key_size, value_size = getattr(config, "qk_head_dim", size), getattr(config, "v_head_dim", size)
    if getattr(config, "attn_logit_softcapping", None) is not None or config.model_type == "gpt_oss":
        return None
    if any(getattr(config, name, 0.0) for name in ("attention_dropout", "attn_pdrop")):
        return None
    device = torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
    flash = recipe.model.attn_implementation != "sdpa"
    return kernel_for(device, COMPUTE[recipe.precision], key_size, value_size, flash=flash)


def describe_attention(model: nn.Module, recipe: Recipe, *, flat: bool, device_type: str) -> list[str]:
    """Return what does the attention of training rows, for the log; nothing for what is no transformers model."""
    from .attention_kernels import FLASH, import_problem

    inner = base_model_of(model)
    chosen = getattr(getattr(inner, "config", None), "_attn_implementation", None)
    if chosen is None:
        return []
    if chosen not in (NAME, BY_TORCH) or not flat:
        return [f"attention: {chosen}"]
    kernel = document_kernel(inner, recipe, device_type)
    broken = [problem for name in FLASH if (problem := import_problem(name)) and "cannot be imported" in problem]
    told = "one document after the other" if kernel is None else f"{kernel}, all documents at once"
    return [f"attention: {told}", *(broken if chosen == NAME and device_type == "cuda" else [])]


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
    flash: bool = True,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Return `[B, T, H, K]` and no weights, from `[B, H, T, K]`; transformers' contract of an attention function.

    With bounds in place of a mask each document attends to itself alone, within its sliding window. One kernel does
    all of them on CUDA; `flash` allows those of flash-attn's packages. Elsewhere, and for what those kernels lack
    (float32, dropout, soft-capping, sinks), they run one by one: that is the arithmetic of a single row, in the time
    of the documents' own squares, where a block-diagonal mask would take the time and memory of the whole row's
    square. On a GPU the loop waits once a layer for the bounds.
    """
    from .attention_kernels import attend_documents, compute_dtype, kernel_for

    extras: dict[str, Any] = {"dropout": dropout, "scaling": scaling, "softcap": softcap, "s_aux": s_aux}
    if not _holds_bounds(attention_mask):
        return _attend_whole(module, query, key, value, attention_mask, **extras, **rest)
    assert attention_mask is not None
    if softcap is None and s_aux is None and dropout == 0.0:
        dtype = compute_dtype(query.dtype)
        kernel = kernel_for(query.device, dtype, query.shape[-1], value.shape[-1], flash=flash)
        if kernel is not None:
            bounds, longest = attention_mask.flatten(), max_length_q or query.shape[2]
            return attend_documents(kernel, query, key, value, bounds, longest, scaling, sliding_window), None
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
