"""Models with parts that rows do not reach, tokens without an embedding, and losses that are not trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from ftcli.loop import steps
from ftcli.models.router_loss import left_out_losses
from ftcli.models.trained_on import differences, identity_of
from ftcli.reports.check import check
from ftcli.runtime.errors import InputError
from ftcli.tiny_models import SIZES, build_tiny
from ftcli.training.evaluation import measure
from ftcli.training.final_weights import save_final
from ftcli.training.setup import prepare

from ..support.cells import cell
from ..support.runner import MakeInputs


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    return make_inputs()


@pytest.mark.parametrize("name", ["vision", "vision-lora"])
def test_train_text_on_a_vision_language_model_freezes_the_tower_and_completes(
    name: str, inputs: Path, tmp_path: Path
) -> None:
    run = prepare(cell(inputs, name, train={"max_steps": 22}), cpu=True, output=tmp_path)
    assert [line for line in run.log_lines if "not trained" in line] == [
        "not trained, because the rows of sft are text: model.vision_tower, model.multi_modal_projector"
    ]
    trained = [name for name, parameter in run.model.named_parameters() if parameter.requires_grad]
    assert trained and not any("vision_tower" in name or "multi_modal" in name for name in trained)
    assert len(list(steps(run))) == 22  # the gradients of all trained tensors are checked after step 20
    save_final(run)
    if name == "vision":
        before, after = (load_file(folder / "model.safetensors") for folder in (inputs / "vision", tmp_path / "final"))
        assert sorted(before) == sorted(after)
        same = {key for key, value in before.items() if value.equal(after[key])}
        assert same == {key for key in before if "vision_tower" in key or "multi_modal" in key}


def test_text_run_of_a_vision_language_model_notices_another_tower(inputs: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(inputs / "vision", tmp_path / "vision"))
    recipe = cell(inputs, "vision", model={"name": str(model), "dropout": 0.0})
    stored = identity_of(recipe)
    assert differences(stored, str(model), None, now=identity_of(recipe)) == []
    weights = load_file(model / "model.safetensors")
    weights[next(name for name in weights if "vision_tower" in name)] += 1
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    for now in (None, identity_of(recipe)):
        assert "the frozen weights of" in differences(stored, str(model), None, now=now)[0]


def with_tokens(inputs: Path, folder: Path, added: list[str], **special: str) -> Path:
    """Copy the tied model, whose embeddings have 259 rows for 258 tokens, and add tokens to its tokenizer alone."""
    shutil.copytree(inputs / "tied", folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(added)
    tokenizer.add_special_tokens(special)
    tokenizer.save_pretrained(folder)
    return folder


def test_token_without_an_embedding_is_refused_before_the_model_trains(inputs: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"alpha {index}", "completion": "beta <b>" if index == 7 else "gamma"} for index in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = with_tokens(inputs, tmp_path / "model", ["<a>", "<b>"])
    changes: dict[str, Any] = {"data": {"train": str(tmp_path / "rows.jsonl"), "max_length": 64}}
    recipe = cell(inputs, "sft-tied", model={"name": str(model)}, **changes)
    with pytest.raises(InputError, match=r"token '<b>' with the id 259, and the embeddings .* 259 rows\n.*new_tokens"):
        prepare(recipe, cpu=True)
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe.model_dump(mode="json", exclude_unset=True)))
    report = check(tmp_path / "recipe.yaml", cpu=True, data=True)
    assert report.exit_code == 2
    assert any("'<b>' with the id 259" in finding.what for finding in report.data.findings if finding.level == "error")

    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows if "<b>" not in row["completion"])
    )
    assert prepare(recipe, cpu=True).log_lines  # a token that no row has does not matter
    padded = with_tokens(inputs, tmp_path / "padded", ["<a>"], pad_token="<pad>")
    with pytest.raises(InputError, match=r"padding is the token '<pad>' with the id 259"):
        prepare(cell(inputs, "sft-tied", model={"name": str(padded)}, **changes), cpu=True)
    prompts = {"generate": {"prompts": ["say <b>"], "max_new_tokens": 2}}
    with pytest.raises(InputError, match="a prompt has the token 259"):
        prepare(cell(inputs, "sft-tied", model={"name": str(model)}, evaluate=prompts, **changes), cpu=True)


def test_loss_that_the_model_asks_for_and_ftcli_does_not_train_is_reported(inputs: Path, tmp_path: Path) -> None:
    sizes = SIZES | {"vocab_size": 259, "num_key_value_heads": 2, "head_dim": 8, "eos_token_id": 1, "pad_token_id": 1}
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    model = build_tiny("Qwen3MoeForCausalLM", **sizes, **experts, bos_token_id=None)
    model.save_pretrained(tmp_path / "experts")
    AutoTokenizer.from_pretrained(inputs / "tied").save_pretrained(tmp_path / "experts")
    recipe = cell(inputs, "sft-tied", model={"name": str(tmp_path / "experts")})
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe.model_dump(mode="json", exclude_unset=True)))
    lines = [line for line in prepare(recipe, cpu=True).log_lines if "further loss" in line]
    assert len(lines) == 1 and "(router_aux_loss_coef), which ftcli does not train" in lines[0]
    assert check(tmp_path / "recipe.yaml", cpu=True).notes.count(lines[0]) == 1


@pytest.mark.parametrize("kind", ["Qwen3Moe", "Mixtral", "GptOss"])
def test_model_that_asks_for_a_loss_of_its_router_trains_concatenated_rows_and_answers_prompts(
    kind: str, inputs: Path, tmp_path: Path
) -> None:
    sizes = SIZES | {"vocab_size": 259, "num_key_value_heads": 2, "head_dim": 8, "eos_token_id": 1, "pad_token_id": 1}
    experts = {"num_experts_per_tok": 2, "output_router_logits": True, "bos_token_id": None}
    experts |= {"num_local_experts": 4, "num_experts": 4, "intermediate_size": 16, "moe_intermediate_size": 16}
    model = build_tiny(f"{kind}ForCausalLM", **(sizes | experts))
    model.save_pretrained(tmp_path / "experts")
    AutoTokenizer.from_pretrained(inputs / "tied").save_pretrained(tmp_path / "experts")
    prompts = {"generate": {"prompts": ["say alpha", "say"], "max_new_tokens": 3}}
    kernel = {"name": str(tmp_path / "experts")}
    losses = {}
    for is_flat in (False, True):
        data = {"train": str(inputs / "chats.jsonl"), "eval_rows": 5, "max_length": 128, "padding_free": is_flat}
        run = prepare(cell(inputs, "sft-tied", model=kernel, data=data, evaluate=prompts), cpu=True)
        losses[is_flat] = [step.loss for step in steps(run)]
        assert len(measure(run).answers) == 2
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)


ASKED: dict[str, tuple[dict[str, Any], str]] = {
    "no experts": ({}, ""),
    "not asked": ({"router_aux_loss_coef": 0.001}, ""),
    "a factor of zero": ({"router_aux_loss_coef": 0.0, "output_router_logits": True}, ""),
    "the default factor": ({"output_router_logits": True}, "router_aux_loss_coef"),
    "inside": ({"text_config": {"router_aux_loss_coef": 0.1, "output_router_logits": True}}, "router_aux_loss_coef"),
    "another name": ({"aux_loss_coef": 0.01, "output_router_logits": True}, "aux_loss_coef"),
    "of logits": ({"z_loss_coefficient": 0.1}, "z_loss_coefficient"),
}


@pytest.mark.parametrize("case", ASKED)
def test_left_out_losses_of_a_configuration_names_the_key(case: str) -> None:
    config, key = ASKED[case]
    lines = left_out_losses(config)
    assert [f"({key})" in line for line in lines] == [True] * bool(key)


def test_prepare_of_a_recipe_object_with_a_fraction_of_warm_up_steps_is_refused(inputs: Path) -> None:
    with pytest.raises(InputError, match=r"schedule.warmup_steps has no effect after its decimal point"):
        prepare(cell(inputs, "sft-tied", schedule={"name": "linear", "warmup_steps": 3.9}), cpu=True)
