"""Compare the speed of `ftcli tokenize` with the tokenizer's encode_batch on the same number of threads.

    benchmarks/tokenizing.py [--rows 200000] [--task pretrain] [--sentences 6] [--model asset:smollm2-135m-instruct]

The rows are random combinations of first sentences from Python's documentation strings: texts, or conversations of 1 to
3 exchanges. Each text has 1 to `--sentences` sentences. encode_batch receives the rendered texts of the same rows, in
lists of 1000. All variants alternate for `--rounds` rounds, and the medians are printed: `ftcli tokenize` from the file
to the finished cache, its encoding part, encode_batch, and encode_batch_fast, which returns no offsets.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ftcli.data.cache
from ftcli.config.recipe import Recipe
from ftcli.data.assets.rows import documented_functions
from ftcli.data.encode import usable_processors
from ftcli.data.paths import local_path
from ftcli.hardware.environment import quiet_libraries
from ftcli.tasks.build import build_task


def write_rows(path: Path, rows: int, task: str, sentences: int) -> None:
    """Write rows of random texts, or of conversations with 1 to 3 exchanges."""
    draw, sources = random.Random(0), [row.text for row in documented_functions()]

    def text() -> str:
        return " ".join(draw.choices(sources, k=draw.randint(1, sentences)))

    with path.open("w") as file:
        for _ in range(rows):
            if task == "pretrain":
                row: dict[str, Any] = {"text": text()}
            else:
                roles = ("user", "assistant") * draw.randint(1, 3)
                row = {"messages": [{"role": role, "content": text()} for role in roles]}
            file.write(json.dumps(row) + "\n")


def texts_of(path: Path, task: Any) -> list[str]:
    """Return the rendered texts of the rows."""
    rows = [json.loads(line) for line in path.open()]
    return [
        row["text"] if "text" in row else task.tokenizer.apply_chat_template(row["messages"], tokenize=False)
        for row in rows
    ]


def time_tokenizer(encode: Callable[..., Any], texts: list[str]) -> tuple[float, int]:
    """Return (seconds, tokens) of encoding with the tokenizer alone."""
    started, tokens = time.perf_counter(), 0
    for start in range(0, len(texts), 1000):
        tokens += sum(len(encoding) for encoding in encode(texts[start : start + 1000]))
    return time.perf_counter() - started, tokens


def time_ours(recipe: Recipe, task: Any, folder: Path) -> tuple[float, float, int]:
    """Return (seconds, seconds of encoding, tokens) of preparing rows in an empty cache."""
    os.environ["FTCLI_CACHE"] = str(folder)
    __import__("datasets").config.HF_DATASETS_CACHE = folder / "datasets"
    encode_source, spent = ftcli.data.cache.encode_source, []

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        counts = encode_source(*args, **kwargs)
        spent.append(time.perf_counter() - started)
        return counts

    ftcli.data.cache.encode_source = timed
    started = time.perf_counter()
    prepared = ftcli.data.cache.prepare_rows(recipe, task)
    seconds = time.perf_counter() - started
    ftcli.data.cache.encode_source = encode_source
    return seconds, sum(spent), prepared.tokens


def main() -> None:
    """Measure all variants, and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--task", choices=("pretrain", "sft"), default="pretrain")
    parser.add_argument("--sentences", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="asset:smollm2-135m-instruct")
    arguments = parser.parse_args()
    quiet_libraries()
    os.environ["RAYON_NUM_THREADS"] = str(usable_processors())
    names = ("ftcli tokenize", "its encoding", "encode_batch", "encode_batch_fast")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    tokens: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        write_rows(path, arguments.rows, arguments.task, arguments.sentences)
        recipe = Recipe.model_validate(
            {
                "task": arguments.task,
                "model": {"name": str(local_path(arguments.model) or arguments.model)},
                "data": {"train": str(path), "max_length": 4096},
                "batch": {"global_size": 8},
                "train": {"max_steps": 1},
                "optimizer": {"learning_rate": 1e-3},
            }
        )
        task = build_task(recipe)
        texts, backend = texts_of(path, task), task.tokenizer.backend_tokenizer
        for number in range(arguments.rounds):
            whole, encoding, count = time_ours(recipe, task, Path(folder) / str(number))
            seconds[names[0]].append(whole)
            seconds[names[1]].append(encoding)
            tokens |= {names[0]: count, names[1]: count}
            for name in names[2:]:
                spent, tokens[name] = time_tokenizer(getattr(backend, name), texts)
                seconds[name].append(spent)
    print(f"processors          {usable_processors()}, {arguments.rounds} rounds, {arguments.rows:,} rows")
    speeds = {name: tokens[name] / statistics.median(spent) for name, spent in seconds.items()}
    for name, spent in seconds.items():
        ratio = f"{speeds[name] / speeds['encode_batch']:.2f} of encode_batch"
        each = " ".join(f"{one:.2f}" for one in spent)
        print(f"{name:<18}{statistics.median(spent):7.2f} s  {speeds[name]:11,.0f} tokens/s  {ratio}  ({each})")


if __name__ == "__main__":
    main()
