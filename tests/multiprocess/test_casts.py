"""The memory estimate counts autocast's copies of weights where a run really holds them, and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ftcli.testing import run_on_cpu

from .cells import cell, write_inputs

NAMES = ("sft-untied", "text")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


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
    """Return of each recipe how many casts of layers' matrices are alive after the last layer, and bytes estimated."""
    from ftcli.activations import _sizes
    from ftcli.loop import steps
    from ftcli.memory import estimate
    from ftcli.profiles import profile_of_process
    from ftcli.run import prepare

    found: dict[str, tuple[int, int]] = {}
    for name in NAMES:
        run = prepare(cell(folder, name, precision="bf16"), cpu=True)
        model: Any = run.hardware.unwrap(run.model)
        layers = [module for key, module in model.named_modules() if key.rpartition(".")[2].isdigit()]
        shapes = [tuple(getattr(p, "ds_shape", p.shape)) for layer in layers for p in layer.parameters()]
        casts, alive = LiveCasts({shape for shape in shapes if len(shape) == 2}), list[int]()
        layers[-1].register_forward_hook(lambda *_: alive.append(sum(not held.expired() for held in casts.made)))  # noqa: B023
        with casts:
            next(iter(steps(run)))
        shares = profile_of_process(os.environ).shares(run.plan.processes)
        parts = estimate(run.recipe, _sizes(model), shares, rows=1, tokens=8, mode="none").parts
        found[name] = alive[0], parts["copies of weights"]
    return found


@pytest.mark.parametrize("profile", ["ddp", "fsdp", "zero3"])
def test_casts_are_estimated_where_they_are_held(profile: str, inputs: Path) -> None:
    (found, _) = run_on_cpu(held_and_estimated, inputs, processes=2, profile=profile)
    print(profile, found)
    for name, (held, estimated) in found.items():
        assert (held > 0) == (estimated > 0) == (profile == "ddp" or (profile, name) == ("fsdp", "text")), name
