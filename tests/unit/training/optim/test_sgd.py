"""SGD: the results of torch, and state that every backend can store and load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ResNetConfig, ResNetForImageClassification

from ftcli import check
from ftcli.config.recipe import Optimizer, Recipe
from ftcli.config.yaml_document import dump_document
from ftcli.hardware.optimizer_state import OptimizerSlot, count_updates, create_missing_state, set_update_count
from ftcli.loop import steps
from ftcli.runtime.errors import RunError
from ftcli.testing import save_tiny_resnet
from ftcli.training import gradient_watch
from ftcli.training.disk_space import bytes_per_element
from ftcli.training.optim.build import build_optimizer
from ftcli.training.optim.sgd import CountingSGD
from ftcli.training.setup import prepare

from ....support.cells import cell, write_inputs
from ....support.recipes import minimal_values

HOW: list[dict[str, Any]] = [
    {"momentum": 0.0, "weight_decay": 0.1},
    {"momentum": 0.9, "weight_decay": 0.1},
    {"momentum": 0.9, "weight_decay": 0.0, "nesterov": True},
]

# Has a parameter that the loss does not reach.
DEAD = """
from ftcli.tasks.text_classification import Options
from ftcli.tasks.text_classification import Task as Whole


class Task(Whole):
    def finish_model(self, model):
        import torch

        model.dead = torch.nn.Parameter(torch.ones(3, 3))
"""


def walk(kind: type[torch.optim.SGD], how: dict[str, Any]) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    draw = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(5, 3, generator=draw))
    optimizer = kind([{"params": [weight]}], lr=0.1, **how)
    for _ in range(4):
        weight.grad = torch.randn(5, 3, generator=draw)
        optimizer.step()
    return weight.detach(), optimizer


@pytest.mark.parametrize("how", HOW)
def test_counting_sgd_has_the_bits_of_torch_and_counts_steps(how: dict[str, Any]) -> None:
    expected, _ = walk(torch.optim.SGD, how)
    actual, optimizer = walk(CountingSGD, how)
    assert torch.equal(actual, expected)
    (state,) = optimizer.state.values()
    assert set(state) == ({"step", "momentum_buffer"} if how["momentum"] else {"step"})
    assert int(state["step"]) == 4


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_create_missing_state_of_sgd_gives_the_state_of_its_first_step(momentum: float) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = CountingSGD([{"params": [weight]}], lr=0.1, momentum=momentum)
    slots = [OptimizerSlot(group, weight, optimizer.state[weight]) for group in optimizer.param_groups]
    create_missing_state(slots)
    set_update_count(slots, 7)
    assert count_updates(slots) == 7
    kinds = {name: value.tolist() for name, value in optimizer.state[weight].items() if name != "step"}
    assert kinds == ({"momentum_buffer": [0.0] * 3} if momentum else {})


def test_build_optimizer_of_sgd_decays_kernels_and_no_norm_or_bias() -> None:
    sizes = {"embedding_size": 8, "hidden_sizes": [8], "depths": [1], "num_labels": 2}
    model = ResNetForImageClassification(ResNetConfig(**sizes))
    section = {"name": "sgd", "learning_rate": 0.1, "weight_decay": 1e-4, "nesterov": True}
    sections = {"model": {"name": "m"}, "data": {"train": "rows"}, "optimizer": section}
    recipe = Recipe.model_validate(minimal_values("image_classification", **sections))
    optimizer = build_optimizer(model, recipe, fused=False)
    assert isinstance(optimizer, CountingSGD)
    names = {parameter: name for name, parameter in model.named_parameters()}
    by_decay = {group["weight_decay"]: {names[p] for p in group["params"]} for group in optimizer.param_groups}
    assert set(by_decay) == {0.0, 1e-4}
    undecayed = {name for name in names.values() if "normalization" in name or name.endswith("bias")}
    assert by_decay == {0.0: undecayed, 1e-4: set(names.values()) - undecayed}
    assert all(group["nesterov"] and group["momentum"] == 0.9 for group in optimizer.param_groups)
    assert bytes_per_element(recipe) == 8


def test_check_of_sgd_says_what_has_no_weight_decay(tmp_path: Path) -> None:
    save_tiny_resnet(tmp_path / "resnet")
    (tmp_path / "rows.jsonl").write_text('{"image": "a.png", "label": "a"}\n')
    section = {"name": "sgd", "learning_rate": 0.1, "weight_decay": 1e-4, "nesterov": True}
    model, data = {"name": str(tmp_path / "resnet")}, {"train": str(tmp_path / "rows.jsonl")}
    values = minimal_values("image_classification", model=model, data=data, optimizer=section)
    (tmp_path / "r.yaml").write_text(dump_document(values))
    decay = "; weight decay 0.0001, not on biases and norms"
    assert check(tmp_path / "r.yaml", cpu=True).facts["optimizer"] == f"sgd, momentum 0.9, nesterov{decay}"
    adamw = check(tmp_path / "r.yaml", cpu=True, overrides=["optimizer={learning_rate: 0.1}"])
    assert adamw.facts["optimizer"] == "adamw; no weight decay"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"momentum": 0.0}, "nesterov needs momentum: set momentum above 0, or delete nesterov"),
        ({"momentum": 1.0}, "momentum"),
    ],
)
def test_optimizer_with_an_impossible_momentum_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Optimizer(name="sgd", learning_rate=0.1, nesterov=True, **changes)


def test_recipe_of_sgd_with_bfloat16_weights_is_refused() -> None:
    section = {"name": "sgd", "learning_rate": 0.1}
    values = minimal_values("sft", model={"name": "m"}, data={"train": "rows"}, optimizer=section)
    with pytest.raises(ValueError, match="optimizer.name: sgd needs float32 weights"):
        Recipe.model_validate(values | {"precision": "bf16_pure"})


def test_check_gradients_of_sgd_names_a_tensor_without_gradient(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    (tmp_path / "dead.py").write_text(DEAD)
    for momentum, is_seen in ((0.9, True), (0.0, False)):  # plain SGD keeps nothing that shows gradients
        section = {"name": "sgd", "learning_rate": 0.01, "momentum": momentum, "weight_decay": 0.1}
        recipe = cell(tmp_path, "text", optimizer=section).model_copy(update={"task": str(tmp_path / "dead.py")})
        run = prepare(recipe, cpu=True)
        if is_seen:
            with pytest.raises(RunError, match="trained tensors had no gradient in 4 steps: dead"):
                list(steps(run))
        else:
            assert len(list(steps(run))) == 4


def test_first_moments_in_groups_are_those_of_one_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_inputs(tmp_path)
    run = prepare(cell(tmp_path, "text"), cpu=True)
    next(steps(run))
    together = gradient_watch.first_moments(run)
    monkeypatch.setattr(gradient_watch, "ELEMENTS_AT_ONCE", 1)
    assert gradient_watch.first_moments(run) == together and len(together) > 5 and all(together.values())
