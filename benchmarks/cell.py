"""Measure one cell: a shape, a length, a profile and a task, trained by one peer. Appends one JSON line to FILE.

    python benchmarks/cell.py --shape llama-3.2-1b --length 4096 --micro-size 4 --task sft --peer ftcli --facts FILE

All peers of a cell train the same weights (random, one seed, written once) and the same packed rows in the same order,
so their curves must agree. The line contains the differences from the reference: the newest line of the peer `bare` in
the same cell and file (for classifiers: of `hf-trainer`, for pairs: of `trl-dpo`). In bf16_pure the reference is `bare`
in bf16, with float32 weights, because an optimizer that loses updates in bfloat16 follows another curve. With
`--median` rows are short and not packed; micro size and accumulation then belong to the peer, not to the cell. Peers:

    ftcli               the program with all checks, without the checkpoint and weights after the last step
    bare                a minimal Accelerate loop over packed rows
    loop                the plainest loop as people write it: padded micro-batches, transformers' own loss
    trl, trl-default    TRL's SFTTrainer with its best settings, and with its defaults
    trl-dpo             TRL's DPOTrainer with its best settings (task preference)
    unsloth             Unsloth, one GPU; needs a PYTHONPATH with its packages
    torchtitan          the profile fsdp only, and models with an untied head
    hf-trainer          transformers' Trainer on a classifier; hf-trainer-default: as in the example scripts

`--set KEY=VALUE` sets a key of the recipe for ftcli, and a setting of the peer otherwise (the files in cells/ list
them). `--trace FILE` profiles the last steps (`--traced`) and writes a summary of kernels and gaps. Tables leave traced
lines out. Without a GPU: `--shape tiny --length 128 --micro-size 2 --precision fp32 --cpu --steps 8 --warm 3`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parent
sys.path[:0] = [str(HOME), str(HOME.parent)]

from cells.cell import CLASSIFIERS, LANGUAGE, PAIRS, Cell, Inputs, Measured, inputs_of  # noqa: E402
from cells.xformers_build import accept_other_build  # noqa: E402

PEERS = {
    "ftcli": "ours",
    "bare": "bare",
    "loop": "plain_loop",
    "trl": "trl_sft",
    "trl-default": "trl_sft",
    "trl-dpo": "trl_dpo",
    "unsloth": "unsloth_sft",
    "torchtitan": "titan",
    "hf-trainer": "trainer",
    "hf-trainer-default": "trainer",
}
PACKAGES = (
    "torch", "transformers", "accelerate", "deepspeed", "peft", "trl", "liger-kernel", "flash-attn-4", "flash-attn",
    "torchao", "bitsandbytes", "triton", "torchtitan", "unsloth", "unsloth-zoo", "xformers",
)  # fmt: skip
TRACED = 3
# Liger's rotary embedding. With cutlass installed, Liger 0.8.5 uses a kernel that is compiled again for every number
# of tokens (0.5 s per step of an 8B shape whose micro-batches differ in length). Triton's kernel is compiled once.
ROPE = "nvidia-triton"


def on_rank(cell: Cell, inputs: Inputs, started: float) -> Measured:
    """Train a cell on this process."""
    if cell.without:
        os.environ["FTCLI_WITHOUT_PATCHES"] = cell.without
    if cell.peer == "unsloth":  # Unsloth must be imported before the libraries that it patches
        os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
        os.environ["HF_HUB_OFFLINE"] = "1"
        multiprocessing.set_start_method("fork", force=True)  # for its loader processes, as in a script
        accept_other_build()
        importlib.import_module("unsloth")
    elif cell.peer in ("bare", "trl", "trl-dpo"):
        os.environ.setdefault("LIGER_KERNEL_IMPL_ROPE", ROPE)
    import torch
    from cells.clock import Clock

    from ftcli.hardware.cpu_simulation import start_on_cpu

    if cell.cpu:
        start_on_cpu()
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // cell.processes))  # as ftcli's launcher does
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    measured: Measured = importlib.import_module(f"cells.{PEERS[cell.peer]}").train(cell, inputs, Clock(cell, started))
    return measured


def make_inputs(cell: Cell, work: Path) -> Inputs:
    """Return the inputs of a cell. A subprocess makes missing ones, so that this process imports no torch."""
    from filelock import FileLock

    inputs = inputs_of(cell, work)
    inputs.model.parent.mkdir(parents=True, exist_ok=True)
    makers = [(inputs.model, "make_model"), (inputs.rows, "make_rows")]
    if cell.lora:
        makers.append((inputs.adapter, "make_adapter"))
    where = os.pathsep.join([str(HOME), str(HOME.parent), os.environ.get("PYTHONPATH", "")])
    with ExitStack() as locks:
        for path, _ in makers:
            locks.enter_context(FileLock(f"{path}.lock"))
        missing = [maker for path, maker in makers if not path.exists()]
        if missing:
            line = [sys.executable, "-m", "cells.making", ",".join(missing), json.dumps(asdict(cell)), str(work)]
            subprocess.run(line, check=True, env=os.environ | {"PYTHONPATH": where})
    return inputs


def facts_of(cell: Cell, inputs: Inputs, ranks: list[Measured]) -> dict[str, Any]:
    """Return the measurements of a cell, from the results of its ranks."""
    import numpy as np
    from cells.flops import flops, peak_of
    from cells.rows import PackedRows

    rows = PackedRows(inputs.rows, cell.global_size)
    timed = [rows.step(number) for number in range(cell.warm, cell.steps)]
    seconds = ranks[0].step_seconds[cell.warm - 1 :]
    processed, trained = sum(len(step.ids) for step in timed), sum(step.items for step in timed)
    spent = flops(inputs.model, processed, sum(int((step.lengths**2).sum()) for step in timed), lora=cell.lora)
    peak = peak_of(ranks[0].device)
    each = sum(seconds) * cell.processes
    losses = [statistics.fmean(values) for values in zip(*(rank.losses for rank in ranks), strict=True)]
    return {
        "tokens a second a GPU": processed / each,
        "rows a second a GPU": len(timed) * cell.global_size / each,
        "trained tokens a second a GPU": trained / each,
        "MFU": None if peak is None else spent / each / peak,
        "TFLOP/s": spent / each / 1e12,
        "step p50": statistics.median(seconds),
        "step p95": float(np.quantile(seconds, 0.95)),
        "first step": max(rank.first_step_seconds for rank in ranks),
        "peak allocated GiB": max(rank.peak_allocated for rank in ranks) / 2**30,
        "peak reserved GiB": max(rank.peak_reserved for rank in ranks) / 2**30,
        "losses": losses,
        "grad norms": ranks[0].grad_norms,
        "step seconds": ranks[0].step_seconds,
        "device": ranks[0].device,
        "details": ranks[0].details,
    }


def versions() -> dict[str, str]:
    """Return the versions of the installed PACKAGES and of Python, and the measured commit."""
    installed = {name: items[0].version for name in PACKAGES if (items := list(metadata.distributions(name=name)))}
    line = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(line, cwd=HOME, capture_output=True, text=True, check=False).stdout.strip()
    return installed | {"python": sys.version.split()[0]} | ({"commit": commit} if commit else {})


def measure(words: list[str] | None = None) -> str:
    """Measure the cell of some command-line arguments, append its line to the file, and return it as a sentence."""
    from cells.curves import compare, read, sentence

    fields, work, facts, trace = arguments(words)
    cell = Cell(**fields)
    inputs = make_inputs(cell, work)
    started = time.time()
    ranks = run_alone(cell, inputs, started) if cell.peer == "unsloth" else run_ranks(cell, inputs, started)
    line = {"cell": cell.key} | asdict(cell) | {"versions": versions(), "time": time.time()}
    line |= facts_of(cell, inputs, ranks)
    line |= compare(line, read(facts))
    facts.parent.mkdir(parents=True, exist_ok=True)
    with facts.open("a") as file:
        file.write(f"{json.dumps(line)}\n")
    if trace is not None:
        trace.write_text(f"{sentence(line)}\n\n{ranks[0].trace}\n")
    return sentence(line)


def run_ranks(cell: Cell, inputs: Inputs, started: float) -> list[Measured]:
    """Train a cell on ranks that are forked from one process with all imports."""
    from ftcli.testing import run_on_cpu, run_on_processes

    start = run_on_cpu if cell.cpu else run_on_processes
    results: list[Measured] = start(on_rank, cell, inputs, started, processes=cell.processes, profile=cell.profile)
    return results


def run_alone(cell: Cell, inputs: Inputs, started: float) -> list[Measured]:
    """Train a cell in one new process without imports."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return [pool.submit(on_rank, cell, inputs, started).result()]


def arguments(words: list[str] | None) -> tuple[dict[str, Any], Path, Path, Path | None]:
    """Return the fields of the cell, the folder of inputs, the file of results, and the file of the trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=PEERS, required=True)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--length", type=int, required=True, help="tokens of a packed row")
    parser.add_argument("--micro-size", type=int, required=True, help="rows of one forward of one process")
    parser.add_argument("--task", default="sft", choices=(*LANGUAGE, *PAIRS, *CLASSIFIERS))
    parser.add_argument("--profile", default="single")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--precision", default="bf16", choices=("fp32", "bf16", "bf16_pure"))
    parser.add_argument("--lora", type=int, default=0, help="rank of a LoRA adapter; 0: all weights are trained")
    parser.add_argument("--four-bit", action="store_true", help="frozen weights in 4 bits, under an adapter")
    parser.add_argument("--median", type=int, default=0, help="tokens of a short row in the median; 0: packed rows")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--warm", type=int, default=5, help="steps before the clock starts")
    parser.add_argument("--learning-rate", type=float, default=Cell.learning_rate)
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--without", default="", help="a patch of other libraries that ftcli leaves out")
    parser.add_argument("--label", default="", help="what distinguishes this line in the tables")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--facts", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/cells"), help="folder for weights and rows")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--traced", type=int, default=TRACED, help="number of steps under the profiler")
    fields = vars(parser.parse_args(words))
    work, facts, trace = fields.pop("work"), fields.pop("facts"), fields.pop("trace")
    return fields | {"traced": fields["traced"] if trace else 0}, work, facts, trace


if __name__ == "__main__":
    print(measure())
