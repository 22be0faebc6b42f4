"""What becomes of batch norm on one process, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ftcli
from ftcli.hardware import batch_norm
from ftcli.hardware.batch_norm import set_batch_norm, trained_norms
from ftcli.launch.preflight import check_inputs
from ftcli.runtime.errors import InputError
from ftcli.testing import save_tiny_resnet
from ftcli.tiny_models import build_tiny
from ftcli.training.resume import recipe_changes

from ...support.batch_norms import SHAPES, assert_as_exact_as_one_process
from ...support.cells import cell


def small() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Linear(2, 2), nn.BatchNorm2d(4)).train()


@pytest.mark.parametrize("mode", ["frozen", "train", "sync"])
def test_set_batch_norm_updates_statistics_unless_they_are_frozen(mode: str) -> None:
    model = small()
    assert set_batch_norm(model, mode) == [f"batch norm: {mode}, 2 layers"]
    plain, inputs = small(), torch.randn(5, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    plain.load_state_dict(model.state_dict())
    model.train()
    if mode == "frozen":
        plain.eval()
        assert not list(trained_norms(model))
    assert torch.equal(model(inputs), plain(inputs))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True))
    before = [buffer.clone() for buffer in model.buffers()]
    with torch.no_grad():
        model(inputs)  # the first pass of a loss: its rows follow with gradient
    assert all(map(torch.equal, model.buffers(), before))


def test_set_batch_norm_of_a_model_without_it_logs_nothing() -> None:
    assert set_batch_norm(nn.Linear(2, 2), "frozen") == []


@pytest.mark.parametrize("mode", ["train", "sync"])
def test_set_batch_norm_of_a_model_without_it_is_refused_unless_frozen(mode: str) -> None:
    with pytest.raises(InputError, match=f"(?s)model.batch_norm: {mode} has no effect: .*delete it"):
        set_batch_norm(nn.Linear(2, 2), mode)


def test_set_batch_norm_of_a_norm_that_no_adapter_saves_is_refused(tmp_path: Path) -> None:
    from ftcli.models.adapters import add_adapter

    def adapted(*saved: str) -> Any:
        section = {"type": "lora", "r": 2, "target_modules": ["convolution"], "modules_to_save": list(saved)}
        recipe = resnet(tmp_path, adapter=section)
        model = build_tiny("ResNetModel", embedding_size=8, hidden_sizes=[8], depths=[1])
        return add_adapter(model, recipe, keep=[], task_type=None)

    model = adapted("normalization")
    set_batch_norm(model, "train")
    assert any(".modules_to_save." in name for name, module in model.named_modules() if module in trained_norms(model))
    some = adapted("embedder.normalization")
    set_batch_norm(some, "frozen")
    expected = (
        r"(?s)model.batch_norm: train would update the running statistics of encoder\.stages\.0\S+\.normalization, "
        r".*adapter\.modules_to_save, for instance normalization"
    )
    with pytest.raises(InputError, match=expected):
        set_batch_norm(some, "train")


@pytest.mark.parametrize("mode", ["frozen", "train"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_batch_norm_that_an_adapter_saves_trains_in_16_bits(mode: str, precision: str, tmp_path: Path) -> None:
    adapter = {"type": "lora", "r": 2, "target_modules": ["convolution"], "modules_to_save": ["normalization"]}
    recipe = resnet(tmp_path, adapter=adapter, precision=precision)
    run = ftcli.prepare(recipe.model_copy(update={"model": recipe.model.model_copy(update={"batch_norm": mode})}))
    norms = [module for module in run.model.modules() if isinstance(module, nn.BatchNorm2d)]
    trained = [norm for norm in norms if norm.weight.requires_grad]
    before = [norm.running_mean.clone() for norm in trained]
    next(iter(ftcli.steps(run)))
    assert {norm.running_mean.dtype for norm in trained} == {torch.float32} and len(trained) == len(norms) / 2
    changed = [not torch.equal(norm.running_mean, old) for norm, old in zip(trained, before, strict=True)]
    assert changed == [mode == "train"] * len(trained)


@pytest.mark.parametrize("mode", ["frozen", "train", "sync"])
def test_convolutions_train_and_evaluate_with_all_weights_in_bfloat16(mode: str, tmp_path: Path) -> None:
    model = {"name": str(tmp_path / "resnet"), "dropout": 0.0, "batch_norm": mode}
    recipe = resnet(tmp_path, precision="bf16_pure", model=model, optimizer={"learning_rate": 1e-3})
    run = ftcli.prepare(recipe)
    losses = [step.loss for step in ftcli.steps(run)] + [ftcli.evaluate(run)["loss"]]
    assert {value.dtype for value in run.model.parameters()} == {torch.bfloat16}
    assert len(losses) == 5 and all(0.1 < loss < 2 for loss in losses)
    assert run.task.probe(run.any_batch())["pixel_values"].dtype is torch.bfloat16


FORMATS = [torch.contiguous_format, torch.channels_last]


@pytest.mark.parametrize("of_gradient", FORMATS)
@pytest.mark.parametrize("of_inputs", FORMATS)
def test_batch_norm_of_all_processes_keeps_the_format_of_its_inputs(
    of_inputs: torch.memory_format, of_gradient: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_norm.dist, "all_reduce", lambda values: None)  # of one process
    draw = torch.Generator().manual_seed(0)
    inputs, grad = torch.randn(2, 6, 5, 3, 4, generator=draw)
    weight, bias = torch.randn(2, 5, generator=draw)
    leaves = [value.clone().requires_grad_() for value in (inputs, weight, bias)]
    plain = (leaves[0] - leaves[0].mean((0, 2, 3), keepdim=True)) * batch_norm._wide(leaves[1], inputs)
    deviation = (leaves[0].var((0, 2, 3), keepdim=True, correction=0) + 1e-5).sqrt()
    expected = torch.autograd.grad(plain / deviation + batch_norm._wide(leaves[2], inputs), leaves, grad)

    mine = [inputs.to(memory_format=of_inputs).requires_grad_(), *(v.clone().requires_grad_() for v in (weight, bias))]
    output, *_ = batch_norm._NormaliseOfAll.apply(*mine, 1e-5)
    actual = torch.autograd.grad(output, mine, grad.to(memory_format=of_gradient))
    for value, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(value, right, rtol=1e-5, atol=1e-5)
    assert [value.is_contiguous(memory_format=of_inputs) for value in (output, actual[0])] == [True] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_batch_norm_of_all_processes_are_as_exact_as_those_of_one(
    shape: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_as_exact_as_one_process(monkeypatch, SHAPES[shape], device="cpu", dtype=dtype)


@pytest.mark.parametrize("mode", ["train", "sync"])
def test_batch_norm_with_one_value_per_channel_names_key_and_layer(mode: str) -> None:
    model = small()
    set_batch_norm(model, mode)
    with pytest.raises(InputError) as caught:
        model[1](torch.ones(1, 4, 1, 1))
    message = str(caught.value)
    assert f"model.batch_norm: {mode}: 1 gets one value for each of 4 channels" in message
    assert "[1, 4, 1, 1]" in message and "raise batch.micro_size" in message
    model.eval()(torch.ones(1, 3, 1, 2))  # an evaluation takes one row


def resnet(folder: Path, **changes: Any) -> Any:
    """Return the recipe of a small ResNet on 17 images."""
    from PIL import Image

    for index in range(17):
        path = folder / "images" / f"class {index % 2}" / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20), (index * 9, 100 * (index % 2), 0)).save(path)
    if not (folder / "resnet").exists():
        save_tiny_resnet(folder / "resnet")
    return cell(folder, "resnet-train", **changes)


def test_prepare_with_recomputed_and_trained_batch_norm_is_refused(tmp_path: Path) -> None:
    from transformers import MobileViTConfig, MobileViTForImageClassification

    sizes = {"hidden_sizes": [8, 8, 8], "neck_hidden_sizes": [4, 4, 4, 4, 4, 4, 8], "image_size": 32}
    MobileViTForImageClassification(MobileViTConfig(**sizes)).save_pretrained(tmp_path / "mobilevit")
    recipe = resnet(tmp_path)
    (tmp_path / "mobilevit" / "preprocessor_config.json").write_bytes(
        (tmp_path / "resnet" / "preprocessor_config.json").read_bytes()
    )
    changes = {"name": str(tmp_path / "mobilevit"), "gradient_checkpointing": "full"}
    section = recipe.model.model_copy(update=changes)
    with pytest.raises(InputError) as caught:
        ftcli.prepare(recipe.model_copy(update={"model": section}), cpu=True)
    assert "model.gradient_checkpointing: full computes layers twice" in str(caught.value)
    assert "set gradient_checkpointing to none or auto, or batch_norm to frozen" in str(caught.value)


# Adds a layer to the model that was loaded.
ADDS_A_NORM = """
from ftcli.tasks.image_classification import Options
from ftcli.tasks.image_classification import Task as Whole


class Task(Whole):
    def finish_model(self, model):
        import torch

        model.added = torch.nn.BatchNorm1d(3)
"""


def test_prepare_freezes_batch_norm_of_a_layer_that_a_task_adds(tmp_path: Path) -> None:
    recipe = resnet(tmp_path, model={"name": str(tmp_path / "resnet"), "dropout": 0.0})
    (tmp_path / "adds.py").write_text(ADDS_A_NORM)
    run = ftcli.prepare(recipe.model_copy(update={"task": str(tmp_path / "adds.py")}), cpu=True)
    run.model.train()
    assert "batch norm: frozen, 13 layers" in run.rows.log_lines
    assert not [module for module in run.model.modules() if isinstance(module, nn.BatchNorm1d) and module.training]


@pytest.mark.parametrize("check", [ftcli.prepare, check_inputs])
@pytest.mark.parametrize("mode", ["train", "sync"])
def test_trained_batch_norm_with_rows_that_the_gpu_decides_is_refused(
    mode: str, check: Callable[[Any], None], tmp_path: Path
) -> None:
    recipe = resnet(tmp_path, batch={"global_size": 12, "micro_size": "auto"})
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"batch_norm": mode})})
    with pytest.raises(InputError) as caught:
        check(recipe)
    assert f"batch.micro_size: auto depends on the GPU, which would change the curve: model.batch_norm: {mode}" in str(
        caught.value
    )
    assert "set batch.micro_size to a number, or batch_norm to frozen" in str(caught.value)


class Rectified(nn.BatchNorm2d):
    """Batch norm and activation in one module, as some libraries have it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


def test_batch_norm_with_a_forward_pass_of_its_own_keeps_it_or_is_refused() -> None:
    model = nn.Sequential(Rectified(4))
    inputs = torch.randn(5, 4, 2, 2, generator=torch.Generator().manual_seed(0))
    set_batch_norm(model.train(), "train")
    trained = model(inputs)
    before = [buffer.clone() for buffer in model.buffers()]
    with torch.no_grad():
        assert torch.equal(model(inputs), trained) and trained.min() == 0
    assert all(map(torch.equal, model.buffers(), before))
    trained.sum().backward()
    with pytest.raises(InputError, match=r"sync: 0 is a Rectified with a forward pass(?s:.*)to train or frozen"):
        set_batch_norm(nn.Sequential(Rectified(4)), "sync")


def test_batch_norm_of_a_frozen_helper_network_is_not_trained() -> None:
    helper = nn.Sequential(nn.BatchNorm2d(4)).eval()
    helper.is_helper = True
    model = nn.Sequential(nn.Conv2d(3, 4, 1), helper)
    with pytest.raises(InputError, match="train has no effect: the model has no batch normalisation"):
        set_batch_norm(model, "train")
    model.append(nn.BatchNorm2d(4))
    assert set_batch_norm(model, "train") == ["batch norm: train, 1 layers"]
    assert list(trained_norms(model)) == [model[2]]


def test_recipe_changes_of_the_micro_size_affect_a_curve_with_trained_statistics(tmp_path: Path) -> None:
    before, after = resnet(tmp_path), resnet(tmp_path, batch={"global_size": 12, "micro_size": 4})
    state = {"recipe": before.model_dump(mode="json"), "step": 1, "data": {"rows": 12}}
    changes, _ = recipe_changes(state, after)
    assert changes == ["batch.micro_size: 3 -> 4"]
    frozen = [
        recipe.model_copy(update={"model": recipe.model.model_copy(update={"batch_norm": "frozen"})})
        for recipe in (before, after)
    ]
    state["recipe"] = frozen[0].model_dump(mode="json")
    assert recipe_changes(state, frozen[1])[0] == []


def test_check_states_on_what_a_trained_batch_norm_depends(tmp_path: Path) -> None:
    import yaml

    path, text = tmp_path / "r.yaml", {}
    for mode, micro in (("train", 3), ("sync", 3), ("sync", 12), ("frozen", 3)):
        recipe = resnet(tmp_path)
        values = recipe.model_dump(mode="json")
        values["model"]["batch_norm"], values["batch"]["micro_size"] = mode, micro
        path.write_text(yaml.safe_dump(values))
        report = ftcli.check(path, cpu=True)
        text[mode, micro] = [note for note in report.notes if note.startswith("batch_norm")]
        assert report.facts["optimizer"] == "sgd, momentum 0.9, nesterov; weight decay 0.1, not on biases and norms"
    assert text["frozen", 3] == []
    assert text["train", 3] == [
        "batch_norm: train: statistics are those of 3 rows, of one forward pass of a process: "
        "the curve depends on batch.micro_size"
    ]
    assert text["sync", 3][0].endswith(
        "of all processes: the curve depends on batch.micro_size and the number of processes"
    )
    assert text["sync", 12][0].endswith("exact on any number of processes without accumulation")
