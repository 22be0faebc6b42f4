"""Train the peers `hf-trainer` and `hf-trainer-default`: transformers' Trainer on the rows of a classification cell.

`hf-trainer-default` has the defaults of the example scripts run_glue.py and run_image_classification.py: float32, texts
padded to the full length, images read in the training process. `hf-trainer` has the precision of the cell, pads to the
longest row of a batch, and uses loader processes. Settings: fields of TrainingArguments.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import yaml

from .cell import Cell, Inputs, Measured
from .clock import Clock
from .rows import PackedRows

LOADERS = 8  # loader processes for images


def train(cell: Cell, inputs: Inputs, clock: Clock) -> Measured:
    """Train the cell's steps."""
    import transformers

    is_text, is_default = cell.task == "text_classification", cell.peer == "hf-trainer-default"
    kind = "AutoModelForSequenceClassification" if is_text else "AutoModelForImageClassification"
    model = getattr(transformers, kind).from_pretrained(inputs.model)
    options = {} if is_default else {"dataloader_num_workers": 0 if is_text or cell.cpu else LOADERS}
    options |= {"bf16": cell.precision == "bf16" and not is_default, "remove_unused_columns": False}
    options |= {name: yaml.safe_load(value) for name, value in cell.named.items()}
    packed = PackedRows(inputs.rows, cell.global_size)
    rows: Any = Texts(packed, cell.length if is_default else None) if is_text else Images(packed, inputs)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(output_dir=folder, **(same_work(cell) | options))
        trainer = watched(transformers.Trainer, clock)(
            model=model, args=arguments, train_dataset=rows, data_collator=rows.collate
        )
        trainer.train()
    return clock.read(**options)


class Texts:
    """Token ids with a label, padded to `length` or to the longest row of a batch."""

    def __init__(self, rows: PackedRows, length: int | None) -> None:
        self.rows, self.length = rows, length

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> tuple[list[int], int]:
        return self.rows.span(number, number + 1).ids.tolist(), self.rows.targets[number]

    def collate(self, rows: list[tuple[list[int], int]]) -> dict[str, torch.Tensor]:
        """Return a batch of padded rows."""
        length = self.length or max(len(ids) for ids, _ in rows)
        return {
            "input_ids": torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in rows]),
            "attention_mask": torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids, _ in rows]),
            "labels": torch.tensor([label for _, label in rows]),
        }


class Images:
    """Pixels from the model's image processor, with a label. Each file is read on access."""

    def __init__(self, rows: PackedRows, inputs: Inputs) -> None:
        from transformers import AutoImageProcessor

        self.rows, self.processor = rows, AutoImageProcessor.from_pretrained(inputs.model)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        with Image.open(self.rows.paths[number]) as image:
            pixels = self.processor(image.convert("RGB"), return_tensors="pt")["pixel_values"][0]
        return pixels, self.rows.targets[number]

    def collate(self, rows: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
        """Return a batch of images."""
        pixels, labels = zip(*rows, strict=True)
        return {"pixel_values": torch.stack(pixels), "labels": torch.tensor(labels)}


def same_work(cell: Cell) -> dict[str, Any]:
    """Return the arguments that all peers share: batch sizes, row order, optimizer, learning rate, clipping."""
    return {
        "per_device_train_batch_size": cell.micro_size,
        "gradient_accumulation_steps": cell.accumulation,
        "max_steps": cell.steps,
        "learning_rate": cell.learning_rate,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "bf16": cell.precision != "fp32",
        "train_sampling_strategy": "sequential",  # rows are already in the order of training
        "use_cpu": cell.cpu,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def watched(trainer: type, clock: Clock) -> type:
    """Return a subclass of a Trainer that records its steps without waiting for the device."""

    class Watched(trainer):  # type: ignore[misc]
        losses: list[Any] = []
        norm: Any = None

        def train(self, *args: Any, **kwargs: Any) -> Any:
            clip = self.accelerator.clip_grad_norm_

            def clip_and_keep(*args: Any, **kwargs: Any) -> Any:
                self.norm = clip(*args, **kwargs)
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
