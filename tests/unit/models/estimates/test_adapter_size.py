"""The count of an adapter's weights, by names and shapes, beside the parameters of the model that is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ftcli
from ftcli.config.recipe import Recipe
from ftcli.models.estimates.adapter_size import count_adapter
from ftcli.models.estimates.shape import measure_model

from ....support.cells import cell, write_inputs
from ....support.recipes import minimal_values


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


@pytest.mark.parametrize("base", ["tied", "untied"])
@pytest.mark.parametrize(
    ("adapter", "model"),
    [
        ({}, {}),
        ({"target_modules": ["q_proj", "down_proj"]}, {}),
        ({"target_modules": r"model\.layers\.0\..*_proj", "exclude_modules": ["k_proj"]}, {}),
        ({"use_dora": True}, {}),
        ({"modules_to_save": ["embed_tokens"]}, {}),
        ({"modules_to_save": ["lm_head"]}, {}),
        ({"modules_to_save": ["mlp"]}, {}),
        ({}, {"new_tokens": ["<a>", "<b>"]}),
        ({"exclude_modules": ["mlp"]}, {}),
        ({"exclude_modules": ["layers.0"], "target_modules": ["q_proj", "v_proj"]}, {}),
        ({"target_modules": ["lm_head", "q_proj"]}, {}),
        ({"target_modules": ["lm_head"]}, {}),
        ({"target_modules": ["embed_tokens", "q_proj"], "use_dora": True}, {}),
    ],
    ids=[
        *("all", "names", "pattern", "dora", "saved", "head", "part", "tokens", "without MLPs", "without a layer"),
        *("adapted head", "only the head", "adapted embeddings"),
    ],
)
def test_weights_of_an_adapter_are_counted_by_the_names_of_its_modules(
    base: str, adapter: dict[str, Any], model: dict[str, Any], inputs: Path
) -> None:
    sections = {"model": {"name": str(inputs / base)} | model, "adapter": {"type": "lora", "r": 3} | adapter}
    recipe = cell(inputs, "sft-tied", **sections)
    run = ftcli.prepare(recipe, cpu=True)
    trained = sum(weight.numel() for weight in run.model.parameters() if weight.requires_grad)
    assert measure_model(inputs / base, recipe).trained == trained
    (inputs / base / "model.safetensors").rename(inputs / "away")
    try:  # from the configuration alone
        assert measure_model(inputs / base, recipe).trained == trained
    finally:
        (inputs / "away").rename(inputs / base / "model.safetensors")


def test_names_in_a_pattern_may_have_a_prefix_that_files_lack() -> None:
    shapes = {"h.0.attn.c_attn.weight": (8, 24), "h.0.mlp.c_fc.weight": (8, 32), "wte.weight": (50, 8)}
    pattern = {"target_modules": r"transformer\.h\.\d+\.attn\.c_attn", "type": "lora", "r": 2, "use_dora": True}
    recipe = Recipe.model_validate(minimal_values(model={"name": "x"}, data={"train": "x.jsonl"}, adapter=pattern))
    assert count_adapter(recipe, shapes) == 2 * (8 + 24) + 24  # DoRA: one magnitude for each output


@pytest.mark.parametrize(
    ("adapter", "expected"),
    [
        ({"modules_to_save": ["transformer.wte"], "target_modules": ["c_attn"]}, 2 * 2 * (8 + 24) + 50 * 8),
        ({"exclude_modules": ["transformer.h.0"], "target_modules": ["c_attn"]}, 2 * (8 + 24)),
        ({"modules_to_save": ["transformer.h.0.mlp"], "target_modules": ["c_attn"]}, 2 * 2 * (8 + 24) + 8 * 32),
        (
            {"modules_to_save": ["f"], "target_modules": ["c_attn"]},
            2 * 2 * (8 + 24) + 8,
        ),  # ln_f, by the end of its name
    ],
)
def test_names_in_a_list_may_have_a_prefix_that_files_lack(adapter: dict[str, Any], expected: int) -> None:
    shapes = {f"h.{layer}.attn.c_attn.weight": (8, 24) for layer in range(2)} | {"wte.weight": (50, 8)}
    shapes |= {"h.0.mlp.c_fc.weight": (8, 32), "ln_f.weight": (8,)}
    values = minimal_values(model={"name": "x"}, data={"train": "x.jsonl"}, adapter=adapter | {"type": "lora", "r": 2})
    assert count_adapter(Recipe.model_validate(values), shapes) == expected


@pytest.mark.parametrize(("text", "tower"), [("language_model.model", "vision_tower"), ("model", "visual")])
def test_language_model_inside_of_another_model_is_counted_without_the_towers_that_text_does_not_reach(
    text: str, tower: str
) -> None:
    shapes = {f"{text}.layers.0.self_attn.q_proj.weight": (8, 8), f"{text}.embed_tokens.weight": (50, 8)}
    shapes |= {f"{tower}.layers.0.self_attn.q_proj.weight": (4, 4), f"{text}.layers.0.mlp.up_proj.weight": (16, 8)}
    own = minimal_values(model={"name": "x"}, data={"train": "x.jsonl"}, adapter={"type": "lora", "r": 2})
    assert count_adapter(Recipe.model_validate(own | {"task": "./own.py"}), shapes) == 2 * (8 + 8 + 4 + 4 + 16 + 8)
    for names in (["q_proj"], r"model\.language_model\.layers\.\d+\.self_attn\.q_proj", "all-linear"):
        adapter = {"type": "lora", "r": 2, "target_modules": names}
        recipe = Recipe.model_validate(minimal_values(model={"name": "x"}, data={"train": "x.jsonl"}, adapter=adapter))
        assert count_adapter(recipe, shapes) == 2 * (8 + 8 + (16 + 8) * (names == "all-linear")), names


def test_head_that_is_stored_under_another_name_is_counted() -> None:
    shapes = {"gpt_neox.layers.0.attention.query_key_value.weight": (24, 8), "gpt_neox.embed_in.weight": (50, 8)}
    shapes["embed_out.weight"] = (50, 8)
    for adapter, expected in (
        ({"modules_to_save": ["lm_head"], "target_modules": ["query_key_value"]}, 2 * (24 + 8) + 50 * 8),
        ({"target_modules": ["lm_head"]}, 2 * (50 + 8)),
    ):
        values = minimal_values(
            model={"name": "x"}, data={"train": "x.jsonl"}, adapter=adapter | {"type": "lora", "r": 2}
        )
        assert count_adapter(Recipe.model_validate(values), shapes) == expected, adapter


def test_new_rows_of_a_tied_head_that_is_saved_whole_are_counted_twice() -> None:
    shapes = {"model.layers.0.self_attn.q_proj.weight": (8, 8), "model.embed_tokens.weight": (50, 8)}
    adapter = {"type": "lora", "r": 2, "modules_to_save": ["embed_tokens", "lm_head"]}
    model = {"name": "x", "new_tokens": ["<a>", "<b>"]}
    values = minimal_values(model=model, data={"train": "x.jsonl"}, adapter=adapter)
    assert count_adapter(Recipe.model_validate(values), shapes) == 2 * (8 + 8) + 2 * 52 * 8


def test_head_that_is_saved_does_not_hide_that_no_name_matches() -> None:
    shapes = {"model.layers.0.self_attn.q_proj.weight": (8, 8), "model.embed_tokens.weight": (50, 8)}  # tied
    adapter = {"type": "lora", "r": 2, "target_modules": ["c_attn"], "modules_to_save": ["lm_head"]}
    values = minimal_values(model={"name": "x"}, data={"train": "x.jsonl"}, adapter=adapter)
    assert count_adapter(Recipe.model_validate(values), shapes) == 2 * (8 + 8) + 50 * 8
