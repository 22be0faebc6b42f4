"""Write the LoRA adapter that all peers of a cell start from. peft alone would draw other values for each peer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any


def lora_config(r: int) -> Any:
    """Return peft's configuration: all linear layers, no dropout."""
    from peft import LoraConfig

    return LoraConfig(r=r, lora_alpha=2 * r, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")


def write_adapter(model: Path, r: int, folder: Path) -> None:
    """Write an adapter for a model, with peft's initial values: A random, B zero. Reads only the configuration."""
    import torch
    from peft import get_peft_model, get_peft_model_state_dict
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        built = get_peft_model(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)), lora_config(r))
    random = torch.Generator().manual_seed(0)
    weights = {}
    for name, like in get_peft_model_state_dict(built).items():
        value = torch.zeros(like.shape)
        if ".lora_A." in name:
            torch.nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=random)
        weights[name] = value
    partial = folder.with_name(f"{folder.name}.part")
    partial.mkdir(parents=True, exist_ok=True)
    save_file(weights, partial / "adapter_model.safetensors")
    built.peft_config["default"].base_model_name_or_path = str(model)
    built.peft_config["default"].save_pretrained(partial)
    partial.rename(folder)


def with_adapter(model: Any, folder: Path) -> Any:
    """Return a transformers model with the trainable adapter of a folder."""
    from peft import PeftModel

    return PeftModel.from_pretrained(model, folder, is_trainable=True)


def four_bits() -> Any:
    """Return bitsandbytes' configuration of frozen weights: nf4, quantised scales, products in bfloat16."""
    import torch
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
