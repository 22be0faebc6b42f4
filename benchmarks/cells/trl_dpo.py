"""Train the peer `trl-dpo`: TRL's DPOTrainer on the pairs of the cell, in their order.

It has TRL's best known settings: the log-probabilities of the reference are computed before training, flash-attn-4 and
Liger are used if they are installed, and nothing is recomputed. TRL 1.16 pads pairs, because it has switched its option
`padding_free` off. Pairs are passed as tokens. Settings: `sort=1` sorts the pairs of each step by length, so that
micro-batches have less padding; `attn_implementation`; or a field of DPOConfig.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import yaml

from .adapters import with_adapter
from .cell import Cell, Inputs, Measured
from .clock import Clock
from .rows import PackedRows
from .trainer import same_work, watched
from .trl_sft import best


def train(cell: Cell, inputs: Inputs, clock: Clock) -> Measured:
    """Train the cell's steps."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    class Tokenized(DPOTrainer):
        """A trainer whose rows are tokens already."""

        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

    options = best(cpu=cell.cpu, without_flash="sdpa")  # pairs are padded
    options |= {name: yaml.safe_load(value) for name, value in cell.named.items()}
    kernel, is_sorted = options.pop("attn_implementation"), bool(options.pop("sort", False))
    dtype = torch.bfloat16 if cell.precision == "bf16_pure" or cell.lora else torch.float32
    model = AutoModelForCausalLM.from_pretrained(inputs.model, dtype=dtype, attn_implementation=kernel)
    if cell.lora:
        model = with_adapter(model, inputs.adapter)
    pairs = as_pairs(PackedRows(inputs.rows, cell.global_size), is_sorted=is_sorted)
    with tempfile.TemporaryDirectory() as folder:
        fixed = {"precompute_ref_log_probs": True, "max_length": None, "beta": 0.1, "logging_steps": 10}
        config = DPOConfig(output_dir=folder, **(same_work(cell) | fixed | options))
        trainer = watched(Tokenized, clock)(
            model=model,
            args=config,
            train_dataset=pairs,
            processing_class=AutoTokenizer.from_pretrained(inputs.model),
        )
        trainer.train()
    return clock.read(attn_implementation=kernel, sort=is_sorted, use_liger_kernel=config.use_liger_kernel)


def as_pairs(rows: PackedRows, *, is_sorted: bool) -> Any:
    """Return the pairs in TRL's format of tokens, and the pairs of each step from short to long if `is_sorted`."""
    from datasets import Dataset

    pairs = []
    for number in range(len(rows)):
        ids, trained = (getattr(rows.span(number, number + 1), name).tolist() for name in ("ids", "trained"))
        middle = int(rows.span(number, number + 1).lengths[0])
        prompt = trained.index(True)
        chosen, rejected = ids[prompt:middle], ids[middle + prompt :]
        pairs.append({"prompt_ids": ids[:prompt], "chosen_ids": chosen, "rejected_ids": rejected})
    if is_sorted:
        steps = (pairs[first : first + rows.global_size] for first in range(0, len(pairs), rows.global_size))
        pairs = [pair for step in steps for pair in sorted(step, key=longest)]
    return Dataset.from_list(pairs)


def longest(pair: dict[str, list[int]]) -> int:
    """Return the number of tokens of the longer answer with its prompt."""
    return len(pair["prompt_ids"]) + max(len(pair["chosen_ids"]), len(pair["rejected_ids"]))
