"""Bad input through the real command line: exit code 2, what, where and what to do, no traceback, nothing lost.

Most cases share this process, because importing torch takes seconds; the last ones start real processes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from ftcli import testing

from ..support.runner import RunCli

ROOT = Path(__file__).resolve().parents[2]
RUBBISH = bytes(range(256)) * 20
CHATS = [{"prompt": f"question {n}", "completion": f"answer {n}"} for n in range(12)]
TEXTS = [{"text": f"text {n}", "label": "xy"[n % 2]} for n in range(12)]
SFT: dict[str, Any] = {
    "task": "sft",
    "model": {"name": "causal", "dropout": 0.0},
    "data": {"train": "chats.jsonl"},
    "batch": {"global_size": 4, "micro_size": 2},
    "train": {"max_steps": 2},
    "optimizer": {"learning_rate": 1e-3},
}
PAIRS = {"task": "preference", "data": {"train": "pairs.jsonl"}}
TEXT = {"task": "text_classification", "model": {"name": "encoder"}, "data": {"train": "texts.jsonl"}}
MULTI = {"task_options": {"problem_type": "multi_label_classification"}}
IMAGE = {"task": "image_classification", "model": {"name": "vit"}, "data": {"train": "images"}}


def jsonl(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def chat(answer: dict[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", **answer}]}


# name -> content; most of it cannot be trained on
FILES: dict[str, str | bytes] = {
    "chats.jsonl": jsonl(CHATS),
    "texts.jsonl": jsonl(TEXTS),
    "first.jsonl": RUBBISH,
    "later.jsonl": jsonl(CHATS[:1]).encode() + RUBBISH,
    "latin.jsonl": jsonl(CHATS[:2]).encode() + '{"prompt": "é", "completion": "x"}\n'.encode("latin-1"),
    "rubbish.csv": RUBBISH,
    "rubbish.json": RUBBISH,
    "rubbish.parquet": RUBBISH,
    "rows.xyz": "a,b\n",
    "broken.jsonl": jsonl(CHATS[:4]) + '{"prompt": "a",\n' + jsonl(CHATS[4:]),
    "list.jsonl": jsonl([*CHATS[:2], [1, 2], *CHATS]),
    "empty.jsonl": "",
    "blank.jsonl": "\n\n",
    "empty.json": "[]",
    "header.csv": "prompt,completion\n",
    "answers.jsonl": jsonl([{"question": "a", "answer": "b"}] * 8),
    "bodies.jsonl": jsonl([{"body": "a", "category": "x"}] * 8),
    "messages.jsonl": jsonl([chat({"content": "b"} if n != 2 else {}) for n in range(8)]),
    "late.jsonl": jsonl([chat({"content": "b"} if n != 9 else {}) for n in range(12)]),  # after the first rows
    "roles.jsonl": jsonl([{"messages": [{"role": "bot", "content": "b"}]}] * 8),
    "numbers.jsonl": jsonl([CHATS[0], {"prompt": ["a"], "completion": "b"}] * 4).replace('["a"]', "null"),
    "long.jsonl": jsonl([{"prompt": "x" * 200, "completion": "y"}] * 8),
    "unseen.jsonl": jsonl([TEXTS[0], {"text": "a", "label": "z"}]),
    "null.jsonl": jsonl([*TEXTS[:3], {"text": "a", "label": None}, *TEXTS]),
    "several.jsonl": jsonl([{"text": "a", "label": ["x", "y"]}] * 8),
    "mixed.jsonl": jsonl([{"text": "a", "label": ["x", "y"]}] * 2 + [{"text": "a", "label": "x"}] * 6),
    "not_finite.jsonl": jsonl([{"text": "a", "label": n} for n in (0.5, float("nan"), *range(6))]),
    "weights.jsonl": jsonl([{"prompt": "a", "completion": "b", "weight": n} for n in (1, -1, *range(6))]),
    "numbered.jsonl": jsonl([{"text": "a", "label": 1 + n % 2} for n in range(8)]),
    "zero.jsonl": jsonl([{"text": "a", "label": 0}]),
    "system.jsonl": jsonl([CHATS[0], {"prompt": "<system>", "completion": "b"}] * 4),
    "ids.jsonl": jsonl([{"id": f"q{n}", **row} for n, row in enumerate(CHATS)]),
    "single.jsonl": jsonl([TEXTS[0]] * 8),
    "pairs.jsonl": jsonl([{"prompt": f"p {n}", "chosen": "yes", "rejected": "no" if n else "yes"} for n in range(8)]),
    "one_sided.jsonl": jsonl([{"prompt": "p", "chosen": "yes"}] * 8),
    "nan_margin.jsonl": jsonl(
        [
            {"prompt": f"p {n}", "chosen": "yes", "rejected": "no", "margin": float("nan") if n == 2 else 1.0}
            for n in range(8)
        ]
    ),
    "long_pairs.jsonl": jsonl([{"prompt": "p" * 200, "chosen": f"yes {n}", "rejected": "no"} for n in range(8)]),
    "judged.jsonl": jsonl([{"prompt": f"p {n}", "completion": "c", "label": 0.5} for n in range(8)]),
}

# name -> (changes to the recipe, what stderr must say)
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no data file": ({"data": {"train": "chat.jsonl"}}, ("data.train: no data at", "did you mean 'chats.jsonl'?")),
    "no data file like it": (
        {"data": {"train": "/no/such.csv"}},
        ("data.train: no data at /no/such.csv", "a relative path starts at the current folder"),
    ),
    "no data set": ({"data": {"train": "nobody/nothing"}}, ("nobody/nothing", "neither on this machine nor")),
    "no data format": ({"data": {"train": "rows.xyz"}}, ("data.train: ", "no known data format", ".parquet")),
    "rubbish": ({"data": {"train": "first.jsonl"}}, ("first.jsonl:1: row 1 is not JSON", "one JSON object a line")),
    "rubbish after a row": (
        {"data": {"train": "later.jsonl"}},
        ("later.jsonl:2: row 2 is not JSON", "one JSON object a line"),
    ),
    "another encoding": ({"data": {"train": "latin.jsonl"}}, ("latin.jsonl:3", "not UTF-8")),
    "rubbish as csv": ({"data": {"train": "rubbish.csv"}}, ("rubbish.csv", "not UTF-8")),
    "rubbish as json": ({"data": {"train": "rubbish.json"}}, ("rubbish.json", "not UTF-8")),
    "rubbish as parquet": ({"data": {"train": "rubbish.parquet"}}, ("rubbish.parquet: cannot be read", "Parquet")),
    "a broken line": ({"data": {"train": "broken.jsonl"}}, ("broken.jsonl:5: row 5 is not JSON",)),
    "a row that is a list": ({"data": {"train": "list.jsonl"}}, ("list.jsonl:3: row 3 is not a JSON object",)),
    "an empty file": ({"data": {"train": "empty.jsonl"}}, ("empty.jsonl is empty", "at least one row")),
    "blank lines": ({"data": {"train": "blank.jsonl"}}, ("blank.jsonl is empty",)),
    "an empty list": ({"data": {"train": "empty.json"}}, ("empty.json has no rows",)),
    "a header alone": ({"data": {"train": "header.csv"}}, ("data.train: ", "header.csv has no rows")),
    "empty evaluation": ({"data": {"train": "chats.jsonl", "eval": "empty.json"}}, ("empty.json has no rows",)),
    "too many held out": ({"data": {"train": "chats.jsonl", "eval_rows": 12}}, ("data.eval_rows 12", "no rows")),
    "too few rows": ({"batch": {"global_size": 64}}, ("12 rows, fewer than batch.global_size 64", "lower")),
    "no column of answers": ({"data": {"train": "answers.jsonl"}}, ("'messages'", "question, answer", "data.columns")),
    "no column of texts": (
        TEXT | {"data": {"train": "bodies.jsonl"}},
        ("no column 'text', 'label'", "the columns are body, category"),
    ),
    "no column of that name": (
        {"data": {"train": "chats.jsonl", "columns": {"prompt": "promt"}}},
        ("no column 'promt'", "the columns are prompt, completion"),
    ),
    "a message without content": ({"data": {"train": "messages.jsonl"}}, ("row 3 of messages.jsonl", "message 2 has")),
    "an unknown role": ({"data": {"train": "roles.jsonl"}}, ("row 1 of roles.jsonl", "'bot'", "assistant")),
    "a prompt that is missing": ({"data": {"train": "numbers.jsonl"}}, ("row 2 of numbers.jsonl", "it has completion")),
    "answers beyond the cut": (
        {"data": {"train": "long.jsonl", "max_length": 32}},
        ("8 of 8 rows of long.jsonl contain no trainable tokens, 8 of them because data.max_length is 32", "split"),
    ),
    "an unseen label": (
        TEXT | {"data": {"train": "texts.jsonl", "eval": "unseen.jsonl"}},
        ("row 2 of unseen.jsonl: label 'z' is not one of: x, y", "fix or delete that row"),
    ),
    "an unseen number as label": (
        TEXT | {"data": {"train": "numbered.jsonl", "eval": "zero.jsonl"}},
        ("row 1 of zero.jsonl: label 0 is not one of: 1, 2",),
    ),
    "a turn that the template refuses": (
        {"model": {"name": "picky"}, "data": {"train": "system.jsonl"}},
        ("row 2 of system.jsonl", "chat template rejects it: no system here"),
    ),
    "a label that is near": (
        TEXT | {"task_options": {"labels": ["yy", "x"]}},
        ("row 2 of texts.jsonl: label 'y' is not one of: yy, x; did you mean 'yy'?",),
    ),
    "a label outside the options": (
        TEXT | {"task_options": {"labels": ["x", "w"]}},
        ("row 2 of texts.jsonl: label 'y' is not one of: x, w",),
    ),
    "a row without a label": (TEXT | {"data": {"train": "null.jsonl"}}, ("row 4 of null.jsonl: has no label",)),
    "several labels": (TEXT | {"data": {"train": "several.jsonl"}}, ("row 1 of several.jsonl has several labels",)),
    "several labels and single ones": (
        TEXT | MULTI | {"data": {"train": "mixed.jsonl"}},
        ("row 3 of mixed.jsonl: label 'x' is not a list", "fix or delete that row"),
    ),
    "a number that is not finite": (
        TEXT | {"task_options": {"problem_type": "regression"}, "data": {"train": "not_finite.jsonl"}},
        ("row 2 of not_finite.jsonl: label is nan; it must be a finite float32",),
    ),
    "a class weight without a class": (
        TEXT | {"task_options": {"class_weights": {"w": 2.0}}},
        ("class_weights has a weight for 'w', which is not one of: x, y",),
    ),
    "a weight below 0": (
        {"data": {"train": "weights.jsonl"}},
        ("row 2 of weights.jsonl: `weight` is -1; it must be a number, 0 or above", "fix or delete that row"),
    ),
    "one label": (TEXT | {"data": {"train": "single.jsonl"}}, ("one label only: x", "two or more")),
    "equal answers": (
        PAIRS,
        ("row 1 of pairs.jsonl", "`chosen` and `rejected` are the same answer", "fix or delete that row"),
    ),
    "one side of pairs": (
        PAIRS | {"data": {"train": "one_sided.jsonl"}},
        ("no column 'chosen' and 'rejected'", "the columns are prompt, chosen"),
    ),
    "rows of another task": (
        PAIRS | {"data": {"train": "chats.jsonl"}},
        ("contains prompt and completion, which this task does not train on", "set task: sft"),
    ),
    "a margin that is not a number": (
        PAIRS | {"data": {"train": "nan_margin.jsonl"}},
        ("row 3 of nan_margin.jsonl", "`margin` is nan; it must be a finite float32", "fix or delete that row"),
    ),
    "answers that the cut makes equal": (
        PAIRS | {"data": {"train": "long_pairs.jsonl", "max_length": 32}},
        ("8 of 8 rows of long_pairs.jsonl contain no trainable tokens", "raise data.max_length\n"),
    ),
    "scored answers that the cut makes equal": (
        PAIRS | {"task": "reward", "data": {"train": "long_pairs.jsonl", "max_length": 32}},
        ("8 of 8 rows of long_pairs.jsonl contain no trainable tokens", "raise data.max_length\n"),
    ),
    "a loss with a reference for a task without one": (
        PAIRS | {"task": "reward", "task_options": {"losses": {"sigmoid": {}}}},
        ("recipe_of_test.yaml:", "unknown key 'losses' in task_options", "task reward takes attributes, center"),
    ),
    "labelled answers for pairs": (
        PAIRS | {"data": {"train": "judged.jsonl"}},
        ("contains labelled answers, which this task does not train on", "set task: unpaired_preference"),
    ),
    "a stream of pairs": (
        PAIRS | {"data": {"train": "pairs.jsonl", "streaming": True}},
        ("data.streaming: preference needs all rows before the first step", "set data.streaming to false"),
    ),
    "split pairs": (
        PAIRS | {"data": {"train": "pairs.jsonl", "truncation": "split"}},
        ("data.truncation: preference does not support split", "set it to truncate or drop"),
    ),
    "split texts": (
        TEXT | {"data": {"train": "texts.jsonl", "truncation": "split"}},
        ("data.truncation: text_classification does not support split", "set it to truncate or drop"),
    ),
    "a loss that does not exist": (
        PAIRS | {"task_options": {"losses": {"sigmoyd": {}}}},
        ("task_options.losses: no preference loss 'sigmoyd'", "did you mean 'sigmoid'?"),
    ),
    "a label that is no boolean": (
        {"task": "unpaired_preference", "data": {"train": "judged.jsonl"}},
        ("row 1 of judged.jsonl", "`label` is 0.5; it must be true for a desirable answer"),
    ),
    "no images": (
        IMAGE | {"data": {"train": "vit"}},
        ("data.train: ", "contains no images", "one sub-folder per label"),
    ),
    "a broken image": (IMAGE | {"data": {"train": "broken_images"}}, ("row 4 of broken_images", "cannot read image")),
    "no model": ({"model": {"name": "nobody/no-such-model"}}, ("neither on this machine nor", "check the spelling")),
    "no name of a model": ({"model": {"name": "no such model!"}}, ("model.name: no model folder at",)),
    "no model folder": ({"model": {"name": "./cuasal"}}, ("no model folder at", "did you mean 'causal'?")),
    "data that is no name on the hub": ({"data": {"train": "my chats/rows"}}, ("data.train: no data at",)),
    "pattern without streaming": ({"data": {"train": "chats.jsonl", "eval": "chats/*.gz"}}, ("data.eval: no data at",)),
    "no model folder, no data file and no prompts": (
        {
            "model": {"name": "./cuasal"},
            "data": {"train": "chat.jsonl", "eval": "chat.csv"},
            "evaluate": {"every_steps": 1, "generate": {"file": "prompts.txt"}},
        },
        ("no model folder at", "chat.jsonl", "did you mean 'chats.jsonl'?", "chat.csv", "prompts.txt"),
    ),
    "an encoder for sft": ({"model": {"name": "encoder"}}, ("do not fit a BertLMHeadModel", "name a model that fits")),
    "a masked encoder for sft": ({"model": {"name": "masked"}}, ("masked is an encoder (bert)", "causal")),
    "an image model for sft": ({"model": {"name": "vit"}}, ("vit has no tokenizer", "tokenizer.json")),
    "a language model for images": (
        IMAGE | {"model": {"name": "causal"}},
        ("AutoImageProcessor cannot load causal", "preprocessor_config.json"),
    ),
    "broken weights": ({"model": {"name": "broken"}}, ("broken/model.safetensors cannot be read", "may be incomplete")),
    "half a download": (
        {"model": {"name": "short"}},
        ("short/model.safetensors ends after", "download or copy it again"),
    ),
    "a shard that lacks": (
        {"model": {"name": "sharded"}},
        ("1 of 2 weight files of sharded are missing, first model-2.safetensors",),
    ),
    "no weights": ({"model": {"name": "empty_model"}}, ("empty_model has no weights", "model.safetensors")),
    "a run for a model": ({"model": {"name": "./a_run"}}, ("is not a model folder", "its weights are a_run/final")),
    "broken configuration": (
        {"model": {"name": "misconfigured"}},
        ("misconfigured/config.json: cannot be read: Expecting property name",),
    ),
    "an unknown kernel": (
        {"model": {"name": "causal", "attn_implementation": "nonsense"}},
        ("attn_implementation", "nonsense"),
    ),
    "checkpointing that is not there": (
        IMAGE | {"model": {"name": "mobilenet", "gradient_checkpointing": True}},
        ("model.gradient_checkpointing", "set it to none"),
    ),
    "one row per step to mix": (
        IMAGE | {"task_options": {"mixup": 0.2}, "batch": {"global_size": 1}},
        (
            "recipe_of_test.yaml:",
            "task_options.mixup mixes rows of a step",
            "batch.global_size is 1",
            "raise batch.global_size",
        ),
    ),
    "one value for each channel": (
        IMAGE | {"model": {"name": "mobilenet", "batch_norm": "train"}, "batch": {"global_size": 2, "micro_size": 1}},
        ("model.batch_norm: train: ", "gets one value for each of 144 channels", "raise batch.micro_size"),
    ),
    "one image per class": (
        IMAGE | {"data": {"train": "one_each", "eval_rows": 1}, "batch": {"global_size": 2}},
        ("of one_each: label 'd' is not one of: a, b, c (no training row has it)",),
    ),
    "an optimizer for GPUs": (
        {"optimizer": {"name": "adamw_8bit", "learning_rate": 1e-3}},
        ("adamw_8bit needs a GPU",),
    ),
    "no such modules": ({"adapter": {"type": "lora", "target_modules": ["nope"]}}, ("adapter.target_modules", "nope")),
    "a tracker that is not installed": ({"log": {"trackers": ["mlflow"]}}, ("mlflow is not installed", "pip install")),
    "an output that is a file": ({"output": "chats.jsonl"}, ("chats.jsonl is a file", "--output")),
    "an output below a file": ({"output": "chats.jsonl/run"}, ("run folder", "--output")),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny models, two good files, and many bad ones."""
    from transformers import BertConfig, BertForMaskedLM

    folder = tmp_path_factory.mktemp("inputs")
    for name, content in FILES.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    testing.save_tiny_causal(folder / "causal")
    testing.save_tiny_encoder(folder / "encoder")
    testing.save_tiny_vit(folder / "vit")
    testing.save_tiny_mobilenet(folder / "mobilenet")
    config = BertConfig(
        vocab_size=259, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, pad_token_id=1
    )
    BertForMaskedLM(config).save_pretrained(folder / "masked")
    testing.tiny_tokenizer().save_pretrained(folder / "masked")
    shutil.copytree(folder / "causal", folder / "broken")
    (folder / "broken" / "model.safetensors").write_bytes(RUBBISH)
    shutil.copytree(folder / "causal", folder / "short")
    whole = (folder / "causal" / "model.safetensors").read_bytes()
    (folder / "short" / "model.safetensors").write_bytes(whole[:-1])
    shutil.copytree(folder / "causal", folder / "sharded")
    (folder / "sharded" / "model.safetensors").rename(folder / "sharded" / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copytree(folder / "causal", folder / "empty_model")
    (folder / "empty_model" / "model.safetensors").unlink()
    (folder / "a_run" / "final").mkdir(parents=True)
    (folder / "a_run" / "recipe.yaml").write_text(yaml.safe_dump(SFT))
    shutil.copytree(folder / "causal", folder / "misconfigured")
    (folder / "misconfigured" / "config.json").write_text("{no")
    shutil.copytree(folder / "causal", folder / "picky")
    refusal = "{% if messages[0].content == '<system>' %}{{ raise_exception('no system here') }}{% endif %}"
    (folder / "picky" / "chat_template.jinja").write_text(refusal + testing.CHAT_TEMPLATE)
    for index in range(8):
        place = folder / "images" / "ab"[index % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20), (index * 20, 9, 9)).save(place / f"{index}.png")
    for label in "abcd":
        (folder / "one_each" / label).mkdir(parents=True)
        Image.new("RGB", (9, 9)).save(folder / "one_each" / label / "0.png")
    shutil.copytree(folder / "images", folder / "broken_images")
    (folder / "broken_images" / "a" / "6.png").write_bytes(b"no image")
    return folder


Ftcli = Callable[..., tuple[int, str]]


@pytest.fixture
def ftcli(inputs: Path, monkeypatch: pytest.MonkeyPatch, run_cli: RunCli) -> Ftcli:
    """Return a function that runs one command line in this process and gives (exit code, stderr)."""
    monkeypatch.chdir(inputs)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)

    def run(*arguments: object) -> tuple[int, str]:
        code, _, err = run_cli(*arguments)
        return code, err

    return run


def write_recipe(folder: Path, changes: dict[str, Any]) -> Path:
    path = folder / "recipe_of_test.yaml"
    path.write_text(yaml.safe_dump(SFT | changes))
    return path


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("name", CASES)
def test_train_bad_input_is_refused_and_the_corrected_run_uses_the_same_folder(
    name: str, inputs: Path, tmp_path: Path, ftcli: Ftcli
) -> None:
    changes, expected = CASES[name]
    recipe, output = write_recipe(tmp_path, changes), tmp_path / "run"
    before = snapshot(inputs)
    place = () if "output" in changes else ("--output", output)
    code, err = ftcli("train", recipe, *place)
    assert code == 2, err
    assert "Traceback" not in err
    assert err.startswith("error: ") or "\nerror: " in err
    assert not [words for words in expected if words not in err], err
    assert snapshot(inputs) == before
    assert not (output / "final").exists()
    if output.exists():
        from ftcli.runtime.run_folder import RunFolder

        RunFolder(output).claim()  # does not raise


def test_train_after_a_corrected_mistake_uses_the_same_command(tmp_path: Path, ftcli: Ftcli) -> None:
    output = tmp_path / "run"
    recipe = write_recipe(tmp_path, {"data": {"train": "messages.jsonl"}})
    assert ftcli("train", recipe, "--output", output)[0] == 2
    write_recipe(tmp_path, {})
    code, err = ftcli("train", recipe, "--output", output)
    assert code == 0, err
    assert json.loads((output / "status.json").read_text())["state"] == "done"
    assert not list(output.glob("errors/*"))


def test_train_with_an_id_column_in_the_data_succeeds(tmp_path: Path, ftcli: Ftcli) -> None:
    recipe = write_recipe(tmp_path, {"data": {"train": "ids.jsonl"}})
    code, err = ftcli("train", recipe, "--output", tmp_path / "run")
    assert code == 0, err


@pytest.mark.parametrize("profile", [(), ("--profile", "ddp", "--cpu", "--num-processes", "2")])
def test_train_into_a_folder_with_another_run_is_refused_and_changes_nothing(
    profile: tuple[str, ...], tmp_path: Path, ftcli: Ftcli
) -> None:
    recipe, output = write_recipe(tmp_path, {}), tmp_path / "run"
    assert ftcli("train", recipe, "--output", output)[0] == 0
    # as if it were still going: a refused second start must not tell the first one that a rank has failed
    status = json.loads((output / "status.json").read_text()) | {"state": "running"}
    (output / "status.json").write_text(json.dumps(status))
    before = snapshot(output)
    code, err = ftcli("train", recipe, "--output", output, *profile)
    assert code == 2 and f"{output} already holds a run" in err and "--output" in err
    assert "Traceback" not in err
    assert snapshot(output) == before


@pytest.mark.parametrize("name", ["final", "recipe.yaml", "metrics.jsonl"])
def test_train_into_a_folder_without_a_run_is_refused(name: str, tmp_path: Path, ftcli: Ftcli) -> None:
    output = tmp_path / "mine"
    output.mkdir()
    (output / name).write_text("precious")
    code, err = ftcli("train", write_recipe(tmp_path, {}), "--output", output)
    assert code == 2 and name in err
    assert [(p.name, p.read_text()) for p in output.iterdir()] == [(name, "precious")]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--profile", "ddp", "--cpu", "--num-processes", "3"), ("global_size 4", "3 processes", "3 or 6")),
        (("--profile", "ddp"), ("needs GPUs", "--cpu --num-processes 2")),
        (("--profile", "ddp", "--num-processes", "2"), ("needs GPUs", "--cpu")),
        (("--profile", "pdd"), ("'pdd' is neither a profile file", "did you mean")),
        (("--num-processes", "2"), ("exactly one process", "--profile ddp")),
        (("--set", "batch.global_sise=8"), ("batch.global_sise", "did you mean 'global_size'?")),
        (("--set", "task=sff"), ("no task 'sff'", "did you mean 'sft'?")),
        (("--set", "task=./nowhere.py"), ("no task './nowhere.py'", "no such file")),
    ],
)
def test_train_with_impossible_launch_options_is_refused_before_a_folder_is_made(
    arguments: tuple[str, ...], expected: tuple[str, ...], tmp_path: Path, ftcli: Ftcli
) -> None:
    code, err = ftcli("train", write_recipe(tmp_path, {}), "--output", tmp_path / "run", *arguments)
    assert code == 2 and "Traceback" not in err
    assert not [words for words in expected if words not in err], err
    assert not (tmp_path / "run").exists()


def test_train_with_more_processes_than_gpus_is_refused(
    tmp_path: Path, ftcli: Ftcli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    arguments = ("--profile", "fsdp", "--num-processes", "2")
    code, err = ftcli("train", write_recipe(tmp_path, {}), "--output", tmp_path / "run", *arguments)
    assert code == 2 and "2 processes on this machine, but it has 1 visible GPU" in err
    assert "--num-processes 1" in err and not (tmp_path / "run").exists()


def test_check_names_a_custom_task_that_an_upload_may_not_run(tmp_path: Path, ftcli: Ftcli) -> None:
    (tmp_path / "mine.py").write_text("from ftcli.tasks.sft import Options, Task\n")
    recipe = write_recipe(tmp_path, {"task": str(tmp_path / "mine.py"), "hub": {"push": "mine"}})
    code, err = ftcli("check", recipe)
    assert code == 2 and "hub.push: its folder names the task" in err and "add --trust-remote-code" in err
    assert ftcli("check", recipe, "--trust-remote-code")[0] == 0


def test_check_names_a_missing_model_missing_rows_and_a_missing_tracker_in_one_error(
    tmp_path: Path, ftcli: Ftcli
) -> None:
    changes = {"model": {"name": "./cuasal"}, "data": {"train": "chat.jsonl"}, "log": {"trackers": ["mlflow"]}}
    code, err = ftcli("check", write_recipe(tmp_path, changes))
    assert code == 2
    missing = ("mlflow is not installed", "no model folder at", "no data at")
    assert [words for words in missing if words not in err] == [], err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("evaluate", "nowhere"), ("there is no folder nowhere", "give the folder of a run")),
        (("evaluate", "images"), ("images has no run", "give the folder of a run")),
        (("export", "nowhere", "new"), ("there is no folder nowhere", "give the folder of a run")),
        (("export", "a_ran", "new"), ("there is no folder a_ran", "did you mean 'a_run'?")),
        (("export", "images", "new"), ("images has no final weights and no checkpoint",)),
        (("generate", "./nowhere", "--prompt", "x"), ("there is no folder nowhere", "give the folder of a run")),
        (("generate", "a_run/fnal", "--prompt", "x"), ("there is no folder a_run/fnal", "did you mean 'final'?")),
        (("generate", "nowhere/checkpoints/step-000002", "--prompt", "x"), ("there is no folder nowhere/check",)),
        (("show", "nowhere"), ("there is no list, run or checkpoint 'nowhere'",)),
        (("generate", "nobody/nothing", "--prompt", "x"), ("error: nobody/nothing is neither on this machine nor",)),
        (
            ("preview", "quickstart", "--html", "nowhere/page.html"),
            ("the folder nowhere for page.html does not exist",),
        ),
        (("preview", "quickstart", "--html", "images"), ("--html: images is a folder", "images/rows.html")),
        (("preview", "quickstart", "--html", ""), ("--html", "is empty")),
        (("train", "quickstart", "--output", ""), ("--output", "is empty")),
        (("generate", "", "--prompt", "x"), ("the name of the run or model is empty",)),
        (
            ("init", "sft", "--model", "causal", "--data", "chats.jsonl", "--output", "/proc/none.yaml"),
            ("/proc/none.yaml cannot be written", "choose a file with --output"),
        ),
        (("export", "a_run", "chats.jsonl/new"), ("cannot create", "Not a directory", "another folder")),
        (("generate", "vit", "--prompt", "x"), ("cannot load vit",)),
        (("fetch", "nowhere.yaml"), ("'nowhere.yaml' is neither a recipe file",)),
        (("train", "chats.jsonl"), ("chats.jsonl",)),
        (("train", "images"), ("a folder, not a recipe",)),
        (("train", "first.jsonl"), ("first.jsonl",)),
    ],
)
def test_other_commands_with_bad_input_exit_with_code_2(
    arguments: tuple[str, ...], expected: tuple[str, ...], inputs: Path, ftcli: Ftcli
) -> None:
    before = snapshot(inputs)
    code, err = ftcli(*arguments)
    assert code == 2 and "Traceback" not in err, err
    assert not [words for words in expected if words not in err], err
    assert snapshot(inputs) == before


def run_process(inputs: Path, *arguments: object, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    marks = ("FTCLI_LAUNCHED", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    inherited = {name: value for name, value in os.environ.items() if name not in marks}
    added = {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([str(path), str(ROOT)])),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "ftcli", *map(str, arguments)]
    return subprocess.run(command, cwd=inputs, env=inherited | added, capture_output=True, text=True)


def test_train_process_with_a_misspelt_model_ends_without_reaching_for_the_hub(inputs: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, {"model": {"name": "HuggingFaceTB/SmolLM2-135M-Instrcut"}})
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import sys\n"
        "def note(event, given):\n"
        "    if event in ('socket.connect', 'socket.getaddrinfo'):\n"
        f"        print(event, given, file=open({str(tmp_path / 'attempts')!r}, 'a'))\n"
        "sys.addaudithook(note)\n"
    )
    result = run_process(inputs, "train", recipe, "--output", tmp_path / "run", path=tmp_path / "site")
    assert not (tmp_path / "attempts").exists()
    assert result.returncode == 2 and result.stdout == ""
    assert "SmolLM2-135M-Instrcut is neither on this machine nor reachable" in result.stderr
    assert "Traceback" not in result.stderr


def test_train_with_a_deepspeed_profile_without_the_package_is_refused(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "class WithoutDeepSpeed(PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        found = super().find_spec(name, path, target)\n"
        "        return None if name.partition('.')[0] == 'deepspeed' else found\n"
        "sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutDeepSpeed\n"
    )
    arguments = ("train", write_recipe(tmp_path, {}), "--output", tmp_path / "run", "--cpu", "--num-processes", "2")
    result = run_process(inputs, *arguments, "--profile", "zero3", path=tmp_path / "site")
    assert result.returncode == 2, result.stderr
    assert "needs DeepSpeed, which is not installed" in result.stderr and "pip install deepspeed" in result.stderr
    assert "Traceback" not in result.stderr and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_train_launched_with_a_bad_row_prints_its_error_last(inputs: Path, tmp_path: Path) -> None:
    recipe, output = write_recipe(tmp_path, {"data": {"train": "late.jsonl"}}), tmp_path / "run"
    arguments = ("--profile", "ddp", "--cpu", "--num-processes", "2", "--output", output)
    result = run_process(inputs, "train", recipe, *arguments)
    assert result.returncode == 2, result.stderr
    message = "rank 0: row 10 of late.jsonl: message 2 has no text `content`\n    fix or delete that row, or "
    message += "raise data.max_bad_rows to skip invalid rows\n"
    assert result.stderr.endswith(message)
    assert result.stdout == "" and "Traceback" not in result.stderr and "ranks wait for it" not in result.stderr
    assert json.loads((output / "status.json").read_text())["exit_code"] == 2
    fixed = write_recipe(tmp_path, {})
    again = run_process(inputs, "train", fixed, *arguments)
    assert again.returncode == 0, again.stderr
