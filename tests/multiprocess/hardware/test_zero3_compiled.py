"""Compiled layers that ZeRO-3 gathers as a whole: no weight stays gathered, and layers share their graphs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ftcli.models.architectures import model_types_with
from ftcli.testing import run_on_cpu, save_tiny_causal

from ...support.cells import cell, write_inputs
from ...support.patching import patching
from ...support.runner import MakeInputs
from .test_zero3_architectures import save_architecture


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    """Return a folder of this module's own, because its tests write into it."""
    return make_inputs()


@patching
def trained(
    patch: pytest.MonkeyPatch, folder: Path, kinds: list[str], *, compiled: bool
) -> dict[str, dict[str, list[Any]]]:
    """Return for each model its curve, and for each pass (layer weights still gathered at the head, all gathered)."""
    from ftcli.hardware import deepspeed
    from ftcli.loop import steps
    from ftcli.models.structure import layers_of
    from ftcli.training.setup import prepare

    none_stays = dict.fromkeys(("stage3_max_live_parameters", "stage3_max_reuse_distance"), 0)
    sizes = none_stays | {"stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 100}
    patch.setattr(deepspeed, "STAGE_3", deepspeed.STAGE_3 | sizes)
    results: dict[str, dict[str, list[Any]]] = {}
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
        results[kind] = {"curve": curve, "whole": counts}
        torch.compiler.reset()
    return results


def as_they_are(folder: Path, kinds: list[str]) -> dict[str, dict[str, list[Any]]]:
    return trained(folder, kinds, compiled=False)


def compiled(folder: Path, kinds: list[str]) -> dict[str, dict[str, list[Any]]]:
    return trained(folder, kinds, compiled=True)


@patching
def cut_to_graphs(patch: pytest.MonkeyPatch, folder: Path, kinds: list[str]) -> dict[str, dict[str, list[Any]]]:
    """Return the results of `compiled` with graphs that run operation by operation, which save the same tensors."""
    patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    return compiled(folder, kinds)


@pytest.mark.slow
def test_zero3_compiled_layers_hold_no_gathered_weight_for_the_backward_pass(inputs: Path) -> None:
    for way in (as_they_are, compiled):
        for rank in run_on_cpu(way, inputs, ["untied"], processes=2, profile="zero3"):
            seen = rank["untied"]["whole"]
            assert seen and all(alive == 0 < gathered for alive, gathered in seen), (way, seen)


# Half of the architectures are slow tests and half are full ones. Other slow tests have every architecture compiled on
# one process, and under ZeRO-3 as it is.
@pytest.mark.parametrize("part", [pytest.param(n, marks=(pytest.mark.slow, pytest.mark.full)[n % 2]) for n in range(4)])
def test_zero3_compiled_layers_of_every_architecture_give_the_eager_curve(part: int, tmp_path: Path) -> None:
    kinds = sorted(model_types_with("compiles_layers"))[part::4]
    write_inputs(tmp_path)
    for kind in kinds:
        save_architecture(kind, tmp_path / kind)
    plain = run_on_cpu(as_they_are, tmp_path, kinds, processes=2, profile="zero3")[0]
    graphs = run_on_cpu(cut_to_graphs, tmp_path, kinds, processes=2, profile="zero3")[0]
    for kind in kinds:
        assert graphs[kind]["curve"] == pytest.approx(plain[kind]["curve"], rel=1e-6), kind
        assert all(alive == 0 < gathered for alive, gathered in graphs[kind]["whole"]), kind


@patching
def graphs(patch: pytest.MonkeyPatch, folder: Path) -> list[int]:
    """Return the number of graphs of a model with two compiled layers, and of a model with ten."""
    from ftcli.hardware import deepspeed
    from ftcli.loop import steps
    from ftcli.models.kernels.compile import GraphCounter
    from ftcli.training.setup import prepare

    patch.setattr(deepspeed, "STAGE_3", deepspeed.STAGE_3 | {"stage3_param_persistence_threshold": 100})
    results = []
    for name in ("untied", "ten"):
        seen, section = GraphCounter(), {"name": str(folder / name), "dropout": 0.0, "torch_compile": True}
        run = prepare(cell(folder, "sft-untied", model=section, precision="bf16", train={"max_steps": 3}), cpu=True)
        list(steps(run))
        seen.update(3)
        results.append(seen.count - seen.before)
        torch.compiler.reset()
    return results


@pytest.mark.slow
def test_zero3_compiled_layers_that_gather_as_one_share_their_graphs(inputs: Path) -> None:
    save_tiny_causal(inputs / "ten", tied=False, num_hidden_layers=10)  # from the ninth graph on torch compiles none
    for few, many in run_on_cpu(graphs, inputs, processes=2, profile="zero3"):
        assert 0 < few == many
