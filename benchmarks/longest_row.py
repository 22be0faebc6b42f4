"""Find the longest row that trains within the memory of small GPUs: an 8B shape, QLoRA, one row at a time.

    python benchmarks/longest_row.py --peer ftcli|unsloth [--tiled] [--embeddings-on-host] --work FOLDER --facts FILE

A row is made of packed rows of up to 1,024 tokens, called parts here. Layers are recomputed and their inputs are kept
in host memory, in both programs. Two rows without a limit give the memory of a token. Then the process may use only so
many GiB, and rows become longer by 3 % until one does not fit. Each row takes a whole step: forward pass, backward
pass and optimizer. `--tiled` turns on Unsloth's tiled MLP. `--embeddings-on-host` keeps the input embeddings in host
memory too, in both programs. `--cpu` rehearses the search of ftcli with a tiny shape: a row of 9 parts is then too
long.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parent
sys.path[:0] = [str(HOME), str(HOME.parent)]

from cell import make_inputs  # noqa: E402
from cells.cell import Cell, inputs_of  # noqa: E402
from cells.xformers_build import accept_other_build  # noqa: E402

PART, MOST = 1024, 160  # tokens of a part, and parts of the longest row that is tried
PROBES = (12, 24)  # parts of the rows without a limit
GROWTH = 1.03
Step = Callable[[int], tuple[int, float]]  # trains a row of so many parts, and returns its tokens and its loss


def ftcli_step(cell: Cell, work: Path, *, on_host: bool) -> Step:
    """Return the step of ftcli: as its loop takes it, with full recomputation and inputs of layers on the host."""
    from ftcli.training.batches.dataloaders import Rows
    from ftcli.training.setup import prepare

    inputs = inputs_of(cell, work)
    adapter = ["adapter.type=lora", f"adapter.r={cell.lora}", f"adapter.lora_alpha={2 * cell.lora}"]
    sizes = ["model.gradient_checkpointing=tiled", "model.activation_offloading=true", "model.torch_compile=true"]
    sizes += ["model.embeddings_on_host=true"] if on_host else []
    overrides = [*adapter, *sizes, *(["model.quantization.load_in_4bit=true"] if cell.four_bit else [])]
    run: Any = prepare(inputs.recipe, overrides=overrides, cpu=cell.cpu)
    rows = Rows(run.rows.train, run.task, training=True, bins=run.rows.bins)

    def step(parts: int) -> tuple[int, float]:
        batch = run.task.collate([document for number in range(parts) for document in rows[0, number]])
        loss = run.task.loss(run.model, run.to_device(batch)).sum() / run.task.count(batch)
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return batch["input_ids"].numel(), float(loss.detach())

    return step


def unsloth_step(cell: Cell, work: Path, *, is_tiled: bool, on_host: bool) -> Step:
    """Return the step of Unsloth's model under TRL's trainer, with its offloaded checkpoints and its own packing."""
    from cells.rows import PackedRows
    from cells.trainer import same_work
    from cells.trl_sft import PACKED
    from cells.unsloth_sft import LINEAR
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer
    from unsloth import FastLanguageModel

    inputs, longest = inputs_of(cell, work), PART * MOST
    recomputed = "unsloth"
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(inputs.model), max_seq_length=longest, dtype=None, load_in_4bit=True, local_files_only=True,
        use_gradient_checkpointing=recomputed, unsloth_tiled_mlp=is_tiled, offload_embedding=on_host,
    )  # fmt: skip
    model = FastLanguageModel.get_peft_model(
        model, r=cell.lora, lora_alpha=2 * cell.lora, lora_dropout=0, bias="none", target_modules=LINEAR,
        use_gradient_checkpointing=recomputed, max_seq_length=longest,
    )  # fmt: skip
    packed = PackedRows(inputs.rows, cell.global_size)

    def row(parts: int) -> dict[str, list[int]]:
        held = packed.span(0, parts)
        return {"input_ids": held.ids.tolist(), "labels": held.labels.tolist(), "seq_lengths": held.lengths.tolist()}

    options = same_work(cell) | PACKED | {"packing": True, "max_length": longest, "max_steps": 2, "logging_steps": 10}
    config = SFTConfig(
        output_dir=str(work / "unsloth"), optim="adamw_torch_fused", gradient_checkpointing=True, **options
    )
    data = Dataset.from_list([row(4), row(8)])
    trainer = SFTTrainer(model=model, args=config, train_dataset=data, processing_class=tokenizer)
    trainer.train()  # prepares the model and makes the optimizer, and turns recomputation off at its end
    FastLanguageModel.for_training(model, use_gradient_checkpointing=recomputed)

    def step(parts: int) -> tuple[int, float]:
        batch = trainer.data_collator([row(parts)])
        loss = trainer.training_step(trainer.model_wrapped, batch, (batch["labels"] >= 0).sum())
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return batch["input_ids"].numel(), float(loss)

    return step


class Memory:
    """The memory that a step may use and has used, in GiB."""

    def __init__(self, *, cpu: bool) -> None:
        import torch

        self.torch, self.cpu = torch, cpu

    def attempt(self, step: Step, parts: int, limit: float | None) -> dict[str, Any] | None:
        """Return what a row needs; None if it does not fit."""
        gc.collect()
        if not self.cpu:
            total = self.torch.cuda.get_device_properties(0).total_memory / 2**30
            self.torch.cuda.empty_cache()
            self.torch.cuda.set_per_process_memory_fraction(1.0 if limit is None else limit / total)
            self.torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        try:
            done = step(parts) if not (self.cpu and parts > 8) else None
        except self.torch.cuda.OutOfMemoryError:
            done = None
        if done is None:
            return None
        used = 0.0 if self.cpu else self.torch.cuda.max_memory_allocated() / 2**30
        held = 0.0 if self.cpu else self.torch.cuda.max_memory_reserved() / 2**30
        seconds = time.perf_counter() - began
        tokens, loss = done
        return {"tokens": tokens, "allocated": used, "reserved": held, "seconds": seconds, "loss": loss}


def search(memory: Memory, step: Step, limit: float, first: int) -> dict[str, Any] | None:
    """Return the longest row that fits, from a first guess."""
    parts, found = min(first, MOST), None
    has_failed = False
    while 1 <= parts <= MOST:
        fits = memory.attempt(step, parts, limit)
        print(f"limit {limit}: {parts} parts: {fits}", flush=True)
        found, has_failed = fits or found, has_failed or fits is None
        if has_failed and found is not None:
            break
        parts = max(parts + 1, int(parts * GROWTH)) if fits else min(parts - 1, int(parts / GROWTH))
    return found


def guess(probes: list[dict[str, Any]], limit: float) -> int:
    """Return how many parts fit, if memory grows linearly."""
    short, long = probes
    each = (long["allocated"] - short["allocated"]) / (long["tokens"] - short["tokens"])
    return max(1, int(0.97 * (short["tokens"] + (limit - short["allocated"]) / each) / PART)) if each > 0 else 6


def main() -> None:
    """Search for each limit, and append a line to the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=("ftcli", "unsloth"), required=True)
    parser.add_argument("--tiled", action="store_true")
    parser.add_argument("--embeddings-on-host", action="store_true")
    parser.add_argument("--limits", type=float, nargs="+", default=[15.3, 23.3])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--facts", type=Path, required=True)
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    shape = {"shape": "tiny", "precision": "fp32"} if arguments.cpu else {"shape": "llama-3.1-8b", "four_bit": True}
    sizes: dict[str, Any] = {"length": PART, "micro_size": 1, "task": "pretrain", "lora": 16, "steps": MOST}
    cell = Cell(peer=arguments.peer, cpu=arguments.cpu, learning_rate=1e-4, **sizes, **shape)
    make_inputs(cell, arguments.work)
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as ftcli's launcher and Unsloth do
    if arguments.peer == "unsloth":
        os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
        accept_other_build()
        importlib.import_module("unsloth")
        step = unsloth_step(cell, arguments.work, is_tiled=arguments.tiled, on_host=arguments.embeddings_on_host)
    else:
        step = ftcli_step(cell, arguments.work, on_host=arguments.embeddings_on_host)
    memory = Memory(cpu=arguments.cpu)
    probes = [memory.attempt(step, number, None) for number in ((2, 4) if arguments.cpu else PROBES)]
    print(f"{arguments.peer}: without a limit {probes}", flush=True)
    line: dict[str, Any] = {"peer": arguments.peer, "tiled": arguments.tiled, "probes": probes, "time": time.time()}
    line["embeddings on the host"] = arguments.embeddings_on_host
    for limit in arguments.limits:
        found = search(memory, step, limit, guess([probe for probe in probes if probe], limit))
        tokens = found["tokens"] if found else 0
        line[f"{limit} GiB"] = {"tokens": tokens, "row": found}
        print(f"{arguments.peer}, tiled {arguments.tiled}: {tokens} tokens within {limit} GiB", flush=True)
    with arguments.facts.open("a") as file:
        file.write(f"{json.dumps(line)}\n")


if __name__ == "__main__":
    main()
