"""What a folder was trained on: differences that change results, and edits that do not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ftcli import testing
from ftcli.config.recipe import Recipe
from ftcli.models.trained_on import config_changes, differences, identity_of, is_same_base, trained_on, write_trained_on
from ftcli.runtime.errors import InputError

from ...support.recipes import minimal_values


def recipe_of(model: Path, adapter: str = "lora", **changes: Any) -> Recipe:
    values = minimal_values(model={"name": str(model)}, data={"train": "rows.jsonl"}, adapter={"type": adapter})
    return Recipe.model_validate(values | changes)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return testing.save_tiny_causal(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture
def model(tied: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tied, tmp_path / "model"))


def edit(file: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes a key."""
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def found(stored: dict[str, Any] | None, model: Path) -> str:
    return "\n".join(differences(json.loads(json.dumps(stored)), str(model), None))


def test_differences_of_edits_that_change_no_result_are_none(model: Path, tmp_path: Path) -> None:
    stored, config = identity_of(recipe_of(model)), model / "config.json"
    values = json.loads(config.read_text())
    edit(config, transformers_version="9", use_cache=False, architectures=["Other"], dtype="float16", my_notes="tiny")
    edit(config, eos_token_id=[1, 2], _name_or_path="elsewhere", hidden_act=None)  # its default is silu
    assert values["hidden_act"] == "silu" and found(stored, model) == ""
    moved = model.rename(tmp_path / "moved")
    assert found(stored, moved) == "" and is_same_base(stored, recipe_of(moved))
    weights = load_file(moved / "model.safetensors")
    (moved / "model.safetensors").unlink()
    head = {"lm_head.weight": weights["model.embed_tokens.weight"], "rotary_emb.inv_freq": torch.ones(2)}
    torch.save(weights | head, moved / "pytorch_model.bin")  # as PyTorch's files have tied weights and constants
    assert found(stored, moved) == "" and is_same_base(stored, recipe_of(moved))
    torch.save(weights, moved / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert found(stored, moved) == ""


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta", "hidden_act", "quantization_config"])
def test_differences_of_a_configuration_name_the_key(key: str, model: Path) -> None:
    stored = [identity_of(recipe_of(model, adapter)) for adapter in ("lora", "none")]
    values: dict[str, Any] = {"rms_norm_eps": 0.5, "hidden_act": "gelu", "quantization_config": {"bits": 4}}
    rope = {"rope_type": "default", "rope_theta": 5.0}
    edit(model / "config.json", **({"rope_parameters": rope} if key == "rope_theta" else {key: values[key]}))
    for entry in stored:  # a run of a whole model has the weights in its checkpoints, but not the configuration
        assert f"config.json of {model} is not the one of the run" in found(entry, model)
        assert key in found(entry, model) and "use_cache" not in found(entry, model)


def test_differences_of_frozen_weights_are_found_in_every_tensor_and_format(model: Path) -> None:
    lora, whole = (identity_of(recipe_of(model, adapter)) for adapter in ("lora", "none"))
    file = model / "model.safetensors"
    weights = load_file(file)
    for name, value in weights.items():
        changed = value.clone()
        changed.view(-1)[-1] += 1
        save_file(weights | {name: changed}, file, {"format": "pt"})
        assert "digest" in found(lora, model), name
        assert found(whole, model) == "" and not is_same_base(whole, recipe_of(model, "none"))
    file.unlink()
    torch.save(weights | {name: changed}, model / "pytorch_model.bin")
    assert "digest" in found(lora, model)
    (model / "pytorch_model.bin").write_bytes(b"not a model")
    assert found(lora, model) == "" and not is_same_base(lora, recipe_of(model))  # loading it reports the damage


def test_differences_of_an_image_processor_name_the_setting(model: Path) -> None:
    settings = {"image_processor_type": "ViTImageProcessor", "image_mean": [0.5, 0.5, 0.5], "size": {"height": 8}}
    (model / "preprocessor_config.json").write_text(json.dumps(settings))
    images, text = (identity_of(recipe_of(model, "none", task=task)) for task in ("image_classification", "sft"))
    edit(model / "preprocessor_config.json", image_processor_type="ViTImageProcessorFast", do_pad=None)
    assert found(images, model) == ""
    edit(model / "preprocessor_config.json", image_mean=[0.1, 0.5, 0.5])
    assert "image_mean: [0.5, 0.5, 0.5] -> [0.1, 0.5, 0.5]" in found(images, model) and found(text, model) == ""


def test_differences_of_a_tokenizer_without_tokenizer_json_are_its_vocabulary_files(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "vocab.json").write_text('{"a": 0}')
    (model / "merges.txt").write_text("a b")
    stored = identity_of(recipe_of(model))
    assert stored is not None and differences(stored, str(model), None, parts=("vocabulary",)) == []
    (model / "merges.txt").write_text("a c")
    other = [f"the tokenizer of {model} is not the one of the run"]
    assert differences(stored, str(model), None, parts=("vocabulary",)) == other
    (model / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    assert differences(stored, str(model), None, parts=("vocabulary",)) == [], "other forms are not compared"


def test_differences_of_a_tokenizer_are_its_ids_and_its_chat_template_in_any_form_of_the_files(model: Path) -> None:
    def tokenizer(ids: dict[str, int], merges: Any, added: Any) -> str:
        vocabulary = {"model": {"vocab": ids, "merges": merges}, "added_tokens": added}
        (model / "tokenizer.json").write_text(json.dumps(vocabulary))
        parts = ("vocabulary", "template")
        return "\n".join(differences(stored, str(model), None, parts=parts))

    stored: dict[str, Any] | None = None
    ids, end = {"a": 0, "b": 1, "ab": 2}, {"id": 3, "content": "<end>"}
    tokenizer(ids, ["a b"], [end])
    stored = identity_of(recipe_of(model))
    assert tokenizer({"ab": 2, "b": 1, "a": 0}, [["a", "b"]], [end | {"lstrip": False}]) == ""
    other = f"the tokenizer of {model} is not the one of the run"
    for changed in (({**ids, "a": 1, "b": 0}, ["a b"], [end]), (ids, [], [end]), (ids, ["a b"], [end | {"id": 4}])):
        assert tokenizer(*changed) == other
    assert tokenizer(ids, 3, [7, None]) == other  # loading it reports the damage
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").unlink()
    edit(model / "tokenizer_config.json", chat_template=template)
    assert tokenizer(ids, ["a b"], [end]) == ""  # where older versions of transformers write it
    edit(model / "tokenizer_config.json", chat_template=template + "!")
    assert tokenizer(ids, ["a b"], [end]) == f"the chat template of {model} is not the one of the run"
    assert found(stored, model) == ""  # a resume compares rows instead


def test_config_changes_of_code_of_its_own_compares_the_keys_in_the_file() -> None:
    old = {"model_type": "own", "auto_map": {"AutoConfig": "x.Y"}, "depth": 2}
    assert config_changes(old, dict(old)) == []
    assert config_changes(old, old | {"depth": 3, "more": 1}) == ["depth: 2 -> 3", "more: absent -> 1"]


def test_trained_on_reads_checkpoints_runs_final_weights_and_exports(model: Path, tmp_path: Path) -> None:
    entry = identity_of(recipe_of(model))
    checkpoint, final, export = tmp_path / "run/checkpoints/step-000001", tmp_path / "run/final", tmp_path / "export"
    for folder in (checkpoint, final, export):
        folder.mkdir(parents=True)
        assert trained_on(folder) is None
    (checkpoint / "state.json").write_text(json.dumps({"frozen": entry}))
    (checkpoint / "COMPLETE").touch()
    assert trained_on(checkpoint) == trained_on(final) == trained_on(tmp_path / "run") == entry  # of earlier versions
    shutil.rmtree(checkpoint)
    (tmp_path / "run/environment.json").write_text(json.dumps({"trained_on": {"name": "whole"}}))
    assert trained_on(final) == trained_on(tmp_path / "run") == {"name": "whole"}
    write_trained_on(final, entry)
    write_trained_on(export, None)
    assert trained_on(final) == trained_on(tmp_path / "run") == entry
    assert trained_on(export) is None and trained_on(tmp_path) is None


@pytest.mark.parametrize(
    "damage", [{"frozen": None}, {"config": None}, {"config": 3}, {"weights": 7}, {"processor": []}]
)
def test_trained_on_of_a_damaged_file_beside_an_adapter_names_it(
    damage: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    write_trained_on(tmp_path, identity_of(recipe_of(model)))
    assert trained_on(tmp_path) is not None
    edit(tmp_path / "trained_on.json", **damage)
    with pytest.raises(InputError, match=r"trained_on\.json is damaged\n.*the base model is not compared"):
        trained_on(tmp_path)
