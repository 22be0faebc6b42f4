"""A task is one file: it is found, started, checked, previewed, trained, evaluated and exported without other edits."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from ftcli.runtime.resources import PACKAGE
from ftcli.runtime.run_folder import RunFolder
from ftcli.testing import save_tiny_encoder

# Of a kind that no shipped task is of: one label for each token.
VOWELS = '''"""Mark the vowels of a text: one label for each token. Loss: cross-entropy summed over tokens."""

from pydantic import BaseModel, ConfigDict, Field

from ftcli.tasks.protocol import Span
from ftcli.tasks.shared.batches import attention_mask, pad


class Options(BaseModel):
    """Keys of task_options."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    letters: str = Field("aeiou", description="The letters to mark.")


class Task:
    """One text, a label for each of its tokens."""

    item = "token"
    columns = ("text",)
    text_columns = ("text",)
    auto_class = "AutoModelForTokenClassification"
    peft_type = None
    pipeline_tag = "token-classification"
    needs_tokenizer = True
    metric_names = ("loss", "accuracy")
    starting_recipe = {
        "data": {"max_length": 64},
        "optimizer": {"learning_rate": 0.01},
        "batch": {"global_size": 8, "micro_size": 4},
    }

    def __init__(self, recipe, options):
        from ftcli.models.tokenizer import load_tokenizer

        self.recipe, self.options, self.tokenizer = recipe, options, load_tokenizer(recipe.model)

    def fingerprint(self):
        return self.tokenizer.backend_tokenizer.to_str() + self.options.letters

    def survey(self, rows):
        return {}

    def encode(self, row, facts):
        ids = self.tokenizer(row["text"])["input_ids"][: self.recipe.data.max_length]
        marks = [int(self.tokenizer.decode([token]) in self.options.letters) for token in ids]
        return [{"input_ids": ids, "marks": marks, "items": len(ids)}]

    def load_model(self, facts, **kwargs):
        from ftcli.models.load import load_model

        return load_model(self.auto_class, self.recipe, new_head=True, labels=["other", "vowel"], **kwargs)

    def finish_model(self, model):
        pass

    def describe_row(self, row, facts):
        letters = [(self.tokenizer.decode([token]), mark) for token, mark in zip(row["input_ids"], row["marks"])]
        return [Span(text, is_trained=bool(mark)) for text, mark in letters], {"vowels": str(sum(row["marks"]))}

    def blank(self, row):
        return row | {"marks": [-100] * len(row["marks"]), "items": 0}

    def collate(self, rows):
        ids = [list(row["input_ids"]) for row in rows]
        return {
            "input_ids": pad(ids, self.tokenizer.pad_token_id),
            "attention_mask": attention_mask([len(row) for row in ids]),
            "marks": pad([list(row["marks"]) for row in rows], -100),
        }

    def count(self, batch):
        return int((batch["marks"] != -100).sum())

    def _each(self, model, batch):
        from ftcli.models.losses import cross_entropy_rows

        logits = model(**self.probe(batch)).logits
        marks = batch["marks"]
        loss = cross_entropy_rows(logits.flatten(0, 1), marks.flatten()).view(marks.shape)
        return loss, (logits.argmax(dim=-1) == marks) & (marks != -100)

    def loss(self, model, batch):
        return self._each(model, batch)[0][batch["marks"] != -100]

    def eval_step(self, model, batch):
        loss, right = self._each(model, batch)
        items = (batch["marks"] != -100).sum(dim=1)
        return {"loss": loss.double().sum(dim=1), "items": items.double(), "right": right.sum(dim=1).double()}

    def metrics(self, rows):
        items = float(rows["items"].sum())
        return {"loss": float(rows["loss"].sum()) / items, "accuracy": float(rows["right"].sum()) / items}

    def save_processor(self, folder):
        self.tokenizer.save_pretrained(folder)

    def probe(self, batch):
        return {name: batch[name] for name in ("input_ids", "attention_mask")}
'''

# The commands of a user for each task, as the command line starts them, in one process.
COMMANDS = """
import sys

import pytest

from ftcli.__main__ import main

for task in sys.argv[1:]:
    name = task.removeprefix("./").removesuffix(".py")
    for line in (
        ["show", "tasks"],
        ["init", task, "--model", "model", "--data", "rows.jsonl"],
        ["check", f"{name}.yaml", "--cpu"],
        ["preview", f"{name}.yaml", "--rows", "1"],
        ["train", f"{name}.yaml", "--cpu", "--output", f"{name}-run"],
        ["evaluate", f"{name}-run", "--cpu", "--trust-remote-code"],
        ["export", f"{name}-run", f"{name}-weights", "--trust-remote-code"],
    ):
        print("##", name, *line, flush=True)
        with pytest.raises(SystemExit) as ended:
            main(line)
        assert not ended.value.code, line
"""
TASKS = {"vowels": "vowels", "my_vowels": "./my_vowels.py"}  # among ftcli's own tasks, and in the user's folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, rows, a task of the user, and a copy of ftcli with the same file among its own."""
    folder = tmp_path_factory.mktemp("new-task")
    copy = folder / "copy"
    shutil.copytree(PACKAGE, copy / "ftcli", ignore=shutil.ignore_patterns("__pycache__"))
    for shipped in ("recipes", "accelerate_configs"):
        os.symlink(PACKAGE.parent / shipped, copy / shipped)
    (copy / "ftcli" / "tasks" / "vowels.py").write_text(VOWELS)
    (folder / "my_vowels.py").write_text(VOWELS)
    save_tiny_encoder(folder / "model")
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "rhythm"]
    rows = [{"text": f"{words[i % 6]} {words[i % 5]} {words[i % 4]}"} for i in range(60)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def printed(folder: Path) -> dict[tuple[str, str], str]:
    """Return (task, command) -> what the command printed."""
    own = dict(os.environ) | {"PYTHONPATH": str(folder / "copy"), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    line = [sys.executable, "-c", COMMANDS, *TASKS.values()]
    done = subprocess.run(line, cwd=folder, env=own, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    parts = [part.partition("\n") for part in done.stdout.split("## ")[1:]]
    return {(line.split()[0], line.split()[1]): text for line, _, text in parts}


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_new_task_file_works_in_every_command_without_other_edits(
    name: str, folder: Path, printed: dict[tuple[str, str], str]
) -> None:
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    assert "vowels" in printed[name, "show"]
    recipe = yaml.safe_load((folder / f"{name}.yaml").read_text())
    assert (recipe["task"], recipe["data"]["max_length"]) == (TASKS[name], 64)
    assert recipe["optimizer"]["learning_rate"] == 0.01
    assert recipe["task_options"] == {"letters": "aeiou"}
    if name == "vowels":  # a user's task is not imported by check
        assert "tokens per step" in printed[name, "check"]
    assert "vowels" in printed[name, "preview"]
    losses = [row["loss"] for row in RunFolder(folder / f"{name}-run").metrics() if "loss" in row]
    assert losses[-1] < 0.5 * losses[0]
    assert "accuracy" in printed[name, "evaluate"]
    weights = folder / f"{name}-weights"
    assert "pipeline_tag: token-classification" in (weights / "README.md").read_text()
    model = AutoModelForTokenClassification.from_pretrained(weights).eval()
    with torch.no_grad():
        predicted = model(**AutoTokenizer.from_pretrained(weights)("beta", return_tensors="pt")).logits.argmax(dim=-1)[
            0
        ]
    assert [model.config.id2label[int(index)] for index in predicted] == ["other", "vowel", "other", "vowel"]
