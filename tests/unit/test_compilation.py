"""Compiled layers give what they gave, settle after two lengths, and leave all else of the model alone."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from ftcli.compilation import Graphs, check_compile, compile_layers
from ftcli.errors import InputError
from ftcli.loop import steps
from ftcli.run import Run, prepare
from ftcli.testing import run_on_cpu

from ..multiprocess.cells import cell, write_inputs
from .test_attention import tiny
from .test_attention_kernels import recipe


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


def asked(kind: str = "x") -> Any:
    return recipe(kind, model={"name": kind, "torch_compile": True})


def test_without_a_compiler_it_is_refused_before_a_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    check_compile(asked())
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(InputError, match=r"torch_compile needs a C\+\+ compiler"):
        check_compile(asked())
    check_compile(recipe("x"))


def test_a_model_without_known_layers_is_refused() -> None:
    with pytest.raises(InputError, match="Linear does not say what its layers are"):
        compile_layers(torch.nn.Linear(1, 1), asked(), hooked=False)


def test_what_is_left_out_is_told() -> None:
    model = tiny("llama")
    assert compile_layers(model, recipe("x"), hooked=False) == []
    assert compile_layers(model, asked(), hooked=True) == [
        "torch_compile: left out, this profile fetches weights by hooks inside of layers"
    ]
    assert "forward" not in vars(model.model.layers[0])


def test_names_stay_and_evaluation_is_not_compiled() -> None:
    model, before = tiny("llama"), tiny("llama")
    told = compile_layers(model, asked(), hooked=False)
    assert told == ["torch_compile: 3 layers, each in place; the first steps wait for it"]
    assert list(model.state_dict()) == list(before.state_dict())
    counted, ids = Graphs(), torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, before(ids, use_cache=False).logits)
    counted.note(1)
    assert counted.told() == "torch_compile: 0 graphs, the last in step 0"


def trained(folder: Path, **model: Any) -> tuple[Run, list[float], list[int]]:
    """Return a run, its losses, and how many graphs were compiled up to each step."""
    torch._dynamo.reset()
    counters.clear()
    section = {"name": str(folder / "tied"), "dropout": 0.0} | model
    data = {"train": str(folder / "chats.jsonl"), "eval_rows": 5, "max_length": 128, "padding_free": True}
    asked = cell(folder, "sft-tied", model=section, precision="bf16", data=data, train={"max_steps": 5})
    run, graphs = prepare(asked, cpu=True), []
    losses = []
    for step in steps(run):
        losses.append(step.loss)
        graphs.append(int(counters["stats"]["unique_graphs"]))
    return run, losses, graphs


@pytest.mark.slow
def test_nothing_is_compiled_after_the_first_steps_also_where_layers_are_computed_again(
    inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # graphs without C++
    for model in ({}, {"gradient_checkpointing": True}):
        _, eager, none = trained(inputs, **model)
        run, losses, graphs = trained(inputs, torch_compile=True, **model)
        assert none[-1] == 0 and graphs[0] > 0, "nothing was compiled"
        assert graphs[1] == graphs[-1]
        assert losses == pytest.approx(eager, rel=3e-4)
        assert sum("torch_compile: 2 layers" in fact for fact in run.facts) == 1


@pytest.mark.slow
def test_losses_are_those_of_eager_layers(inputs: Path) -> None:
    assert trained(inputs, torch_compile=True)[1] == pytest.approx(trained(inputs)[1], rel=3e-4)


def losses_of_both(folder: Path) -> list[list[float]]:
    torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    return [trained(folder)[1], trained(folder, torch_compile=True)[1]]


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["fsdp", "zero3"])
def test_every_profile_trains_compiled_layers_or_leaves_them_alone(inputs: Path, profile: str) -> None:
    for eager, compiled in run_on_cpu(losses_of_both, inputs, profile=profile):
        assert compiled == pytest.approx(eager, rel=3e-4)
