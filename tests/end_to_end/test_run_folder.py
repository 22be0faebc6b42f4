"""The files of a run folder, and the commands that read them. Tiny models, one process."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ftcli._version import __version__
from ftcli.checkpoint.folder import read_state, update_state
from ftcli.config.load import load_recipe
from ftcli.runtime.checkpoint_names import checkpoints_of
from ftcli.runtime.run_folder import RunFolder

from ..support.recipes import recipe_values
from ..support.runner import MakeInputs, RunCli

SFT = recipe_values(
    evaluate={"every_steps": 2},
)
LORA = {"adapter": {"type": "lora", "r": 3, "lora_alpha": 6}}
TEXT = {
    "task": "text_classification",
    "model": {"name": "encoder", "dropout": 0.0},
    "data": {"train": "texts.jsonl", "eval_rows": 5},
}
IMAGE = {"task": "image_classification", "model": {"name": "vit"}, "data": {"train": "images", "eval_rows": 5}}
FILES = {
    "recipe.yaml",
    "profile.yaml",
    "environment.json",
    "events.jsonl",
    "metrics.jsonl",
    "status.json",
    "probe.safetensors",
    "checkpoints",
}
WEIGHTS = {"model.safetensors", "config.json", "generation_config.json"}
ADAPTER = {"adapter_model.safetensors", "adapter_config.json"}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
OWN_TASK = '''
"""A task of the user's own: the text's length as its label, on the parts of text_classification."""
import numpy as np
from pydantic import BaseModel, ConfigDict
from ftcli.models.losses import cross_entropy_rows
from ftcli.models.load import load_model; from ftcli.models.tokenizer import load_tokenizer
from ftcli.tasks import text_classification as text
from ftcli.tasks.shared.classification import classification_rows

class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    long_from: int = 20

class Task:
    item, columns, peft_type = "sample", ("text",), None
    auto_class = "AutoModelForSequenceClassification"
    blank, collate, count = text.Task.blank, text.Task.collate, text.Task.count
    save_processor, probe, finish_model = text.Task.save_processor, text.Task.probe, text.Task.finish_model

    def __init__(self, recipe, options):
        self.recipe, self.options, self.tokenizer = recipe, options, load_tokenizer(recipe.model)

    def fingerprint(self):
        return f"length {self.options.long_from}"

    def survey(self, rows):
        return {}

    def encode(self, row, facts):
        ids = self.tokenizer(row["text"])["input_ids"]
        return [{"input_ids": ids, "target": int(len(ids) >= self.options.long_from), "items": 1}]

    def load_model(self, facts, **kwargs):
        return load_model(self.auto_class, self.recipe, new_head=True, labels=["short", "long"], **kwargs)

    def logits(self, model, batch):
        return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits

    def loss(self, model, batch):
        return cross_entropy_rows(self.logits(model, batch), batch["targets"]).sum()

    def eval_step(self, model, batch):
        return classification_rows(self.logits(model, batch), batch["targets"])

    def metrics(self, rows):
        return {"loss": float(rows["loss"].sum() / rows["items"].sum()), "long": float(np.mean(rows["prediction"]))}
'''


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    return make_inputs({"my_task.py": OWN_TASK})


@pytest.fixture
def ftcli(inputs: Path, monkeypatch: pytest.MonkeyPatch, run_cli: RunCli) -> RunCli:
    """Return `run_cli` in the folder of inputs."""
    monkeypatch.chdir(inputs)
    return run_cli


@pytest.fixture
def train(tmp_path: Path, ftcli: RunCli) -> Callable[..., Path]:
    """Return a function that trains the small recipe with changes and gives the run folder."""

    def run(changes: dict[str, Any], *arguments: object) -> Path:
        recipe, output = tmp_path / "small.yaml", tmp_path / "run"
        recipe.write_text(yaml.safe_dump(SFT | changes))
        code, out, err = ftcli("train", recipe, "--output", output, *arguments)
        assert code == 0, err
        assert ("best checkpoint: step" in err) == ("keep_best" in changes.get("checkpoint", {}))
        assert out == (f"{output}-dry-run\n" if "--dry-run" in arguments else f"{output}\n")
        return Path(out.rstrip("\n"))

    return run


def names(folder: Path) -> set[str]:
    return {item.name for item in folder.iterdir()}


def rows_of(run: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    rows = RunFolder(run).metrics()
    return [row for row in rows if "loss" in row], [row for row in rows if "loss" not in row]


def test_train_writes_exactly_these_files(train: Callable[..., Path], ftcli: RunCli) -> None:
    run = train({})
    assert names(run) == FILES | {"final"}
    assert names(run / "final") == WEIGHTS | TOKENIZER | {"README.md"}
    assert json.loads((run / "final" / "generation_config.json").read_text())["eos_token_id"] == [1]
    assert "Answers end with `<|im_end|>`" in (run / "final" / "README.md").read_text()
    training, evaluations = rows_of(run)
    assert [row["step"] for row in training] == [1, 2, 3, 4]
    expected = {"step", "loss", "grad_norm", "learning_rate", "items", "samples", "epoch", "seconds"}
    speed = {"tokens_per_second", "rows_per_second", "data_wait_share", "peak_memory_gb"}
    assert all({key for key in row if not key.startswith("load/")} == expected | speed for row in training)
    assert all(row["items"] > 0 and row["samples"] > 0 and 0 <= row["data_wait_share"] <= 1 for row in training)
    assert [row["step"] for row in evaluations] == [2, 4]
    assert all(set(row) == {"step", "eval/loss", "eval/perplexity"} for row in evaluations)
    assert training[-1]["loss"] < training[0]["loss"]
    status = RunFolder(run).status()
    assert {name: status[name] for name in ("state", "step", "exit_code", "error")} == {
        "state": "done",
        "step": 4,
        "exit_code": 0,
        "error": "",
    }
    assert load_recipe(run / "recipe.yaml") == load_recipe(run.parent / "small.yaml")
    assert yaml.safe_load((run / "profile.yaml").read_text()) is None
    environment = json.loads((run / "environment.json").read_text())
    assert environment["packages"]["torch"] and environment["packages"]["transformers"]
    assert {"git_commit", "device", "python", "command"} <= environment.keys()
    assert (environment["processes"], environment["launched"]) == (1, "directly")
    parts = environment["seconds_of_loading"]
    expected_parts = ("imports", "recipe", "rows", "devices", "model", "kernels", "optimizer", "placing", "other")
    assert tuple(parts) == expected_parts
    assert all(seconds >= 0 for seconds in parts.values())
    assert 0 < sum(parts.values()) < environment["seconds_to_first_step"]
    card = (run / "final" / "README.md").read_text()
    assert f"| loss | {evaluations[-1]['eval/loss']:.4f} |" in card

    code, out, _ = ftcli("show", run)
    assert code == 0 and "done at step 4" in out and "eval     step 4: eval/loss" in out
    code, out, err = ftcli("evaluate", run)
    assert code == 0, err
    last = {name.removeprefix("eval/"): value for name, value in evaluations[-1].items() if name != "step"}
    assert json.loads(out) == pytest.approx(last, rel=1e-6)
    assert json.loads((run / "evaluation.json").read_text()) == json.loads(out)
    code, out, _ = ftcli("generate", run, "--prompt", "alpha", "--prompt", "beta", "--max-new-tokens", 3)
    assert code == 0 and out.count("\n\n") == 1
    _refuses_an_export_of_other_weights(run, ftcli)


def test_evaluate_keeps_the_class_weights_of_the_trained_rows(
    train: Callable[..., Path], ftcli: RunCli, inputs: Path, tmp_path: Path
) -> None:
    rows = (inputs / "texts.jsonl").read_text().splitlines(keepends=True)
    few = next(row for row in rows if '"label": "z"' in row)
    (tmp_path / "train.jsonl").write_text("".join(rows[:30]))
    (tmp_path / "eval.jsonl").write_text("".join(rows[30:]))
    data = TEXT["data"] | {"train": str(tmp_path / "train.jsonl"), "eval": str(tmp_path / "eval.jsonl")}
    data.pop("eval_rows", None)
    run = train(TEXT | {"data": data, "task_options": {"class_weights": "balanced"}})
    code, first, err = ftcli("evaluate", run)
    assert code == 0, err
    (tmp_path / "train.jsonl").write_text("".join(rows[:30] + [few] * 20))
    code, again, err = ftcli("evaluate", run)
    assert code == 0 and json.loads(again) == json.loads(first), err
    newest = checkpoints_of(run)[-1]
    update_state(newest, data=read_state(newest)["data"] | {"facts": None})  # as older versions wrote it
    for is_gone in (False, True):
        if is_gone:
            shutil.rmtree(run / "checkpoints")
        code, again, err = ftcli("evaluate", run)
        assert code == 0 and "no checkpoint with class weights, so they are those of today's training rows" in err, err
        assert json.loads(again)["loss"] != json.loads(first)["loss"]


def _refuses_an_export_of_other_weights(run: Path, ftcli: RunCli) -> None:
    """Change one weight of the trained model; the comparison of logits must see it and leave nothing behind."""
    from safetensors.torch import load_file, save_file

    weights = load_file(run / "final" / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] *= 1.5
    save_file(weights, run / "final" / "model.safetensors", metadata={"format": "pt"})
    before = names(run.parent)
    code, out, err = ftcli("export", run, run.parent / "exported")
    assert code == 1 and out == ""
    assert "differ from those of the trained model" in err
    (run / "final" / "model.safetensors").write_bytes(b"rubbish")
    code, _, err = ftcli("export", run, run.parent / "exported", "--trust-remote-code")
    assert code == 2 and "model.safetensors is damaged" in err
    assert names(run.parent) == before


@pytest.mark.parametrize(
    "changes",
    [pytest.param(LORA, marks=pytest.mark.slow), pytest.param(TEXT | LORA, marks=pytest.mark.slow)],
    ids=["sft", "text"],
)
def test_export_of_an_adapter_with_and_without_merge_succeeds(
    changes: dict[str, Any], train: Callable[..., Path], ftcli: RunCli
) -> None:
    run = train(changes)
    assert names(run / "final") >= ADAPTER and "model.safetensors" not in names(run / "final")
    _, evaluations = rows_of(run)
    code, out, err = ftcli("evaluate", run)
    last = {name.removeprefix("eval/"): value for name, value in evaluations[-1].items() if name != "step"}
    assert code == 0 and json.loads(out) == pytest.approx(last, rel=1e-6), err
    for merge in (False, True):
        target = run.parent / f"exported {merge}"
        code, out, err = ftcli("export", run, target, *(["--merge"] * merge))
        assert code == 0, err
        assert out == f"{target}\n" and "loads in plain transformers" in err
        assert names(target) >= ({"model.safetensors", "config.json"} if merge else ADAPTER)
        assert merge != (names(target) >= ADAPTER)
    for place in (target, Path("~") / os.path.relpath(target, Path.home())):
        code, _, err = ftcli("export", run, place)
        assert code == 2 and "is not an empty folder" in err


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, IMAGE], ids=["sft", "image"])
def test_export_of_a_full_model_succeeds_and_merge_is_refused(
    changes: dict[str, Any], train: Callable[..., Path], ftcli: RunCli
) -> None:
    run = train(changes)
    (run.parent / "exported.tmp").mkdir()
    (run.parent / "exported.tmp" / "notes.txt").write_text("somebody else's")
    code, _, err = ftcli("export", run, run.parent / "exported", "--trust-remote-code")
    assert code == 0, err
    assert (run.parent / "exported.tmp" / "notes.txt").exists()
    assert {"model.safetensors", "config.json"} <= names(run.parent / "exported")
    code, _, err = ftcli("export", run, run.parent / "merged", "--merge")
    assert code == 2 and "--merge: this run trained the whole model" in err
    code, _, err = ftcli("generate", run, "--prompt", "alpha", "--max-new-tokens", 2)
    assert code == (2 if changes else 0), err
    assert not changes or "does not generate text" in err


def test_metrics_of_several_sources_have_a_loss_each_in_steps_with_their_rows(
    inputs: Path, train: Callable[..., Path], ftcli: RunCli
) -> None:
    chats = (inputs / "chats.jsonl").read_text().splitlines(keepends=True)
    (inputs / "many.jsonl").write_text("".join(chats[:40]))
    (inputs / "few.jsonl").write_text("".join(chats[40:]))
    sources = [{"path": "many.jsonl"}, {"path": "few.jsonl", "label": "rare"}]
    run = train(
        {
            "data": {
                "train": sources,
                "eval": [dict(one) for one in sources[::-1]],
                "max_length": 128,
                "drop_last": False,
            }
        }
    )
    training, evaluations = rows_of(run)
    keys = {"train/many/loss", "train/rare/loss"}
    assert "train/many/loss" in training[0] and all(row["train/many/loss"] > 0 for row in training)
    lines = [keys & set(row) for row in training]
    assert {"train/many/loss"} in lines  # 42 rows in steps of 6, two of them rare: most steps have none
    assert all(row["loss"] == pytest.approx(row["train/many/loss"]) for row in training if len(keys & set(row)) == 1)
    assert {"eval/many/loss", "eval/rare/loss"} <= set(evaluations[0])
    first, last = training[0]["train/many/loss"], training[-1]["train/many/loss"]
    assert f"loss     many: {first:.4f} at step 1, {last:.4f} at step 4\n" in ftcli("show", run)[1]


def test_train_with_tracker_tensorboard_writes_its_rows(train: Callable[..., Path]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train({"log": {"trackers": ["tensorboard"]}})
    events = list(run.rglob("events.out.tfevents.*"))
    scalars = {}
    for path in events:
        accumulator = EventAccumulator(str(path))
        accumulator.Reload()
        scalars |= {tag: accumulator.Scalars(tag) for tag in accumulator.Tags()["scalars"]}
    training, evaluations = rows_of(run)
    assert [event.value for event in scalars["loss"]] == pytest.approx([row["loss"] for row in training])
    assert [event.step for event in scalars["eval/loss"]] == [row["step"] for row in evaluations]


def test_train_with_log_report_writes_the_report(train: Callable[..., Path]) -> None:
    best = {"keep_best": {"metric": "loss", "direction": "min"}}
    run = train({"log": {"report": True}, "train": {"max_steps": 2}, "checkpoint": best})
    assert names(run) == FILES | {"final", "report.html"}
    events = [(row["event"], row["step"]) for row in map(json.loads, (run / "events.jsonl").read_text().splitlines())]
    events = [event for event in events if event[0] in ("launch", "checkpoint")]  # a busy machine has others too
    assert events == [("launch", 0), ("checkpoint", 2)]
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "no profile (NO), processes: 1, device: cpu" in page and "Loss per item" in page
    assert "Best checkpoint of run: step 2 has the smallest loss of the checkpoints that were evaluated" in page


@pytest.mark.parametrize(
    "profile", [(), pytest.param(("--profile", "ddp", "--num-processes", "2", "--cpu"), marks=pytest.mark.slow)]
)
def test_train_that_fails_writes_the_report_of_its_own_run(
    profile: tuple[str, ...], tmp_path: Path, ftcli: RunCli
) -> None:
    (tmp_path / "failing.py").write_text(
        "from ftcli.tasks import sft\nOptions = sft.Options\n\nclass Task(sft.Task):\n    calls = 0\n\n"
        "    def loss(self, *arguments):\n        self.calls += 1\n"
        "        if self.calls > 2: raise RuntimeError('the task fails')\n        return super().loss(*arguments)\n"
    )
    changes = {"task": str(tmp_path / "failing.py"), "log": {"report": True, "every_steps": 1}}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SFT | changes))
    run = tmp_path / "run"
    code, _, err = ftcli("train", tmp_path / "small.yaml", "--output", run, *profile)
    assert code == 1 and f"report: {run / 'report.html'}" in err, err
    assert "failed at step" in (run / "report.html").read_text(encoding="utf-8")
    (run / "report.html").unlink()
    code, _, err = ftcli("train", tmp_path / "small.yaml", "--output", run, *profile)  # after the status "failed"
    assert code == 2 and "already holds a run" in err and not (run / "report.html").exists()


def test_train_that_fails_in_its_first_step_writes_no_report(tmp_path: Path, ftcli: RunCli) -> None:
    (tmp_path / "failing.py").write_text(
        "from ftcli.tasks import sft\nOptions = sft.Options\n\nclass Task(sft.Task):\n"
        "    def loss(self, *arguments):\n        raise RuntimeError('the task fails')\n"
    )
    changes = {"task": str(tmp_path / "failing.py"), "log": {"report": True}, "evaluate": {"every_steps": 1}}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SFT | changes))
    code, _, err = ftcli("train", tmp_path / "small.yaml", "--output", tmp_path / "run")
    assert code == 1 and "the task fails" in err and "report" not in err


def test_train_whose_report_fails_says_so_in_one_line_and_exits_with_0(tmp_path: Path, ftcli: RunCli) -> None:
    (tmp_path / "run" / "report.html").mkdir(parents=True)
    changes = {"log": {"report": True}, "train": {"max_steps": 1}}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SFT | changes))
    code, out, err = ftcli("train", tmp_path / "small.yaml", "--output", tmp_path / "run")
    assert code == 0 and out == f"{tmp_path / 'run'}\n"
    (line,) = [line for line in err.splitlines() if "the report could not" in line]
    assert line.startswith("ftcli: the report could not be written: ") and "is a directory" in line


def test_dry_run_does_two_steps_an_evaluation_and_a_save(train: Callable[..., Path]) -> None:
    run = train({"schedule": {"warmup_steps": 3}, "train": {"epochs": 2.0}}, "--dry-run")
    assert names(run.parent) == {"small.yaml", "run-dry-run"}
    training, evaluations = rows_of(run)
    assert [row["step"] for row in training] == [1, 2] and len(evaluations) == 1
    assert "model.safetensors" in names(run / "final")


def test_train_after_a_dry_run_succeeds(inputs: Path, ftcli: RunCli) -> None:
    (inputs / "twice.yaml").write_text(yaml.safe_dump(SFT))
    for _ in range(2):
        code, out, err = ftcli("train", "twice.yaml", "--dry-run")
        assert code == 0, err
    code, out, err = ftcli("train", "twice.yaml")
    assert code == 0, err
    assert out == "runs/twice\n" and RunFolder("runs/twice").status()["step"] == 4
    code, _, err = ftcli("train", "twice.yaml", "--dry-run")  # and leaves the real one alone
    assert code == 0, err
    assert RunFolder("runs/twice").status()["step"] == 4
    shutil.rmtree("runs")


@pytest.mark.slow
def test_train_with_an_own_task_file_succeeds(train: Callable[..., Path], ftcli: RunCli) -> None:
    run = train(TEXT | {"task": "./my_task.py", "task_options": {"long_from": 30}})
    training, evaluations = rows_of(run)
    assert len(training) == 4 and set(evaluations[-1]) == {"step", "eval/loss", "eval/long"}
    assert json.loads((run / "final" / "config.json").read_text())["label2id"] == {"short": 0, "long": 1}
    code, _, err = ftcli("export", run, run.parent / "exported", "--trust-remote-code")
    assert code == 0, err
    code, _, err = ftcli("train", run / "recipe.yaml", "--output", run.parent / "b", "--set", "task_options.long=3")
    assert code == 2 and "unknown key 'long' in task_options" in err and "long_from" in err


def test_environment_json_has_the_version_of_an_installed_ftcli(ftcli: RunCli) -> None:
    code, out, _ = ftcli("version")
    assert code == 0 and __version__ in out
