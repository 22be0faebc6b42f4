"""Measure the overhead of `ftcli.steps(run)` over a bare PyTorch loop. Both alternate in one process.

    python benchmarks/loop_overhead.py [--shape tiny] [--length 64] [--rows 1] [--accumulation 1] [--steps 400] [--cpu]
    python benchmarks/loop_overhead.py --recipe RECIPE [--set KEY=VALUE] [--steps 40]

Both train the same model on the same rows with the same loss, collation and optimizer. The bare loop has only a
DataLoader, forward, backward, clip_grad_norm_ and step. It reads no loss and has no schedule, accumulation or checks.
Python's own rule collects its garbage; ftcli collects after steps. `recorded` adds the work of `ftcli train` after each
step: metrics, status and progress line. Blocks of steps alternate, so that noise of the machine affects all loops. The
device is synchronised only at the end of a block. Prints one JSON line: the median milliseconds of a step, the
difference from the bare loop (median over neighbouring blocks), and the losses of all loops, which must agree.
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

SMALL: dict[str, dict[str, Any]] = {  # in addition to the shapes of random_model.py
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512},
    "qwen3-0.6b-4-layers": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4, "head_dim": 128,
                            "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936},
}  # fmt: skip


def write_inputs(folder: Path, shape: str, length: int, rows: int) -> Path:
    """Write a small model with random weights, rows of `length` tokens, and a recipe; return the recipe's path."""
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
    """Train the model of `run` in a plain PyTorch loop; yield after each step."""
    from ftcli.hardware.precision import compute_in
    from ftcli.training.batches.dataloaders import Collate, Rows
    from ftcli.training.optim.build import build_optimizer
    from ftcli.training.prepared_data import PreparedData
    from ftcli.training.setup import build_model

    device = run.hardware.accelerator.device
    model = build_model(run.recipe, PreparedData(run.task, run.rows, [], run.plan)).to(device)
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
    """Train with ftcli's loop; `recorded` adds the records of `ftcli train`, without evaluations and saves."""
    from contextlib import nullcontext

    from ftcli.loop import steps
    from ftcli.training.reporter import Reporter

    with Reporter(run) if recorded else nullcontext() as report:
        training = steps(run)
        while True:
            run.settings.own()  # the other run, which was prepared by the same recipe, has the same settings
            step = next(training)
            if report is not None:
                report.step(step)
            losses.append(step.loss_tensor)
            yield


def alternate(loops: dict[str, Iterator[None]], steps: int, block: int, warm: int) -> dict[str, list[float]]:
    """Return the milliseconds per step of each block, by loop, without the first steps of each loop."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for loop in loops.values():
        for _ in range(warm):
            next(loop)
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(steps // block):
        for name, loop in loops.items():
            (gc.enable if name == "bare" else gc.disable)()  # ftcli collects garbage itself
            next(loop)  # not timed: the first step after another loop
            wait()
            began = time.perf_counter()
            for _ in range(block):
                next(loop)
            wait()
            times[name].append(1000 * (time.perf_counter() - began) / block)
    gc.enable()
    return times


def main() -> None:
    """Measure the loops and print one JSON line."""
    from ftcli.config.load import load_recipe
    from ftcli.training.setup import prepare

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SMALL, default="tiny")
    parser.add_argument("--length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=1, help="rows of a micro-batch")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--recipe", help="measure this recipe instead")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--steps", type=int, default=400, help="steps of each loop, in blocks")
    parser.add_argument("--block", type=int, default=20)
    parser.add_argument("--warm", type=int, default=5, help="steps before the first block")
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = arguments.recipe or str(write_inputs(folder, arguments.shape, arguments.length, arguments.rows))
        total = arguments.warm + (arguments.steps // arguments.block) * (arguments.block + 1) + 1
        overrides = [f"train.max_steps={total}", "evaluate.at_start=false"]
        if arguments.recipe is None:
            overrides.append(f"batch.global_size={arguments.rows * arguments.accumulation}")
        runs, losses = [], {name: list[Tensor]() for name in ("bare", "ours", "recorded")}
        for output in (None, folder / "run"):
            run = prepare(load_recipe(recipe, [*overrides, *arguments.set]), cpu=arguments.cpu, output=output)
            runs.append(run)
        loops = {
            "bare": bare(runs[0], runs[0].plan.accumulation, losses["bare"]),
            "ours": ours(runs[0], losses["ours"], recorded=False),
            "recorded": ours(runs[1], losses["recorded"], recorded=True),
        }
        times = alternate(loops, arguments.steps, arguments.block, arguments.warm)
        medians = {name: statistics.median(values) for name, values in times.items()}
        extra = {
            name: statistics.median(a - b for a, b in zip(times[name], times["bare"], strict=True))
            for name in ("ours", "recorded")
        }
        result = {
            "piece": "loop overhead",
            "shape": arguments.recipe or arguments.shape,
            "length": arguments.length,
            "micro_batches": runs[0].plan.accumulation,
            "device": runs[0].hardware.accelerator.device.type,
            "torch": torch.__version__,
            "ms": medians,
            "more_ms": extra,
            "more_percent": {name: 100 * value / medians["bare"] for name, value in extra.items()},
            "losses": {name: [float(values[0]), float(values[-1])] for name, values in losses.items()},
        }
        print(json.dumps(result), flush=True)
        for loop in loops.values():
            loop.close()  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
