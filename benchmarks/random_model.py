"""Write a model of a known shape with random weights, rows to train it on, and a recipe: input for GPU runs.

    python benchmarks/random_model.py qwen3-0.6b FOLDER --rows 512 --precision bf16 --steps 20

Nothing is downloaded: the tokenizer is byte-level and the rows are random words. Losses are meaningful only in
comparison between profiles. `--median 330` draws answer lengths as in chats, log-normal with this median in tokens, and
sets the maximum length of rows to 4096 tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path
from typing import Any

import torch
import yaml
from cells.shapes import SIZES
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from ftcli.testing import tiny_tokenizer

MAX_LENGTH, SIGMA = 4096, 0.9
KINDS = {"llama": LlamaConfig, "qwen3": Qwen3Config}
SHAPES = {name: (KINDS[kind], sizes) for name, (kind, sizes) in SIZES.items()}


def write_model(shape: str, folder: Path) -> None:
    """Write random float32 weights of a shape and a byte-level tokenizer. A GPU draws the weights if there is one."""
    kind, sizes = SHAPES[shape]
    tokens = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 1}
    config = kind(**{"tie_word_embeddings": True, **sizes}, **tokens, max_position_embeddings=MAX_LENGTH)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def write_rows(path: Path, rows: int, seed: int = 0, median: int | None = None) -> None:
    """Write prompts and completions of random words, with a few to a few hundred characters.

    With `median`, the lengths of completions are log-normal with this median in characters (tokens), and at most 4000.
    """
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 8))) for _ in range(200)]

    def text(most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(1, most)))

    def answer() -> str:
        if median is None:
            return text(60)
        length = min(4000, max(16, int(draw.lognormvariate(math.log(median), SIGMA))))
        return " ".join(draw.choices(words, k=length // 3 + 1))[:length]

    lines = [json.dumps({"prompt": text(20), "completion": answer()}) for _ in range(rows)]
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    """Write model, rows and recipe into one folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--median", type=int, help="tokens of an answer, log-normal; absent: up to 60 words")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    write_model(arguments.shape, arguments.folder / "model")
    write_rows(arguments.folder / "train.jsonl", arguments.rows, median=arguments.median)
    write_rows(arguments.folder / "eval.jsonl", 61, seed=1)
    recipe: dict[str, Any] = {
        "task": "sft",
        "precision": arguments.precision,
        "model": {"name": str(arguments.folder / "model"), "dropout": 0.0},
        "data": {"train": str(arguments.folder / "train.jsonl"), "eval": str(arguments.folder / "eval.jsonl")},
        "batch": {"global_size": 16, "micro_size": 4},
        "train": {"max_steps": arguments.steps},
        "optimizer": {"learning_rate": arguments.learning_rate, "weight_decay": 0.1},
        "schedule": {"name": "cosine", "warmup_steps": 4},
        "evaluate": {"at_start": True},
    }
    if arguments.median is not None:
        recipe["data"] |= {"max_length": MAX_LENGTH}
    (arguments.folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))


if __name__ == "__main__":
    main()
