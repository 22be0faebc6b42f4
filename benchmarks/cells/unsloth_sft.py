"""Train the peer `unsloth`: Unsloth's model and kernels under TRL's SFTTrainer, on the packed rows of the cell.

Rows are passed packed, with the lengths of their documents. With `packing`, Unsloth's variable-length attention uses
these lengths, so that documents do not attend to each other. Rows marked only as padding-free lose the lengths, and the
first loss differs. Unsloth concatenates short rows by default, but not those that are tokenised already, so the short
rows of a micro-batch are passed as one packed row. Settings: `use_gradient_checkpointing` (false, true, or unsloth:
layer inputs are kept in host memory), `offload_embedding` (the input embeddings are too), or a field of SFTConfig.
Unsloth patches transformers, peft and trl when it is imported. Therefore `cell.py` runs its cells in one new process
that has not imported them.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import yaml

from .cell import Cell, Inputs, Measured
from .clock import Clock
from .rows import PackedRows
from .trainer import same_work, watched
from .trl_sft import PACKED, as_dataset

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def train(cell: Cell, inputs: Inputs, clock: Clock) -> Measured:
    """Train the cell's steps."""
    from trl import SFTConfig, SFTTrainer
    from unsloth import FastLanguageModel

    options = {name: yaml.safe_load(value) for name, value in cell.named.items()}
    recomputed, on_host = options.pop("use_gradient_checkpointing", False), options.pop("offload_embedding", False)
    tokens = cell.length * cell.micro_size
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(inputs.model),
        max_seq_length=tokens,
        dtype=torch.bfloat16,
        load_in_4bit=cell.four_bit,
        full_finetuning=not cell.lora,
        use_gradient_checkpointing=recomputed,
        offload_embedding=on_host,
        local_files_only=True,
    )
    if cell.lora:
        model = with_unsloth_adapter(FastLanguageModel, model, cell, inputs, recomputed)
    work = same_work(cell) | PACKED | {"packing": True, "max_length": tokens, "dataloader_num_workers": 2}
    if cell.median:
        work |= {"per_device_train_batch_size": 1}  # the rows of a micro-batch, one after the other
    work |= {"logging_steps": 10}  # as in TRL and ftcli; Unsloth's default waits for the device in every step
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder,
            optim="adamw_torch_fused",
            gradient_checkpointing=bool(recomputed),
            **(work | options),
        )
        trainer = watched(SFTTrainer, clock)(
            model=model,
            args=config,
            train_dataset=as_dataset(
                PackedRows(inputs.rows, cell.global_size), each=cell.micro_size if cell.median else 1
            ),
            processing_class=tokenizer,
        )
        keeps_documents = bool(getattr(trainer.data_collator, "_unsloth_packing_wrapped", False))
        trainer.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return clock.read(
        documents_apart=keeps_documents,
        attention=attention(),
        use_gradient_checkpointing=recomputed,
        trained=sum(parameter.numel() for parameter in trained),
        dtypes=sorted({str(parameter.dtype) for parameter in trained}),
    )


def attention() -> str:
    """Return the package that Unsloth uses for attention over several documents in one row."""
    from unsloth.utils import attention_dispatch

    if attention_dispatch.HAS_FLASH_ATTENTION:
        return "flash-attn"
    return "xformers" if attention_dispatch.HAS_XFORMERS else "torch"


def with_unsloth_adapter(maker: Any, model: Any, cell: Cell, inputs: Inputs, recomputed: Any) -> Any:
    """Return the model with Unsloth's LoRA layers, which have the initial values of all peers."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    wrapped = maker.get_peft_model(
        model,
        r=cell.lora,
        lora_alpha=2 * cell.lora,
        lora_dropout=0,
        bias="none",
        use_gradient_checkpointing=recomputed,
        target_modules=LINEAR,
    )
    set_peft_model_state_dict(wrapped, load_file(inputs.adapter / "adapter_model.safetensors"))
    return wrapped
