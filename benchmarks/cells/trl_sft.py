"""Train the peers `trl` and `trl-default`: TRL's SFTTrainer on the packed rows of the cell, in their order.

`trl-default` has TRL's defaults. `trl` has its best known settings: flash-attn-4 and Liger if they are installed, and
no gradient checkpointing. Without flash-attn it has torch's variable-length attention, which computes the same. Rows
are passed packed, with `seq_lengths`, in the format of TRL's own packing. So both peers train the same rows as ftcli.
Short rows are passed one by one. `trl` concatenates those of a micro-batch (TRL's `padding_free`). Settings:
`attn_implementation`, or a field of SFTConfig.
"""

from __future__ import annotations

import importlib.util
import tempfile
from typing import Any

import torch
import yaml

from .adapters import four_bits, with_adapter
from .bare import VARLEN, register_varlen
from .cell import Cell, Inputs, Measured
from .clock import Clock
from .rows import PackedRows
from .trainer import same_work, watched


def train(cell: Cell, inputs: Inputs, clock: Clock) -> Measured:
    """Train the cell's steps."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    options = {} if cell.peer == "trl-default" else best(cpu=cell.cpu)
    options |= {name: yaml.safe_load(value) for name, value in cell.named.items()}
    kernel = options.pop("attn_implementation", "sdpa")
    if kernel == VARLEN:
        register_varlen()
    dtype = torch.bfloat16 if cell.precision == "bf16_pure" or cell.lora else torch.float32
    quantised = {"quantization_config": four_bits(), "device_map": {"": 0}} if cell.four_bit else {}
    model = AutoModelForCausalLM.from_pretrained(inputs.model, dtype=dtype, attn_implementation=kernel, **quantised)
    if cell.lora:
        model = with_adapter(model, inputs.adapter)
    with tempfile.TemporaryDirectory() as folder:
        layout = PACKED | ({"padding_free": kernel != "sdpa"} if cell.median else {})  # sdpa sees one document only
        config = SFTConfig(output_dir=folder, **(same_work(cell) | layout | options))
        trainer = watched(SFTTrainer, clock)(
            model=model,
            args=config,
            train_dataset=as_dataset(PackedRows(inputs.rows, cell.global_size), packed=cell.median == 0),
            processing_class=AutoTokenizer.from_pretrained(inputs.model),
        )
        trainer.train()
    settings = {name: getattr(config, name) for name in RECORDED}
    return clock.read(attn_implementation=kernel, backend=trainer.accelerator.distributed_type.value, **settings)


PACKED = {
    "packing": False,  # rows are packed already
    "padding_free": True,
    "max_length": None,
    "dataset_kwargs": {"skip_prepare_dataset": True},
}
RECORDED = ("use_liger_kernel", "gradient_checkpointing", "torch_compile", "dataloader_num_workers", "padding_free")


def best(*, cpu: bool, without_flash: str = VARLEN) -> dict[str, Any]:
    """Return TRL's best known settings for the packages that are installed, `without_flash` for GPUs that lack it."""
    on_gpu = "flash_attention_4" if importlib.util.find_spec("flash_attn") is not None else without_flash
    return {
        "attn_implementation": "sdpa" if cpu else on_gpu,
        "use_liger_kernel": importlib.util.find_spec("liger_kernel") is not None and not cpu,
        "gradient_checkpointing": False,
        "dataloader_num_workers": 0 if cpu else 2,
    }


def as_dataset(rows: PackedRows, *, packed: bool = True, each: int = 1) -> Any:
    """Return the rows in TRL's format: input_ids, labels, and where they are packed the document lengths of each.

    With `each` above 1 so many neighbouring rows become one packed row.
    """
    from datasets import Dataset

    every = [rows.span(number, number + each) for number in range(0, len(rows), each)]
    columns = {"input_ids": [row.ids.tolist() for row in every], "labels": [row.labels.tolist() for row in every]}
    return Dataset.from_dict(columns | ({"seq_lengths": [row.lengths.tolist() for row in every]} if packed else {}))
