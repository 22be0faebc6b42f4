"""A key that has no effect beside the others is refused by name; a walk over the schema misses no key."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftcli.config.ineffective_keys import RULES, TEXT_RULES
from ftcli.config.load import dump_recipe, key_paths, list_recipes, load_recipe, load_run_recipe
from ftcli.config.recipe import Recipe
from ftcli.config.recipe_model import Adapter
from ftcli.config.yaml_document import dump_document
from ftcli.launch.launcher import train
from ftcli.runtime.errors import InputError

from ...support.recipes import minimal_values

Values = dict[str, Any]
SFT: Values = minimal_values(
    model={"name": "somebody/some-model"},
    data={"train": {"path": "rows.jsonl"}},
    batch={"global_size": 4},
    train={"max_steps": 2},
)
IMAGES = SFT | {"task": "image_classification"}
LORA = {"adapter": {"type": "lora"}}
EVALUATES = {"data": {**SFT["data"], "eval_rows": 4}}
ASKS = {"evaluate": {"generate": {"prompts": ["a"]}}}
DRAWS = {"evaluate": {"generate": {"prompts": ["a"], "temperature": 1.0}}}
STREAMS = {"data": {**SFT["data"], "streaming": True}}
PACKS = {"data": {**SFT["data"], "packing": True}}
SKIPS = {"faults": {"non_finite": "skip"}}
PUSHES = {"hub": {"push": "somebody/model"}}
MOMENTUM = {"optimizer": {"name": "sgd"}}
NONE = {"adapter": {"type": "none"}}

# key -> values, what makes them idle, and what gives them an effect
DEPENDENT: dict[str, tuple[list[Any], Values, Values]] = {
    "adapter.r": ([16, 64], NONE, LORA),
    "adapter.lora_alpha": ([32.0, 1.0], NONE, LORA),
    "adapter.lora_dropout": ([0.1], NONE, LORA),
    "adapter.target_modules": (["q_proj", ["q_proj", "v_proj"]], NONE, LORA),
    "adapter.exclude_modules": ([["lm_head"]], NONE, LORA),
    "adapter.modules_to_save": ([["lm_head"]], NONE, LORA),
    "adapter.use_rslora": ([True], NONE, LORA),
    "adapter.use_dora": ([True], NONE, LORA),
    "adapter.loraplus_lr_ratio": ([16.0], NONE, LORA),
    "adapter.path": (["adapter"], NONE, LORA),
    "model.dtype": (["bfloat16"], {}, LORA),
    "model.embeddings_on_host": ([True], NONE, LORA),
    "model.shard_frozen": ([True, False], NONE, LORA),
    "optimizer.betas": ([[0.8, 0.99]], MOMENTUM, {}),
    "optimizer.eps": ([1e-6], MOMENTUM, {}),
    "optimizer.momentum": ([0.5, 0.0], {}, MOMENTUM),
    "optimizer.nesterov": ([True], {}, MOMENTUM),
    "schedule.min_ratio": ([0.1], {"schedule": {"name": "constant"}}, {"schedule": {"name": "cosine"}}),
    "evaluate.every_steps": ([5], {}, EVALUATES),
    "evaluate.at_start": ([True], {}, EVALUATES),
    "evaluate.generate.top_p": ([0.5], ASKS, DRAWS),
    "faults.max_in_a_row": ([1, 7], {}, SKIPS),
    "faults.max_in_all": ([1, 70], {}, SKIPS),
    "data.drop_last": ([False], STREAMS, {}),
    "data.shuffle_buffer": ([10], {}, STREAMS),
    "data.padding_free": ([False], PACKS, {}),
    "data.columns": (
        [{"prompt": "q"}],
        {"data": {"train": {"path": "rows.jsonl", "columns": {"prompt": "a"}}}},
        {"data": {"train": [{"path": "a.jsonl"}, {"path": "b.jsonl", "columns": {"prompt": "a"}}]}},
    ),
    "checkpoint.keep_best": ([{"metric": "loss", "direction": "min"}], {}, EVALUATES),
    "hub.push_at": (["checkpoint"], {}, PUSHES),
    "hub.private": ([True], {}, PUSHES),
    "model.quantization": ([{"load_in_4bit": True}], NONE, LORA),
}
# Other values of these belong to tests of their own sections: they exclude each other, or one requires the other.
EXCLUSIVE = {"data.eval", "data.eval_rows", "train.epochs", "train.max_steps", "data.eval.weight"}
# Whether these have an effect depends on files or rows, which check looks at (tests/unit/data/test_first_rows.py).
OF_FILES = {
    *("model.revision", "data.train.name", "data.train.split", "data.train.revision"),
    *("data.eval.name", "data.eval.split", "data.eval.revision", "data.chat_template_kwargs"),
}
# These have an effect in every recipe, or in every one that has their section.
ALWAYS = {
    *("task", "seed", "precision", "output", "model", "adapter", "data", "task_options", "batch", "train"),
    *("optimizer", "schedule", "evaluate", "checkpoint", "faults", "log", "hub"),
    *("model.name", "model.trust_remote_code", "model.dropout", "model.batch_norm", "model.attn_implementation"),
    *("model.use_liger_kernel", "model.torch_compile", "model.cuda_graphs"),
    *("model.gradient_checkpointing", "model.activation_offloading"),
    *(f"model.quantization.{key}" for key in ("load_in_4bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")),
    *("adapter.type", "data.train", "data.max_bad_rows", "data.packing", "data.streaming", "data.workers"),
    *(f"data.{split}.{key}" for split in ("train", "eval") for key in ("path", "label", "columns", "max_rows")),
    *("data.train.weight", "batch.global_size", "batch.micro_size", "train.max_minutes"),
    *(f"optimizer.{key}" for key in ("name", "learning_rate", "weight_decay", "max_grad_norm")),
    *("schedule.name", "schedule.warmup_steps", "evaluate.generate"),
    *(f"evaluate.generate.{key}" for key in ("prompts", "file", "max_new_tokens", "temperature")),
    *("checkpoint.every_steps", "checkpoint.keep", "checkpoint.background"),
    *("checkpoint.keep_best.metric", "checkpoint.keep_best.direction"),
    *("faults.non_finite", "faults.missing_gradient", "log.every_steps", "log.trackers", "log.report", "hub.push"),
}


def written(values: Values, *changes: Values) -> Values:
    """Return recipe values with sections of `changes` merged in."""
    merged = copy.deepcopy(values)
    for change in changes:
        for key, value in change.items():
            merged[key] = {**merged.get(key, {}), **copy.deepcopy(value)} if isinstance(value, dict) else value
    return merged


def with_key(values: Values, key: str, value: Any) -> Values:
    merged = copy.deepcopy(values)
    *above, last = key.split(".")
    section = merged
    for name in above:
        section = section.setdefault(name, {})
    section[last] = value
    return merged


def problems_of(folder: Path, values: Values) -> list[str]:
    """Return what is wrong with a recipe of these values."""
    path = folder / "r.yaml"
    path.write_text(dump_document(values))
    with pytest.raises(InputError) as error:
        load_recipe(path)
        raise InputError([])  # nothing was found
    return [str(problem) for problem in error.value.problems]


def test_ineffective_key_problems_classify_every_recipe_key() -> None:
    known = [*DEPENDENT, *TEXT_RULES, *EXCLUSIVE, *OF_FILES, *ALWAYS]
    assert set(key_paths()) - set(known) == set(), "say here when these have no effect, and refuse them then"
    assert set(known) - set(key_paths()) == set()
    assert {rule.key for rule in RULES} <= set(DEPENDENT)


@pytest.mark.parametrize("key", DEPENDENT)
def test_load_recipe_key_without_effect_is_refused_and_elsewhere_taken(key: str, tmp_path: Path) -> None:
    values, idle, used = DEPENDENT[key]
    for value in values:
        message = problems_of(tmp_path, with_key(written(SFT, idle), key, value))
        assert len(message) == 1 and key.rpartition(".")[2] in message[0] and "r.yaml" in message[0], message
        assert problems_of(tmp_path, with_key(written(SFT, used), key, value)) == []


@pytest.mark.parametrize("key", TEXT_RULES)
def test_load_recipe_key_for_texts_is_refused_for_images(key: str, tmp_path: Path) -> None:
    value = {"data.max_length": 64, "data.truncation": "drop", "model.new_tokens": ["<a>"]}.get(key, True)
    assert f"{key} has no effect for task image_class" in str(problems_of(tmp_path, with_key(IMAGES, key, value)))
    assert problems_of(tmp_path, with_key(SFT, key, value)) == []


@settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_load_recipe_any_set_of_keys_without_effect_is_named_key_by_key(data: st.DataObject, tmp_path: Path) -> None:
    own = [rule.key for rule in RULES if DEPENDENT[rule.key][1] in ({}, NONE)]  # idle in one recipe, all together
    chosen = data.draw(st.sets(st.sampled_from(own), min_size=1))
    values = written(SFT, NONE)
    for key in sorted(chosen):
        values = with_key(values, key, data.draw(st.sampled_from(DEPENDENT[key][0])))
    message = problems_of(tmp_path, values)
    assert sorted(text.partition(" has no effect")[0].partition(": ")[2] for text in message) == sorted(chosen)


@given(r=st.integers(1, 64), alpha=st.sampled_from([8.0, 16.0, 32.0]))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_adapter_without_a_type_is_refused_also_with_default_values(r: int, alpha: float) -> None:
    with pytest.raises(ValueError, match="type is missing, and without it the whole model is trained"):
        Adapter.model_validate({"r": r, "lora_alpha": alpha})
    assert Adapter().type == "none" and Adapter(type="lora", r=r).r == r


def test_load_recipe_columns_that_the_task_does_not_read_are_refused(tmp_path: Path) -> None:
    values = written(SFT, {"data": {"columns": {"promt": "q"}}})
    assert (
        "data.columns: task sft reads no column 'promt'\n    did you mean 'prompt'?" in problems_of(tmp_path, values)[0]
    )
    values["data"] = {"train": [{"path": "rows.jsonl", "columns": {"text": "q"}}, "b.jsonl"]}
    assert "data.train.0.columns: task sft reads no column 'text'" in problems_of(tmp_path, values)[0]


@pytest.mark.parametrize("name", list_recipes())
def test_load_recipe_with_every_key_written_out_is_taken(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    (tmp_path / "whole.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "whole.yaml") == recipe


def test_load_recipe_of_a_finished_run_accepts_keys_without_effect(tmp_path: Path) -> None:
    """An earlier version let them pass; what it trained can still be evaluated and exported."""
    (tmp_path / "recipe.yaml").write_text(dump_document(written(SFT, NONE, {"adapter": {"r": 16}})))
    assert load_run_recipe(tmp_path).adapter.r == 16


def test_train_recipe_object_with_a_key_without_effect_is_refused(tmp_path: Path) -> None:
    recipe = Recipe.model_validate(written(SFT, {"schedule": {"name": "constant", "min_ratio": 0.1}}))
    with pytest.raises(InputError, match=r"schedule\.min_ratio has no effect with schedule\.name constant"):
        train(recipe, output=tmp_path / "run")
    assert not (tmp_path / "run").exists()
