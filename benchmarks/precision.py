"""What our dtype policy costs beside the backends' own bf16, and why their first loss is another one.

    python benchmarks/precision.py RECIPE --processes 2 [--profiles zero3,fsdp] [--steps 12]

`stock` is what Accelerate's `mixed_precision: bf16` gives: DeepSpeed's bf16.enabled (bfloat16 weights and residual
stream, float32 masters made from the rounded weights), FSDP2's MixedPrecisionPolicy(param_dtype=bfloat16,
reduce_dtype=float32). `rounded` is our policy on weights that were rounded to bfloat16 first: it tells what rounding
weights does apart from what a bfloat16 residual stream does. Loss and gradient norm of step 1 come before any update.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch

from ftcli.testing import run_on_processes


def measure(recipe: str, variant: str, steps: int, overrides: list[str]) -> dict[str, Any]:
    """Return losses, gradient norms, trained tokens a second over the second half, and peak memory of one variant."""
    import ftcli.loop
    import ftcli.run
    from ftcli.recipe_file import load_recipe

    precision = {"pure": "bf16_pure", "fp32": "fp32"}.get(variant, "bf16")
    given = [f"precision={precision}", f"train.max_steps={steps}", "evaluate.at_start=false"]
    loaded = load_recipe(recipe, [*given, "data.eval=null", *overrides])
    if variant == "stock":
        _use_stock_bf16()
    if variant == "rounded":
        _round_weights()
    run = ftcli.run.prepare(loaded)
    torch.cuda.reset_peak_memory_stats()
    losses, norms, items, began = [], [], 0, 0.0
    for step in ftcli.loop.steps(run):
        losses.append(step.loss_tensor), norms.append(step.norm_tensor)
        if step.number == steps // 2:
            torch.cuda.synchronize()
            began = time.perf_counter()
        items += step.items if step.number > steps // 2 else 0
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return {
        "loss": [float(x) for x in losses],
        "norm": [float(x) for x in norms],
        "step_ms": 1000 * seconds / (steps - steps // 2),
        "tokens": items / seconds,
        "memory": torch.cuda.max_memory_allocated() / 1e9,
    }


def _use_stock_bf16() -> None:
    """Hand precision back to the backends."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from ftcli.hardware import deepspeed, fsdp, precision

    configure, options = deepspeed.configure, fsdp.options

    def stock_configure(accelerator: Any, recipe: Any, plan: Any) -> None:
        configure(accelerator, recipe, plan)
        accelerator.state.deepspeed_plugin.deepspeed_config["bf16"] = {"enabled": True}

    def stock_options() -> dict[str, Any]:
        found = options()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        found["fsdp_plugin"].mixed_precision_policy = policy
        return found

    deepspeed.configure, fsdp.options = stock_configure, stock_options
    if os.environ.get("ACCELERATE_USE_DEEPSPEED"):  # FSDP2 casts its float32 shards itself
        precision.load_dtype = lambda recipe: torch.bfloat16
    precision.compute_in = lambda model, recipe, device: None
    precision.check = lambda model, recipe: "left to the backend"


def _round_weights() -> None:
    import ftcli.run

    build = ftcli.run._build_model

    def rounded(*args: Any) -> Any:
        model = build(*args)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(torch.bfloat16))
        return model

    ftcli.run._build_model = rounded


def main() -> None:
    """Print one line a variant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--profiles", default="zero3,fsdp")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--set", action="append", default=[], help="as `ftcli train --set`")
    arguments = parser.parse_args()
    cells = [("single", 1, variant) for variant in ("fp32", "bf16", "rounded", "pure")]
    for profile in arguments.profiles.split(","):
        cells += [(profile, arguments.processes, variant) for variant in ("bf16", "stock", "pure")]
    for profile, processes, variant in cells:
        name = f"{profile} x{processes} {variant}"
        try:
            found = run_on_processes(
                measure,
                str(arguments.recipe),
                variant,
                arguments.steps,
                arguments.set,
                processes=processes,
                profile=profile,
            )[0]
        except RuntimeError as error:
            print(f"{name}: failed: {str(error).strip().splitlines()[-1]}", flush=True)
            continue
        losses = " ".join(f"{loss:.5f}" for loss in found["loss"][:4])
        print(
            f"{name:<18} losses {losses} ... {found['loss'][-1]:.5f}  norm 1 {found['norm'][0]:.5f}  "
            f"{found['step_ms']:.1f} ms a step  {found['tokens']:,.0f} tokens/s  {found['memory']:.1f} GB",
            flush=True,
        )


if __name__ == "__main__":
    main()
