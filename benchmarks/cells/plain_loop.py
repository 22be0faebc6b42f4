"""Train the peer `loop`: the plainest loop as people write it for their first run.

It has sdpa, autocast to bfloat16, padded micro-batches with a mask, the loss of transformers' model, fused
AdamW and clipping, peft for an adapter, and reads the loss in every step. The model divides its loss by the trained
tokens of the step, so that its curve can be compared. Settings: none.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from .adapters import with_adapter
from .cell import Cell, Inputs, Measured
from .clock import Clock
from .rows import Documents, PackedRows


def train(cell: Cell, inputs: Inputs, clock: Clock) -> Measured:
    """Train the cell's steps."""
    from transformers import AutoModelForCausalLM

    device = torch.device("cpu" if cell.cpu or not torch.cuda.is_available() else "cuda")
    dtype = torch.bfloat16 if cell.lora and cell.precision == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(inputs.model, dtype=dtype)
    if cell.lora:
        model = with_adapter(model, inputs.adapter)
    model.to(device).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=cell.learning_rate, weight_decay=0.0, fused=device.type == "cuda")
    rows = PackedRows(inputs.rows, cell.global_size)
    sizes = {"micro_size": cell.micro_size, "rank": 0, "processes": 1}
    for number in range(cell.steps):
        items, total = rows.step(number).items, 0.0
        for documents in rows.micro_batches(number, **sizes):
            batch = {name: tensor.to(device) for name, tensor in padded(documents).items()}
            cast = torch.autocast(device.type, torch.bfloat16) if cell.precision == "bf16" else nullcontext()
            with cast:
                loss = model(**batch, num_items_in_batch=items, use_cache=False).loss
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.mark(torch.tensor(total), norm)
    return clock.read(micro_size=cell.micro_size, accumulation=cell.accumulation)


def padded(documents: Documents) -> dict[str, Any]:
    """Return a micro-batch padded to its longest row, `[B, T]`."""
    longest, count = int(documents.lengths.max()), len(documents.lengths)
    batch = {
        "input_ids": torch.zeros(count, longest, dtype=torch.int64),
        "attention_mask": torch.zeros(count, longest, dtype=torch.int64),
        "labels": torch.full((count, longest), -100),
    }
    values = {
        "input_ids": torch.from_numpy(documents.ids.astype("int64")),
        "attention_mask": torch.ones(len(documents.ids), dtype=torch.int64),
        "labels": torch.from_numpy(documents.labels),
    }
    for name, value in values.items():
        for row, part in enumerate(value.split(documents.lengths.tolist())):
            batch[name][row, : len(part)] = part
    return batch
