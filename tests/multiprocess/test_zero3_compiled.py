"""Layers under ZeRO-3 that gather as one and are compiled: no weight stays whole, and they share their graphs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ftcli.compilation import KNOWN
from ftcli.testing import run_on_cpu, save_tiny_causal

from .cells import cell, write_inputs
from .test_zero3_architectures import save_architecture


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


def trained(folder: Path, kinds: list[str], *, compiled: bool) -> dict[str, dict[str, list[Any]]]:
    """Return of each model its curve, and how many of the layers' weights are whole at the head, and how many were."""
    from ftcli.base_model import layers_of
    from ftcli.hardware import deepspeed
    from ftcli.loop import steps
    from ftcli.run import prepare

    none_stays = dict.fromkeys(("stage3_max_live_parameters", "stage3_max_reuse_distance"), 0)
    sizes = none_stays | {"stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 100}
    deepspeed.STAGE_3 = deepspeed.STAGE_3 | sizes
    found: dict[str, dict[str, list[Any]]] = {}
    for kind in kinds:
        section = {"name": str(folder / kind), "dropout": 0.0, "torch_compile": compiled}
        run = prepare(cell(folder, "sft-untied", model=section, precision="bf16", train={"max_steps": 3}), cpu=True)
        assert run.compiled == compiled
        model: Any = run.hardware.unwrap(run.model)
        gathered: list[StorageWeakRef] = []
        counts: list[tuple[int, int]] = []

        def look(layer: Any, *_: Any, gathered: list[StorageWeakRef] = gathered) -> None:
            gathered.extend(StorageWeakRef(w.data.untyped_storage()) for w in layer.parameters() if w.ndim == 2)

        def count(*_: Any, gathered: list[StorageWeakRef] = gathered, counts: list[tuple[int, int]] = counts) -> None:
            counts.append((sum(not storage.expired() for storage in gathered), len(gathered)))
            gathered.clear()

        for layer in layers_of(model):
            layer.register_forward_pre_hook(look)
        model.get_output_embeddings().register_forward_pre_hook(count)
        curve = [number for step in steps(run) for number in (step.loss, step.grad_norm)]
        found[kind] = {"curve": curve, "whole": counts}
        torch.compiler.reset()
    return found


def as_they_are(folder: Path, kinds: list[str]) -> dict[str, dict[str, list[Any]]]:
    return trained(folder, kinds, compiled=False)


def compiled(folder: Path, kinds: list[str]) -> dict[str, dict[str, list[Any]]]:
    return trained(folder, kinds, compiled=True)


def cut_to_graphs(folder: Path, kinds: list[str]) -> dict[str, dict[str, list[Any]]]:
    """Return what `compiled` does, of graphs that run operation by operation: what is kept for later is the same."""
    torch.compile = partial(torch.compile, backend="aot_eager")
    return compiled(folder, kinds)


@pytest.mark.slow
def test_compiled_layers_keep_no_weight_whole_for_the_backward_pass(inputs: Path) -> None:
    for way in (as_they_are, compiled):
        for rank in run_on_cpu(way, inputs, ["untied"], processes=2, profile="zero3"):
            seen = rank["untied"]["whole"]
            assert seen and all(alive == 0 < gathered for alive, gathered in seen), (way, seen)


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, 1])
def test_every_architecture_that_is_compiled_unasked_has_the_curve_of_layers_as_they_are(
    part: int, tmp_path: Path
) -> None:
    kinds = sorted(KNOWN)[part::2]
    write_inputs(tmp_path)
    for kind in kinds:
        save_architecture(kind, tmp_path / kind)
    plain = run_on_cpu(as_they_are, tmp_path, kinds, processes=2, profile="zero3")[0]
    graphs = run_on_cpu(cut_to_graphs, tmp_path, kinds, processes=2, profile="zero3")[0]
    for kind in kinds:
        assert graphs[kind]["curve"] == pytest.approx(plain[kind]["curve"], rel=1e-6), kind
        assert all(alive == 0 < gathered for alive, gathered in graphs[kind]["whole"]), kind


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
