"""What the loop itself costs: steps of `ftcli.steps(run)` against a bare PyTorch loop, in turns, in one process.

    python benchmarks/loop_overhead.py [--shape tiny] [--length 64] [--rows 1] [--accumulation 1] [--steps 400] [--cpu]
    python benchmarks/loop_overhead.py --recipe RECIPE [--set KEY=VALUE] [--steps 40]

Both train the same model on the same rows with the same loss, collation and optimizer; the bare loop has nothing else:
a DataLoader, forward, backward, clip_grad_norm_, step. It reads no loss and has no schedule, no accumulation wrapper,
no checks. Its garbage is collected by Python's own rule, ours by the step. `recorded` is ours with what `ftcli train`
does after each step: a row of metrics, the status, a line of progress. Blocks of steps take turns, so that a noisy
machine is noisy for all; the device is waited for at the end of a block only. Prints one JSON line: the median
milliseconds of a step, what ours takes more than the bare loop (median of neighbouring blocks), and losses of both,
which must agree.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

SMALL: dict[str, dict[str, Any]] = {  # beside the shapes of random_model.py
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512},
    "qwen3-0.6b-4-layers": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4, "head_dim": 128,
                            "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936},
}  # fmt: skip


def write_inputs(folder: Path, shape: str, length: int, rows: int) -> Path:
    """Write a small model with random weights, rows that are all of `length` tokens, and a recipe; return that."""
    import yaml
    from transformers import AutoModelForCausalLM, Qwen3Config

    from ftcli.testing import tiny_tokenizer

    tokens = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 1, "tie_word_embeddings": True}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3Config(**SMALL[shape], **tokens)).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    lines = [json.dumps({"text": chr(97 + n % 26) * (length - 1)}) for n in range(64)]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    recipe: dict[str, Any] = {
        "task": "pretrain",
        "precision": "bf16" if torch.cuda.is_available() else "fp32",
        "model": {"name": str(folder / "model"), "dropout": 0.0},
        "data": {"train": str(folder / "rows.jsonl"), "max_length": length},
        "batch": {"global_size": rows, "micro_size": rows},
        "train": {"max_steps": 1},
        "optimizer": {"learning_rate": 1e-4},
        "schedule": {"name": "constant"},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def bare(run: Any, accumulation: int, losses: list[Tensor]) -> Iterator[None]:
    """Train a model as `run` does, by PyTorch alone; yield after each step."""
    from ftcli.hardware.precision import compute_in
    from ftcli.loaders import Collate, Rows
    from ftcli.optimizers import build_optimizer
    from ftcli.run import _build_model

    device = run.hardware.accelerator.device
    model = _build_model(run.recipe, run.task, run.rows, None).to(device)
    compute_in(model, run.recipe, device.type)
    optimizer = build_optimizer(model, run.recipe, fused=device.type == "cuda")
    rows: Any = Rows(run.rows.train, run.task, training=True, bins=run.rows.bins)
    loader = DataLoader(rows, batch_sampler=run.order, collate_fn=Collate(run.task), pin_memory=device.type == "cuda")
    batches = iter(loader)
    while True:
        window = [next(batches) for _ in range(accumulation)]
        items = sum(run.task.count(batch) for batch in window)
        total = torch.zeros((), device=device)
        for batch in window:
            on_device = {
                name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
                for name, value in batch.items()
                if name != "sample_ids"
            }
            loss = run.task.loss(model, on_device).sum() / items
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.recipe.optimizer.max_grad_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        yield


def ours(run: Any, losses: list[Tensor], *, recorded: bool) -> Iterator[None]:
    """Train by ftcli's own loop; with `recorded` as `ftcli train` does, but for evaluations and saves."""
    from contextlib import nullcontext

    from ftcli.loop import steps
    from ftcli.report import Reporter

    with Reporter(run) if recorded else nullcontext() as report:
        for step in steps(run):
            if report is not None:
                report.step(step)
            losses.append(step.loss_tensor)
            yield


def in_turns(contestants: dict[str, Iterator[None]], steps: int, block: int, warm: int) -> dict[str, list[float]]:
    """Return milliseconds of a step in each block, by contestant; the first steps of each are left out."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for contestant in contestants.values():
        for _ in range(warm):
            next(contestant)
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(steps // block):
        for name, contestant in contestants.items():
            (gc.enable if name == "bare" else gc.disable)()  # after its first steps our loop collects by the step
            next(contestant)  # alone after another's
            wait()
            began = time.perf_counter()
            for _ in range(block):
                next(contestant)
            wait()
            times[name].append(1000 * (time.perf_counter() - began) / block)
    gc.enable()
    return times


def main() -> None:
    """Measure and print."""
    from ftcli.recipe_file import load_recipe
    from ftcli.run import prepare

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SMALL, default="tiny")
    parser.add_argument("--length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=1, help="rows of a micro-batch")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--recipe", help="measure this recipe instead")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--steps", type=int, default=400, help="of each, in blocks")
    parser.add_argument("--block", type=int, default=20)
    parser.add_argument("--warm", type=int, default=5, help="steps before the first block")
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = given.recipe or str(write_inputs(folder, given.shape, given.length, given.rows))
        most = given.warm + (given.steps // given.block) * (given.block + 1) + 1
        overrides = [f"train.max_steps={most}", "evaluate.at_start=false"]
        if given.recipe is None:
            overrides.append(f"batch.global_size={given.rows * given.accumulation}")
        runs, losses = [], {name: list[Tensor]() for name in ("bare", "ours", "recorded")}
        for output in (None, folder / "run"):
            run = prepare(load_recipe(recipe, [*overrides, *given.set]), cpu=given.cpu, output=output)
            runs.append(run)
        contestants = {
            "bare": bare(runs[0], runs[0].plan.accumulation, losses["bare"]),
            "ours": ours(runs[0], losses["ours"], recorded=False),
            "recorded": ours(runs[1], losses["recorded"], recorded=True),
        }
        times = in_turns(contestants, given.steps, given.block, given.warm)
        medians = {name: statistics.median(values) for name, values in times.items()}
        extra = {
            name: statistics.median(a - b for a, b in zip(times[name], times["bare"], strict=True))
            for name in ("ours", "recorded")
        }
        found = {
            "piece": "loop overhead",
            "shape": given.recipe or given.shape,
            "length": given.length,
            "micro_batches": runs[0].plan.accumulation,
            "device": runs[0].hardware.accelerator.device.type,
            "torch": torch.__version__,
            "ms": medians,
            "more_ms": extra,
            "more_percent": {name: 100 * value / medians["bare"] for name, value in extra.items()},
            "losses": {name: [float(values[0]), float(values[-1])] for name, values in losses.items()},
        }
        print(json.dumps(found), flush=True)
        for contestant in contestants.values():
            contestant.close()  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
