"""Verification of an export detects wrong weights. Tiny models."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from ftcli.checkpoint.export_job import ExportJob
from ftcli.checkpoint.final import PROBE, find_probe
from ftcli.checkpoint.model_card import loading_instructions
from ftcli.checkpoint.verify import ExpectedModel, digest, reload_in_fresh_process
from ftcli.config.recipe import Recipe
from ftcli.models.adapter_folder import BASE_CONFIG, write_adapter
from ftcli.runtime.errors import InputError
from ftcli.runtime.run_folder import RunFolder
from ftcli.testing import save_tiny_causal

from ...support.recipes import minimal_values


@pytest.mark.slow
def test_verify_names_a_different_missing_new_or_non_finite_weight(tmp_path: Path) -> None:
    folder = save_tiny_causal(tmp_path / "tied")
    model = AutoModelForCausalLM.from_pretrained(folder)
    digests = {name: digest(p.detach()) for name, p in model.named_parameters()}
    expected = ExpectedModel("AutoModelForCausalLM", "float32", digests=digests, whole=True)
    assert reload_in_fresh_process(folder, expected) == (0, 0)
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(RuntimeError, match=f"these weights differ from the trained ones: .*{name}"):
        reload_in_fresh_process(folder, dataclasses.replace(expected, digests=digests | {name: "0"}))
    del digests[name]
    with pytest.raises(RuntimeError, match=f"weights that were not trained: .*{name}"):
        reload_in_fresh_process(folder, expected)
    state = model.state_dict()
    state[name] = state[name].index_fill(0, torch.tensor(3), float("nan"))
    model.save_pretrained(folder, state_dict=dict(state))
    with pytest.raises(RuntimeError, match=f"empty or not finite: .*{name}"):
        reload_in_fresh_process(folder, dataclasses.replace(expected, digests={}, whole=False))
    del state[name]
    model.save_pretrained(folder, state_dict=state)
    with pytest.raises(RuntimeError, match=f"missing or unexpected in the files: .*{name}"):
        reload_in_fresh_process(folder, dataclasses.replace(expected, digests={}, whole=False))


@pytest.mark.slow
def test_reload_of_an_adapter_with_a_tokenizer_of_its_own_names_the_exported_folder(tmp_path: Path) -> None:
    base = save_tiny_causal(tmp_path / "base")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "copy")
    code = {"auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}, "tokenizer_class": "OwnTokenizer"}
    (tmp_path / "copy" / "tokenizer_config.json").write_text(json.dumps(code))
    expected = ExpectedModel("AutoModelForCausalLM", "float32", source=tmp_path / "final")
    with pytest.raises(InputError, match=f"^{tmp_path / 'final'} comes with Python code of its own"):
        reload_in_fresh_process(tmp_path / "copy", expected)


OWN_CLASSIFIER = """
import torch
from transformers import LlamaConfig, LlamaModel, LlamaPreTrainedModel

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

class OwnClassifier(LlamaPreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = LlamaModel(config)
        self.score = torch.nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()
"""


@pytest.mark.slow
def test_reload_of_an_adapter_of_a_classifier_with_code_of_its_own_has_its_label_names(tmp_path: Path) -> None:
    base, names = save_tiny_causal(tmp_path / "base"), {0: "no", 1: "yes"}
    (base / "modeling_own.py").write_text(OWN_CLASSIFIER)
    code = {
        "AutoConfig": "modeling_own.OwnConfig",
        "AutoModelForSequenceClassification": "modeling_own.OwnClassifier",
    }
    config = json.loads((base / "config.json").read_text()) | {"model_type": "own_llama", "auto_map": code}
    (base / "config.json").write_text(json.dumps(config))
    model = AutoModelForSequenceClassification.from_pretrained(base, trust_remote_code=True, id2label=names)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["score"]))
    values = {name: value for name, value in adapted.named_parameters() if value.requires_grad}
    write_adapter(adapted, values, tmp_path / "copy", "SEQ_CLS")
    assert (tmp_path / "copy" / BASE_CONFIG / "config.json").exists()
    expected = ExpectedModel("AutoModelForSequenceClassification", "float32", labels=2, names=names, trusted=True)
    assert reload_in_fresh_process(tmp_path / "copy", expected) == (0, 0)
    with pytest.raises(RuntimeError, match="wrong label names"):
        reload_in_fresh_process(tmp_path / "copy", dataclasses.replace(expected, names={0: "yes", 1: "no"}))
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "copy")
    card = "\n".join(loading_instructions(expected.auto_class, ["no", "yes"], "text-classification", has_code=True))
    scope: dict[str, Any] = {"folder": str(tmp_path / "copy")}
    exec(card.partition("```python\n")[2].partition("```")[0], scope)
    assert scope["model"].config.id2label == names and scope["classify"].model is scope["model"]


@pytest.mark.slow
def test_reload_of_a_model_that_was_trained_in_16_bits_measures_their_rounding_if_its_logits_are_far_away(
    tmp_path: Path,
) -> None:
    folder, probe = save_tiny_causal(tmp_path / "tied"), tmp_path / PROBE
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    inputs = {"input_ids": torch.arange(12).view(2, 6), "attention_mask": torch.ones(2, 6, dtype=torch.long)}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        save_file(inputs | {"logits": model(**inputs).logits.float()}, probe)
    expected = ExpectedModel("AutoModelForCausalLM", "float32", probe=probe, compute="bfloat16", tolerance=1e-6)
    distance, rounding = reload_in_fresh_process(folder, expected)
    assert 1e-4 < distance < 0.1 and rounding == pytest.approx(distance, rel=1e-3)
    assert reload_in_fresh_process(folder, dataclasses.replace(expected, tolerance=0.1)) == (distance, 0)
    assert reload_in_fresh_process(folder, dataclasses.replace(expected, compute=None)) == (distance, 0)


def test_tolerance_of_an_export_grows_with_the_rounding_of_its_model_up_to_a_limit(tmp_path: Path) -> None:
    def job(precision: str) -> ExportJob:
        recipe = Recipe.model_validate(
            minimal_values(model={"name": "m"}, data={"train": "t.jsonl"}, precision=precision)
        )
        return ExportJob(recipe, "AutoModelForCausalLM", tmp_path, None, None, "float32", merge=False, most=1)

    assert [job("bf16").tolerance_with(rounding) for rounding in (0.0, 0.01, 0.034, 0.9)] == [0.03, 0.03, 0.068, 0.1]
    assert [job(precision).compute for precision in ("fp32", "fp16", "fp8")] == [None, "float16", "bfloat16"]


def test_find_probe_of_a_checkpoint_is_that_of_the_same_step(tmp_path: Path) -> None:
    run, path = RunFolder(tmp_path), tmp_path / PROBE
    run.final.mkdir()
    for step, expected in ((4, path), (2, None)):
        (folder := tmp_path / f"step-{step:06d}").mkdir()
        (folder / "state.json").write_text(json.dumps({"step": step}))
        save_file({"logits": torch.zeros(2, 3)}, path, metadata={"step": "4"})
        assert find_probe(run, folder) == expected


def test_find_probe_of_a_damaged_file_is_logged_and_not_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, path = RunFolder(tmp_path), tmp_path / PROBE
    run.final.mkdir()
    save_file({"logits": torch.zeros(2, 3)}, path, metadata={"step": "4"})
    assert find_probe(run, None) == path and capsys.readouterr().err == ""
    whole = path.read_bytes()
    for content in (b"", whole[:20], whole[:-4], bytes(len(whole))):
        path.write_bytes(content)
        assert find_probe(run, None) is None
        assert f"{path} is damaged and not used" in capsys.readouterr().err
