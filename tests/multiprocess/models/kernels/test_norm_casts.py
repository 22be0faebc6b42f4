"""The memory estimate counts autocast's copies of weights exactly for the runs that have them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ftcli.testing import run_on_cpu

from ....support.cells import cell

NAMES = ("sft-untied", "text")


class LiveCasts(TorchDispatchMode):
    """Remembers what is cast to bfloat16 and has one of these shapes, without keeping it alive."""

    def __init__(self, shapes: set[tuple[int, ...]]) -> None:
        super().__init__()
        self.shapes, self.made = shapes, list[StorageWeakRef]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if "_to_copy" in str(function) and result.dtype == torch.bfloat16 and tuple(result.shape) in self.shapes:
            self.made.append(StorageWeakRef(result.untyped_storage()))
        return result


def held_and_estimated(folder: Path) -> dict[str, tuple[int, int]]:
    """Return for each recipe the casts of layer matrices alive after the last layer, and the estimated bytes."""
    from ftcli.config.profile import profile_of_process
    from ftcli.loop import steps
    from ftcli.models.estimates.memory_estimate import estimate_memory
    from ftcli.training.acceleration import _sizes
    from ftcli.training.setup import prepare

    results: dict[str, tuple[int, int]] = {}
    for name in NAMES:
        run = prepare(cell(folder, name, precision="bf16"), cpu=True)
        model: Any = run.hardware.unwrap(run.model)
        layers = [module for key, module in model.named_modules() if key.rpartition(".")[2].isdigit()]
        shapes = [tuple(getattr(p, "ds_shape", p.shape)) for layer in layers for p in layer.parameters()]
        casts, alive = LiveCasts({shape for shape in shapes if len(shape) == 2}), list[int]()
        layers[-1].register_forward_hook(lambda *_: alive.append(sum(not counted.expired() for counted in casts.made)))  # noqa: B023
        with casts:
            next(iter(steps(run)))
        shares = profile_of_process(os.environ).shard_counts(run.plan.processes)
        parts = estimate_memory(
            run.recipe, _sizes(model, run.recipe), shares, rows=1, tokens=8, mode="none"
        ).bytes_by_use
        results[name] = alive[0], parts["copies of weights"]
    return results


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["ddp", "fsdp", "zero3"])
def test_memory_estimate_counts_casts_where_they_are_cached(profile: str, inputs: Path) -> None:
    (results, _) = run_on_cpu(held_and_estimated, inputs, processes=2, profile=profile)
    print(profile, results)
    for name, (counted, estimated) in results.items():
        assert (counted > 0) == (estimated > 0) == (profile == "ddp" or (profile, name) == ("fsdp", "text")), name
