"""`ftcli report`: one page for one or several runs, in which nothing of a run folder is markup."""

from __future__ import annotations

import importlib.util
import math
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

import ftcli
from ftcli.reports.report_charts import draw_charts
from ftcli.reports.report_samples import draw_samples
from ftcli.reports.run_record import read_runs
from ftcli.reports.run_series import find_panels
from ftcli.runtime.errors import InputError

from ...support.run_folders import FOLDERS, MARKUP, SCRIPT, change_rows, copy_run, hostile_run
from ...support.runner import RunCli


class Elements(HTMLParser):
    """Collects the text, the tags and the addresses of a page; the text of scripts and styles apart."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.scripts, self.tags, self.attributes = "", "", [], []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts += data
        else:
            self.text += f"{data}\n"


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the page of a hostile run beside a run of another task with values that are not finite."""
    folder = tmp_path_factory.mktemp("report")
    other = copy_run("text_classification", folder / "other")
    load = {f"load/gpu_power_watts/rank-{rank}": 600.0 + rank for rank in range(2)}
    change_rows(other, {0: load, 1: load})
    change_rows(other, {0: {"loss": math.nan}, 1: {"grad_norm": math.inf, "learning_rate": 10**400}})
    path = ftcli.write_report(hostile_run(folder), other, output=folder / "page.html")
    return path.read_text(encoding="utf-8")


def test_write_report_of_a_hostile_run_has_no_element_of_it(hostile_page: str) -> None:
    page = Elements(hostile_page)
    assert page.tags.count("script") == 2 and "img" not in page.tags and "iframe" not in page.tags
    assert not {"src", "href", "onerror", "onclick", "onload"} & set(page.attributes)
    for text in ("prompt ", "answer ", "model ", "event "):
        assert f"{text}{SCRIPT}" in page.text, text
    assert f"a {MARKUP} run" in page.text and SCRIPT not in page.scripts and MARKUP not in page.scripts


def test_write_report_allows_its_own_scripts_only(hostile_page: str) -> None:
    policy = hostile_page.partition('Content-Security-Policy" content="')[2].partition('"')[0]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and policy.count("sha256-") == 2
    assert "unsafe-inline" not in policy.partition("script-src")[2].partition(";")[0]


def test_write_report_of_several_runs_has_differences_charts_and_events(hostile_page: str) -> None:
    text = Elements(hostile_page).text
    for heading in ("Differences", "Versions", "Training", "Evaluation", "Devices and host", "Events"):
        assert f"\n{heading}\n" in text, heading
    assert "Answers over time" in text and "Power of the GPU, in watts" in text
    assert "Loss per item" in text and "eval/macro_f1" in text and "not comparable" in text and "loss is nan" in text


def test_write_report_of_one_run_is_in_its_folder_and_small(tmp_path: Path) -> None:
    run = copy_run("sft", tmp_path / "run")
    path = ftcli.write_report(run)
    assert path == run / "report.html" and path.stat().st_size < 2_000_000
    text = Elements(path.read_text(encoding="utf-8")).text
    assert "Differences" not in text and "learning_rate: 0.03" in text and "Environment of run" in text


def test_write_report_of_a_run_with_keep_best_names_the_best_checkpoint_and_its_export(tmp_path: Path) -> None:
    run = Path(shutil.copytree(FOLDERS / "sft", tmp_path / "run"))
    text = Elements(ftcli.write_report(run).read_text(encoding="utf-8")).text
    assert "Best checkpoint of run: step 3 has the smallest loss of the checkpoints that were evaluated" in text
    assert f"`ftcli export {run / 'checkpoints' / 'step-000003'} FOLDER` exports it" in text


def test_write_report_replaces_a_link_in_the_run_folder_and_does_not_follow_it(tmp_path: Path) -> None:
    run = copy_run("sft_stopped", tmp_path / "run")
    (tmp_path / "mine").write_text("my file")
    (run / "report.html").symlink_to(tmp_path / "mine")
    path = ftcli.write_report(run)
    assert (tmp_path / "mine").read_text() == "my file" and not path.is_symlink()
    assert [item.name for item in run.iterdir() if item.name.startswith(".")] == []


def test_write_report_without_metrics_has_the_rest(tmp_path: Path) -> None:
    run = copy_run("sft_stopped", tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    text = Elements(ftcli.write_report(run).read_text(encoding="utf-8")).text
    assert "has no training row" in text and "Loss per item" not in text and "Recipe of run" in text


def test_report_into_a_folder_that_does_not_exist_exits_with_2(run_cli: RunCli, tmp_path: Path) -> None:
    done = run_cli("report", FOLDERS / "sft", "--output", tmp_path / "none" / "page.html")
    assert done.code == 2 and "--output: the folder" in done.err and "does not exist" in done.err
    done = run_cli("report", FOLDERS / "sft", "--output", tmp_path)
    assert done.code == 2 and "is a folder" in done.err and "report.html" in done.err


def test_report_prints_the_file(run_cli: RunCli, tmp_path: Path) -> None:
    done = run_cli("report", FOLDERS / "sft", "--output", tmp_path / "page.html")
    assert done.code == 0 and done.out == f"{tmp_path / 'page.html'}\n" and (tmp_path / "page.html").is_file()


def test_write_report_without_bokeh_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real_find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bokeh" else real_find_spec(name))
    with pytest.raises(InputError, match="a report needs bokeh") as refused:
        ftcli.write_report(FOLDERS / "sft")
    assert "ftcli[report]" in refused.value.problems[0].hint


def test_draw_samples_has_a_row_for_each_evaluation_and_a_column_for_each_run(tmp_path: Path) -> None:
    other = copy_run("sft", tmp_path / "other")
    change_rows(other, {0: {"answer": "<b>bold</b>", "reference": "right", "ended": False}}, "samples.jsonl")
    runs = read_runs([FOLDERS / "sft", other, FOLDERS / "sft_ddp"])
    heading, first, second = draw_samples(runs)
    assert "Answers" in heading and "user: gamma" in second and "Expected: right" in first
    assert first.count("<th>") == 3 and first.count("<tr>") == 4 and "&lt;b&gt;bold" in first
    assert list(draw_samples(runs[2:])) == []


def test_curves_show_small_values_at_the_pointer() -> None:
    (run,) = read_runs([FOLDERS / "sft"])
    panels, _ = find_panels([run])
    figures, _ = draw_charts([run], [panel for panel in panels if panel.key == "learning_rate"])
    (tool,) = [tool for tool in figures["learning_rate"].tools if hasattr(tool, "tooltips")]
    form = dict(tool.tooltips)["value"].removeprefix("@value{").removesuffix("}")
    assert tool.formatters == {"@value": "printf"}
    assert [float(form % value) for value in (5e-7, 1.5e-8, -2e-7, 7.25)] == [5e-7, 1.5e-8, -2e-7, 7.25]
