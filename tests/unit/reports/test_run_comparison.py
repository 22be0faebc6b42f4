"""`ftcli compare`: what differs between runs, in text and JSON; and the curve that `ftcli show` draws."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml

import ftcli
from ftcli.reports.run_comparison import _json
from ftcli.reports.run_summary import show_run
from ftcli.reports.text_chart import HEIGHT, WIDTH, draw_text_chart
from ftcli.runtime.errors import InputError

from ...support.run_folders import FOLDERS, change_rows, copy_run
from ...support.runner import RunCli


def test_compare_runs_finds_differences_of_recipe_profile_versions_and_curves(tmp_path: Path) -> None:
    other = copy_run("sft_ddp", tmp_path / "other")
    environment = json.loads((other / "environment.json").read_text())
    environment["packages"] |= {"torch": "2.11.0"}
    (other / "environment.json").write_text(json.dumps(environment))
    change_rows(other, {3: {"samples": 1}})
    comparison = ftcli.compare_runs(FOLDERS / "sft", other)
    assert ("data.max_length", ["64", "40"]) in comparison.differences["recipe"]
    assert ("evaluate.generate.max_new_tokens", ["4", "not set"]) in comparison.differences["recipe"]
    assert not [name for name, _ in comparison.differences["recipe"] if name.startswith("optimizer")]
    assert ("distributed_type", ["not set", "MULTI_GPU"]) in comparison.differences["profile"]
    assert comparison.differences["versions"] == [("torch", ["2.13.0+cpu", "2.11.0"])]
    assert ("processes", ["1", "2"]) in comparison.differences["machine"]
    curves = dict(comparison.curves)
    assert curves["steps in common"][1] == "3" and curves["largest difference of learning_rate"][1] == "identical"
    mine, theirs = 5.346167087554932, 5.3805694580078125  # losses of step 2
    assert curves["largest difference of loss"][1] == f"{abs(mine - theirs) / mine:.1e} at step 2"
    assert curves["ids of trained rows"][1] == "differ from step 3"


def test_compare_runs_shows_a_last_loss_that_is_infinite_as_it_is(tmp_path: Path) -> None:
    run = copy_run("sft_ddp", tmp_path / "run")
    change_rows(run, {3: {"loss": math.inf}})
    comparison = ftcli.compare_runs(FOLDERS / "sft_ddp", run)
    assert dict(comparison.summary)["last loss"][1] == "inf at step 3"


def test_compare_runs_names_a_step_that_is_finite_in_one_run_only(tmp_path: Path) -> None:
    run, same, other = (copy_run("sft_ddp", tmp_path / name) for name in ("run", "same", "other"))
    for each in (run, same):
        change_rows(each, {1: {"loss": math.nan}})
    change_rows(other, {1: {"loss": math.nan}, 3: {"loss": math.inf}})
    curves = dict(ftcli.compare_runs(FOLDERS / "sft_ddp", run, other).curves)
    assert curves["largest difference of loss"][1:] == ["finite in one run only at step 2"] * 2
    assert curves["largest difference of learning_rate"][1:] == ["identical"] * 2
    curves = dict(ftcli.compare_runs(run, same, other).curves)
    expected = ["identical, 1 step not finite in both", "finite in one run only at step 3"]
    assert curves["largest difference of loss"][1:] == expected


def test_compare_runs_has_the_highest_memory_of_all_launches(tmp_path: Path) -> None:
    run = copy_run("sft", tmp_path / "run")
    change_rows(run, {0: {"peak_memory_gb": 7.0}})
    summary = dict(ftcli.compare_runs(run, FOLDERS / "sft_ddp").summary)
    assert summary["peak_memory_gb"][0] == "7"


def test_compare_runs_of_different_tasks_says_that_losses_are_not_comparable() -> None:
    comparison = ftcli.compare_runs(FOLDERS / "sft", FOLDERS / "text_classification")
    assert ("task", ["sft", "text_classification"]) in comparison.differences["recipe"]
    assert "not comparable" in comparison.notes[-1]
    assert ("last eval/accuracy", ["none", "0.5 at step 3"]) in comparison.summary


def test_compare_runs_without_a_recipe_compares_the_rest(tmp_path: Path) -> None:
    other = copy_run("sft", tmp_path / "other")
    (other / "recipe.yaml").unlink()
    comparison = ftcli.compare_runs(FOLDERS / "sft", other)
    assert "recipe" not in comparison.differences and comparison.differences["versions"] == []
    assert comparison.notes == ["other: recipe.yaml is missing"]


def test_compare_runs_of_one_run_is_refused() -> None:
    with pytest.raises(InputError, match="two runs or more"):
        ftcli.compare_runs(FOLDERS / "sft")


def test_compare_prints_tables_and_curves(run_cli: RunCli) -> None:
    done = run_cli("compare", FOLDERS / "sft", FOLDERS / "sft_ddp")
    lines = done.out.splitlines()
    assert done.code == 0 and lines[0].split() == ["run", "sft", "sft_ddp"]
    assert "versions: no difference" in lines and "loss: A sft, B sft_ddp" in lines
    (rate,) = [line for line in lines if line.startswith("data.max_length")]
    assert rate.split() == ["data.max_length", "64", "40"]


def test_compare_with_json_has_the_same_tables(run_cli: RunCli) -> None:
    done = run_cli("compare", FOLDERS / "sft", FOLDERS / "sft_ddp", "--json")
    values = json.loads(done.out)
    assert values["runs"] == ["sft", "sft_ddp"] and values["differences"]["recipe"]["data.max_length"] == ["64", "40"]
    assert values["summary"]["last loss"] == ["4.9305 at step 3", "4.9492 at step 3"]


def test_compare_of_a_folder_without_a_run_exits_with_2(run_cli: RunCli, tmp_path: Path) -> None:
    done = run_cli("compare", FOLDERS / "sft", tmp_path)
    assert done.code == 2 and "has no run" in done.err and "runs/<recipe>" in done.err and done.out == ""


def test_draw_text_chart_places_means_by_step_and_value() -> None:
    *rows, axis, labels = draw_text_chart([([0, 63], [1.0, 0.0])])
    assert len(rows) == HEIGHT and rows[0] == "1 |*" and rows[-1] == "0 |" + " " * (WIDTH - 1) + "*"
    assert axis == "  +" + "-" * WIDTH and labels.split() == ["step", "0", "63"]


def test_draw_text_chart_of_two_curves_marks_shared_places() -> None:
    rows = draw_text_chart([([0, 10], [1.0, 0.0]), ([0, 10], [1.0, 0.5])])
    assert rows[0] == "1 |#" and "A" in rows[HEIGHT - 1] and any(row.endswith("B") for row in rows)


def test_draw_text_chart_without_two_finite_values_is_empty() -> None:
    assert (
        draw_text_chart([])
        == draw_text_chart([([1, 2], [1.0, math.nan])])
        == draw_text_chart([([1, 1], [1.0, 2.0])])
        == []
    )
    assert draw_text_chart([([1, 2], [3.0, 3.0])])[0].endswith("*")


def test_show_run_draws_the_loss(tmp_path: Path) -> None:
    lines = list(show_run(FOLDERS / "sft"))
    place = lines.index("loss     5.5487 at step 1, 4.9305 at step 3")
    assert lines[place + 1].split() == ["5.549", "|*"] and lines[place + HEIGHT].split()[:2] == ["4.93", "|"]


def test_show_run_with_keep_best_names_the_best_checkpoint_and_its_export() -> None:
    best = FOLDERS / "sft" / "checkpoints" / "step-000003"
    value = json.loads((best / "state.json").read_text())["metrics"]["loss"]
    text = (
        f"step 3 has the smallest loss of the checkpoints that were evaluated, {value:.6g}; "
        f"`ftcli export {best} FOLDER` exports it"
    )
    assert f"best     {text}" in list(show_run(FOLDERS / "sft"))
    assert not any(line.startswith("best") for line in show_run(FOLDERS / "sft_lora"))


def test_show_run_of_rows_with_text_and_nan_draws_the_rest(tmp_path: Path) -> None:
    run = copy_run("sft", tmp_path / "run")
    change_rows(run, {0: {"loss": "x", "train/a/loss": "y"}, 1: {"eval/loss": "z"}, 4: {"loss": math.nan}})
    lines = list(show_run(run))
    assert "loss     5.3462 at step 2, nan at step 3" in lines and not [line for line in lines if "train/a" in line]


def test_compare_runs_finds_texts_that_only_look_equal(tmp_path: Path) -> None:
    folders = []
    for number, prompts in enumerate((["a b", "c"], ["a", "b", "c"], "a b c", ["a\nb"])):
        folder = copy_run("sft", tmp_path / str(number))
        values = yaml.safe_load((folder / "recipe.yaml").read_text())
        values["evaluate"]["generate"]["prompts"] = prompts
        (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
        folders.append(folder)
    shown = dict(ftcli.compare_runs(*folders).differences["recipe"])["evaluate.generate.prompts"]
    assert shown == ['["a b", "c"]', '["a", "b", "c"]', '"a b c"', '["a\\nb"]']
    assert _json([{1: 2, "a": 3}]) == '[{"1": 2, "a": 3}]', "keys without an order"
    shown = dict(ftcli.compare_runs(FOLDERS / "sft", folders[3]).differences["recipe"])["evaluate.generate.prompts"]
    assert shown[1] == '["a\\nb"]', "one line of the table"
    again = copy_run("sft", tmp_path / "again")
    assert ftcli.compare_runs(FOLDERS / "sft", again).differences["recipe"] == []
