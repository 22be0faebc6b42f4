"""Measure the share of a step that ranks wait for each other, with rows divided by number and by tokens.

    python benchmarks/rank_waits.py [--processes 2] [--profile ddp] [--rows 8] [--micro-size 4] [--steps 12]

Trains a small random model on CPU processes. Rows have log-normal lengths with a median of 330 tokens. The work of a
rank in a step is its processor time, so it does not matter what else the machine does. All ranks wait for the one with
the most work: the share is 1 - mean / maximum, over the steps.
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


def main() -> None:
    """Print the shares."""
    from ftcli.testing import run_on_cpu

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--profile", default="ddp")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--micro-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, rows = Path(name), arguments.rows
        write_inputs(folder, rows * arguments.steps)
        for layout, changes in {"padded": {}, "concatenated": {"padding_free": True}}.items():
            for size in (arguments.micro_size, "auto"):
                batch = {"global_size": rows, "micro_size": size}
                where = {"processes": arguments.processes, "profile": arguments.profile}
                ranks = run_on_cpu(work, folder, batch, arguments.steps, changes, **where)
                by_step = list(zip(*(seconds for seconds, _ in ranks), strict=True))
                longest = sum(map(max, by_step))
                share = 1 - sum(map(sum, by_step)) / arguments.processes / longest
                print(
                    f"{layout}, micro size {size}: ranks wait {100 * share:.1f} % of a step, {longest:.1f} s of work "
                    f"in {len(by_step)} steps; {ranks[0][1]}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
