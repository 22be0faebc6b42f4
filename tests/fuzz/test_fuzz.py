"""Seeded mutations of every shipped recipe and profile and of small data files, through the command line in-process.

Whatever a file holds, a command ends with exit code 0 or 2 without a traceback; a refusal names a
file, a key or an option; every row of a data file is read or refused by name. A failure is repeated by its seed:
`case(seed)` builds it.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet
from safetensors.numpy import save_file

from ftcli.__main__ import main
from ftcli.config.load import key_paths, list_recipes
from ftcli.config.profile_schema import SECTIONS, TOP
from ftcli.data.text_files import parse_rows
from ftcli.runtime.errors import MOST_PROBLEMS, RowError
from ftcli.runtime.resources import shipped_files

from ..support.mutations import mutate_bytes, mutate_lines, mutate_values

MOST_CHARACTERS = 2_200 * (MOST_PROBLEMS + 1)
PROFILE_PATHS = [*TOP, *(f"{section}.{key}" for section, keys in SECTIONS.items() for key in keys)]
CHATS = [{"prompt": f"question {n}", "completion": f'"answer", {n}\n'} for n in range(40)]
TEXTS = [{"text": f"text {n}", "label": "ab"[n % 2]} for n in range(80)]
PAIRS = [{"prompt": f"question {n}", "chosen": f"answer {n}", "rejected": "no answer"} for n in range(240)]
DATA_OF = {
    **dict.fromkeys(("smoke/text_classification", "smoke/pretrain"), "texts.jsonl"),
    **dict.fromkeys(("smoke/preference", "smoke/unpaired_preference", "smoke/reward"), "pairs.jsonl"),
}
CONFIG = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 259}
# What a refusal names: a file, an option, or a key of a recipe or profile.
NAMED = re.compile(
    r"\.(yaml|jsonl|json|csv|tsv|txt|parquet)\b|--[a-z]|\b[a-z_]+\.[a-z_]+|images|model|task|profile"
    r"|_size|asset:|^error: /|sources of data"
)


ALONE = ["--set", "data.eval=null", "--set", "evaluate.at_start=false"]


@dataclass(frozen=True)
class Case:
    """One command line with a mutated file, and a description of the mutation."""

    description: str
    path: Path
    arguments: list[str]


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str


def run(arguments: list[str]) -> Result:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
        main(arguments)
        raise SystemExit(0)
    return Result(int(end.value.code or 0), out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder with a model, rows in every format, and the shipped recipes and profiles that read them."""
    place = tmp_path_factory.mktemp("fuzz")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("FTCLI_CACHE", str(place / "cache"))
        write_inputs(place)
        yield place


def write_inputs(place: Path) -> None:
    (place / "model").mkdir()
    for name, text in {"config": json.dumps(CONFIG), "tokenizer": "{}", "tokenizer_config": "{}"}.items():
        (place / "model" / f"{name}.json").write_text(text)
    save_file({"a.weight": np.zeros((4, 4), np.float32)}, place / "model" / "model.safetensors")
    for name, rows in {"chats": CHATS, "texts": TEXTS, "pairs": PAIRS}.items():
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (place / f"{name}.json").write_text(json.dumps(rows, indent=1))
        for suffix, mark in {"csv": ",", "tsv": "\t"}.items():
            quoted = [mark.join('"' + str(value).replace('"', '""') + '"' for value in row.values()) for row in rows]
            (place / f"{name}.{suffix}").write_text("\n".join([mark.join(rows[0]), *quoted]) + "\n")
        parquet.write_table(pa.Table.from_pylist(rows), place / f"{name}.parquet")
    (place / "texts.txt").write_text("".join(f"{row['text']}\n" for row in TEXTS))
    for number in range(64):
        image = place / "images" / "ab"[number % 2] / f"{number}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(image)
    for name, file in list_recipes().items():
        text = re.sub(r'(name|perceptual): "?asset:[^\s",}]+"?', r"\1: model", file.read_text())
        data = "images" if re.search("image|resnet|face", name) else DATA_OF.get(name, "chats.jsonl")
        (place / f"{name.replace('/', '_')}.yaml").write_text(re.sub(r'"?asset:[^\s",}]+"?', data, text))


@cache
def shipped_names(kind: str) -> dict[str, Path]:
    """Return name -> file of the shipped recipes or profiles."""
    return list_recipes() if kind == "recipe" else shipped_files("accelerate_configs")


recipe_paths = cache(key_paths)


def case(seed: int, folder: Path) -> Case:
    """Return the case of a seed, its file written."""
    draw = random.Random(seed)
    kind = draw.choice(["recipe", "recipe", "profile", "data"])
    if kind == "data":
        return data_case(seed, folder, draw)
    names = shipped_names(kind)
    name = draw.choice(list(names))
    source = folder / f"{name.replace('/', '_')}.yaml" if kind == "recipe" else names[name]
    how, content = draw.choice(["bytes", "lines", "values", "values"]), source.read_bytes()
    if how == "values":
        content = mutate_values(content, draw, recipe_paths() if kind == "recipe" else PROFILE_PATHS)
    else:
        content = mutate_bytes(content, draw) if how == "bytes" else mutate_lines(content, draw)
    path = folder / f"fuzzed-{kind}.yaml"
    path.write_bytes(content)
    recipe = [path.name] if kind == "recipe" else ["smoke_sft.yaml", "--profile", path.name, "--num-processes", "2"]
    return Case(f"seed {seed}: {how} of the {kind} {name}", path, ["check", *recipe])


def data_case(seed: int, folder: Path, draw: random.Random) -> Case:
    source = draw.choice(sorted(path for path in folder.glob("*.*") if path.stem in ("chats", "texts")))
    mutate = mutate_lines if draw.random() < 0.3 and source.suffix != ".parquet" else mutate_bytes
    path = folder / f"fuzzed-data{source.suffix}"
    path.write_bytes(mutate(source.read_bytes(), draw))
    recipes = ["smoke_sft"] if source.stem == "chats" else ["smoke_pretrain", "smoke_text_classification"]
    given = ["--set", f"data.train={path.name}", *ALONE]
    if source.suffix in (".jsonl", ".txt") and "pretrain" in recipes[0] and draw.random() < 0.3:
        given += ["--set", "data.streaming=true"]
        recipes = recipes[:1]
    return Case(f"seed {seed}: the data file {source.name}", path, ["check", f"{draw.choice(recipes)}.yaml", *given])


def faults(actual: Case, result: Result) -> list[str]:
    """Return what is wrong with how a command ended."""
    log_lines = [
        f"exit code {result.code}" if result.code not in (0, 2) else "",
        "a traceback" if "Traceback" in result.err else "",
        f"{len(result.err):,} characters" if len(result.err) > MOST_CHARACTERS else "",
        "no reason is given" if result.code == 2 and "error: " not in result.err else "",
    ]
    lines = [line for line in result.err.splitlines() if line.startswith("error: ")]
    log_lines += [f"names no place: {line}" for line in lines if not NAMED.search(line)]
    if actual.path.stem == "fuzzed-data" and actual.path.suffix != ".parquet":
        log_lines.append(lost_rows(actual.path))
    return [f"{actual.description}: {text}\n{result.err[-2000:]}" for text in log_lines if text]


def lost_rows(path: Path) -> str:
    """Return how many rows of a text file are neither read nor refused, or an empty string."""
    with path.open("rb") as file:
        rows = list(parse_rows(file, path.suffix))
    kinds: set[Any] = {type(row) for row in rows if not isinstance(row, RowError)}
    if kinds - {dict}:
        return f"rows of the types {kinds}"
    if path.suffix != ".jsonl":
        return ""
    lines = sum(bool(line.strip()) for line in path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"))
    return f"{len(rows)} rows of {lines} lines" if len(rows) != lines else ""


def fuzz(seeds: range, folder: Path) -> None:
    problems: list[str] = []
    codes: set[int] = set()
    for seed in seeds:
        each = case(seed, folder)
        result = run(each.arguments)
        codes.add(result.code)
        problems += faults(each, result)
    assert not problems, f"{len(problems)} faults\n" + "\n".join(problems[:5])
    assert codes == {0, 2}


def test_check_unmutated_files_pass(folder: Path) -> None:
    for name in list_recipes():
        assert run(["check", f"{name.replace('/', '_')}.yaml"]).code == 0, name
    for data in ("chats.jsonl", "chats.json", "chats.csv", "chats.tsv", "chats.parquet"):
        given = ["--set", f"data.train={data}", *ALONE]
        assert run(["check", "smoke_sft.yaml", *given]).code == 0, data


def test_check_some_hundred_mutated_files(folder: Path) -> None:
    fuzz(range(400), folder)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_check_ten_thousand_mutated_files(folder: Path) -> None:
    fuzz(range(10_000, 20_000), folder)
