"""The end tokens that were trained are those of generation_config.json and of the model card. Tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from ftcli.checkpoint.answer_ends import BASE_LACKS_IT, complete_answer_ends, write_answer_ends
from ftcli.checkpoint.model_card import merged_card, model_card
from ftcli.config.recipe import Recipe
from ftcli.models.own_model import save_config
from ftcli.tasks.build import build_task
from ftcli.testing import save_tiny_causal

from ...support.recipes import minimal_values

LORA = {"type": "lora"}
# The template ends turns with <|im_end|> (1); the end token of tokenizer and model is <|im_start|> (0).
CASES: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    "chats": ("sft", {}, [1, 0]),
    "adapter": ("sft", {"adapter": LORA}, [1, 0]),
    "pairs": ("preference", {}, [1, 0]),
    "labelled": ("unpaired_preference", {}, [1, 0]),
    "text, and chats as they are": ("sft", {"task_options": {"chat": "never"}}, [0, 1]),
    "documents": ("pretrain", {}, [0]),
}


@pytest.mark.parametrize("case", CASES)
def test_write_answer_ends_adds_what_was_trained_before_the_ends_of_the_base(case: str, tmp_path: Path) -> None:
    task_name, changes, expected = CASES[case]
    base = save_tiny_causal(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.eos_token = "<|im_start|>"
    tokenizer.save_pretrained(base)
    GenerationConfig(eos_token_id=0, top_k=5, do_sample=True).save_pretrained(base)
    values = minimal_values(task_name, model={"name": str(base)}, data={"train": "rows.jsonl", "max_length": 32})
    recipe = Recipe.model_validate(values | changes)
    task, model = build_task(recipe), AutoModelForCausalLM.from_pretrained(base)
    folder, is_adapter = tmp_path / "final", "adapter" in changes
    if is_adapter:
        folder.mkdir()
    else:
        save_config(None, model, folder)
    write_answer_ends(task, model, folder)
    settings = json.loads((folder / "generation_config.json").read_text())
    assert settings["eos_token_id"] == expected and settings["top_k"] == 5 and "_from_model_config" not in settings
    assert GenerationConfig.from_pretrained(folder).eos_token_id == expected
    final = folder  # as an earlier version wrote it
    task.save_processor(str(final))
    if is_adapter:
        (final / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
        (final / "generation_config.json").unlink()
        exported = tmp_path / "exported"
        exported.mkdir()
    else:
        GenerationConfig(eos_token_id=[0], top_k=5, do_sample=True).save_pretrained(final)
        exported = final
    complete_answer_ends(recipe, final, exported)
    assert json.loads((exported / "generation_config.json").read_text()) == settings
    card = model_card(recipe, {}, model, task.auto_class, task=task)
    names = ["`<|im_start|>`", "`<|im_end|>`"]
    trained = names if expected == [0, 1] else [names[expected[0]]]
    assert f"Answers end with {' or '.join(trained)}: `generation_config.json` has it" in card
    assert f"library_name: {'peft' if is_adapter else 'transformers'}" in card
    assert is_adapter or "library_name" not in model_card(recipe, {})  # a module that no class of transformers loads
    assert (BASE_LACKS_IT in card) == is_adapter and BASE_LACKS_IT not in merged_card(card)
