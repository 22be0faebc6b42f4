"""Training a few added weights instead of the whole model, through peft."""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING

from .errors import InputError
from .sampling import seed_of

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn

    from .recipe import Adapter


def add_adapter(
    model: nn.Module,
    section: Adapter,
    *,
    seed: int,
    keep: list[str],
    dtype: torch.dtype,
    task_type: str | None,
    weights: Path | None = None,
) -> nn.Module:
    """Return `model` with the recipe's adapter; only the adapter and the modules named in `keep` are trained.

    `keep` are newly made heads, saved in full beside the adapter. Adapter weights have `dtype` and are drawn from
    `seed` alone, so they are equal on every process; or they are those of the folder `weights`. Raises `InputError`
    when target_modules match nothing.
    """
    from peft import LoraConfig, PeftModel, get_peft_model

    if section.type == "none":
        return model
    if weights is not None:
        return PeftModel.from_pretrained(model, str(weights), is_trainable=True, autocast_adapter_dtype=False)
    config = LoraConfig(
        task_type=task_type,
        r=section.r,
        lora_alpha=section.lora_alpha,  # type: ignore[arg-type]  # peft takes floats, its annotation says int
        lora_dropout=section.lora_dropout,
        target_modules=section.target_modules,
        modules_to_save=keep or None,
        exclude_modules=keep or None,
    )
    try:
        wrapped = get_peft_model(model, config, autocast_adapter_dtype=False)
    except ValueError as error:
        raise InputError(f"adapter.target_modules: {error}") from error
    for name, parameter in wrapped.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
        if ".lora_A." in name:
            _draw(name, parameter, seed)
    return wrapped


def _draw(name: str, parameter: nn.Parameter, seed: int) -> None:
    """Draw one input matrix as peft does (Kaiming, uniform), on the host and from (seed, name) alone.

    peft draws on the device, one after the other, so that its values depend on the hardware and the backend.
    """
    import torch

    from .hardware import full_shape, whole

    generator = torch.Generator().manual_seed(seed_of(seed, zlib.crc32(name.encode())))
    values = torch.empty(full_shape(parameter))
    torch.nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
    with torch.no_grad(), whole([parameter]):
        parameter.copy_(values)
