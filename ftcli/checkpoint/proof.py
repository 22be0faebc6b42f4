"""Prove an export on this process: its logits are those of the model that was assembled from the checkpoint.

The assembled model is the base with its adapter, as in training. An export is loaded by transformers and peft alone.
If a merged model differs, its weights are compared with peft's own merge of the whole model, to name the wrong one.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.checkpoint.export_job import ROUNDING_TOLERANCES, TOLERANCES, ExportJob
from ftcli.checkpoint.final import load_plain
from ftcli.models.own_model import probe_tensor
from ftcli.models.structure import embeddings_and_head
from ftcli.runtime.errors import ExportError, shortened
from ftcli.runtime.log import log_line

if TYPE_CHECKING:
    from torch import Tensor


TOKENS = 64  # of the row that both models compute
SMALLEST_EFFECT = 10  # times the tolerance. If the adapter changes the logits by less, weights are compared too
HEADROOM = 1.2  # of the memory for the weights in float32
WEIGHT_TOLERANCES = {"float32": 1e-5}  # relative, between two merges
ROUNDED_WEIGHT_TOLERANCE = 5e-3  # the same, if one of them is rounded to 16 bits


def prove(job: ExportJob, model: Any, folder: Path, *, labels: int) -> float | None:
    """Compare the logits of an export with those of the model with the trained weights.

    Args:
        job: The export.
        model: The assembled model in evaluation mode. Its weights become float32 if the memory suffices. The adapter
            may be merged into it.
        folder: The exported folder.
        labels: Width of a classifier's head; 0 for other models.

    Returns:
        The relative distance; None if the logits cannot be computed, after a log line with the reason.

    Raises:
        ExportError: The logits differ, or a merged weight is another one; the message names it.
    """
    is_exact = fits_in_memory(model)
    if is_exact:
        model.float()
    tolerance = max(TOLERANCES["fp32"], ROUNDING_TOLERANCES[job.dtype])
    if not is_exact:
        tolerance = max(tolerance, ROUNDING_TOLERANCES["bfloat16"])
    plain = load_plain(
        job.auto_class,
        folder,
        labels,
        dtype="float32" if is_exact else "auto",
        trust_remote_code=job.recipe.model.trust_remote_code,
        revision=job.recipe.model.revision,
    )
    distance, effect = _distances(model, plain)
    if distance is not None and not distance <= tolerance:
        wrong = _wrong_weight(job, model, plain, is_exact=is_exact) if job.merge else None
        raise ExportError(
            f"the export is wrong: its logits differ from those of the trained model by {distance:.2g}, more than "
            f"{tolerance:g}" + (f". The first wrong weight is {wrong}" if wrong else "")
        )
    if job.merge and (effect is None or effect < SMALLEST_EFFECT * tolerance):
        wrong = _wrong_weight(job, model, plain, is_exact=is_exact)
        if wrong is not None:
            raise ExportError(f"the export is wrong: {wrong}")
    return distance


def fits_in_memory(model: Any) -> bool:
    """Return whether the host has memory for the weights of a model in float32."""
    import psutil

    needed = sum(parameter.numel() for parameter in model.parameters()) * 4 * HEADROOM
    return bool(needed < psutil.virtual_memory().available)


def _distances(model: Any, plain: Any) -> tuple[float | None, float | None]:
    """Return the relative distance of the export's logits from the model's, and of the base's; None if unknown."""
    import torch

    from ftcli.models.adapters import disable_adapter
    from ftcli.models.structure import base_model_of

    inputs = _sample_inputs(base_model_of(model))
    if inputs is None:
        log_line("the export is compared by its weights: no inputs are known for this kind of model")
        return None, None
    try:
        with torch.no_grad():
            expected, actual = (_logits(each, inputs) for each in (model, plain))
            base = expected
            if base_model_of(model) is not model:
                with disable_adapter(model):
                    base = _logits(model, inputs)
    except Exception as error:  # a model may need other inputs, or an attention kernel that this machine lacks
        log_line(f"the export is compared by its weights: its logits were not computed: {shortened(str(error), 200)}")
        return None, None
    size = torch.linalg.vector_norm(expected).clamp_min(torch.finfo(torch.float32).tiny)
    away, effect = (float(torch.linalg.vector_norm(each - expected) / size) for each in (actual, base))
    return away, effect


def _logits(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Return the output of a model that an export must reproduce, in float32."""
    dtype = next(parameter.dtype for parameter in model.parameters())
    output = probe_tensor(None, model(**{k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}))
    if output is None:
        raise ValueError("the output has no logits")
    return output.float()


def _sample_inputs(model: Any) -> dict[str, Tensor] | None:
    """Return fixed inputs for a language model or an image model; None for other models."""
    import torch

    generator, config = torch.Generator().manual_seed(0), model.config.get_text_config()
    if getattr(model, "main_input_name", None) == "input_ids":
        most = getattr(config, "max_position_embeddings", None) or TOKENS
        ids = torch.randint(config.vocab_size, (1, min(TOKENS, most // 2)), generator=generator)
        pad = getattr(config, "pad_token_id", None)
        ids = torch.where(ids == pad, (ids + 1) % config.vocab_size, ids) if isinstance(pad, int) else ids
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if getattr(model, "main_input_name", None) == "pixel_values":
        size = getattr(config, "image_size", None) or 224
        sides = [size, size] if isinstance(size, int) else list(size)[-2:]
        channels = getattr(config, "num_channels", None) or 3
        return {"pixel_values": torch.randn(1, channels, *sides, generator=generator)}
    return None


def _wrong_weight(job: ExportJob, model: Any, plain: Any, *, is_exact: bool) -> str | None:
    """Merge a peft model with peft, and return the first weight of the export that differs, with its distance."""
    import torch

    _untie_adapted(model.get_base_model())
    exported = dict(plain.named_parameters(remove_duplicate=False))
    tolerance = WEIGHT_TOLERANCES.get(job.dtype, ROUNDED_WEIGHT_TOLERANCE) if is_exact else ROUNDED_WEIGHT_TOLERANCE
    for name, value in model.merge_and_unload().named_parameters():
        if name not in exported:
            return f"{name} is missing"
        expected = value.detach().float()
        difference = torch.linalg.vector_norm(exported[name].detach().float() - expected)
        size = torch.linalg.vector_norm(expected)
        if not difference <= tolerance * size:
            return f"{name} differs from peft's own merge by {float(difference / size):.2g}"
    return None


def _untie_adapted(base: Any) -> None:
    """Give embeddings and head their own weights if one has a LoRA adapter; peft would merge it into both."""
    import torch
    from peft.tuners.lora import LoraLayer

    ends = embeddings_and_head(base)
    if any(isinstance(end, LoraLayer) for end in ends):
        for end in ends:
            layer: Any = end.get_base_layer() if isinstance(end, LoraLayer) else end
            layer.weight = torch.nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
