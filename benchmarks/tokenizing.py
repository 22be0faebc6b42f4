"""How fast rows are prepared: `ftcli tokenize` against the tokenizer's own encode_batch on as many threads.

    benchmarks/tokenizing.py [--rows 200000] [--task pretrain] [--model asset:smollm2-135m-instruct]

Prints rows and tokens a second of both, and their ratio. The rows are paragraphs of Python's documentation strings,
put together at random; encode_batch is given the very texts that the rows become, in lists of 1000.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from ftcli.asset_rows import documented_functions
from ftcli.cache import prepare_rows
from ftcli.encoding import usable_processors
from ftcli.models import quiet_libraries
from ftcli.recipe import Recipe
from ftcli.rows import local_path
from ftcli.tasks import build_task


def write_rows(path: Path, rows: int, task: str) -> None:
    """Write texts of 1 to 6 sentences, or conversations of 1 to 3 turns with them."""
    draw, told = random.Random(0), [row.text for row in documented_functions()]
    with path.open("w") as file:
        for _ in range(rows):
            if task == "pretrain":
                row: dict[str, Any] = {"text": " ".join(draw.choices(told, k=draw.randint(1, 6)))}
            else:
                pairs = [draw.choices(told, k=2) for _ in range(draw.randint(1, 3))]
                turns = [(role, text) for pair in pairs for role, text in zip(("user", "assistant"), pair, strict=True)]
                row = {"messages": [{"role": role, "content": text} for role, text in turns]}
            file.write(json.dumps(row) + "\n")


def time_tokenizer(path: Path, task: Any) -> tuple[float, int]:
    """Return (seconds, tokens) of encode_batch alone, on texts that are rendered beforehand."""
    rows = [json.loads(line) for line in path.open()]
    texts = [
        row["text"] if "text" in row else task.tokenizer.apply_chat_template(row["messages"], tokenize=False)
        for row in rows
    ]
    backend = task.tokenizer.backend_tokenizer
    backend.encode_batch(texts[:1000])
    started, tokens = time.perf_counter(), 0
    for start in range(0, len(texts), 1000):
        tokens += sum(len(found) for found in backend.encode_batch(texts[start : start + 1000]))
    return time.perf_counter() - started, tokens


def main() -> None:
    """Measure both, in this order, and print one fact a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--task", choices=("pretrain", "sft"), default="pretrain")
    parser.add_argument("--model", default="asset:smollm2-135m-instruct")
    given = parser.parse_args()
    quiet_libraries()
    os.environ["RAYON_NUM_THREADS"] = str(usable_processors())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        write_rows(path, given.rows, given.task)
        recipe = Recipe.model_validate(
            {
                "task": given.task,
                "model": {"name": str(local_path(given.model) or given.model)},
                "data": {"train": str(path), "max_length": 4096},
                "batch": {"global_size": 8},
                "train": {"max_steps": 1},
                "optimizer": {"learning_rate": 1e-3},
            }
        )
        task = build_task(recipe)
        os.environ["FTCLI_CACHE"] = folder  # the rows must be new
        started = time.perf_counter()
        prepared = prepare_rows(recipe, task)
        ours, tokens = time.perf_counter() - started, prepared.tokens
        theirs, alone = time_tokenizer(path, task)
    print(f"processors          {usable_processors()}")
    for name, seconds, count in (("ftcli tokenize", ours, tokens), ("encode_batch", theirs, alone)):
        speed = f"{given.rows / seconds:9,.0f} rows/s  {count / seconds:11,.0f} tokens/s"
        print(f"{name:<18}{seconds:7.1f} s  {speed}")
    print(f"ratio               {(tokens / ours) / (alone / theirs):.2f}")


if __name__ == "__main__":
    main()
