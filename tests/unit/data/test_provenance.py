"""Rows in messages: by file and number, wherever a sample id comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ftcli.data.sampler import hold_out_rows
from ftcli.loop import steps
from ftcli.runtime.errors import RunError
from ftcli.training.run import Run
from ftcli.training.setup import prepare

from ...support.cells import cell
from ...support.runner import MakeInputs

BATCH = {"global_size": 2, "micro_size": 1}


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    folder = make_inputs()
    for name in "ab":
        texts = [{"text": name * 5 * (number + 1)} for number in range(8)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    return folder


def run_of(folder: Path, data: dict[str, Any], name: str = "pretrain") -> Run:
    return prepare(cell(folder, name, data={"max_length": 32} | data, batch=BATCH, train={"max_steps": 3}), cpu=True)


def test_provenance_with_a_row_is_named_by_its_source_and_its_number_there(inputs: Path) -> None:
    a, b = str(inputs / "a.jsonl"), str(inputs / "b.jsonl")
    run = run_of(inputs, {"train": [{"path": a, "weight": 2}, {"path": b, "max_rows": 3}]})
    rows = list(run.rows.train)
    everything = run.guard.name_rows(range(len(rows)))
    assert len(rows) > 2 * 8 + 3  # long rows are several
    assert everything == [f"{a}:{n}" for n in range(1, 9)] + [
        f"{b}:{n + 1}" for n in sorted({row["row"] for row in rows if row["source"] == 1})
    ]
    for row in rows:
        (name,) = run.guard.name_rows([row["id"]])
        path, number = name.rsplit(":", 1)
        text = json.loads(Path(path).read_text().splitlines()[int(number) - 1])["text"]
        letters = run.task.tokenizer.decode(row["input_ids"], skip_special_tokens=True)  # type: ignore[attr-defined]
        assert letters and letters in text


def test_provenance_of_training_rows_skips_held_out_rows(inputs: Path) -> None:
    chats = str(inputs / "chats.jsonl")
    run = run_of(inputs, {"train": chats, "eval_rows": 5, "packing": True, "max_length": 256}, "sft-tied")
    train_rows = hold_out_rows(42, 5, 0)[0]
    assert run.guard.name_rows([36, 7]) == [f"{chats}:{train_rows[7] + 1}", f"{chats}:{train_rows[36] + 1}"]


def test_provenance_with_an_image_of_a_folder_is_named_by_its_own_file(inputs: Path) -> None:
    run = run_of(inputs, {"train": str(inputs / "images")}, "vit")
    assert run.guard.name_rows([0, 29]) == [str(inputs / "images/green/1.png"), str(inputs / "images/red/8.png")]
    (inputs / "images").rename(inputs / "elsewhere")  # it is not listed for every step that is named
    assert run.guard.name_rows([29]) == [str(inputs / "images/red/8.png")]
    (inputs / "elsewhere").rename(inputs / "images")


def test_provenance_with_a_row_of_a_stream_is_named_by_its_file(inputs: Path) -> None:
    (inputs / "stream").mkdir()
    for name in "ab":
        (inputs / "stream" / f"{name}.jsonl").write_text((inputs / f"{name}.jsonl").read_text())
    run = run_of(inputs, {"train": str(inputs / "stream"), "streaming": True, "packing": True, "max_length": 64})
    ids = np.concatenate([batch["sample_ids"].numpy() for batch, _ in zip(run.train_loader, range(20), strict=False)])
    names = run.guard.name_rows(ids.tolist())
    assert sorted(names) == [f"{inputs}/stream/{name}.jsonl:{n}" for name in "ab" for n in range(1, 9)]


POISONED_TASK = """
import os
from ftcli.tasks import pretrain

Options = pretrain.Options

class Task(pretrain.Task):
    def loss(self, model, batch):
        parts = super().loss(model, batch)
        if not (batch["input_ids"] == self.tokenizer.convert_tokens_to_ids("a")).any():
            return parts
        if os.environ["BAD"] == "loss":
            return parts * float("nan")
        return parts + (parts - parts.detach()).abs().sqrt()  # 0, and its derivative is not a number
"""


@pytest.mark.parametrize("bad", ["loss", "gradient"])
@pytest.mark.parametrize("streams", [False, True])
def test_provenance_with_a_step_that_is_not_finite_names_its_rows(
    bad: str, streams: bool, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (inputs / "poisoned.py").write_text(POISONED_TASK)
    monkeypatch.setenv("BAD", bad)
    sources: Any = [str(inputs / f"{name}.jsonl") for name in "ab"]
    data = {"train": str(inputs / "[ab].jsonl"), "streaming": True} if streams else {"train": sources}
    recipe = cell(
        inputs,
        "pretrain",
        task=str(inputs / "poisoned.py"),
        data=data | {"max_length": 64, "truncation": "split"},
        batch=BATCH,
        train={"max_steps": 8},
    )
    run = prepare(recipe, cpu=True)
    letter = run.task.tokenizer.convert_tokens_to_ids("a")  # type: ignore[attr-defined]
    batches = [batch for batch, _ in zip(run.train_loader, range(16), strict=False)]
    is_bad = [bool((batch["input_ids"] == letter).any()) for batch in batches]
    first = is_bad.index(True) // 2 * 2  # of the two micro-batches of its step
    guilty = [n for n in (first, first + 1) if bad == "gradient" or is_bad[n]]
    names = run.guard.name_rows([int(id_) for n in guilty for id_ in batches[n]["sample_ids"]])
    assert names and all(name.split(":")[0] in sources for name in names)
    with pytest.raises(RunError) as caught:
        list(steps(prepare(recipe, cpu=True)))
    where = "not finite on rank 0, rows" if bad == "loss" else "the gradient is not; rows of the step:"
    assert f"step {first // 2 + 1}: loss " in str(caught.value)
    assert f"{where} {', '.join(names)}. The step was not saved" in str(caught.value)
