"""What check reads of data and model before it says that all is well, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from safetensors.numpy import save_file

from ftcli.config.recipe import Recipe
from ftcli.config.recipe_data import Source
from ftcli.config.yaml_document import dump_document
from ftcli.data.sources import read_rows
from ftcli.launch.preflight import check_inputs
from ftcli.reports.check import check
from ftcli.runtime.errors import InputError

from ...support.recipes import minimal_values

CHATS = [{"prompt": f"q{n}", "completion": f"a{n}"} for n in range(12)]
TEXTS = [{"text": f"t{n}", "label": "ab"[n % 2]} for n in range(12)]
SFT: dict[str, Any] = minimal_values(
    model={"name": "model"},
    data={"train": "chats.jsonl", "max_length": 64},
    batch={"global_size": 4},
    train={"max_steps": 2},
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, rows in {"chats": CHATS, "texts": TEXTS, "odd": [*CHATS[:2], {"prompt": "q"}, *CHATS]}.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        parquet.write_table(pa.Table.from_pylist(rows), f"{name}.parquet")
    (tmp_path / "images" / "a").mkdir(parents=True)
    (tmp_path / "images" / "a" / "1.png").touch()
    write_model({"model_type": "bert", "max_position_embeddings": 512})
    return tmp_path


def write_model(config: dict[str, Any]) -> None:
    Path("model").mkdir(exist_ok=True)
    Path("model/config.json").write_text(json.dumps(config))
    Path("model/tokenizer.json").write_text("{}")
    Path("model/tokenizer_config.json").write_text("{}")
    save_file({"a": np.zeros((2, 2), np.float32)}, "model/model.safetensors")


def checked(values: dict[str, Any], **data: Any) -> list[str]:
    Path("r.yaml").write_text(dump_document(values | {"data": values["data"] | data}))
    return check("r.yaml", cpu=True).notes


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_check_file_of_another_task_is_refused(suffix: str, folder: Path) -> None:
    checked(SFT, train=f"chats.{suffix}")
    with pytest.raises(InputError, match=rf"data.train: texts.{suffix} contains raw text"):
        checked(SFT, train=f"texts.{suffix}")
    classify = SFT | {"task": "text_classification"}
    checked(classify, train=f"texts.{suffix}")
    with pytest.raises(InputError, match=rf"chats.{suffix}: no column 'text', 'label'"):
        checked(classify, train=f"chats.{suffix}")
    with pytest.raises(InputError, match=rf"chats.{suffix}: no column 'text', 'label'"):
        checked(classify, train=f"texts.{suffix}", eval=f"chats.{suffix}")
    with pytest.raises(InputError, match="images is a folder, but task sft reads text"):
        checked(SFT, train="images")
    with pytest.raises(InputError, match=rf"^data\.eval\.1: texts.{suffix} contains raw text"):
        checked(SFT, train=f"chats.{suffix}", eval=[f"chats.{suffix}", f"texts.{suffix}"])
    with pytest.raises(InputError, match=r"^data\.train\.1: images is a folder"):
        checked(SFT, train=[f"chats.{suffix}", "images"])


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_check_first_row_that_the_task_cannot_use_is_named(suffix: str, folder: Path) -> None:
    with pytest.raises(InputError, match=rf"row 3 of odd.{suffix}: needs `messages`"):
        checked(SFT, train=f"odd.{suffix}")
    checked(SFT, train=f"odd.{suffix}", max_bad_rows=1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"prompt": "q", "completion": "a"}\n{"prompt":', "a.jsonl:2: row 2 is not JSON"),
        ("a.json", '[{"prompt": "q", "completion": "a"}, {"prompt"', "a.json:1: line 1 is not JSON"),
        ("a.csv", 'prompt,completion\nq,a\n"q,a\n', "a.csv:3: row 2 is not a row of a table"),
        ("a.jsonl", '{"messages": [{"role": ["user"], "content": "q"}]}', "row 1 of a.jsonl: message 1 "),
        ("a.jsonl", '{"messages": [{"role": "user", "content": 5}]}', "row 1 of a.jsonl: message 1 has no text"),
    ],
)
def test_check_of_an_unreadable_first_row_names_it(name: str, content: str, message: str, folder: Path) -> None:
    Path(name).write_text(content)
    with pytest.raises(InputError, match=message):
        checked(SFT, train=name)


@pytest.mark.parametrize(
    "address", ["https://", "https://host/rows.jsonl", "s3://bucket/rows.jsonl", "hf://datasets/a/b"]
)
def test_check_of_an_address_without_a_stream_names_the_setting(address: str, folder: Path) -> None:
    with pytest.raises(InputError, match=f"{address} is an address, .*\n.*data.streaming") as checking:
        checked(SFT, train=address)
    with pytest.raises(InputError, match="only a stream") as reading:
        read_rows(Source(path=address), {}, key="data.train")
    assert str(reading.value) == str(checking.value)


def test_check_of_a_parquet_file_without_rows_is_refused(folder: Path) -> None:
    parquet.write_table(pa.Table.from_pylist(CHATS).slice(0, 0), "none.parquet")
    with pytest.raises(InputError, match="none.parquet has no rows"):
        checked(SFT, train="none.parquet")
    with pytest.raises(InputError, match="none.parquet has no rows"):
        read_rows(Source(path="none.parquet"), {})


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_check_reads_the_column_that_the_recipe_names(suffix: str, folder: Path) -> None:
    rows = [{"prompt": "q", "chosen": "good", "completion": ""}] * 12
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pa.Table.from_pylist(rows), "pairs.parquet")
    with pytest.raises(InputError, match=rf"row 1 of pairs.{suffix}: has an empty completion"):
        checked(SFT, train=f"pairs.{suffix}")
    checked(SFT, train=f"pairs.{suffix}", columns={"completion": "chosen"})


def test_check_parquet_with_flipped_bytes_names_the_file(folder: Path) -> None:
    content = bytearray(Path("chats.parquet").read_bytes())
    for at in range(40, len(content) - 10, 7):
        content[at] ^= 0xFF
    Path("flipped.parquet").write_bytes(content)
    with pytest.raises(InputError, match=r"flipped\.parquet: cannot be read"):
        checked(SFT, train="flipped.parquet")
    pages = bytearray(Path("chats.parquet").read_bytes())
    pages[20:60] = b"\xff" * 40  # the footer with the columns is whole
    Path("flipped.parquet").write_bytes(pages)
    with pytest.raises(InputError, match=r"flipped\.parquet: cannot be read"):
        checked(SFT, train="flipped.parquet")


@pytest.mark.parametrize(
    ("config", "most"),
    [
        ({"model_type": "bert", "max_position_embeddings": 512}, 512),
        ({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}, 512),
        ({"model_type": "gpt2", "n_positions": 1024}, 1024),
        ({"model_type": "llama", "max_position_embeddings": 512}, 10**9),
    ],
)
def test_check_max_length_beyond_the_positions_is_refused(config: dict[str, Any], most: int, folder: Path) -> None:
    write_model(config)
    checked(SFT, max_length=most)
    if most == 10**9:  # rotary positions have no end
        return
    with pytest.raises(InputError, match=f"data.max_length is {most + 1}, but model has only {most} positions"):
        checked(SFT, max_length=most + 1)


def test_check_inputs_of_a_run_refuse_a_max_length_beyond_the_positions_too(folder: Path) -> None:
    recipe = Recipe.model_validate(SFT | {"data": SFT["data"] | {"max_length": 513}})
    with pytest.raises(InputError, match="data.max_length is 513, but model has only 512 positions"):
        check_inputs(recipe, cpu=True)  # what `train` asks before it starts


def test_check_default_max_length_beyond_the_positions_is_noted(folder: Path) -> None:
    Path("r.yaml").write_text(dump_document(SFT | {"data": {"train": "chats.jsonl"}}))
    assert (
        "data.max_length is 1024, but model has only 512 positions; a longer row would end the run"
        in check("r.yaml", cpu=True).notes
    )


def test_check_default_max_length_may_be_written_out(folder: Path) -> None:
    Path("r.yaml").write_text(dump_document(SFT | {"data": {"train": "chats.jsonl", "max_length": 1024}}))
    assert any("model has only 512 positions" in note for note in check("r.yaml", cpu=True).notes)


@pytest.mark.parametrize(
    ("config", "is_noted"),
    [
        ({}, True),
        ({"rope_scaling": None}, True),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, True),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, False),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, False),
        ({"max_position_embeddings": 2048}, False),
    ],
)
def test_check_max_length_beyond_computed_positions_is_noted(
    config: dict[str, Any], is_noted: bool, folder: Path
) -> None:
    write_model({"model_type": "llama", "max_position_embeddings": 512} | config)
    note = "data.max_length is 1024, but max_position_embeddings of model is 512: it was not made for longer rows"
    assert (note in checked(SFT, max_length=1024)) == is_noted
    assert not any("max_position_embeddings" in text for text in checked(SFT, max_length=512))


def test_check_key_for_the_hub_names_the_source_of_a_list(folder: Path) -> None:
    sources = [{"path": "chats.jsonl"}, {"path": "chats.jsonl", "name": "mine", "label": "b"}]
    Path("r.yaml").write_text(dump_document(SFT | {"data": {"train": sources}}))
    with pytest.raises(InputError, match=r"data\.train\.1\.name has no effect(.|\n)*label names a source"):
        check("r.yaml", cpu=True)


@pytest.mark.parametrize("key", ["model.revision", "data.train.name", "data.train.split", "data.train.revision"])
def test_check_key_for_the_hub_is_refused_for_local_files(key: str, folder: Path) -> None:
    Path("r.yaml").write_text(dump_document(SFT))
    with pytest.raises(InputError, match=f"{key} has no effect: .* is on this machine"):
        check("r.yaml", cpu=True, overrides=[f"{key}=x"])
