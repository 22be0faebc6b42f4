"""Which runs replay their passes as CUDA graphs. tests/gpu/test_cuda_graphs_on_gpus.py compares results."""

from __future__ import annotations

import copy
import inspect
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ftcli.config.graph_exclusions import COMPARED
from ftcli.config.recipe import Recipe
from ftcli.config.task_registry import find_task
from ftcli.models.kernels.capture_setting import leaves_of_their_own, padded_length, tensors_of
from ftcli.models.kernels.captured_pass import MOST_GRAPHS, CapturedPass
from ftcli.models.kernels.cuda_graphs import use_cuda_graphs
from ftcli.runtime.errors import InputError
from ftcli.tiny_models import build_tiny

from ....support.recipes import recipe_values
from ....support.small_classifiers import CLASSIFIERS

SIZES = {"embedding_size": 8, "hidden_sizes": [16], "depths": [1], "num_labels": 3}


def resnet() -> nn.Module:
    model: nn.Module = build_tiny("ResNetForImageClassification", **SIZES)
    return model.train()


def vit(**config: Any) -> nn.Module:
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "num_labels": 3,
    }
    model: nn.Module = build_tiny("ViTForImageClassification", image_size=16, patch_size=8, **sizes, **config)
    return model.train()


ENCODER = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 8}
DECODER = {**ENCODER, "num_key_value_heads": 1, "vocab_size": 32}


def bert(**config: Any) -> nn.Module:
    model: nn.Module = build_tiny("BertForSequenceClassification", vocab_size=32, num_labels=2, **ENCODER, **config)
    return model.train()


def chosen(
    network: nn.Module,
    /,
    device: str = "cuda",
    task: str = "image_classification",
    recomputed: str = "none",
    whole: bool = True,
    **sections: Any,
) -> bool:
    sections["model"] = {"name": "any"} | sections.get("model", {})
    recipe = Recipe.model_validate(recipe_values(task, **sections))
    lines = use_cuda_graphs(network, recipe, device, recomputed=recomputed, is_whole=whole)
    assert bool(lines) == isinstance(network.forward, CapturedPass)
    return bool(lines)


GRAPHS = {"cuda_graphs": True}


def test_compared_models_are_captured_by_default_and_others_if_the_recipe_asks_for_it() -> None:
    assert chosen(resnet()) and chosen(vit()) and chosen(bert(), task="text_classification")
    assert not chosen(resnet(), model={"cuda_graphs": False})
    other = resnet()
    other.config.model_type = "other"
    assert not chosen(other)
    assert chosen(other, model=GRAPHS)
    assert chosen(resnet(), model=GRAPHS | {"batch_norm": "train"})


@pytest.mark.parametrize(("declares", "expected"), [("", False), ("has_fixed_forward = True", True)])
def test_task_of_a_user_has_graphs_by_default_only_if_it_declares_a_fixed_forward_pass_itself(
    declares: str, expected: bool, tmp_path: Path
) -> None:
    code = "from ftcli.tasks.image_classification import Options, Task as Base"
    (tmp_path / "own.py").write_text(f"{code}\nclass Task(Base):\n    {declares or 'pass'}\n")
    find_task(str(tmp_path / "own.py"))  # as the process that trains does
    assert chosen(resnet(), task=str(tmp_path / "own.py")) is expected


def test_compared_models_that_the_support_module_does_not_build_are_named() -> None:
    assert set(CLASSIFIERS) >= COMPARED


@pytest.mark.parametrize(
    "changes",
    [
        {"adapter": {"type": "lora"}},
        {"model": {"torch_compile": True}},
        {"model": {"gradient_checkpointing": "full"}},
        {"model": {"batch_norm": "sync"}},
        {"precision": "fp8"},
    ],
)
def test_runs_that_leave_it_open_and_exclude_graphs_have_none(changes: dict[str, Any]) -> None:
    assert not chosen(resnet(), **changes)


def test_tasks_of_the_user_have_graphs_only_if_the_recipe_asks_for_them() -> None:
    task = "./my_task.py"
    assert not chosen(bert(), task=task)
    assert chosen(bert(), task=task, model=GRAPHS)


@pytest.mark.parametrize(("eager", "longest", "free"), [(False, 16, 130), (False, 64, 250), (True, 64, 750)])
def test_optional_graphs_need_memory_beside_a_pass_of_the_longest_text(
    monkeypatch: pytest.MonkeyPatch, eager: bool, longest: int, free: int, capsys: pytest.CaptureFixture[str]
) -> None:
    model = bert()
    model.config._attn_implementation = "eager" if eager else "sdpa"
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 20)
    needed = 2 * sum(weight.nbytes for weight in model.parameters())
    shape = (2, 16, "attention_mask", "input_ids")
    for is_optional, least in ((True, free), (False, 0)):
        passes = CapturedPass(model, is_optional=is_optional, longest=longest)
        passes.activations[shape] = 25
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (needed / 0.9 + free - 10, 10**9))
        assert passes._may_capture(shape)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (needed / 0.9 + 0.6 * free - 10, 10**9))
        for _ in range(2):
            assert passes._may_capture(shape) == (least == 0)
        assert capsys.readouterr().err.count("no CUDA graphs, because memory is scarce") == (least != 0)


def test_copies_of_a_model_have_no_graphs() -> None:
    model = resnet()
    assert chosen(model, model=GRAPHS)
    model.forward.captures["shape"] = threading.Lock()  # as little to be copied as a graph
    model.forward.weights = list(model.parameters())
    copied = copy.deepcopy(model)
    assert not copied.forward.captures and not copied.forward.weights and model.forward.captures
    assert copied.forward.model is copied and copied.forward.plain.__self__ is copied
    images = torch.randn(2, 3, 32, 32)
    assert copied(pixel_values=images).logits.equal(model(pixel_values=images).logits)


def test_a_pass_of_texts_without_a_graph_is_padded_as_for_one() -> None:
    model = bert(pad_token_id=0)
    passes = CapturedPass(model)
    ids = torch.randint(1, 32, (3, 13))
    mask = (torch.arange(13)[None] < torch.tensor([[13], [5], [9]])).long()
    inputs = {"input_ids": ids * mask, "attention_mask": mask}
    torch.manual_seed(0)
    found = passes._pass_without_graph(inputs, passes._shape_of(inputs)).logits
    longer = {name: nn.functional.pad(value, (0, 3)) for name, value in inputs.items()}
    torch.manual_seed(0)
    assert found.equal(model(**longer).logits)  # dropout draws the same numbers
    torch.manual_seed(0)
    assert not found.equal(model(**inputs).logits)
    assert list(passes.activations) == [(3, 16, "attention_mask", "input_ids")] and passes.first == -1


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"device": "cpu"}, "needs an NVIDIA GPU"),
        ({"whole": False}, "this profile shards weights"),
        ({"recomputed": "full"}, "recomputes activations"),
    ],
)
def test_runs_that_cannot_be_captured_say_why(how: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=f"model.cuda_graphs: .*{why}"):
        chosen(resnet(), **({"model": GRAPHS} | how))
    assert not chosen(resnet(), **how)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"layerdrop": 0.1}, "leaves out layers"),
        ({"output_hidden_states": True}, "more outputs than logits"),
        ({"output_attentions": True, "attn_implementation": "eager"}, "more outputs than logits"),
    ],
)
def test_models_whose_configuration_excludes_graphs_run_without_them(config: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        chosen(vit(**config), model=GRAPHS)
    assert not chosen(vit(**config))


def test_attention_that_reads_the_mask_on_the_host_is_not_captured() -> None:
    model = bert()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(InputError, match="attention flash_attention_2 reads the mask"):
        chosen(model, task="text_classification", model=GRAPHS)
    assert not chosen(model, task="text_classification")


def test_batch_norms_without_momentum_are_not_captured() -> None:
    model = resnet()
    next(module for module in model.modules() if isinstance(module, nn.BatchNorm2d)).momentum = None
    with pytest.raises(InputError, match="batch norm without momentum"):
        chosen(model, model=GRAPHS)


def test_text_encoders_are_captured_and_other_models_of_texts_are_not() -> None:
    assert chosen(bert(), task="text_classification", model=GRAPHS)
    decoder = build_tiny("LlamaForSequenceClassification", num_labels=2, **DECODER)
    for model in (decoder, build_tiny("BertForMaskedLM", **ENCODER)):
        with pytest.raises(InputError, match="texts with attention in both directions"):
            chosen(model, task="text_classification", model=GRAPHS)


@pytest.mark.parametrize(
    ("length", "padded"),
    [(1, 16), (16, 16), (17, 32), (128, 128), (129, 144), (256, 256), (257, 288), (500, 512), (4000, 4096)],
)
def test_texts_are_padded_to_one_of_a_few_lengths(length: int, padded: int) -> None:
    assert padded_length(length) == padded
    assert padded_length(padded) == padded


def test_there_are_few_lengths() -> None:
    assert len({padded_length(length) for length in range(1, 513)}) == 24 < MOST_GRAPHS
    assert max(padded_length(length) / length for length in range(257, 4097)) < 1.125


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("bert", {"max_position_embeddings": 40}, [16, 32, 40, 40]),
        ("bert", {"max_position_embeddings": 40, "pad_token_id": 31}, [16, 32, 40, 40]),
        ("roberta", {"max_position_embeddings": 42}, [16, 32, 40, 40]),  # its first position is the third
        ("roberta", {"max_position_embeddings": 64}, [16, 32, 48, 48]),
        ("modernbert", {"pad_token_id": 31, "max_position_embeddings": 8192}, [16, 32, 48, 48]),
    ],
)
def test_texts_are_padded_to_at_most_what_the_model_takes(
    kind: str, changes: dict[str, Any], expected: list[int]
) -> None:
    name, settings = CLASSIFIERS[kind]
    passes = CapturedPass(build_tiny(name, **settings | changes))
    assert [passes._length_for(length) for length in (10, 32, 33, 40)] == expected


def test_passes_on_the_host_and_evaluations_run_as_they_are() -> None:
    model, images = resnet(), torch.randn(2, 3, 32, 32)
    expected = model(pixel_values=images).logits
    assert chosen(model, model=GRAPHS)
    assert list(inspect.signature(model.forward).parameters)[0] == "pixel_values"
    for _ in range(3):
        assert model(pixel_values=images).logits.equal(expected) and model(images).logits.equal(expected)
    assert not model.forward.captures


def testleaves_of_their_own_share_memory_with_the_weights_and_take_no_hooks() -> None:
    model, images = resnet(), torch.randn(2, 3, 32, 32)
    model.tied = model.classifier[1]
    before = list(model.parameters())
    for weight in before:
        weight.register_hook(lambda gradient: 3 * gradient)
    with leaves_of_their_own(model) as pairs:
        assert [weight for weight, _ in pairs] == before and model.tied.weight is model.classifier[1].weight
        assert all(leaf is not weight and leaf.data_ptr() == weight.data_ptr() for weight, leaf in pairs)
        outputs = list(tensors_of(model(pixel_values=images)).values())
        found = torch.autograd.grad(outputs, [leaf for _, leaf in pairs], [torch.ones_like(one) for one in outputs])
    assert all(now is weight for now, weight in zip(model.parameters(), before, strict=True))
    model(pixel_values=images).logits.sum().backward()
    for gradient, weight in zip(found, before, strict=True):
        assert weight.grad is not None and (3 * gradient).allclose(weight.grad, rtol=1e-4, atol=1e-6)


def test_outputs_with_other_parts_than_trained_tensors_are_refused() -> None:
    model, images = resnet(), torch.randn(2, 3, 32, 32)
    model.config.output_hidden_states = True
    with pytest.raises(InputError, match="model returns ImageClassifierOutput"):
        tensors_of(model(pixel_values=images))
    with pytest.raises(InputError, match="model returns Tensor"):
        tensors_of(images)
