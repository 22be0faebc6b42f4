"""Measure the processor time of a training step on the host, by cause. CPU processes, a model of tiny layers.

    python benchmarks/zero3_host_time.py [--profile zero3] [--layers 28] [--pairs 3] [--without PATCH,PATCH]
    python benchmarks/zero3_host_time.py --list [NAME]      # all functions by a profiler, or the callers of one

With `--without`, runs with all patches and without some take turns.

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
# Owner in a run -> method -> what it does. The time of a method includes that of those indented below it.
CAUSES: dict[str, dict[str, str]] = {
    "engine": {
        "_forward_prologue": "a forward pass begins: flags of all modules",
        "_forward_epilogue": "a forward pass ends: flags of all modules",
    },
    "coordinator": {
        "fetch_sub_module": "hooks of modules: gather weights, wait, gather ahead",
        "release_sub_module": "hooks of modules: free weights",
    },
    "zero": {
        "reduce_ready_partitions_and_remove_grads": "gradient hooks: add to a bucket",
        "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads": "sums of gradients",
        "independent_gradient_partition_epilogue": "a backward pass ends",
        "_partition_all_parameters": "  free small weights (twice)",
        "step": "a step: norm, AdamW",
        "_prepare_sub_group": "  gradients of the step",
        "_reassign_or_swap_out_partitioned_parameters": "  shards that are gathered",
        "_post_step": "  gather small weights",
    },
}
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
    # Different tokens: the gradients of queries and keys of equal ones are zero, which stops the run.
    lines = [json.dumps({"text": "".join(chr(97 + n * i % 26) for i in range(1, 16))}) for n in range(1, 65)]
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


def train(path: str, steps: int, without: str, listed: str | None) -> dict[str, Any]:
    """Train on this rank; return milliseconds of processor time per step, in all and by cause, and the losses.

    With `listed` a profiler lists all functions, or the callers of the function with that name.
    """
    import ftcli
    from ftcli.hardware import deepspeed
    from ftcli.training.setup import prepare

    os.environ["FTCLI_WITHOUT_PATCHES"] = without
    deepspeed.STAGE_3 = deepspeed.STAGE_3 | {"stage3_param_persistence_threshold": WHOLE}
    run: Any = prepare(ftcli.load_recipe(path), cpu=True)
    causes: dict[str, list[float]] = {}
    if hasattr(run.model, "optimizer") and listed is None:
        zero = run.model.optimizer
        owners = {"engine": run.model, "zero": zero, "coordinator": zero.parameter_offload.param_coordinator}
        for owner, methods in CAUSES.items():
            for method, cause in methods.items():
                times = causes.setdefault(cause, [])
                setattr(owners[owner], method, _timed(getattr(owners[owner], method), times))
    loop = ftcli.steps(run)
    losses = [next(loop).loss for _ in range(4)]
    for times in causes.values():
        times.clear()
    profile = cProfile.Profile()
    if listed is not None:
        profile.enable()
    started = time.thread_time()
    losses += [next(loop).loss for _ in range(steps)]
    spent = time.thread_time() - started
    profile.disable()
    rows = []
    entries: dict[Any, Any] = vars(pstats.Stats(profile))["stats"] if listed is not None else {}
    for key, (_, calls, own, total, callers) in entries.items():
        if not listed:
            rows.append((_place(key), calls / steps, own / steps * 1e3, total / steps * 1e3))
        elif listed == key[2]:
            for caller, (_, calls, own, total) in callers.items():
                rows.append((_place(caller), calls / steps, own / steps * 1e3, total / steps * 1e3))
    by_cause = {cause: (len(times) / steps, sum(times) / steps * 1e3) for cause, times in causes.items()}
    return {"ms": spent / steps * 1e3, "losses": losses, "causes": by_cause, "rows": rows}


def _timed(function: Any, times: list[float]) -> Any:
    """Return the function, which then adds the processor time of each call to `times`, in seconds."""

    def timed(*given: Any, **options: Any) -> Any:
        started = time.thread_time()
        try:
            return function(*given, **options)
        finally:
            times.append(time.thread_time() - started)

    return timed


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
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--without", default="", help="names of patches, separated by commas")
    parser.add_argument("--list", default=None, nargs="?", const="", metavar="NAME",
                        help="list all functions by a profiler, or the callers of one")  # fmt: skip
    parser.add_argument("--top", type=int, default=60)
    args = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {"": [], args.without: []} if args.list is None else {args.without: []}
    with tempfile.TemporaryDirectory() as folder:
        path = write_inputs(Path(folder), args.layers)
        for _ in range(args.pairs if args.list is None else 1):
            for without, measured in results.items():
                measured += run_on_cpu(train, str(path), args.steps, without, args.list, profile=args.profile)
    for without, measured in results.items():
        every = [result["ms"] for result in measured]
        print(f"\nwithout {without or 'nothing'}: {statistics.median(every):.1f} ms a step")
        print("   of each rank and turn:", *(f"{ms:.1f}" for ms in every))
        for cause, (calls, _) in measured[0]["causes"].items():
            ms = statistics.median(result["causes"][cause][1] for result in measured)
            print(f"{calls:8.1f} calls {ms:8.2f} ms  {cause}")
    curves = [result["losses"] for measured in results.values() for result in measured]
    print("\nlosses have the same bits:", all(curve == curves[0] for curve in curves))
    if args.list is None:
        return
    for order, title in ((3, "with what they call"), (2, "own")):
        print(f"\n{title}\n   calls      own    total")
        for name, calls, own, total in sorted(measured[0]["rows"], key=lambda row: -row[order])[: args.top]:
            print(f"{calls:8.1f} {own:8.3f} {total:8.3f}  {name}")


if __name__ == "__main__":
    main()
