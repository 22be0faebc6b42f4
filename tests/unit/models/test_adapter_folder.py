"""An adapter's folder holds what clients need to build the base: label names, task type, and heads they can load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModel, AutoPeftModelForSequenceClassification, PeftModel
from peft.utils.other import ModulesToSaveWrapper
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    ElectraConfig,
    ElectraForSequenceClassification,
    ElectraModel,
    LlamaConfig,
    LlamaModel,
    ResNetModel,
    XLNetConfig,
    XLNetModel,
)

from ftcli.checkpoint.final import load_plain
from ftcli.config.recipe import Recipe
from ftcli.models.adapter_folder import BASE_CONFIG, check_labels, label_settings, write_adapter
from ftcli.models.adapters import add_adapter, load_adapter_weights
from ftcli.models.load import load_model
from ftcli.runtime.errors import InputError
from ftcli.testing import save_tiny_resnet

from ...support.recipes import minimal_values

AUTO = "AutoModelForSequenceClassification"
SMALL: dict[str, Any] = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 37, "pad_token_id": 0}
LABELS = ["neg", "pos", "so-so"]
BASES: dict[str, tuple[Any, Any]] = {
    "bert": (BertModel, BertConfig(**SMALL)),
    "llama": (LlamaModel, LlamaConfig(**SMALL)),
    "electra": (ElectraModel, ElectraConfig(**SMALL)),  # its head is a module with two layers
    "xlnet": (XLNetModel, XLNetConfig(vocab_size=99, d_model=32, n_layer=1, n_head=4, d_inner=37)),
    "sentiments": (ElectraForSequenceClassification, ElectraConfig(**SMALL, num_labels=5)),  # one layer of it is new
    "other name": (ElectraModel, ElectraConfig(**SMALL)),  # it matches a layer of the head too
    "several": (BertForSequenceClassification, BertConfig(**SMALL, problem_type="multi_label_classification")),
}
# peft would save the whole head, with a task type
TYPES = dict.fromkeys(BASES, "SEQ_CLS") | {"sentiments": None, "other name": None}
MORE = {"other name": {"target_modules": ["query"], "modules_to_save": ["dense"]}}


def recipe_of(folder: Path, **section: Any) -> Recipe:
    adapter = {"type": "lora", "r": 2} | section
    values = minimal_values(
        "text_classification", model={"name": str(folder)}, data={"train": "t.jsonl"}, adapter=adapter
    )
    return Recipe.model_validate(values)


@pytest.mark.filterwarnings("ignore:.*")  # transformers and peft, of what they themselves do
@pytest.mark.parametrize("name", BASES)
def test_clients_load_an_adapter_with_its_head_and_label_names(name: str, tmp_path: Path) -> None:
    kind, config = BASES[name]
    torch.manual_seed(0)
    kind(config).save_pretrained(tmp_path / "base")
    recipe, folder = recipe_of(tmp_path / "base", **MORE.get(name, {})), tmp_path / "adapter"
    head: dict[str, Any] = {"new_head": True, "labels": LABELS, "problem_type": "single_label_classification"}
    base, heads = load_model(AUTO, recipe, **head, dtype=torch.float32)
    model: Any = add_adapter(base, recipe, keep=heads, task_type=None).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    trained = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    write_adapter(model, trained, folder, "SEQ_CLS")
    batch = {"input_ids": torch.randint(3, 90, (2, 7)), "attention_mask": torch.ones(2, 7, dtype=torch.long)}
    settings = label_settings(folder)
    assert settings["id2label"] == dict(enumerate(LABELS)) and settings["label2id"]["so-so"] == 2
    assert settings["problem_type"] == "single_label_classification"
    assert json.loads((folder / "adapter_config.json").read_text())["task_type"] == TYPES[name]
    saved = json.loads((folder / BASE_CONFIG / "config.json").read_text())
    assert saved["architectures"] == [type(base).__name__] and "dtype" not in saved
    assert not (folder / "config.json").exists()  # transformers would take the folder for a whole model
    options = settings | {"ignore_mismatched_sizes": True}
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", **options)
    automatic = AutoPeftModel if TYPES[name] is None else AutoPeftModelForSequenceClassification
    actual = {
        "transformers": AutoModelForSequenceClassification.from_pretrained(folder, **options),
        "peft": PeftModel.from_pretrained(plain, str(folder)),
        "peft's auto class": automatic.from_pretrained(str(folder), **options),
        "ftcli": load_plain(AUTO, folder),
    }
    with torch.no_grad():
        expected = model(**batch).logits
        for client, loaded in actual.items():
            assert loaded.config.id2label == dict(enumerate(LABELS)), client
            torch.testing.assert_close(loaded.eval()(**batch).logits, expected, msg=client)
    same, swapped = dict(head), head | {"labels": ["pos", "neg", "so-so"]}
    load_model(AUTO, recipe, **same, dtype=torch.float32, weights=folder)
    labels = r"trained for the labels \['neg', .* the rows have \['pos', 'neg', 'so-so'\]"
    with pytest.raises(InputError, match=labels):
        load_model(AUTO, recipe, **swapped, dtype=torch.float32, weights=folder)


def test_write_adapter_keeps_the_statistics_of_batch_norms_that_are_saved_whole(tmp_path: Path) -> None:
    base = save_tiny_resnet(tmp_path / "base")
    section = {"target_modules": ["convolution"], "modules_to_save": ["normalization"]}

    def adapted() -> Any:
        return add_adapter(ResNetModel.from_pretrained(base), recipe_of(base, **section), keep=[], task_type=None)

    model, fresh, folder = adapted().train(), adapted(), tmp_path / "adapter"
    model(torch.randn(4, 3, 32, 32))  # updates the statistics
    trained = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    write_adapter(model, trained, folder, None)
    clients = {"peft": PeftModel.from_pretrained(ResNetModel.from_pretrained(base), str(folder)), "ftcli": fresh}
    load_adapter_weights(fresh, folder)
    statistics = {name: value for name, value in model.state_dict().items() if ".modules_to_save.default.r" in name}
    assert len(statistics) == 2 * sum(isinstance(module, ModulesToSaveWrapper) for module in model.modules()) > 0
    for client, loaded in clients.items():
        values = loaded.state_dict()
        assert all(torch.equal(values[name], value) for name, value in statistics.items()), client


def test_check_labels_of_weights_trained_for_other_labels_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"id2label": {"0": "1", "1": "pos"}}))
    check_labels(tmp_path, ["1", "pos"])
    check_labels(tmp_path, ["1.0", "pos"])  # the same number
    for labels in (["pos", "1"], ["1"], ["1", "pos", "so-so"]):
        with pytest.raises(InputError, match=r"were trained for the labels \['1', 'pos'\], but the rows have"):
            check_labels(tmp_path, labels)
    for labels in (["pos", "1.0"], ["POS", "1"], ["pos", "so-so"]):  # a label would move to another logit
        with pytest.raises(InputError, match=r"were trained for the labels \['1', 'pos'\], but the rows have"):
            check_labels(tmp_path, labels, continues=True)
    for labels in (["1", "Pos"], ["spam", "ham"], ["pos", "1", "so-so"]):  # the last ones get a new head
        check_labels(tmp_path, labels, continues=True)
    (tmp_path / "base").mkdir()
    BertModel(BASES["bert"][1]).save_pretrained(tmp_path / "base")
    recipe = recipe_of(tmp_path / "base")
    recipe = recipe.model_copy(update={"adapter": recipe.adapter.model_copy(update={"path": str(tmp_path)})})
    head: dict[str, Any] = {"new_head": True, "labels": ["pos", "1"], "problem_type": "single_label_classification"}
    base, heads = load_model(AUTO, recipe, **head, dtype=torch.float32)
    with pytest.raises(InputError, match=r"but the rows have \['pos', '1'\]"):  # adapter.path
        add_adapter(base, recipe, keep=heads, task_type=None)
    config = BASES["bert"][1]
    config = type(config).from_dict(config.to_dict() | {"id2label": {0: "1", 1: "pos"}})
    BertForSequenceClassification(config).save_pretrained(tmp_path / "trained")
    with pytest.raises(InputError, match=r"but the rows have \['pos', '1'\]"):  # model.name
        load_model(AUTO, recipe_of(tmp_path / "trained"), **head, dtype=torch.float32)
    (tmp_path / "config.json").unlink()
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path / "base")}))
    with pytest.raises(InputError, match=f"is an adapter of {tmp_path / 'base'}, not a model"):
        load_model(AUTO, recipe_of(tmp_path), **head, dtype=torch.float32)
    (tmp_path / "config.json").write_text(json.dumps({"id2label": {"0": "LABEL_0", "1": "LABEL_1"}}))
    check_labels(tmp_path, ["neg", "pos"])  # names that transformers makes up
