"""Measure the processor time of a training step on the host, by cause. CPU processes, a model of tiny layers.

    python benchmarks/zero3_host_time.py [--profile zero3] [--layers 28] [--steps 20] [--without PATCH,PATCH]
    python benchmarks/zero3_host_time.py --pairs 5 --without PATCH      # in turns with all patches and without some

The layers have a hidden size of 64, so that Python takes most of the time. A backward pass on CPU runs in the thread
that calls it, so one profiler sees the whole step. Streams, events and kernels of a GPU are not in these numbers.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parent
sys.path[:0] = [str(HOME), str(HOME.parent)]

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 16, "vocab_size": 512, "tie_word_embeddings": True}  # fmt: skip
WHOLE = 100  # elements up to which weights are never sharded: norms, as in a large model


def write_inputs(folder: Path, layers: int) -> Path:
    """Write a model of tiny layers with random weights, rows and a recipe; return the recipe's path."""
    import torch
    import yaml
    from transformers import AutoModelForCausalLM, Qwen3Config

    from ftcli.testing import tiny_tokenizer

    tokens = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 1}
    torch.manual_seed(0)
    config = Qwen3Config(**SHAPE, **tokens, num_hidden_layers=layers)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    lines = [json.dumps({"text": chr(97 + n % 26) * 15}) for n in range(64)]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    recipe: dict[str, Any] = {
        "task": "pretrain",
        "precision": "bf16",
        "model": {"name": str(folder / "model"), "dropout": 0.0},
        "data": {"train": str(folder / "rows.jsonl"), "max_length": 16},
        "batch": {"global_size": 2, "micro_size": 1},
        "train": {"max_steps": 1000},
        "optimizer": {"learning_rate": 1e-4},
        "schedule": {"name": "constant"},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def train(path: str, steps: int, without: str, profiled: bool, callee: str = "") -> dict[str, Any]:
    """Train on this rank; return milliseconds of processor time per step, losses, and the profile."""
    import ftcli
    from ftcli.hardware import deepspeed
    from ftcli.training.setup import prepare

    os.environ["FTCLI_WITHOUT_PATCHES"] = without
    deepspeed.STAGE_3 = deepspeed.STAGE_3 | {"stage3_param_persistence_threshold": WHOLE}
    run = prepare(ftcli.load_recipe(path), cpu=True)
    loop = ftcli.steps(run)
    losses = [next(loop).loss for _ in range(4)]
    profile = cProfile.Profile()
    if profiled:
        profile.enable()
    started = time.thread_time()
    losses += [next(loop).loss for _ in range(steps)]
    spent = time.thread_time() - started
    profile.disable()
    rows = []
    entries: dict[Any, Any] = vars(pstats.Stats(profile))["stats"] if profiled else {}
    for key, (_, calls, own, total, callers) in entries.items():
        if not callee:
            rows.append((_place(key), calls / steps, own / steps * 1e3, total / steps * 1e3))
        elif callee == key[2]:
            for caller, (_, calls, own, total) in callers.items():
                rows.append((_place(caller), calls / steps, own / steps * 1e3, total / steps * 1e3))
    return {"ms": spent / steps * 1e3, "losses": losses, "rows": rows}


def _place(key: tuple[str, int, str]) -> str:
    """Return file, line and name of a function, without the folder of packages."""
    file, line, name = key
    return f"{file.split('site-packages/')[-1].removeprefix(str(HOME.parent))}:{line}:{name}"


def main() -> None:
    """Measure and print."""
    from ftcli.testing import run_on_cpu

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="zero3")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=0)
    parser.add_argument("--without", default="")
    parser.add_argument("--callers", default="", help="list the callers of this function instead")
    parser.add_argument("--top", type=int, default=60)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = write_inputs(Path(folder), args.layers)
        if args.pairs:
            both: dict[str, list[float]] = {"": [], args.without: []}
            curves = {}
            for _ in range(args.pairs):
                for without, measured in both.items():
                    ranks = run_on_cpu(train, str(path), args.steps, without, False, profile=args.profile)
                    measured.append(statistics.mean(rank["ms"] for rank in ranks))
                    curves[without] = ranks[0]["losses"]
            for without, measured in both.items():
                print(f"without {without or 'nothing':40} {statistics.median(measured):8.2f} ms  {measured}")
            print("same losses:", curves[""] == curves[args.without])
            return
        rank = run_on_cpu(train, str(path), args.steps, args.without, True, args.callers, profile=args.profile)[0]
    print(f"{rank['ms']:.2f} ms a step under the profiler")
    for order, title in ((3, "with what they call"), (2, "own")):
        print(f"\n{title}\n   calls      own    total")
        for name, calls, own, total in sorted(rank["rows"], key=lambda row: -row[order])[: args.top]:
            print(f"{calls:8.1f} {own:8.3f} {total:8.3f}  {name}")


if __name__ == "__main__":
    main()
