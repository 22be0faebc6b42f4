"""Attention inside documents for flat rows. A flat row has several documents that do not attend to each other.

The bounds of the documents are passed as the attention mask, `[1, 1, 1, D + 1]` int32. transformers forwards the mask
unchanged to every attention layer. A model therefore cannot drop the bounds, and a model that uses them as an ordinary
mask fails at once. torch is imported inside functions, because `ftcli check` uses this module.
Shapes: B rows, H heads, T tokens, D documents, K features of a head.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ftcli.models.architectures import architecture_of, model_types_with
from ftcli.models.estimates.shape import Shape
from ftcli.models.files import parse_json_object
from ftcli.models.hub import ATTENTION, attention_of
from ftcli.models.kernels.single_attention import attend_single, sliding_window_mask
from ftcli.models.structure import base_model_of
from ftcli.runtime.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ftcli.config.recipe import Recipe


DOCUMENT_ATTENTION = "documents"  # the name under which `attend` is registered with transformers
# The same with PyTorch's kernels only. The name must not contain "sdpa", which transformers refuses for gpt-oss.
DOCUMENT_ATTENTION_TORCH = "documents_by_torch"

DYNAMIC_ROTARY = ("dynamic", "longrope")  # rotary scalings that depend on the longest row of the micro-batch


def is_flash(attn_implementation: str | None) -> bool:
    """Return whether a kernel is one of flash-attn's, to which transformers itself passes document bounds."""
    name = attn_implementation or ""
    return name.startswith("flash_attention") or "flash-attn" in name


def is_flat(recipe: Recipe) -> bool:
    """Return whether the recipe requests flat training rows (packing or `padding_free: true`) instead of padding."""
    return recipe.data.packing or recipe.data.padding_free is True


def prefers_flat(model: nn.Module, recipe: Recipe) -> bool:
    """Return whether training rows are flat: as the recipe sets it, or by default if a GPU kernel supports the model.

    Padded rows need a mask, which flash kernels do not support. Other kernels take time and memory for the square of
    the longest row.

    Args:
        model: The model, not prepared.
        recipe: The recipe of the run.
    """
    import torch
    from accelerate.state import AcceleratorState, is_initialized

    if recipe.data.packing or recipe.data.padding_free is not None:
        return is_flat(recipe)
    inner = base_model_of(model)
    on_gpu = AcceleratorState().device.type == "cuda" if is_initialized() else torch.cuda.is_available()
    if not on_gpu or recipe.model.attn_implementation not in (None, "sdpa"):
        return False
    return (
        _packing_problem(inner.config.to_dict(), recipe, "") is None
        and document_kernel(inner, recipe, "cuda") is not None
    )


def check_attention(recipe: Recipe, task: Any) -> None:
    """Check streaming, flat rows and the attention kernel against the task and a local model's configuration.

    Args:
        recipe: The recipe.
        task: The class of its task.

    Raises:
        InputError: The task's rows are not documents, or the kernel or the model does not support flat rows.
    """
    from ftcli.data.paths import model_folder

    folder = model_folder(recipe.model.name)
    config, needs_config = None, is_flat(recipe) or is_flash(recipe.model.attn_implementation)
    if needs_config and folder is not None and (folder / "config.json").is_file():
        config = parse_json_object(folder / "config.json", (folder / "config.json").read_bytes())
        check_heads(config, recipe)

    if recipe.data.streaming and not getattr(task, "packs", False):
        problem = f"data.streaming: the rows of task {recipe.task} are not documents of a language model"
        raise InputError(problem, hint="set data.streaming to false")
    if not is_flat(recipe):
        return
    key = "data.packing" if recipe.data.packing else "data.padding_free"
    if not getattr(task, "packs", False):
        problem = f"{key}: the rows of task {recipe.task} are not documents of a language model"
        raise InputError(problem, hint=f"set {key} to false")
    kernel = recipe.model.attn_implementation
    if kernel not in (None, "sdpa") and not is_flash(kernel):
        raise InputError(
            f"model.attn_implementation: {kernel} cannot separate documents in one row ({key})",
            hint=f"delete model.attn_implementation, name sdpa or a flash_attention kernel, or set {key} to false",
        )
    if config is not None:
        check_architecture(config, recipe)


def check_heads(config: dict[str, Any], recipe: Recipe) -> None:
    """Check that the recipe's flash-attn kernel supports the head size of a model.

    Args:
        config: The model's configuration.
        recipe: The recipe.

    Raises:
        InputError: The kernel does not support heads of this size.
    """
    kernel, shape = recipe.model.attn_implementation, Shape.of(config)
    if kernel is None or not kernel.startswith("flash_attention") or shape is None:
        return
    from ftcli.models.kernels.varlen_attention import FLASH_KERNELS

    size = shape.attention // shape.heads
    *_, sizes = FLASH_KERNELS.get(kernel, (None, None, [size]))
    if size not in sizes:
        supported = f"{sizes[0]} to {sizes[-1]}" if isinstance(sizes, range) else ", ".join(map(str, sizes))
        raise InputError(
            f"model.attn_implementation: {kernel} supports heads of {supported} features; this model's have {size}",
            hint="delete model.attn_implementation to use the fastest kernel that supports them",
        )


def check_architecture(config: dict[str, Any], recipe: Recipe) -> None:
    """Check that a model computes flat rows exactly like separate rows, if the recipe requests flat rows.

    Args:
        config: The model's configuration.
        recipe: The recipe.

    Raises:
        InputError: The architecture is not supported, or attention or positions depend on other documents.
    """
    if not is_flat(recipe):
        return
    problem = _packing_problem(config, recipe, "data.packing" if recipe.data.packing else "data.padding_free")
    if problem is not None:
        raise problem


def _packing_problem(config: dict[str, Any], recipe: Recipe, key: str) -> InputError | None:
    """Return why a model does not support flat rows, which the recipe requests with `key`; None if it does."""
    model_type = config.get("model_type")
    if architecture_of(model_type).packed_attention is None:
        return InputError(
            f"{key}: several documents in one row are not tested for models of type {model_type}",
            hint=f"set {key} to false; supported: {', '.join(sorted(model_types_with('packed_attention')))}",
        )
    if config.get("use_bidirectional_attention") or config.get("is_causal") is False:
        problem = f"{key}: several documents in one row need causal attention, and this model's is not causal"
        return InputError(problem, hint=f"set {key} to false")
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
    """Return the arguments of a model's forward that pass the bounds of documents to its attention kernel.

    Args:
        lengths: Tokens of each document, in order.
        attn_implementation: The kernel of the recipe; None for the default.

    Returns:
        Bounds of shape `[D + 1]` for flash-attn, else `[1, 1, 1, D + 1]` as attention mask, int32, on the host; and the
        longest length.
    """
    import torch

    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    longest = {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    if is_flash(attn_implementation):
        return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, **longest}
    return {"attention_mask": bounds[None, None, None, :], **longest}


def confine_to_documents(model: nn.Module, attn_implementation: str | None = None) -> None:
    """Replace the attention of a transformers model by `attend`. Results for padded rows do not change.

    Args:
        model: The model, not prepared.
        attn_implementation: The kernel of the recipe. sdpa allows PyTorch's kernels only; None allows all.

    Raises:
        InputError: The model does not support another attention function.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(DOCUMENT_ATTENTION, attend)
    AttentionInterface.register(DOCUMENT_ATTENTION_TORCH, partial(attend, flash=False))
    for name in (DOCUMENT_ATTENTION, DOCUMENT_ATTENTION_TORCH):
        AttentionMaskInterface.register(name, sdpa_mask)  # without a mask function models would create no mask
    requested = DOCUMENT_ATTENTION_TORCH if attn_implementation == "sdpa" else DOCUMENT_ATTENTION
    inner = base_model_of(model)
    ATTENTION.require()
    inner.set_attn_implementation(requested)
    if attention_of(inner) != requested:  # transformers only warns
        problem = f"data.packing: the attention of {type(inner).__name__} cannot be replaced"
        raise InputError(problem, hint="set data.packing and data.padding_free to false")


def document_kernel(model: Any, recipe: Recipe, device_type: str) -> str | None:
    """Return the name of the kernel that `attend` uses for flat rows; None if it processes documents one by one.

    Args:
        model: A transformers model.
        recipe: The recipe of the run.
        device_type: Such as cuda.
    """
    import torch

    from ftcli.models.kernels.varlen_attention import choose_kernel
    from ftcli.models.precision import COMPUTE

    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    key_size, value_size = getattr(config, "qk_head_dim", size), getattr(config, "v_head_dim", size)
    if (
        getattr(config, "attn_logit_softcapping", None) is not None
        or architecture_of(config.model_type).has_attention_sinks
    ):
        return None
    if any(getattr(config, name, 0.0) for name in ("attention_dropout", "attn_pdrop")):
        return None
    device = torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
    flash = recipe.model.attn_implementation != "sdpa"
    return choose_kernel(device, COMPUTE[recipe.precision], key_size, value_size, flash=flash)


def describe_attention(model: nn.Module, recipe: Recipe, *, flat: bool, device_type: str) -> list[str]:
    """Return lines for the log that name the attention kernel; empty for a model that transformers does not provide.

    Args:
        model: The model.
        recipe: The recipe of the run.
        flat: Whether training rows are flat.
        device_type: Such as cuda.
    """
    from ftcli.models.kernels.varlen_attention import FLASH_KERNELS, import_problem

    inner = base_model_of(model)
    implementation = attention_of(inner)
    if implementation is None:
        return []
    if implementation not in (DOCUMENT_ATTENTION, DOCUMENT_ATTENTION_TORCH) or not flat:
        return [f"attention: {implementation}"]
    kernel = document_kernel(inner, recipe, device_type)
    broken = [
        problem for name in FLASH_KERNELS if (problem := import_problem(name)) and "cannot be imported" in problem
    ]
    description = "one document after the other" if kernel is None else f"{kernel}, all documents at once"
    shows_broken = implementation == DOCUMENT_ATTENTION and device_type == "cuda"
    return [f"attention: {description}", *(broken if shows_broken else [])]


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
    """Compute attention; with document bounds in place of a mask, separately for each document.

    The signature is that of transformers' attention functions. On CUDA one kernel processes all documents. Otherwise,
    and with float32, dropout, soft-capping or sinks, the documents are processed one by one. This takes less time and
    memory than a block-diagonal mask for the whole row. On a GPU it waits for the device once per layer.

    Args:
        module: The attention layer.
        query: `[B, H, T, K]`.
        key: `[B, heads, T, K]`, with as many heads as `query` or fewer.
        value: Like `key`.
        attention_mask: Document bounds `[1, 1, 1, D + 1]` int32, or a mask, or None for causal attention.
        dropout: Probability of dropping an attention weight.
        scaling: Factor of the scores; None is `K ** -0.5`.
        sliding_window: Tokens that a token attends to, including itself; None for all.
        softcap: Limit of the scores (Gemma 2).
        s_aux: Sinks `[H]` (gpt-oss).
        max_length_q: Tokens of the longest document.
        flash: Whether kernels of flash-attn's packages may be used.
        **rest: Further arguments for transformers' attention.

    Returns:
        `[B, T, H, K]`, and None instead of attention weights.
    """
    from ftcli.models.kernels.varlen_attention import attend_documents, choose_kernel, compute_dtype

    extras: dict[str, Any] = {"dropout": dropout, "scaling": scaling, "softcap": softcap, "s_aux": s_aux}
    if not _is_bounds(attention_mask):
        return attend_single(module, query, key, value, attention_mask, **extras, **rest)
    assert attention_mask is not None
    if softcap is None and s_aux is None and dropout == 0.0:
        dtype = compute_dtype(query.dtype)
        kernel = choose_kernel(query.device, dtype, query.shape[-1], value.shape[-1], flash=flash)
        if kernel is not None:
            bounds, longest = attention_mask.flatten(), max_length_q or query.shape[2]
            return attend_documents(kernel, query, key, value, bounds, longest, scaling, sliding_window), None
    outputs = []
    for start, end in pairwise(attention_mask.flatten().tolist()):  # on CUDA this waits for the device
        q, k, v = (tensor[:, :, start:end] for tensor in (query, key, value))
        mask = sliding_window_mask(end - start, sliding_window, q)
        outputs.append(attend_single(module, q, k, v, mask, **extras, **rest)[0])
    import torch

    return torch.cat(outputs, dim=1), None


def _is_bounds(attention_mask: Tensor | None) -> bool:
    """Return whether the mask argument has document bounds, which are int32."""
    import torch

    return attention_mask is not None and attention_mask.dtype == torch.int32
