r"""Measure the share of a step that ranks wait for each other, with rows divided by number and by tokens.

    python benchmarks/rank_waits.py [--processes 2] [--profile ddp] [--rows 8] [--micro-size 4] [--steps 12]
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 2 benchmarks/rank_waits.py \
        --recipe RECIPE [--set KEY=VALUE ...] [--steps 12]

The first form trains a small random model on CPU processes. Rows have log-normal lengths with a median of 330 tokens.
The work of a rank in a step is its processor time, so it does not matter what else the machine does. The second form
trains a recipe on GPUs. There the work of a rank is the time from the first forward pass of a step to the end of its
last backward pass on the device, and gradients are not summed over ranks, so no rank waits within this time (the curve
of such a run means nothing). All ranks wait for the one with the most work: the share is 1 - mean / maximum, over the
steps.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

SIZES = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}


def write_inputs(folder: Path, rows: int) -> None:
    """Write a model with random weights, and rows."""
    from random_model import write_rows
    from transformers import AutoModelForCausalLM, LlamaConfig

    from ftcli.testing import tiny_tokenizer

    tokens = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 1, "vocab_size": 512}
    config = LlamaConfig(**SIZES, **tokens, num_key_value_heads=4, max_position_embeddings=4096)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    write_rows(folder / "train.jsonl", rows, median=330)


def work(folder: Path, batch: dict[str, Any], count: int, changes: dict[str, Any]) -> tuple[list[float], str]:
    """Train, and return this rank's processor seconds of each step but the first, and how a step is divided."""
    from ftcli.config.recipe import Recipe
    from ftcli.loop import steps
    from ftcli.training.setup import prepare

    data = {"train": str(folder / "train.jsonl"), "max_length": 4096} | changes
    recipe: dict[str, Any] = {"task": "sft", "precision": "fp32", "data": data, "batch": batch}
    recipe |= {"model": {"name": str(folder / "model"), "dropout": 0.0}, "train": {"max_steps": count}}
    run = prepare(Recipe.model_validate(recipe | {"optimizer": {"learning_rate": 1e-4}}), cpu=True)
    seconds, before = [], time.process_time()
    for _ in steps(run):
        now = time.process_time()
        seconds.append(now - before)
        before = now
    return seconds[1:], run.plan.batch_layout


def measure_recipe(recipe: str, settings: list[str], count: int) -> None:
    """Train a recipe under DDP, and print the share from rank 0. The first two steps are left out."""
    import torch

    from ftcli.loop import steps
    from ftcli.runtime.heartbeat import Heartbeat
    from ftcli.training.setup import prepare

    on_gpu = torch.cuda.is_available()

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    class Work(Heartbeat):
        """Takes the time from the first forward pass of a step to the end of the last backward pass."""

        def __init__(self) -> None:
            super().__init__()
            self.seconds: list[float] = []
            self._began = 0.0

        def beat(self, phase: str, step: int) -> None:
            super().beat(phase, step)
            if phase == "forward" and not self._began:
                self._began = now()
            if phase == "optimizer" and self._began:
                self.seconds.append(now() - self._began)
                self._began = 0.0

    with tempfile.TemporaryDirectory() as folder:
        run = prepare(recipe, overrides=[*settings, f"train.max_steps={count}"], output=folder, cpu=not on_gpu)
        run.heartbeat = watch = Work()
        run.model.require_backward_grad_sync = False  # type: ignore[assignment]  # of DistributedDataParallel
        for _ in steps(run):
            pass
        ranks: list[Any] = [None] * run.plan.processes
        torch.distributed.all_gather_object(ranks, (watch.seconds[2:], run.plan.batch_layout))
        if run.hardware.ranks.is_main:
            print_share(" ".join(settings) or recipe, ranks)
        run.hardware.close()


def print_share(name: str, ranks: list[tuple[list[float], str]]) -> None:
    """Print which share of a step ranks wait, from the seconds of work of each rank and step."""
    by_step = list(zip(*(seconds for seconds, _ in ranks), strict=True))
    longest = sum(map(max, by_step))
    share = 1 - sum(map(sum, by_step)) / len(ranks) / longest
    print(
        f"{name}: ranks wait {100 * share:.1f} % of a step, {longest:.2f} s of work in {len(by_step)} steps; "
        f"{ranks[0][1]}",
        flush=True,
    )


def main() -> None:
    """Print the shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--profile", default="ddp")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--micro-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--recipe", help="of a run on GPUs")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    arguments = parser.parse_args()
    if arguments.recipe:
        measure_recipe(arguments.recipe, arguments.settings, arguments.steps)
        return
    from ftcli.testing import run_on_cpu

    with tempfile.TemporaryDirectory() as name:
        folder, rows = Path(name), arguments.rows
        write_inputs(folder, rows * arguments.steps)
        for layout, changes in {"padded": {}, "concatenated": {"padding_free": True}}.items():
            for size in (arguments.micro_size, "auto"):
                batch = {"global_size": rows, "micro_size": size}
                where = {"processes": arguments.processes, "profile": arguments.profile}
                ranks = run_on_cpu(work, folder, batch, arguments.steps, changes, **where)
                print_share(f"{layout}, micro size {size}", ranks)


if __name__ == "__main__":
    main()
