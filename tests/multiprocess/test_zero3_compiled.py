"""Layers under ZeRO-3 that gather as one and are compiled: no weight stays whole, and they share their graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ftcli.testing import run_on_cpu, save_tiny_causal

from .cells import cell, write_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


def whole_weights(folder: Path) -> dict[bool, list[tuple[int, int]]]:
    """Return, as they are and compiled, how many of the layers' weights are whole at the head, and how many were."""
    from ftcli.hardware import deepspeed
    from ftcli.loop import steps
    from ftcli.run import prepare

    none_stays = dict.fromkeys(("stage3_max_live_parameters", "stage3_max_reuse_distance"), 0)
    sizes = none_stays | {"stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 100}
    deepspeed.STAGE_3 = deepspeed.STAGE_3 | sizes
    found: dict[bool, list[tuple[int, int]]] = {}
    for compiled in (False, True):
        section = {"name": str(folder / "untied"), "dropout": 0.0, "torch_compile": compiled}
        run = prepare(cell(folder, "sft-untied", model=section, precision="bf16", train={"max_steps": 3}), cpu=True)
        assert run.compiled == compiled
        model: Any = run.hardware.unwrap(run.model)
        gathered: list[StorageWeakRef] = []

        def look(layer: Any, *_: Any, gathered: list[StorageWeakRef] = gathered) -> None:
            gathered.extend(StorageWeakRef(w.data.untyped_storage()) for w in layer.parameters() if w.ndim == 2)

        def count(*_: Any, gathered: list[StorageWeakRef] = gathered, compiled: bool = compiled) -> None:
            alive = sum(not storage.expired() for storage in gathered)
            found.setdefault(compiled, []).append((alive, len(gathered)))
            gathered.clear()

        for layer in model.model.layers:
            layer.register_forward_pre_hook(look)
        model.lm_head.register_forward_pre_hook(count)
        for _ in steps(run):
            pass
    return found


@pytest.mark.slow
def test_compiled_layers_keep_no_weight_whole_for_the_backward_pass(inputs: Path) -> None:
    for rank in run_on_cpu(whole_weights, inputs, processes=2, profile="zero3"):
        for compiled, seen in rank.items():
            assert seen and all(alive == 0 < gathered for alive, gathered in seen), (compiled, seen)


def graphs(folder: Path) -> list[int]:
    """Return how many graphs compiled layers are: of a model with two of them, and of one with ten."""
    from ftcli.compilation import Graphs
    from ftcli.hardware import deepspeed
    from ftcli.loop import steps
    from ftcli.run import prepare

    deepspeed.STAGE_3 = deepspeed.STAGE_3 | {"stage3_param_persistence_threshold": 100}
    found = []
    for name in ("untied", "ten"):
        seen, section = Graphs(), {"name": str(folder / name), "dropout": 0.0, "torch_compile": True}
        run = prepare(cell(folder, "sft-untied", model=section, precision="bf16", train={"max_steps": 3}), cpu=True)
        list(steps(run))
        seen.note(3)
        found.append(seen.count - seen.before)
        torch.compiler.reset()
    return found


@pytest.mark.slow
def test_layers_that_gather_as_one_share_their_graphs(inputs: Path) -> None:
    save_tiny_causal(inputs / "ten", tied=False, num_hidden_layers=10)  # from the ninth graph on torch compiles none
    for few, many in run_on_cpu(graphs, inputs, processes=2, profile="zero3"):
        assert 0 < few == many
