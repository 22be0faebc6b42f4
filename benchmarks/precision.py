"""Compare ftcli's dtype policy with the bf16 modes of the backends: cost, and the difference of the first loss.

    python benchmarks/precision.py RECIPE --processes 2 [--profiles zero3,fsdp] [--steps 12]

`stock` is Accelerate's `mixed_precision: bf16`: DeepSpeed's bf16.enabled (bfloat16 weights and residual stream, float32
master weights copied from the rounded ones), and FSDP2's MixedPrecisionPolicy(param_dtype=bfloat16,
reduce_dtype=float32). `rounded` is ftcli's policy on weights first rounded to bfloat16. It separates the effect
of rounded weights from that of a bfloat16 residual stream. Loss and gradient norm of step 1 precede any update.
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
    """Return losses, gradient norms, trained tokens per second of the second half, and peak memory of one variant."""
    import ftcli.loop
    import ftcli.training.setup
    from ftcli.config.load import load_recipe

    precision = {"pure": "bf16_pure", "fp32": "fp32"}.get(variant, "bf16")
    settings = [f"precision={precision}", f"train.max_steps={steps}", "evaluate.at_start=false"]
    loaded = load_recipe(recipe, [*settings, "data.eval=null", *overrides])
    if variant == "stock":
        _use_stock_bf16()
    if variant == "rounded":
        _round_weights()
    run = ftcli.training.setup.prepare(loaded)
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
    """Restore the bf16 modes of the backends."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from ftcli.hardware import precision
    from ftcli.hardware.deepspeed import DeepSpeed
    from ftcli.hardware.fsdp import FSDP2
    from ftcli.models import precision as models_precision

    configure, options = DeepSpeed.configure, FSDP2.accelerator_options

    def stock_configure(self: DeepSpeed, accelerator: Any, recipe: Any, plan: Any) -> None:
        configure(self, accelerator, recipe, plan)
        accelerator.state.deepspeed_plugin.deepspeed_config["bf16"] = {"enabled": True}

    def stock_options(self: FSDP2) -> dict[str, Any]:
        kwargs = options(self)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        kwargs["fsdp_plugin"].mixed_precision_policy = policy
        return kwargs

    DeepSpeed.configure, FSDP2.accelerator_options = stock_configure, stock_options
    if os.environ.get("ACCELERATE_USE_DEEPSPEED"):  # FSDP2 casts its float32 shards
        models_precision.load_dtype = lambda recipe: torch.bfloat16
    precision.compute_in = lambda model, recipe, device: None
    precision.check = lambda model, recipe: "left to the backend"


def _round_weights() -> None:
    """Round the weights of models to bfloat16 after they are built."""
    import ftcli.training.setup

    build = ftcli.training.setup.build_model

    def rounded(*args: Any) -> Any:
        model = build(*args)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(torch.bfloat16))
        return model

    ftcli.training.setup.build_model = rounded


def main() -> None:
    """Measure, and print one line for each variant."""
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
            result = run_on_processes(
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
        losses = " ".join(f"{loss:.5f}" for loss in result["loss"][:4])
        print(
            f"{name:<18} losses {losses} ... {result['loss'][-1]:.5f}  norm 1 {result['norm'][0]:.5f}  "
            f"{result['step_ms']:.1f} ms per step  {result['tokens']:,.0f} tokens/s  {result['memory']:.1f} GB",
            flush=True,
        )


if __name__ == "__main__":
    main()
