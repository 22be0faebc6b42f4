"""Columns that the starting weights give: computed once, found again, and refused if other weights would give them."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from ftcli.config.task_registry import FROM_FILE
from ftcli.loop import steps, train
from ftcli.models import weight_files_digest
from ftcli.runtime.errors import InputError
from ftcli.runtime.resources import cache_root
from ftcli.training import derived_columns
from ftcli.training.evaluation import evaluate
from ftcli.training.setup import prepare

from ...support.cells import LORA, cell, write_inputs
from ...support.two_terms import DERIVED, two_terms

FULL = """        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


def folders() -> set[str]:
    return {path.name for path in (cache_root() / "derived").glob("*")}


def test_add_columns_returns_values_of_the_starting_weights_in_row_order(inputs: Path) -> None:
    run = prepare(two_terms(inputs, DERIVED), cpu=True)
    assert run.derived in folders()
    column = run.rows.derived["train"]["start_nll"]
    assert column.shape == (len(run.rows.train),) and column.dtype == np.float32
    assert run.rows.eval is not None and run.rows.derived["eval"]["start_nll"].shape == (len(run.rows.eval),)
    drift = [step.term_losses["drift"] for step in steps(run)]
    assert drift[0] == pytest.approx(1.0, rel=1e-6) and drift[-1] < 0.99


def test_add_columns_reuses_the_columns_of_equal_settings_only(
    inputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = prepare(two_terms(inputs, DERIVED), cpu=True).derived
    assert key is not None

    def refuse(*args: Any) -> Any:
        raise AssertionError("computed again")

    monkeypatch.setattr(derived_columns, "_compute", refuse)
    again = prepare(two_terms(inputs, DERIVED, batch={"global_size": 12, "micro_size": 1}), cpu=True)
    assert again.derived == key
    origin = "read from the cache, computed on device cpu, 1 process"
    assert f"derived columns start_nll of 42 rows: {origin} (key {key[:8]})" in again.log_lines
    others: dict[str, dict[str, Any]] = {
        "another precision": {"precision": "bf16"},
        "other weights and other settings of the model": {"model": {"name": str(inputs / "untied"), "dropout": 0.0}},
    }
    for words, changes in others.items():
        capsys.readouterr()
        with pytest.raises(AssertionError, match="computed again"):
            prepare(two_terms(inputs, DERIVED, **changes), cpu=True)
        line = "computing the derived columns of 37 train rows and 5 eval rows with the starting weights; "
        assert f"{line}those of these rows in the cache belong to {words}\n" in capsys.readouterr().err


def test_add_columns_out_of_memory_error_lists_micro_sizes_that_fit(inputs: Path) -> None:
    full = DERIVED.replace("    def derive(self, model, batch):\n", f"    def derive(self, model, batch):\n{FULL}")
    assert full != DERIVED
    (inputs / "full.py").write_text(full)
    recipe = two_terms(inputs, DERIVED, batch={"global_size": 6, "micro_size": 2})
    with pytest.raises(InputError, match="ran out of memory in deriving columns") as error:
        prepare(recipe.model_copy(update={"task": str(inputs / "full.py")}), cpu=True)
    assert "set batch.micro_size to 1:" in str(error.value)


def test_a_resumed_run_reads_or_rebuilds_the_columns_of_the_starting_weights(inputs: Path, tmp_path: Path) -> None:
    recipe = two_terms(inputs, DERIVED, checkpoint={"every_steps": 2}, log={"every_steps": 1})
    train(prepare(recipe, cpu=True, output=tmp_path / "run"))
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000002"
    state = json.loads((checkpoint / "state.json").read_text())
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    expected = [row["train/drift"] for row in rows if "loss" in row][2:]
    for is_gone in (False, True):
        if is_gone:
            shutil.rmtree(cache_root() / "derived" / state["derived"])
        run = prepare(recipe, cpu=True, resume=checkpoint)
        assert run.derived == state["derived"]
        drift = [step.term_losses["drift"] for step in steps(run)]
        # Bit for bit if the columns are read. A column that is computed again may differ by the rounding of float32.
        assert drift == (pytest.approx(expected, rel=1e-6) if is_gone else expected)

    metrics = evaluate(prepare(recipe, cpu=True, weights=tmp_path / "run" / "final"))
    assert metrics["drift"] < 0.99  # the columns are those of the starting weights, not of the final ones
    shutil.rmtree(cache_root() / "derived" / state["derived"])
    with pytest.raises(InputError, match="needs the weights at the start of the training"):
        prepare(recipe, cpu=True, weights=tmp_path / "run" / "final")


def test_columns_of_finished_weights_belong_to_their_rows_only(inputs: Path, tmp_path: Path) -> None:
    rows = (inputs / "chats.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(rows[:30]))
    (tmp_path / "eval.jsonl").write_text("".join(rows[30:]))
    data = {"train": str(tmp_path / "train.jsonl"), "eval": str(tmp_path / "eval.jsonl"), "max_length": 128}
    recipe = two_terms(inputs, DERIVED, checkpoint={"every_steps": 2}, data=data)
    train(prepare(recipe, cpu=True, output=tmp_path / "run"))
    final: dict[str, Any] = {"cpu": True, "weights": tmp_path / "run" / "final"}
    expected = evaluate(prepare(recipe, **final))
    (tmp_path / "train.jsonl").write_text("".join(rows[:31]))
    run = prepare(recipe, **final)
    assert evaluate(run) == expected
    with pytest.raises(InputError, match="the training rows are not those of the run of the given weights"):
        next(steps(run))
    meta = cache_root() / "derived" / str(run.derived) / "meta.json"
    content = meta.read_text()
    meta.write_text(json.dumps({name: part for name, part in json.loads(content).items() if name != "parts"}))
    assert evaluate(prepare(recipe, **final)) == expected  # columns of an older version: only their number is known
    (tmp_path / "eval.jsonl").write_text("".join(rows[31:]))
    with pytest.raises(InputError, match="the evaluation rows are not those of the run of "):
        prepare(recipe, **final)
    meta.write_text(content)
    for changed in (rows[:29:-1], rows[30:] + rows[:1], rows[31:]):
        (tmp_path / "eval.jsonl").write_text("".join(changed))
        with pytest.raises(InputError, match="the evaluation rows are not those of the run of "):
            prepare(recipe, **final)


def test_evaluation_rows_that_the_run_did_not_have_have_no_columns(inputs: Path, tmp_path: Path) -> None:
    rows = (inputs / "chats.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(rows[:30]))
    data: dict[str, Any] = {"train": str(tmp_path / "train.jsonl"), "max_length": 128}
    train(prepare(two_terms(inputs, DERIVED, data=data), cpu=True, output=tmp_path / "run"))
    (tmp_path / "eval.jsonl").write_text("".join(rows[30:]))
    later = two_terms(inputs, DERIVED, data=data | {"eval": str(tmp_path / "eval.jsonl")})
    with pytest.raises(InputError, match="the evaluation rows are not those of the run of "):
        prepare(later, cpu=True, weights=tmp_path / "run" / "final")


def test_task_that_derives_no_column_trains(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text(
        "from ftcli.tasks.sft import Options\nfrom ftcli.tasks.sft import Task as Sft\n\n\n"
        "class Task(Sft):\n    def derive(self, model, batch):\n        return {}\n"
    )
    rows = (inputs / "chats.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "eval.jsonl").write_text("".join(rows[30:]))
    data = {"train": str(inputs / "chats.jsonl"), "eval": str(tmp_path / "eval.jsonl"), "max_length": 128}
    recipe = cell(inputs, "sft-tied", task=str(tmp_path / "none.py"), train={"max_steps": 2}, data=data)
    assert len(list(steps(prepare(recipe, cpu=True)))) == 2
    train(run := prepare(recipe, cpu=True, output=tmp_path / "run"))
    before = evaluate(run)["loss"]
    (tmp_path / "eval.jsonl").write_text("".join(rows[:29:-1]))  # no columns that could belong to other rows
    assert evaluate(prepare(recipe, cpu=True, weights=tmp_path / "run" / "final"))["loss"] == pytest.approx(before)


def test_add_columns_of_other_weights_is_refused_on_resume(inputs: Path) -> None:
    run = prepare(two_terms(inputs, DERIVED), cpu=True)
    other = {"derived": "0" * 32}
    with pytest.raises(InputError, match="not those that the checkpoint was trained on"):
        derived_columns.add_columns(run, state=other, anyway=False)
    derived_columns.add_columns(run, state=other, anyway=True)
    derived_columns.add_columns(run, state={"derived": run.derived}, anyway=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda values: {"input_ids": values}, "'input_ids', which cannot be a new column"),
        (lambda values: {"start_nll": values[:1]}, "\\[1\\] for start_nll, but the batch has 3 rows"),
    ],
)
def test_a_column_of_a_wrong_name_or_shape_is_refused(
    change: Any, words: str, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepare(two_terms(inputs, DERIVED), cpu=True)
    derive = run.task.derive  # type: ignore[attr-defined]
    monkeypatch.setattr(run.task, "derive", lambda model, batch: change(derive(model, batch)["start_nll"]))
    monkeypatch.setattr(derived_columns, "columns_key", lambda parts: "1" * 32)
    with pytest.raises(InputError, match=words):
        derived_columns.add_columns(run, anyway=False)


@pytest.fixture
def base(inputs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(inputs / "tied", tmp_path / "base"))


def pairs_run(inputs: Path, model: Path, adapter: dict[str, Any] = LORA, **section: Any) -> Any:
    model_section = {"name": str(model), "dropout": 0.0, **section}
    return prepare(cell(inputs, "preference", model=model_section, adapter=adapter), cpu=True)


def test_weights_from_files_are_identified_without_gathering_them(
    inputs: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(run: Any) -> str:
        raise AssertionError("gathered")

    monkeypatch.setattr(derived_columns, "_values_digest", refuse)
    key = pairs_run(inputs, base).derived
    copy = Path(shutil.copytree(base, tmp_path / "copy"))
    assert pairs_run(inputs, copy, LORA | {"r": 2}).derived == key  # another adapter on a copy of the base
    file = copy / "model.safetensors"
    before, weights = file.stat(), load_file(file)
    name, value = max(weights.items(), key=lambda item: item[1].numel())
    value.view(-1)[value.numel() // 2] += 1.0
    save_file(weights, file, {"format": "pt"})
    assert file.stat().st_size == before.st_size, name
    assert pairs_run(inputs, copy).derived != key
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert pairs_run(inputs, base).derived != key
    with pytest.raises(AssertionError, match="gathered"):  # the rows of new tokens are in no file
        pairs_run(inputs, base, new_tokens=["<new>"])


def test_digests_of_files_are_remembered_until_a_file_changes(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = cell(base.parent, "preference", model={"name": str(base)})
    file, read = base / "model.safetensors", list[Path]()
    digest = weight_files_digest.file_digest
    monkeypatch.setattr(weight_files_digest, "file_digest", lambda path: read.append(path) or digest(path))
    first = weight_files_digest.weight_files_digest(given)
    assert weight_files_digest.weight_files_digest(given) == first and len(read) == 2  # a young file may change again
    monkeypatch.setattr(weight_files_digest, "UNCHANGED_SECONDS", -1.0)
    assert {weight_files_digest.weight_files_digest(given) for _ in range(3)} == {first} and len(read) == 3
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert weight_files_digest.weight_files_digest(given) != first and len(read) == 4


def test_a_checkpoint_from_before_the_digest_of_files_resumes(inputs: Path, base: Path) -> None:
    run = pairs_run(inputs, base)
    parts = derived_columns.key_parts(run)
    in_float32, *_, before = derived_columns._keys_of_earlier_versions(run, parts)
    assert in_float32 == derived_columns.columns_key(parts | {"format": 2})
    for key in (in_float32, before):
        assert key != derived_columns.columns_key(parts)
        derived_columns.add_columns(run, state={"derived": key}, anyway=False)
        assert run.derived == key


READING = """
import json
from pathlib import Path

SCALE = json.loads(Path(__file__).with_name("scale.json").read_text())
"""


def test_columns_of_a_task_depend_on_the_files_that_it_reads_and_not_on_their_place(
    inputs: Path, tmp_path: Path
) -> None:
    def run_of(place: str, scale: str) -> Any:
        file = tmp_path / place / "reading.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(DERIVED + READING)
        file.with_name("scale.json").write_text(scale)
        sys.modules.pop(f"{FROM_FILE}reading", None)  # as in a new process
        return prepare(two_terms(inputs, DERIVED, task=str(file)), cpu=True)

    first, moved, other = run_of("here", "1"), run_of("there", "1"), run_of("here", "2")
    assert first.rows.digests == other.rows.digests  # the rows do not depend on the file
    assert first.derived == moved.derived != other.derived
    _, earlier, _ = derived_columns._keys_of_earlier_versions(other, derived_columns.key_parts(other))
    derived_columns.add_columns(other, state={"derived": earlier}, anyway=False)  # a checkpoint from before the files
    assert other.derived == earlier


def test_add_columns_keeps_columns_published_by_another_run(tmp_path: Path) -> None:
    folder = tmp_path / "columns"
    derived_columns._publish(folder, {"train": {"x": np.zeros(3)}}, {})
    (folder / "meta.json").rename(folder / "meta.hidden")  # as if it came after the look
    (folder / "meta.hidden").rename(folder / "meta.json")
    derived_columns._publish(folder, {"train": {"x": np.ones(3)}}, {})
    assert np.load(folder / "train" / "x.npy").tolist() == [0.0] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["columns"]


def test_rows_of_a_stream_cannot_have_columns(inputs: Path) -> None:
    data = {"train": str(inputs / "chats.jsonl"), "max_length": 128, "streaming": True}
    with pytest.raises(InputError, match="rows of a stream cannot have"):
        prepare(two_terms(inputs, DERIVED, data=data), cpu=True)
