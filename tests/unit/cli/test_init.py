"""`ftcli init`: a recipe that loads as it stands, and says of each key what its declaration says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ftcli.cli.init import write_recipe
from ftcli.config.load import load_recipe
from ftcli.config.recipe import Recipe
from ftcli.config.recipe_data import Data, Source
from ftcli.config.recipe_training import Batch, Optimizer
from ftcli.config.task_registry import list_tasks
from ftcli.data.row_counts import check_row_counts, count_rows
from ftcli.reports.survey import survey_data
from ftcli.runtime.errors import InputError
from ftcli.tasks.sft import Options
from ftcli.testing import save_tiny_causal

ROOT = Path(__file__).resolve().parents[3]


def words_of(path: Path) -> str:
    """Return the comments of a file as one line of text, however they are wrapped."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    return " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))


@pytest.mark.parametrize("task", list_tasks())
def test_write_recipe_of_every_task_loads_without_changes(task: str, tmp_path: Path) -> None:
    path = write_recipe(task, "org/model", "rows.jsonl", output=tmp_path / "mine.yaml")
    recipe = load_recipe(path)
    assert path == tmp_path / "mine.yaml"
    assert (recipe.task, recipe.model.name, recipe.data.train.path) == (task, "org/model", "rows.jsonl")
    assert recipe.data.eval is None and recipe.data.eval_rows > 0
    saving = recipe.model.gradient_checkpointing, recipe.model.activation_offloading, recipe.model.embeddings_on_host
    assert saving == ("auto", "auto", "auto"), "so that the run fits a small GPU"
    sections = [line.partition(":")[0] for line in path.read_text().splitlines() if line[:1].isalpha()]
    assert set(sections) == set(Recipe.model_fields) - {"output"}


def test_write_recipe_puts_the_declared_description_above_each_key(tmp_path: Path) -> None:
    path = write_recipe("sft", "org/model", "rows.jsonl", output=tmp_path / "r.yaml")
    message = words_of(path)
    for section, key in ((Batch, "micro_size"), (Data, "max_length"), (Optimizer, "learning_rate"), (Options, "chat")):
        assert section.model_fields[key].description in message
    assert "One of constant, linear, cosine." in message  # what else it may be
    lines = path.read_text().splitlines()
    for above, line in zip(lines, lines[1:], strict=False):
        if line.strip() and not line.strip().startswith("#"):
            assert above.strip().startswith("#"), line


def test_write_recipe_first_line_names_the_schema_that_ships_and_the_head_lists_the_commands(tmp_path: Path) -> None:
    path = write_recipe("sft", "org/model", "rows.jsonl", output=tmp_path / "my recipe.yaml")
    first, *rest = path.read_text().splitlines()
    label, _, schema = first.partition("$schema=")
    assert label == "# yaml-language-server: " and Path(schema) == ROOT / "recipes" / "recipe.schema.json"
    assert Path(schema).is_file()
    head = "\n".join(rest[: rest.index("")])
    assert f"ftcli check '{path}'" in head and f"ftcli train '{path}'" in head


def test_write_recipe_with_evaluation_data_sets_no_eval_rows(tmp_path: Path) -> None:
    data = load_recipe(write_recipe("sft", "m", "a.jsonl", eval="b.jsonl", output=tmp_path / "r.yaml")).data
    assert data.eval is not None and data.eval.path == "b.jsonl" and data.eval_rows == 0


def test_write_recipe_with_a_data_set_on_the_hub_is_not_evaluated_on_the_split_it_trains_on(tmp_path: Path) -> None:
    path = write_recipe("sft", "m", "org/rows", eval="org/rows", output=tmp_path / "r.yaml")
    data = load_recipe(path).data
    assert data.eval is not None and (data.train.split, data.eval.split) == ("train", "test")
    assert "split: train" in path.read_text() and "split: test" in path.read_text()


@pytest.mark.parametrize(
    "name", ["./rows: 1.jsonl", "./#1.jsonl", "./ä 'b' \"c\".jsonl", "./" + "long name " * 20, "1e5"]
)
def test_write_recipe_quotes_a_name_that_yaml_would_convert(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe("sft", name, name, output=tmp_path / "r.yaml"))
    assert recipe.model.name == name and recipe.data.train.path == name


def test_write_recipe_with_a_users_own_task_brings_its_own_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_task.py").write_text(
        '"""Rank answers."""\n'
        "from pydantic import BaseModel, ConfigDict, Field\n"
        "class Options(BaseModel):\n"
        '    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)\n'
        '    margin: float = Field(0.5, description="Least distance.")\n'
        "class Task: ...\n"
    )
    path = write_recipe("./my_task.py", "org/model", "rows.jsonl")
    assert path == Path("my_task.yaml")
    assert "  # Least distance.\n  margin: 0.5\n" in path.read_text()
    assert load_recipe(path).task_options == {"margin": 0.5}


def test_write_recipe_to_an_existing_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("mine\n")
    for place in (path, Path("~") / os.path.relpath(path, Path.home())):
        with pytest.raises(InputError, match="r.yaml exists already"):
            write_recipe("sft", "m", "d", output=place)
    assert path.read_text() == "mine\n"


def test_write_recipe_with_an_unknown_task_suggests_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean 'text_classification'"):
        write_recipe("text_clasification", "m", "d", output=tmp_path / "r.yaml")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("names", [("asset:smollm2-135m", "a.jsonl"), ("m", "asset:python-modules2/train.jsonl")])
def test_write_recipe_with_an_unknown_asset_suggests_the_nearest_and_writes_nothing(
    names: tuple[str, str], tmp_path: Path
) -> None:
    with pytest.raises(
        InputError, match="there is no asset '.*\n.*did you mean '(smollm2-135m-instruct|python-modules)'"
    ):
        write_recipe("sft", *names, output=str(tmp_path / "a.yaml"))
    assert not list(tmp_path.iterdir())


def test_write_recipe_with_an_empty_name_or_missing_folder_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        write_recipe("sft", "", "", output=tmp_path / "r.yaml")
    assert [problem.what.split()[0] for problem in caught.value.problems] == ["model.name", "data.train.path"]
    with pytest.raises(InputError, match="the folder .* does not exist"):
        write_recipe("sft", "m", "d", output=tmp_path / "absent" / "r.yaml")
    assert list(tmp_path.iterdir()) == []


def test_write_recipe_command_prints_the_file_and_loads_nothing_heavy(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom ftcli.__main__ import main\n"
        "try: main(['init', 'sft', '--model', 'org/model', '--data', 'rows.jsonl'])\n"
        "except SystemExit as end: print(end.code, *({'torch', 'datasets'} & set(sys.modules)), file=sys.stderr)"
    )
    inherited = {name: value for name, value in os.environ.items() if name != "FTCLI_LAUNCHED"}
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**inherited, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (result.stdout, result.stderr) == ("sft.yaml\n", "0\n")
    assert load_recipe(tmp_path / "sft.yaml").task == "sft"


def recipe_for(rows: int, folder: Path, task: str = "sft", **options: str) -> tuple[Recipe, str]:
    """Return the recipe for a file with a number of rows, and its comments."""
    data = folder / "few.jsonl"
    data.write_text('{"prompt": "a", "completion": "b", "text": "c"}\n' * rows)
    path = write_recipe(task, "org/model", str(data), output=folder / "few.yaml", **options)
    return load_recipe(path), words_of(path)


@pytest.mark.parametrize("rows", [2, 3, 7, 30, 35, 36, 500])
def test_write_recipe_for_a_small_file_leaves_rows_for_a_step_and_for_the_evaluation(rows: int, tmp_path: Path) -> None:
    recipe, comments = recipe_for(rows, tmp_path)
    check_row_counts(recipe, may_split=False)  # raises InputError without enough rows
    assert recipe.data.eval_rows >= 1
    is_small = rows < 36  # 20 rows to evaluate on and 16 of a step
    assert ("smaller values than usual" in comments) is is_small
    assert ((recipe.data.eval_rows, recipe.batch.global_size) == (20, 16)) is not is_small


def test_write_recipe_for_a_small_file_names_only_the_values_that_it_changed(tmp_path: Path) -> None:
    recipe, comments = recipe_for(30, tmp_path)
    assert (recipe.data.eval_rows, recipe.batch.global_size) == (6, 16)
    assert "few.jsonl has only 30 rows" in comments and "than usual: data.eval_rows." in comments
    (tmp_path / "few.yaml").unlink()
    recipe, comments = recipe_for(5, tmp_path, eval="other.jsonl")
    assert (recipe.data.eval_rows, recipe.batch.global_size) == (0, 4)
    assert "than usual: batch.global_size." in comments


@pytest.mark.parametrize("name", ["rows.JSONL", "rows.jsonl.gz", "rows", "rows.xyz"])
def test_write_recipe_for_a_file_of_an_unknown_kind_counts_nothing(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"prompt": "a", "completion": "b"}\n')
    data = load_recipe(write_recipe("sft", "org/model", str(tmp_path / name), output=tmp_path / "r.yaml")).data
    assert data.eval_rows == 20


def test_write_recipe_for_a_named_pipe_does_not_wait_for_its_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    path = write_recipe("sft", "org/model", str(tmp_path / "rows.jsonl"), output=tmp_path / "r.yaml")
    assert load_recipe(path).data.eval_rows == 20


def test_write_recipe_for_a_folder_that_cannot_be_counted_is_written_as_usual(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "again").symlink_to(tmp_path / "images")
    with pytest.raises(InputError):
        count_rows(Source(path=str(tmp_path / "images")), 10)
    path = write_recipe("image_classification", "org/model", str(tmp_path / "images"), output=tmp_path / "r.yaml")
    assert load_recipe(path).data.eval_rows == 20


def test_write_recipe_for_a_file_whose_name_has_line_separators_is_one_comment(tmp_path: Path) -> None:
    name = "a\u2028b.jsonl"
    (tmp_path / name).write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    path = write_recipe("sft", "org/model", str(tmp_path / name), output=tmp_path / "r.yaml")
    assert load_recipe(path).data.train.path.endswith(name) and "a?b.jsonl has only 4 rows" in words_of(path)


def test_write_recipe_for_few_rows_counts_a_row_that_may_become_two_as_one(tmp_path: Path) -> None:
    recipe, _ = recipe_for(10, tmp_path, task="unpaired_preference")  # of a pair two rows are made
    assert (recipe.data.eval_rows, recipe.batch.global_size) == (2, 8)


@pytest.mark.parametrize(
    ("file", "row", "size"),
    [
        ("texts.txt", "{} is a short line.\n", 8),
        ("texts.jsonl", '{{"text": "{} is a short text.", "from": 1}}\n', 8),
        ("texts.csv", '"{} has\nseveral\nshort\nlines"\n', 8),
        ("texts.txt", "{} " + "has many words " * 1400 + "\n", 32),  # 5 rows of each
        ("texts.txt", "{} " + "has some words " * 550 + "\n", 16),  # 2 rows of each
    ],
)
def test_write_recipe_for_few_texts_fits_the_rows_of_a_step_to_their_lengths(
    file: str, row: str, size: int, tmp_path: Path
) -> None:
    (tmp_path / file).write_text("text\n" * file.endswith(".csv") + "".join(row.format(n) for n in range(10)))
    model = save_tiny_causal(tmp_path / "model")
    path = write_recipe("pretrain", str(model), str(tmp_path / file), output=tmp_path / "few.yaml")
    recipe, survey = load_recipe(path), survey_data(path)
    assert (recipe.data.eval_rows, recipe.batch.global_size) == (2, size)
    assert ("data.eval_rows and batch.global_size." in words_of(path)) is (size < 32)
    assert survey.statistics["train"]["epoch"]["steps"] >= 1


def test_write_recipe_for_few_texts_does_not_count_on_a_long_one_that_may_be_held_out(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("A short line.\n" * 9 + "long " * 100_000 + "\n")
    path = write_recipe("pretrain", "m", str(tmp_path / "texts.txt"), output=tmp_path / "r.yaml")
    assert load_recipe(path).batch.global_size == 8


def test_write_recipe_with_short_rows_proposes_packing_and_what_it_means_for_the_batch(tmp_path: Path) -> None:
    row = json.dumps({"prompt": "p" * 100, "completion": "c" * 267})  # 400 bytes with the end of the line
    (tmp_path / "rows.jsonl").write_text(f"{row}\n" * 50)
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "p" * 9000, "completion": "c"}) + "\n")

    def text(task: str, data: str) -> str:
        path = write_recipe(task, "m", str(tmp_path / data), output=tmp_path / f"{task}-{data}.yaml")
        assert load_recipe(path).data.packing is False
        return " ".join(path.read_text().replace("# ", "").split())

    short = text("sft", "rows.jsonl")
    assert "Rows of rows.jsonl are short: about 100 tokens, 10 % of max_length." in short
    assert "global_size counts these: 2 instead of 16 keeps the batch" in short
    for proposed in (text("sft", "long.jsonl"), text("text_classification", "rows.jsonl")):
        assert "are short" not in proposed
