"""Recipe files: every mistake at once, in plain words, with its line; overrides; names; schema, reference."""

from __future__ import annotations

import random
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import jsonschema
import pytest
import yaml
from pydantic import ValidationError

from ftcli.config import recipe as recipe_module
from ftcli.config.aliases import EXPLAINED, RENAMED
from ftcli.config.load import dump_recipe, find_recipe, key_paths, list_recipes, load_recipe, run_output
from ftcli.config.recipe import Recipe
from ftcli.config.recipe_data import Source
from ftcli.config.reference import SCHEMA_FILE, recipe_reference, recipe_schema
from ftcli.config.task_registry import METHODS, find_task, list_tasks
from ftcli.config.yaml_document import read_document
from ftcli.runtime.errors import MOST_WORD, InputError, nearest
from ftcli.runtime.resources import shipped_folder
from ftcli.tasks.build import build_task

from ...support.counting import count_lines
from ...support.recipes import minimal_values

GOOD = """\
task: sft
model:
  name: gpt2
data:
  train: rows.jsonl
batch:
  global_size: 8
train:
  max_steps: 10
optimizer:
  learning_rate: 1e-4
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(GOOD)
    return Path("r.yaml")


def problems_of(text: str, *overrides: str) -> list[str]:
    """Return every problem of a recipe's text as printed."""
    Path("r.yaml").write_text(text)
    with pytest.raises(InputError) as caught:
        load_recipe("r.yaml", overrides)
    return [str(problem) for problem in caught.value.problems]


def only_problem(text: str, *overrides: str) -> str:
    problems = problems_of(text, *overrides)
    assert len(problems) == 1, problems
    return problems[0]


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ("{x: -1}", "class_weights.x is -1, and must be a number, above 0"),
        ("{x: a}", "class_weights.x is 'a' (text), and must be a number, above 0"),
        ("3", "class_weights is 3, and must be a mapping of names to values or balanced or null"),
        ("balance", "class_weights is 'balance' (text), and must be a mapping of names to values or balanced or null"),
    ],
)
def test_load_recipe_with_wrong_class_weights_names_the_key_once(recipe: Path, weights: str, problem: str) -> None:
    """The option is a mapping or a word. Names that pydantic gives to the two are no keys."""
    text = GOOD.replace("sft", f"text_classification\ntask_options: {{class_weights: {weights}}}")
    assert only_problem(text) == f"r.yaml:2: task_options.{problem}"


def test_load_recipe_with_a_key_that_resembles_a_name_of_pydantic_is_named_in_full(recipe: Path) -> None:
    text = GOOD.replace("data:\n", "data:\n  columns: {'dict[x': [1]}\n")
    assert "data.columns.dict[x is a list of 1 item" in only_problem(text)


def test_load_recipe_with_a_short_recipe_reads_with_defaults(recipe: Path) -> None:
    loaded = load_recipe(recipe)
    assert loaded.data.train == Source(path="rows.jsonl")
    assert loaded.optimizer.learning_rate == 1e-4
    assert (loaded.seed, loaded.precision, loaded.adapter.type, loaded.train.epochs) == (
        0,
        "fp32",
        "none",
        None,
    )


def test_load_recipe_reports_all_mistakes_in_file_order(recipe: Path) -> None:
    text = GOOD.replace("task: sft", "task: stf\nseed: 1\nseed: 2\nepochs: 3").replace("8", "zero")
    assert problems_of(text.replace("gpt2", "gpt2\n  nmae: x"), "optimizer.eps=-1") == [
        "r.yaml:1: no task 'stf'\n    did you mean 'sft'?",
        "r.yaml:3: duplicate key 'seed', first given in line 2\n    keep one of the two",
        "r.yaml:4: unknown key 'epochs'\n    it belongs elsewhere: train.epochs",
        "r.yaml:7: unknown key 'nmae' in model\n    did you mean 'name'?",
        "r.yaml:11: batch.global_size is 'zero' (text), and must be a whole number, at least 1",
        "--set optimizer.eps=-1: optimizer.eps is -1, and must be a number, above 0",
    ]


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        (
            "global_size: 8",
            "global_size: 0",
            "7: batch.global_size is 0, and must be a whole number, at least 1",
        ),
        (
            "global_size: 8",
            "global_size: '8'",
            "7: batch.global_size is '8' (text), and must be a whole number, at least 1\n"
            "    write it as a plain number, without quotes or underscores",
        ),
        (
            "global_size: 8",
            "global_size: 8.5",
            "7: batch.global_size is 8.5, and must be a whole number, at least 1",
        ),
        (
            "max_steps: 10",
            "max_steps: 1e3",
            "9: train.max_steps is 1000.0, and must be a whole number, at least 1, or null\n    write 1000",
        ),
        (
            "1e-4",
            "'1e-4'",
            "11: optimizer.learning_rate is '1e-4' (text), and must be a number, above 0 and at most 10\n"
            "    write it as a plain number, without quotes or underscores",
        ),
        ("1e-4", "11", "11: optimizer.learning_rate is 11, and must be a number, above 0 and at most 10"),
        ("1e-4", ".nan", "11: optimizer.learning_rate is nan, and must be a number, above 0 and at most 10"),
        ("1e-4", "1e-4\n  eps: .inf", "12: optimizer.eps is inf, and must be a number, above 0"),
        ("1e-4", "", "11: optimizer.learning_rate is empty, and must be a number, above 0 and at most 10"),
        (
            "1e-4",
            "true",
            "11: optimizer.learning_rate is true, and must be a number, above 0 and at most 10",
        ),
        ("name: gpt2", "name: ''", "3: model.name is '' (text), and must be text, not empty"),
        (
            "name: gpt2",
            "name: 7",
            "3: model.name is 7, and must be text, not empty\n    put it in quotes to make it text",
        ),
        (
            "name: gpt2",
            "name: gpt2\n  trust_remote_code: yes",
            "4: model.trust_remote_code is 'yes' (text), and must be true or false\n    write true",
        ),
        (
            "name: gpt2",
            "name: gpt2\n  batch_norm: frosen",
            "4: model.batch_norm is 'frosen' (text), and must be one of frozen, train, sync\n"
            "    did you mean 'frozen'?",
        ),
        (
            "1e-4",
            "1e-4\n  betas: [0.9]",
            "12: optimizer.betas is a list of 1 item, and must be a list of exactly 2 items, each of a number, "
            "at least 0 and below 1",
        ),
        (
            "1e-4",
            "1e-4\n  betas: [0.9, 2]",
            "12: optimizer.betas.1 is 2, and must be a number, at least 0 and below 1",
        ),
        (
            "1e-4",
            "1e-4\nlog:\n  trackers: tensorboard",
            "13: log.trackers is 'tensorboard' (text), and must be a list of one of tensorboard, "
            "wandb, mlflow, "
            "trackio\n    write [tensorboard]",
        ),
        (
            "1e-4",
            "1e-4\nadapter:\n  target_modules: 5",
            "13: adapter.target_modules is 5, and must be text or a list of text\n    put it in quotes to make it text",
        ),
        (
            "1e-4",
            "1e-4\nadapter: {type: lora, target_modules: '('}",
            "12: adapter: target_modules is not a regular expression: missing ), unterminated subpattern",
        ),
        (
            "1e-4",
            "1e-4\nadapter: {type: lora, target_modules: []}",
            "12: adapter: target_modules is empty: name modules",
        ),
        ("1e-4", "1e-4\noutput: ''", "12: output is '' (text), and must be text, not empty"),
        (
            "1e-4",
            "1e-4\nschedule: {warmup_steps: 1.5}",
            "12: schedule.warmup_steps has no effect after its decimal point: 1 or more is a number of whole steps",
        ),
        (
            "1e-4",
            "1e-4\nadapter:\n  target_modules: [q, 5]",
            "13: adapter.target_modules.1 is 5, and must be text\n    put it in quotes to make it text",
        ),
        (
            "1e-4",
            "1e-4\nschedule: linear",
            "12: schedule is 'linear' (text), and must be a section with the keys name, warmup_steps, min_ratio",
        ),
        (
            "rows.jsonl",
            "5",
            "5: data.train is 5, and must be text, not empty, or a section with the keys path, name, split",
        ),
        (
            "rows.jsonl",
            "[]",
            "5: data.train is an empty list, and must be text, not empty, or a section with the keys path, name, split",
        ),
        (
            "rows.jsonl",
            "[rows.jsonl, {path: more.jsonl, wait: 2}]",
            "5: unknown key 'wait' in data.train.1\n    did you mean 'weight'?",
        ),
        (
            "rows.jsonl",
            "[rows.jsonl, {path: more.jsonl, weight: 0}]",
            "5: data.train.1.weight is 0, and must be a number, above 0 and at most 1000",
        ),
        (
            "rows.jsonl",
            "rows.jsonl\n  eval: {path: more.jsonl, weight: 2}",
            "4: data: eval: a weight is for training rows only; set max_rows to evaluate fewer rows",
        ),
        (
            "rows.jsonl",
            "rows.jsonl\n  columns: {text: 5}",
            "6: data.columns.text is 5, and must be text\n    put it in quotes to make it text",
        ),
        (
            "rows.jsonl",
            "rows.jsonl\n  eval: more.jsonl\n  eval_rows: 5",
            "4: data: eval and eval_rows exclude each other: keep one of the two",
        ),
        ("max_steps: 10", "{}", "8: train: exactly one of max_steps and epochs must be given"),
        (
            "max_steps: 10",
            "max_steps: 10\n  epochs: 1",
            "8: train: exactly one of max_steps and epochs must be given",
        ),
        (
            "  name: gpt2",
            "  revision: main",
            "2: model.name is missing\n    text, not empty. Name on the hub, local ",
        ),
        (
            "optimizer:\n  learning_rate: 1e-4\n",
            "",
            "1: optimizer is missing\n    write at least optimizer.learning_rate",
        ),
        ("sft", "sft\noutput: [a]", "2: output is a list of 1 item, and must be text, not empty, or null"),
        (
            "sft",
            "sft\ntask_options: {chat: always}",
            "2: task_options.chat is 'always' (text), and must be one of",
        ),
        (
            "sft",
            "sft\ntask_options: {chatt: never}",
            "2: unknown key 'chatt' in task_options\n    did you mean 'chat'?",
        ),
        (
            "sft",
            "sft\ntask_options: {xyz: never}",
            "2: unknown key 'xyz' in task_options\n    task sft takes chat",
        ),
    ],
)
def test_load_recipe_mistake_has_a_plain_message(recipe: Path, before: str, after: str, problem: str) -> None:
    assert before in GOOD
    assert only_problem(GOOD.replace(before, after)).startswith(f"r.yaml:{problem}")


@pytest.mark.parametrize(
    ("place", "value", "written"),
    [
        ("  betas: {}", "0.9", ""),  # two numbers are needed
        ("log: {{trackers: {}}}", "tensorbord", ""),
        ("log: {{trackers: {}}}", "wandb", "[wandb]"),
        ("evaluate: {{generate: {{prompts: {}}}}}", "[hi, '']", ""),
        ("evaluate: {{generate: {{prompts: {}}}}}", "{'0': hi}", ""),
        ("evaluate: {{generate: {{prompts: {}}}}}", "hi", "[hi]"),
        ("evaluate: {{generate: {{prompts: {}}}}}", "'Hi, you'", '["Hi, you"]'),
        ("evaluate: {{generate: {{prompts: {}}}}}", "'['", '["["]'),
    ],
)
def test_load_recipe_hint_for_a_list_is_a_value_that_the_key_may_have(
    recipe: Path, place: str, value: str, written: str
) -> None:
    problem = only_problem(GOOD.replace("1e-4", f"1e-4\n{place.format(value)}"))
    assert problem.partition("\n    ")[2] == (f"write {written}" if written else "")
    if written:
        recipe.write_text(GOOD.replace("1e-4", f"1e-4\n{place.format(written)}"))
        load_recipe(recipe)


@pytest.mark.parametrize(
    ("before", "after"),
    [("global_size: 8", "global_size: 8\n  micro_size: 0"), ("train: rows.jsonl", "train: ~")],
)
def test_load_recipe_value_without_an_obvious_correction_has_no_hint(recipe: Path, before: str, after: str) -> None:
    assert before in GOOD and "\n" not in only_problem(GOOD.replace(before, after))


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("per_device_train_batch_size", "that is batch.micro_size here"),
        ("num_train_epochs", "that is train.epochs here"),
        ("sequence_len", "that is data.max_length here"),
        ("lr-scheduler-type", "that is schedule.name here"),
        ("bf16", "write precision: bf16"),
        ("lora_alpha", "it belongs elsewhere: adapter.lora_alpha"),
        ("every_steps", "it belongs elsewhere: evaluate.every_steps or checkpoint.every_steps or log.every_steps"),
        ("gradient_accumulation_steps", "derived from batch.global_size, never written: delete this line"),
        ("num_processes", "this key describes hardware: it belongs in a profile (--profile)"),
        ("label_smoothing", "known: task, seed"),  # not betas
        ("strict", "known: task, seed"),  # not checkpoint.keep_best.metric
        ("warmup_stps", "did you mean 'schedule.warmup_steps'?"),
        (
            "qqq",
            "known: task, seed, precision, output, model, adapter, data, task_options, batch, train, optimizer, ",
        ),
    ],
)
def test_load_recipe_with_an_unknown_key_prints_a_hint(recipe: Path, key: str, hint: str) -> None:
    assert only_problem(f"{GOOD}{key}: 1\n").startswith(f"r.yaml:12: unknown key '{key}'\n    {hint}")


def test_unknown_key_hint_prefers_a_name_of_the_same_section(recipe: Path) -> None:
    text = GOOD.replace("global_size: 8", "global_size: 8\n  micro_sise: 2")
    assert only_problem(text) == "r.yaml:8: unknown key 'micro_sise' in batch\n    did you mean 'micro_size'?"


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("task: sft", "tsk: sft", "1: unknown key 'tsk'\n    did you mean 'task'?"),
        ("model:", "modle:", "2: unknown key 'modle'\n    did you mean 'model'?"),
        ("name: gpt2", "nam: gpt2", "3: unknown key 'nam' in model\n    did you mean 'name'?"),
        ("train: rows", "trian: rows", "5: unknown key 'trian' in data\n    did you mean 'train'?"),
        ("rows.jsonl", "[{pth: rows.jsonl}]", "5: unknown key 'pth' in data.train.0\n    did you mean 'path'?"),
        (
            "batch:\n  global_size: 8",
            "global_size: 8",
            "6: unknown key 'global_size'\n    it belongs elsewhere: batch.global_size",
        ),
        (
            "optimizer:\n  learning_rate: 1e-4",
            "learning_rate: 1e-4",
            "10: unknown key 'learning_rate'\n    it belongs elsewhere: optimizer.learning_rate",
        ),
    ],
)
def test_load_recipe_with_a_required_key_under_another_name_has_one_problem(
    recipe: Path, before: str, after: str, problem: str
) -> None:
    assert GOOD.count(before) == 1
    assert only_problem(GOOD.replace(before, after)) == f"r.yaml:{problem}"


def test_load_recipe_with_a_missing_section_and_a_misplaced_key_of_it_reports_both(recipe: Path) -> None:
    text = GOOD.replace("data:\n  train: rows.jsonl", "max_length: 5")
    assert [problem.split("\n")[0] for problem in problems_of(text)] == [
        "r.yaml:1: data is missing",
        "r.yaml:4: unknown key 'max_length'",
    ]


def test_alias_hint_targets_are_existing_keys() -> None:
    assert set(RENAMED.values()) <= set(key_paths())
    leaves = {path for path in key_paths() if "." not in path}
    assert not (set(RENAMED) | set(EXPLAINED)) & leaves, "a top-level key needs no hint"
    assert not set(RENAMED) & set(EXPLAINED)


def test_nearest_of_a_long_word_returns_no_suggestion() -> None:
    assert nearest("k" * MOST_WORD, ["k" * (MOST_WORD + 1)]) == f"did you mean '{'k' * (MOST_WORD + 1)}'?"
    assert nearest("k" * (MOST_WORD + 1), ["k" * MOST_WORD]) == ""
    letters = [chr(0x4E00 + number) for number in range(400)]
    label = random.Random(0).choices(letters, k=2_000)
    word, known = "".join(label[1:]), ["".join(random.Random(1).sample(label, len(label)))]
    assert count_lines(lambda: nearest(word, known)) < len(word)  # the search grows with the square of the length
    assert nearest(word, known) == ""


def test_overrides_follow_the_number_rules_of_a_file_and_make_sections(recipe: Path) -> None:
    loaded = load_recipe(
        recipe,
        [
            "optimizer.learning_rate=1e-3",
            "schedule.warmup_steps=0.1",
            "optimizer.betas=[0.8, 0.9]",
            "data.train.split=test",
            "data.columns={prompt: body}",
            "model.name=a=b",
            "output=",
            "evaluate.at_start=true",
            "data.eval_rows=1",
        ],
    )
    assert (loaded.optimizer.learning_rate, loaded.schedule.warmup_steps) == (1e-3, 0.1)
    assert loaded.optimizer.betas == [0.8, 0.9] and loaded.data.columns == {"prompt": "body"}
    assert loaded.data.train == Source(path="rows.jsonl", split="test")
    assert (loaded.model.name, loaded.output, loaded.evaluate.at_start) == ("a=b", None, True)


@pytest.mark.parametrize("key", ["data.drop_last", "seed", "task_options", "9" * 4400])
@pytest.mark.parametrize("start", ["", "-", "0x", "1e", ".", "a:", "1:", "a: ", "a:\u00b2", "!!int "])
def test_load_recipe_with_an_override_of_4400_digits_is_refused(key: str, start: str, recipe: Path) -> None:
    with pytest.raises(InputError) as error:
        load_recipe(recipe, [f"{key}={start}{'9' * 4400}"])
    assert f"--set {key[:30]}" in str(error.value) and len(str(error.value)) < 4000


def test_load_recipe_with_an_override_of_steps_or_epochs_replaces_the_other(recipe: Path) -> None:
    by_epochs = load_recipe(recipe, ["train.epochs=2"])
    assert (by_epochs.train.max_steps, by_epochs.train.epochs) == (None, 2)
    Path("r.yaml").write_text(GOOD.replace("max_steps: 10", "epochs: 3"))
    by_steps = load_recipe(recipe, ["train.max_steps=5"])
    assert (by_steps.train.max_steps, by_steps.train.epochs) == (5, None)


def test_load_recipe_with_overrides_of_steps_and_epochs_raises(recipe: Path) -> None:
    assert "exactly one of max_steps and epochs" in only_problem(GOOD, "train.epochs=2", "train.max_steps=5")


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("optimizer.lr=1", "unknown key 'lr' in optimizer\n    that is optimizer.learning_rate here"),
        ("optimiser.name=adamw", "unknown key 'optimiser'\n    did you mean 'optimizer'?"),
        ("batch.micro=2", "unknown key 'micro' in batch\n    did you mean 'micro_size'?"),
        ("seed=x", "seed is 'x' (text), and must be a whole number, at least 0 and below 2147483648"),
        ("seed", "is not of the form KEY=VALUE\n    for instance --set a.b=c"),
        ("a..b=1", "is not of the form KEY=VALUE\n    for instance --set a.b=c"),
        ("seed=[1", "not valid YAML: "),
        ("task.name=x", "task is a single value, not a section\n    set the whole value: --set task=..."),
    ],
)
def test_load_recipe_with_a_wrong_override_quotes_it(recipe: Path, override: str, problem: str) -> None:
    assert only_problem(GOOD, override).startswith(f"--set {override}: {problem}")


@pytest.mark.parametrize(
    ("more", "overrides", "problem"),
    [
        (
            "adapter: {type: lora, r: 4}\n",
            ["seed=3", "adapter.type=none"],
            "--set adapter.type=none: adapter.r has no effect without an adapter: the whole model is trained",
        ),
        (
            "",
            ["checkpoint.keep_best={metric: loss, direction: min}"],
            "--set checkpoint.keep_best={metric: loss, direction: min}: checkpoint.keep_best needs evaluation rows",
        ),
        (
            "",
            ["train.epochs=2", "seed=3", "train.max_steps=5"],
            "--set train.epochs=2 --set train.max_steps=5: train: exactly one of max_steps and epochs must be given",
        ),
        (
            "task_options: {train_on: last}\n",
            ["task=pretrain"],
            "--set task=pretrain: unknown key 'train_on' in task_options",
        ),
        (
            "adapter: {type: lora, r: 4}\n",
            ["model.batch_norm=train"],
            "--set model.batch_norm=train: model.batch_norm: train updates running statistics, which an",
        ),
        (
            "",
            ["model.batch_norm=sync", "model.gradient_checkpointing=full"],
            "--set model.batch_norm=sync --set model.gradient_checkpointing=full: model.gradient_checkpointing: full "
            "computes layers twice, and model.batch_norm: sync would",
        ),
        ("schedule: {min_ratio: 0.5, name: constant}\n", ["seed=3"], "r.yaml:12: schedule.min_ratio has no effect"),
    ],
)
def test_load_recipe_with_an_override_that_breaks_a_rule_between_keys_is_reported_at_the_override(
    recipe: Path, more: str, overrides: list[str], problem: str
) -> None:
    assert only_problem(GOOD + more, *overrides).startswith(problem)


@pytest.mark.parametrize("overrides", ["seed=3", {"seed": 3}])
def test_load_recipe_with_overrides_that_are_no_list_is_refused(recipe: Path, overrides: object) -> None:
    with pytest.raises(InputError, match="overrides must be a list of texts KEY=VALUE"):
        load_recipe(recipe, overrides)  # type: ignore[arg-type]


def test_load_recipe_with_an_override_that_completes_the_file_reports_other_problems_at_their_lines(
    recipe: Path,
) -> None:
    """The file alone lacks its model's name, so that the check of ineffective keys needs the override."""
    text = GOOD.replace("model:\n  name: gpt2\n", "") + "schedule: {min_ratio: 0.5, name: constant}\n"
    assert only_problem(text, "model.name=gpt2").startswith("r.yaml:10: schedule.min_ratio has no effect")


def test_load_recipe_with_an_override_inside_a_list_raises(recipe: Path) -> None:
    text = f"{GOOD}  betas: [0.9, 0.99]\n"
    assert only_problem(text, "optimizer.betas.0=1") == (
        "--set optimizer.betas.0=1: optimizer.betas is a list, not a section\n"
        "    set the whole value: --set optimizer.betas=..."
    )


def test_load_recipe_with_the_same_override_twice_raises(recipe: Path) -> None:
    assert only_problem(GOOD, "seed=1", "seed=2") == (
        "--set seed=2: sets seed again\n    keep one of the two; the other is --set seed=1"
    )


def test_find_recipe_accepts_paths_and_shipped_names(recipe: Path) -> None:
    assert find_recipe("r.yaml") == Path("r.yaml")
    assert find_recipe("smoke/sft") == shipped_folder("recipes") / "smoke" / "sft.yaml"
    assert "quickstart" in list_recipes()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "quickstrat",
            "'quickstrat' is neither a recipe file nor the name of a shipped recipe\n    did you mean 'quickstart'?",
        ),
        (
            "./q.yaml",
            "'./q.yaml' is neither a recipe file nor the name of a shipped recipe\n    did you mean 'r.yaml'?",
        ),
        (
            "somewhere",
            "'somewhere' is a folder, not a recipe\n    give a file, or one of those that `ftcli show recipes` lists",
        ),
        (
            "xyz",
            "'xyz' is neither a recipe file nor the name of a shipped recipe\n    give a file, or one of those that ",
        ),
    ],
)
def test_find_recipe_with_an_unknown_name_is_refused(recipe: Path, name: str, message: str) -> None:
    Path("somewhere").mkdir()
    with pytest.raises(InputError) as caught:
        find_recipe(name)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("name", list_recipes())
def test_load_recipe_with_a_shipped_recipe_loads_dumps_back_equal_and_points_at_the_schema(
    name: str, tmp_path: Path
) -> None:
    path = list_recipes()[name]
    loaded = load_recipe(name)
    (tmp_path / "again.yaml").write_text(dump_recipe(loaded))
    assert load_recipe(tmp_path / "again.yaml") == loaded
    up = "../" * name.count("/")
    assert path.read_text().splitlines()[0] == f"# yaml-language-server: $schema={up}{SCHEMA_FILE}"


def test_dump_recipe_keeps_numeric_text_as_text(recipe: Path) -> None:
    loaded = load_recipe(recipe, ["model.name='1e-4'", "output='NO'", "data.columns={prompt: '7'}"])
    recipe.write_text(dump_recipe(loaded))
    assert load_recipe(recipe) == loaded


def test_load_recipe_run_folder_is_the_option_else_the_recipes_else_the_file_name(recipe: Path) -> None:
    loaded = load_recipe(recipe)
    assert run_output("smoke/sft", loaded) == Path("runs/sft")
    assert run_output("a/v1.5.yaml", loaded) == Path("runs/v1.5")
    assert run_output("r.yaml", load_recipe(recipe, ["output=o"])) == Path("o")
    assert run_output("r.yaml", load_recipe(recipe, ["output=~/o"])) == Path.home() / "o"
    assert run_output("r.yaml", load_recipe(recipe, ["output=o"]), "p") == Path("p")


def test_recipe_is_frozen(recipe: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_recipe(recipe).seed = 3  # type: ignore[misc]


def test_recipe_keys_have_a_description() -> None:
    sections = [value for value in vars(recipe_module).values() if isinstance(value, type)]
    for section in sections:
        if issubclass(section, recipe_module.Section):
            assert section.__doc__
            undescribed = [key for key, field in section.model_fields.items() if not field.description]
            assert undescribed == [], section


def test_recipe_reference_names_every_key() -> None:
    text = recipe_reference()
    assert [path for path in key_paths() if f"`{path}`" not in text] == []


@pytest.mark.parametrize("name", list_recipes())
def test_recipe_schema_accepts_the_shipped_recipes(name: str) -> None:
    validator = jsonschema.Draft202012Validator(recipe_schema())
    validator.check_schema(recipe_schema())
    assert list(validator.iter_errors(read_document(list_recipes()[name]).values)) == []


@pytest.mark.parametrize(
    "change",
    ["sed: 1", "seed: -1", "task_options: {chatt: auto}", "precision: fp61", "train: {max_steps: 1e-1}"],
)
def test_recipe_schema_refuses_what_the_program_refuses(change: str) -> None:
    values = (
        yaml.safe_load(GOOD) | {"optimizer": {"learning_rate": 1e-4}} | yaml.safe_load(change.replace("1e-1", "0.1"))
    )
    assert not jsonschema.Draft202012Validator(recipe_schema()).is_valid(values)
    assert jsonschema.Draft202012Validator(recipe_schema()).is_valid(
        yaml.safe_load(GOOD) | {"optimizer": {"learning_rate": 1e-4}}
    )


@pytest.mark.parametrize("model", [None, {}, {"revision": "main"}])
@pytest.mark.parametrize(
    ("task", "is_good"), [("./task.py", True), ("package.task", True), ("face_swap", True), ("sft", False)]
)
def test_recipe_schema_requires_a_model_where_the_program_does(
    task: str, is_good: bool, model: dict[str, str] | None
) -> None:
    values = yaml.safe_load(GOOD) | {"optimizer": {"learning_rate": 1e-4}, "task": task, "task_options": {}}
    values = {key: value for key, value in values.items() if key != "model"}
    values |= {} if model is None else {"model": model}
    assert jsonschema.Draft202012Validator(recipe_schema()).is_valid(values) == is_good
    with nullcontext() if is_good else pytest.raises(ValidationError, match="model"):
        Recipe.model_validate(values)


def test_list_tasks_is_the_list_of_task_files() -> None:
    shipped = ("face_swap", "image_classification", "preference", "pretrain", "reward", "sft", "text_classification")
    assert list_tasks() == [*shipped, "unpaired_preference"]
    assert find_task("sft").__name__ == "ftcli.tasks.sft"


OWN = """\
from pydantic import BaseModel, ConfigDict, Field
class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    depth: int = Field(1, ge=1)
class Task:
    def __init__(self, recipe, options):
        self.depth = options.depth
"""


def test_recipe_with_a_users_own_task_file_is_checked_in_a_process_apart(recipe: Path) -> None:
    Path("mine.py").write_text(f"import torch\n{OWN}")
    text = GOOD.replace("task: sft", "task: ./mine.py\ntask_options:\n  depth: 0")
    recipe.write_text(text)
    script = (
        "import sys\nfrom ftcli.config.load import load_recipe\nfrom ftcli.runtime.errors import InputError\n"
        "try: load_recipe('r.yaml')\nexcept InputError as error: print(error)\nprint('torch' in sys.modules)"
    )
    home = str(Path(__file__).resolve().parents[3])
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env={"PYTHONPATH": home}
    )
    assert done.stdout.splitlines() == [
        "r.yaml:3: task_options.depth is 0, and must be a whole number, at least 1",
        "False",
    ]


def test_load_recipe_with_a_module_of_the_user_loads_its_task(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("mypackage").mkdir()
    needed = "".join(f"\n    def {method}(self, *arguments): ...\n" for method in METHODS)
    Path("mypackage/mytask.py").write_text(OWN.replace("class Task:\n", f"class Task:{needed}\n"))
    monkeypatch.syspath_prepend(str(Path.cwd()))
    recipe.write_text(GOOD.replace("task: sft", "task: mypackage.mytask\ntask_options: {depth: 3}"))
    loaded = load_recipe(recipe)
    assert build_task(loaded).depth == 3  # type: ignore[attr-defined]
    wrong = loaded.model_copy(update={"task_options": {"depht": 3}})
    with pytest.raises(InputError, match="unknown key 'depht' in task_options\n    did you mean 'depth'?"):
        build_task(wrong)


@pytest.mark.parametrize(
    ("name", "body", "problem"),
    [
        ("./gone.py", None, "no task './gone.py': no such file\n    the path starts at the current folder"),
        (
            "no.such.module",
            None,
            "no task 'no.such.module': no module 'no'\n    install its package, or start in ",
        ),
        ("./mine.txt", "x = 1\n", "task './mine.txt' is not a Python file\n    give a file whose name ends in .py"),
        ("./mine1.py", "x = 1\n", "task './mine1.py' defines no Options and no Task\n    a task's file has "),
        ("./mine2.py", "raise OSError('boo')\n", "task './mine2.py' cannot be imported: OSError: boo"),
        (
            "./mine3.py",
            OWN.replace('extra="forbid", ', ""),
            "Options of task './mine3.py' would silently ignore a misspelt key\n    give it model_config = ",
        ),
    ],
)
def test_load_recipe_with_a_file_that_is_no_task_is_refused(
    recipe: Path, name: str, body: str | None, problem: str
) -> None:
    if body is not None:
        Path(name).write_text(body)
    assert only_problem(GOOD.replace("task: sft", f"task: {name}")).startswith(f"r.yaml:1: {problem}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model_type: llama\nvocab_size: 9\n",
            "a.yaml: this is not a recipe: it has no key of a recipe\n    `ftcli init`",
        ),
        ("distributed_type: FSDP\n", "a.yaml: this is not a recipe: it has no key of a recipe\n    it is a profile"),
    ],
)
def test_load_recipe_of_another_kind_of_file_reports_one_error(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(text)
    with pytest.raises(InputError) as caught:
        load_recipe("a.yaml")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"torch_compile": True}},
        {"model": {"activation_offloading": True}},
        {"model": {"gradient_checkpointing": "full"}},
        {"model": {"batch_norm": "sync"}},
        {"adapter": {"type": "lora"}},
    ],
)
def test_cuda_graphs_with_a_key_that_excludes_them_are_refused_before_a_model_loads(
    sections: dict[str, dict[str, object]],
) -> None:
    ((section, keys),) = sections.items()
    ((key, value),) = keys.items()
    values = minimal_values(data={"train": "rows.jsonl"}, **sections) | {"task": "text_classification"}
    values["model"] = {"name": "m", "cuda_graphs": True, **sections.get("model", {})}
    with pytest.raises(
        ValidationError, match=f"cuda_graphs cannot be .* {section}.{key}: {str(value).lower()}: change"
    ):
        Recipe.model_validate(values)
    values["model"]["cuda_graphs"] = False
    Recipe.model_validate(values)


def test_cuda_graphs_of_tasks_that_cannot_have_them_are_refused_before_a_model_loads() -> None:
    values = minimal_values(data={"train": "rows.jsonl"}) | {"model": {"name": "m", "cuda_graphs": True}}
    with pytest.raises(ValidationError, match="cuda_graphs cannot be combined with task: sft: change"):
        Recipe.model_validate(values | {"task": "sft"})
    for task in ("image_classification", "text_classification"):
        Recipe.model_validate(values | {"task": task})
