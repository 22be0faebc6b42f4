"""Training a few added weights instead of the whole model, through peft."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from .recipe import Adapter


def add_adapter(
    model: nn.Module,
    section: Adapter,
    *,
    seed: int,
    keep: list[str],
    task_type: str | None,
    weights: Path | None = None,
) -> nn.Module:
    """Return `model` with the recipe's adapter; only the adapter and the modules named in `keep` are trained.

    `keep` are newly made heads, saved in full beside the adapter. Adapter weights are float32 and drawn from `seed`
    alone, so they are equal on every process; or they are those of the folder `weights`. Raises `InputError` when
    target_modules match nothing.
    """
    import torch
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
    torch.manual_seed(seed)
    try:
        wrapped = get_peft_model(model, config, autocast_adapter_dtype=False)
    except ValueError as error:
        raise InputError(f"adapter.target_modules: {error}") from error
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return wrapped
