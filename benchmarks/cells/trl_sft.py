"""The peers `trl` and `trl-default`: TRL's SFTTrainer on the cell's own packed rows, in their order.

`trl-default` is what TRL chooses by itself; `trl` its best known settings: flash-attn-4 and Liger where they are
installed, no gradient checkpointing. Rows come packed (`seq_lengths`), as TRL's own packing would give them, so that
both see what ftcli sees. Settings: `attn_implementation`, or a field of SFTConfig.
"""

from __future__ import annotations

import importlib.util
import tempfile
from typing import Any

import torch
import yaml

from .adapters import with_adapter
from .cell import Cell, Inputs, Measured
from .clock import Clock
from .rows import PackedRows


def train(cell: Cell, inputs: Inputs, clock: Clock) -> Measured:
    """Train the cell's steps."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    chosen = {} if cell.peer == "trl-default" else best(cpu=cell.cpu)
    chosen |= {name: yaml.safe_load(value) for name, value in cell.named.items()}
    kernel = chosen.pop("attn_implementation", "sdpa")
    dtype = torch.bfloat16 if cell.precision == "bf16_pure" or cell.lora else torch.float32
    model = AutoModelForCausalLM.from_pretrained(inputs.model, dtype=dtype, attn_implementation=kernel)
    if cell.lora:
        model = with_adapter(model, inputs.adapter)
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(output_dir=folder, **(same_work(cell) | chosen))
        trainer = watched(SFTTrainer, clock)(
            model=model,
            args=config,
            train_dataset=as_dataset(PackedRows(inputs.rows, cell.global_size)),
            processing_class=AutoTokenizer.from_pretrained(inputs.model),
        )
        trainer.train()
    return clock.read(attn_implementation=kernel, **{name: getattr(config, name) for name in TOLD})


TOLD = ("use_liger_kernel", "gradient_checkpointing", "torch_compile", "dataloader_num_workers")


def best(*, cpu: bool) -> dict[str, Any]:
    """Return TRL's best known settings for the packages that are installed."""
    has_flash = importlib.util.find_spec("flash_attn") is not None and not cpu
    return {
        "attn_implementation": "flash_attention_4" if has_flash else "sdpa",
        "use_liger_kernel": importlib.util.find_spec("liger_kernel") is not None and not cpu,
        "gradient_checkpointing": False,
        "dataloader_num_workers": 0 if cpu else 2,
    }


def same_work(cell: Cell) -> dict[str, Any]:
    """Return what must be the same for all peers: rows, their order, optimizer, learning rate, clipping."""
    return {
        "per_device_train_batch_size": cell.micro_size,
        "gradient_accumulation_steps": cell.accumulation,
        "max_steps": cell.steps,
        "learning_rate": cell.learning_rate,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "bf16": cell.precision != "fp32",
        "packing": False,  # they are
        "padding_free": True,
        "max_length": None,
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "train_sampling_strategy": "sequential",
        "use_cpu": cell.cpu,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def as_dataset(rows: PackedRows) -> Any:
    """Return the packed rows as TRL keeps them: input_ids, labels, and the lengths of a row's documents."""
    from datasets import Dataset

    held = [rows.span(number, number + 1) for number in range(len(rows))]
    return Dataset.from_dict(
        {
            "input_ids": [row.ids.tolist() for row in held],
            "labels": [row.labels.tolist() for row in held],
            "seq_lengths": [row.lengths.tolist() for row in held],
        }
    )


def watched(trainer: type, clock: Clock) -> type:
    """Return a Trainer class that tells the clock of its steps, without waiting for the device."""

    class Watched(trainer):  # type: ignore[misc]
        losses: list[Any] = []
        norm: Any = None

        def train(self, *args: Any, **kwargs: Any) -> Any:
            clip = self.accelerator.clip_grad_norm_

            def clip_and_keep(*given: Any, **named: Any) -> Any:
                self.norm = clip(*given, **named)
                return self.norm

            self.accelerator.clip_grad_norm_ = clip_and_keep
            self.add_callback(marks(self))
            return super().train(*args, **kwargs)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            self.losses.append(loss)
            return loss

    def marks(watching: Any) -> Any:
        from transformers import TrainerCallback

        class Marks(TrainerCallback):
            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                norm = watching.norm if watching.norm is not None else float("nan")
                clock.mark(sum(watching.losses), norm)
                watching.losses.clear()

        return Marks()

    return Watched
