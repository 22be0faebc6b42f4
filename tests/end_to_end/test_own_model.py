"""Models that are not transformers' own, and transformers' models without logits: from training to export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ftcli
from ftcli.checkpoint.export import export
from ftcli.config.load import load_recipe
from ftcli.launch.worker import evaluate_run, work
from ftcli.models.own_model import load_weights
from ftcli.reports.check import check
from ftcli.reports.comparison import TOLERANCES, Curve, compare
from ftcli.runtime.checkpoint_names import PROBE
from ftcli.runtime.errors import InputError, RunError
from ftcli.runtime.run_folder import RunFolder
from ftcli.task_contract import check_task
from ftcli.testing import run_on_cpu, save_tiny_encoder
from ftcli.training.checkpointing import save_checkpoint
from ftcli.training.final_weights import save_final

OWN = '''
import numpy as np
import torch
from pydantic import BaseModel, ConfigDict

from ftcli.testing import tiny_tokenizer


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Bag(torch.nn.Module):
    """The mean of some embeddings, through one layer."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = torch.nn.Embedding(260, 8)
        self.head = torch.nn.Linear(8, 2)
        self.register_buffer("scale", torch.tensor(2.0))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(generator=generator)

    def forward(self, input_ids):
        return {"scores": self.head(self.embed(input_ids).mean(dim=1)) * self.scale}


class Task:
    item = "sample"
    auto_class = None
    peft_type = None
    columns = ("text", "label")
    uncompared_metrics = ("hits",)

    def __init__(self, recipe, options):
        self.recipe, self.tokenizer = recipe, tiny_tokenizer()

    def fingerprint(self):
        return "bag"

    def survey(self, rows):
        return {}

    def encode(self, row, facts):
        ids = (self.tokenizer(row["text"])["input_ids"] + [0] * 8)[:8]
        return [{"input_ids": ids, "target": int(row["label"] == "x"), "items": 1}]

    def load_model(self, facts, dtype=None, weights=None):
        return Bag(), []

    def finish_model(self, model):
        pass

    def blank(self, row):
        return row | {"target": -100, "items": 0}

    def collate(self, rows):
        return {
            "input_ids": torch.tensor([list(row["input_ids"]) for row in rows]),
            "targets": torch.tensor([row["target"] for row in rows]),
        }

    def count(self, batch):
        return int((batch["targets"] != -100).sum())

    def loss(self, model, batch):
        scores = model(input_ids=batch["input_ids"])["scores"]
        return torch.nn.functional.cross_entropy(scores, batch["targets"], reduction="none", ignore_index=-100)

    def eval_step(self, model, batch):
        loss = self.loss(model, batch)
        return {"loss": loss, "items": (batch["targets"] != -100).long()}

    def metrics(self, rows):
        return {"loss": float(np.sum(rows["loss"]) / np.sum(rows["items"]))}

    def save_processor(self, folder):
        self.tokenizer.save_pretrained(folder)
'''
PROBED = """
    def probe(self, batch):
        return {"input_ids": batch["input_ids"]}

    def probe_output(self, output):
        return output["scores"]

    def save_model(self, model, folder):
        with open(f"{folder}/bag.txt", "w") as file:
            file.write("8 dimensions")
"""


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    rows = [{"text": "abcdef"[n % 5 :] + "xyz"[n % 3], "label": "xyz"[n % 3]} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def recipe(folder: Path, task: str, **model: str) -> Path:
    values: dict[str, Any] = {
        "task": str(folder / "own.py"),
        "data": {"train": str(folder / "rows.jsonl"), "eval_rows": 4, "max_length": 16},
        "batch": {"global_size": 6, "micro_size": 3},
        "train": {"max_steps": 4},
        "optimizer": {"learning_rate": 0.01},
    }
    (folder / "own.py").write_text(task)
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(values | ({"model": model} if model else {})))
    return path


@pytest.mark.parametrize("is_probed", [True, False])
def test_task_with_its_own_module_trains_resumes_evaluates_and_exports(is_probed: bool, inputs: Path) -> None:
    path = recipe(inputs, OWN + PROBED * is_probed)
    assert "task builds its own model" in str(check(path))
    check_task(path)  # its model returns no logits of transformers
    run = ftcli.prepare(path, cpu=True, output=inputs / "run")
    assert any("of its own model: " in fact for fact in run.log_lines)
    assert json.loads((inputs / "run" / "environment.json").read_text())["resolution"] == []  # it is not on the hub
    saved, losses = None, []
    for step in ftcli.steps(run):
        losses.append(step.loss)
        saved = save_checkpoint(run, 2) if step.number == 2 else saved
    expected = ftcli.evaluate(run)
    save_checkpoint(run, 4)
    save_final(run)
    final = load_file(inputs / "run" / "final" / "model.safetensors")
    assert set(final) == {"embed.weight", "head.weight", "head.bias", "scale"}
    assert (inputs / "run" / "final" / "bag.txt").exists() == (inputs / "run" / PROBE).exists() == is_probed
    assert saved is not None
    resumed = ftcli.prepare(path, cpu=True, resume=saved)
    assert [step.loss for step in ftcli.steps(resumed)] == losses[2:]
    assert evaluate_run(inputs / "run", cpu=True, trust_remote_code=True) == pytest.approx(expected)
    for source, name in ((inputs / "run", "a"), (inputs / "run" / "checkpoints" / "step-000004", "b")):
        folder = export(source, inputs / name, trust_remote_code=True)
        values = load_file(folder / "model.safetensors")
        assert all(torch.equal(values[key], final[key]) for key in final)
        assert (folder / "bag.txt").exists() == is_probed


@pytest.mark.parametrize("method", ["save_model", "save_processor", "probe", "probe_output", "answer_ends"])
def test_prepare_with_a_task_whose_method_for_saving_raises_names_its_line(method: str, inputs: Path) -> None:
    arguments = {"save_model": "model, folder", "save_processor": "folder", "probe": "batch", "probe_output": "output"}
    raising = f"\n    def {method}(self, {arguments.get(method, '')}):\n        raise KeyError('no such key')\n"
    path = recipe(inputs, OWN + PROBED + raising)
    line = (inputs / "own.py").read_text().count("\n")
    with pytest.raises(InputError, match=f"the task's method {method} raised KeyError: 'no such key'") as raised:
        ftcli.prepare(path, cpu=True, output=inputs / "run")
    assert raised.value.problems[0].where == f"{inputs / 'own.py'}:{line}"
    ftcli.prepare(path, cpu=True)  # writes nothing


def test_prepare_with_a_task_whose_helper_raises_names_the_method_and_the_line_of_the_helper(inputs: Path) -> None:
    raising = (
        "\n    def probe(self, batch):\n        return helper()\n\n\ndef helper():\n    return [{}['x'] for _ in '1']\n"
    )
    path = recipe(inputs, OWN + PROBED + raising)
    line = (inputs / "own.py").read_text().count("\n")
    with pytest.raises(InputError, match="the task's method probe raised KeyError: 'x'") as raised:
        ftcli.prepare(path, cpu=True, output=inputs / "run")
    assert raised.value.problems[0].where == f"{inputs / 'own.py'}:{line}"


def test_prepare_with_a_task_without_a_method_that_each_task_needs_names_it(inputs: Path) -> None:
    path = recipe(inputs, OWN.replace("def eval_step(", "def eval_stp("))
    with pytest.raises(InputError, match="class Task of task '.*own.py' has no method eval_step.*\n.*'eval_stp'"):
        ftcli.prepare(path, cpu=True)


def test_prepare_with_methods_that_only_the_task_object_has_succeeds(inputs: Path) -> None:
    moved = "\nclass Whole(Task):\n    pass\n\nclass Task:\n    def __init__(self, recipe, options):\n"
    moved += "        self.inner = Whole(recipe, options)\n    def __getattr__(self, name):\n"
    moved += (
        "        return getattr(self.__dict__['inner'], name)\n    auto_class, peft_type, columns = None, None, ()\n"
    )
    loss = next(ftcli.steps(ftcli.prepare(recipe(inputs, OWN + moved), cpu=True))).loss
    assert loss > 0


def test_save_final_with_a_task_that_raises_after_training_names_the_checkpoint(inputs: Path) -> None:
    raising = "\n    def save_model(self, model, folder):\n        assert folder.count('final') == 0, 'not here'\n"
    run = ftcli.prepare(recipe(inputs, OWN + raising), cpu=True, output=inputs / "run")
    with pytest.raises(RunError, match="own.py:.*save_model raised AssertionError: not here.*export the checkpoint"):
        save_final(run)
    assert not (inputs / "run" / "final").exists()
    saved = save_checkpoint(run, 0)
    assert saved is not None
    (inputs / "own.py").write_text(OWN + raising.replace("'final'", "''"))
    with pytest.raises(InputError, match="the task's method save_model raised AssertionError: not here"):
        export(saved, inputs / "exported", trust_remote_code=True)


@pytest.mark.parametrize("is_probed", [True, False])
def test_export_of_an_own_module_with_an_adapter_succeeds(is_probed: bool, inputs: Path) -> None:
    values = json.loads(recipe(inputs, OWN + PROBED * is_probed).read_text())
    path = inputs / "recipe.yaml"
    path.write_text(json.dumps(values | {"adapter": {"type": "lora", "r": 2, "target_modules": ["head"]}}))
    run = ftcli.prepare(path, cpu=True, output=inputs / "run")
    for _ in ftcli.steps(run):
        pass
    save_checkpoint(run, 4)
    save_final(run)
    adapter = load_file(inputs / "run" / "final" / "adapter_model.safetensors")
    assert len(adapter) == 2 and all(torch.isfinite(value).all() for value in adapter.values())
    for source, name in ((inputs / "run", "a"), (inputs / "run" / "checkpoints" / "step-000004", "b")):
        folder = export(source, inputs / name, trust_remote_code=True)
        values = load_file(folder / "adapter_model.safetensors")
        assert values.keys() == adapter.keys() and all(torch.equal(values[key], adapter[key]) for key in adapter)
    if is_probed:
        path = inputs / "run" / PROBE
        probe = load_file(path)
        save_file(probe | {"logits": probe["logits"] + 1}, path, metadata={"step": "4"})
        with pytest.raises(RuntimeError, match="logits of the reloaded model differ"):
            export(inputs / "run", inputs / "other", trust_remote_code=True)
    with pytest.raises(InputError, match="--merge supports models of transformers only"):
        export(inputs / "run", inputs / "merged", merge=True, trust_remote_code=True)


def train_by_worker(path: Path, output: Path) -> None:
    work(load_recipe(path), None, output=output, cpu=True, record_start=True)


def test_train_and_parity_with_an_own_module_succeed(inputs: Path) -> None:
    path = recipe(inputs, OWN)
    train_by_worker(path, inputs / "run")
    curve = Curve.of("own", RunFolder(inputs / "run"))
    assert set(curve.start) == {"embed.weight", "head.weight", "head.bias"}
    assert curve.uncompared == ("hits", "answer_tokens", "answers_ended")
    assert compare(curve, curve, TOLERANCES["fp32"]).weights == 0.0


@pytest.mark.parametrize("profile", [pytest.param(p, marks=pytest.mark.slow) for p in ("fsdp", "zero3")])
def test_save_final_of_an_own_module_on_two_processes_writes_all_weights(profile: str, inputs: Path) -> None:
    path = recipe(inputs, OWN + PROBED)
    train_by_worker(path, inputs / "one")
    run_on_cpu(train_by_worker, path, inputs / "two", profile=profile)
    one, two = (load_file(inputs / name / "final" / "model.safetensors") for name in ("one", "two"))
    assert list(one) == list(two)
    for name in one:
        torch.testing.assert_close(one[name], two[name])


EMBED = """
from pydantic import BaseModel, ConfigDict

from ftcli.tasks.text_classification import Options
from ftcli.tasks.text_classification import Task as Text


class Task(Text):
    auto_class = "AutoModel"

    def load_model(self, facts, **kwargs):
        from ftcli.models.load import load_model

        return load_model(self.auto_class, self.recipe, new_head=False, **kwargs)

    def _rows(self, model, batch):
        inputs = {name: value for name, value in batch.items() if name != "targets"}
        mean = model(**inputs).last_hidden_state[:, 0]
        return (mean - (batch["targets"] > 0).float()[:, None]).square().mean(dim=1) * (batch["targets"] != -100)

    def loss(self, model, batch):
        return self._rows(model, batch).float()

    def eval_step(self, model, batch):
        return {"loss": self._rows(model, batch).float(), "items": (batch["targets"] != -100).long()}

    def metrics(self, rows):
        return {"loss": float(rows["loss"].mean())}
"""


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["none", pytest.param("lora", marks=pytest.mark.slow)])
def test_export_of_a_model_without_logits_verifies_its_probe(adapter: str, inputs: Path) -> None:
    save_tiny_encoder(inputs / "encoder")
    path = recipe(inputs, EMBED, name=str(inputs / "encoder"))
    values = json.loads(path.read_text())
    # The pooler has no part in the loss.
    faults = {"missing_gradient": "warn"}
    path.write_text(json.dumps(values | {"adapter": {"type": adapter}, "faults": faults}))
    run = ftcli.prepare(path, cpu=True, output=inputs / "run")
    for _ in ftcli.steps(run):
        pass
    save_final(run)
    assert load_file(inputs / "run" / PROBE)["logits"].shape[-1] == 32
    export(inputs / "run", inputs / "out", trust_remote_code=True)


def test_prepare_of_a_module_that_cannot_be_saved_is_refused(inputs: Path) -> None:
    wrong = PROBED.replace('return output["scores"]', "return output")
    with pytest.raises(InputError, match="`probe_output` returned an object of type dict"):
        ftcli.prepare(recipe(inputs, OWN + wrong), cpu=True, output=inputs / "run")
    unknown = OWN.replace("auto_class = None", 'auto_class = "AutoBag"')
    other = inputs / "other"
    other.mkdir()
    (other / "rows.jsonl").write_text((inputs / "rows.jsonl").read_text())
    with pytest.raises(InputError, match="auto_class of the task is AutoBag, which transformers does not have"):
        ftcli.prepare(recipe(other, unknown), cpu=True, output=other / "run")


def test_prepare_of_a_parameter_whose_name_no_checkpoint_can_hold_is_refused(inputs: Path) -> None:
    parameter = 'self.register_parameter("a@0", torch.nn.Parameter(torch.ones(1)))'
    odd = OWN.replace("self.register_buffer(", f"{parameter}\n        self.register_buffer(")
    with pytest.raises(InputError, match="the parameter a@0 cannot be saved: @ separates names in checkpoints"):
        ftcli.prepare(recipe(inputs, odd), cpu=True, output=inputs / "run")


def test_prepare_without_model_name_names_the_missing_key(inputs: Path) -> None:
    with pytest.raises(InputError, match="model.name is missing"):
        ftcli.prepare(recipe(inputs, EMBED), cpu=True)


def test_load_of_weights_with_another_shape_is_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"do not fit: bias is missing, but the model has \[2\]"):
        load_weights(torch.nn.Linear(2, 2), tmp_path)
    with pytest.raises(InputError, match="has no weights"):
        load_weights(torch.nn.Linear(2, 2), tmp_path / "none")
