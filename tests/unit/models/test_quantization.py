"""A base model in 4 bits is refused before anything is loaded where it cannot run; no bitsandbytes is needed here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from ftcli.config.compatibility import check_pair
from ftcli.config.load import load_recipe
from ftcli.config.profile import load_profile
from ftcli.config.recipe import Recipe
from ftcli.launch.preflight import check_bitsandbytes
from ftcli.models.load import load_model
from ftcli.models.quantised_files import check_loaded, quantised_problems
from ftcli.runtime.errors import InputError
from ftcli.tiny_models import SIZES, build_tiny, save_tiny_causal

from ...support.recipes import minimal_values

VALUES = minimal_values(
    model={"name": "some/model", "quantization": {"load_in_4bit": True}},
    adapter={"type": "lora"},
    data={"train": "rows.jsonl"},
    batch={"global_size": 8},
    train={"max_steps": 2},
    optimizer={"learning_rate": 1e-4},
)
RECIPE = Recipe.model_validate(VALUES)


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp", "hsdp"])
def test_check_pair_of_4_bit_and_sharded_profiles(name: str) -> None:
    assert check_pair(RECIPE, load_profile(name)) == []


@pytest.mark.parametrize("name", ["zero2", "zero3", "zero3_offload", "fsdp_offload"])
def test_four_bits_are_refused_where_weights_are_flattened_or_wait_on_the_host(name: str) -> None:
    lines = [problem.what for problem in check_pair(RECIPE, load_profile(name))]
    assert len(lines) == 1 and lines[0].startswith("model.quantization cannot run on this profile")


def test_four_bits_need_a_gpu_and_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    lines = [problem.what for problem in check_bitsandbytes(RECIPE, cpu=True)]
    assert lines == [
        "model.quantization needs bitsandbytes, which is not installed",
        "model.quantization needs a GPU",
    ]
    plain = RECIPE.model_copy(update={"model": RECIPE.model.model_copy(update={"quantization": None})})
    assert check_bitsandbytes(plain, cpu=True) == []


def test_check_of_adamw_8bit_without_package_or_gpu_names_the_alternative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    packed = RECIPE.optimizer.model_copy(update={"name": "adamw_8bit"})
    both = check_bitsandbytes(RECIPE.model_copy(update={"optimizer": packed}), cpu=True)
    assert [problem.what for problem in both[2:]] == [
        "optimizer.name: adamw_8bit needs bitsandbytes, which is not installed",
        "optimizer.name: adamw_8bit needs a GPU",
    ]
    assert "or remove the section" in both[0].hint and "--set model.quantization=null" in both[1].hint
    assert "or set it to adamw" in both[2].hint and "--set optimizer.name=adamw" in both[3].hint


def test_weights_in_four_bits_cannot_be_trained(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(VALUES | {"adapter": {"type": "none"}}))
    with pytest.raises(InputError, match="weights in 4 bits cannot be trained"):
        load_recipe(tmp_path / "recipe.yaml")


@pytest.mark.parametrize(
    ("key", "hint"),
    [("bnb_4bit_compute_dtype", "it is the recipe's precision"), ("bnb_4bit_quant_storage", "it follows from")],
)
def test_dtypes_of_four_bits_are_derived(key: str, hint: str, tmp_path: Path) -> None:
    quantization = {"load_in_4bit": True, key: "bfloat16"}
    model = {"name": "some/model", "quantization": quantization}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(VALUES | {"model": model}))
    with pytest.raises(InputError, match=hint):
        load_recipe(tmp_path / "recipe.yaml")


@pytest.mark.parametrize(
    ("settings", "section", "is_refused"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, None, True),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, {"load_in_4bit": True}, False),
        ({"quant_method": "gptq", "bits": 4}, {"load_in_4bit": True}, True),
        ({"quant_method": "mxfp4"}, None, False),  # transformers may convert it
        (None, None, False),
    ],
)
def test_check_inputs_of_a_model_with_quantised_files_names_the_method(
    settings: Any, section: Any, is_refused: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    recipe = Recipe.model_validate(VALUES | {"model": {"name": str(tmp_path), "quantization": section}})
    problems = [problem.what for problem in quantised_problems(recipe)]
    method = (settings or {}).get("quant_method")
    expected = f"model.name: the files of {tmp_path} have quantised weights ({method}), on which ftcli does not train"
    assert problems == [expected] * is_refused


def test_check_loaded_of_packed_weights_allows_those_of_the_recipe_only() -> None:
    model: Any = build_tiny("LlamaForCausalLM", **SIZES, vocab_size=16)
    plain = RECIPE.model_copy(update={"model": RECIPE.model.model_copy(update={"quantization": None})})
    check_loaded(model, plain)
    model.is_quantized = True  # as transformers says of 4 bits that are stored as floats
    check_loaded(model, RECIPE)
    with pytest.raises(InputError, match=r"the files of some/model have quantised weights"):
        check_loaded(model, plain)
    packed = torch.zeros(8, dtype=torch.uint8)
    model.lm_head.weight = torch.nn.Parameter(packed, requires_grad=False)
    with pytest.raises(InputError, match="quantised weights"):
        check_loaded(model, RECIPE)


def test_load_model_that_transformers_loads_with_packed_weights_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_causal(tmp_path)
    plain = RECIPE.model.model_copy(update={"name": str(tmp_path), "quantization": None})
    recipe = RECIPE.model_copy(update={"model": plain})
    load_model("AutoModelForCausalLM", recipe, dtype=torch.float32, new_head=False)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "is_quantized", True, raising=False)  # no package for it is here
    with pytest.raises(InputError, match=r"have quantised weights"):
        load_model("AutoModelForCausalLM", recipe, dtype=torch.float32, new_head=False)
