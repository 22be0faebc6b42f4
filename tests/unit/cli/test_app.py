"""The command line as a user meets it: help, exit codes, where text goes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ftcli._version import __version__
from ftcli.runtime.environment import PACKAGES

from ...support.cells import cell
from ...support.runner import RunCli

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = [
    "init",
    "train",
    "check",
    "preview",
    "parity",
    "fetch",
    "tokenize",
    "evaluate",
    "export",
    "generate",
    "chat",
    "show",
    "report",
    "compare",
    "schema",
    "quickstart",
    "version",
]


def run_ftcli(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("FTCLI_LAUNCHED", "RANK")}
    return subprocess.run(
        [sys.executable, "-m", "ftcli", *arguments],
        cwd=cwd,
        env={**inherited, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
    )


def test_help_names_every_command_and_fits_a_terminal() -> None:
    result = run_ftcli("--help")
    assert result.returncode == 0 and result.stderr == ""
    for command in COMMANDS:
        assert f"\n  {command} " in result.stdout
    assert "..." not in result.stdout.split("Commands:")[1]  # no help line is cut
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_app_every_command_has_help_for_every_option(command: str) -> None:
    result = run_ftcli(command, "--help")
    assert result.returncode == 0
    options = result.stdout.partition("Options:")[2].splitlines()
    assert options and not [line for line in options if line.strip().startswith("--") and len(line.split()) < 3]


@pytest.mark.parametrize(
    "arguments",
    [
        ("trian",),
        ("train",),
        ("train", "r.yaml", "--no-such-option"),
        ("show",),
        ("parity", "r.yaml", "--micro-sizes", "2,x"),
        ("parity", "r.yaml", "--micro-sizes", "2,\u00b2"),
        ("parity", "r.yaml", "--num-processes", "9" * 4400),
    ],
)
def test_app_with_a_wrong_command_line_exits_with_2_and_writes_to_stderr(arguments: tuple[str, ...]) -> None:
    result = run_ftcli(*arguments)
    assert result.returncode == 2
    assert result.stdout == "" and "Usage" in result.stderr


def test_app_with_a_stray_word_is_refused() -> None:
    result = run_ftcli("train", "r.yaml", "another.yaml", "--profile", "ddp", "--cpu")
    assert result.returncode == 2 and "unexpected argument 'another.yaml'" in result.stderr


def test_wrong_input_exits_with_2_and_no_traceback(tmp_path: Path) -> None:
    result = run_ftcli("train", "missing.yaml", cwd=tmp_path)
    assert result.returncode == 2
    assert "missing.yaml" in result.stderr and "Traceback" not in result.stderr
    assert result.stdout == "" and not list(tmp_path.iterdir())


def test_app_every_problem_of_a_recipe_is_printed(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("task: sft\nseeed: 1\nmodel: {name: 3}\n")
    result = run_ftcli("check", "r.yaml", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.count("error: ") >= 3 and "r.yaml:2" in result.stderr


def test_show_lists_tasks_and_refuses_unknown_words() -> None:
    result = run_ftcli("show", "tasks")
    assert [line.split()[0] for line in result.stdout.splitlines()] == [
        "face_swap",
        "image_classification",
        "preference",
        "pretrain",
        "reward",
        "sft",
        "text_classification",
        "unpaired_preference",
    ]
    wrong = run_ftcli("show", "taks")
    assert wrong.returncode == 2 and "did you mean 'tasks'?" in wrong.stderr


def test_show_lists_recipes_and_profiles() -> None:
    profiles = run_ftcli("show", "profiles").stdout
    assert {"single", "ddp", "fsdp", "zero3"} <= {line.split()[0] for line in profiles.splitlines()}
    assert run_ftcli("show", "recipes").returncode == 0


def test_show_of_a_run_prints_its_state_and_curve(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("task: sft\n")
    (tmp_path / "status.json").write_text('{"state": "done", "step": 7, "exit_code": 0, "error": ""}')
    assert "done at step 7" in run_ftcli("show", str(tmp_path)).stdout


def test_schema_is_json_on_stdout() -> None:
    schema = json.loads(run_ftcli("schema").stdout)
    assert "batch" in schema["properties"]


def test_version_names_the_packages_a_report_needs() -> None:
    lines = run_ftcli("version").stdout.splitlines()
    assert lines[0].split() == ["ftcli", __version__]
    assert [line.split()[0] for line in lines] == list(PACKAGES)


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_commands_on_a_stream_that_is_not_utf_8_escape_what_it_lacks(
    encoding: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ftcli.__main__ import main

    rows = [{"prompt": f"語 {index}", "completion": "\U0001f600" * (1 + index % 3)} for index in range(30)]
    (tmp_path / "語.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = cell(inputs, "sft-tied", data={"train": str(tmp_path / "語.jsonl"), "max_length": 64})
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe.model_dump(mode="json", exclude_unset=True)))
    commands = (
        ["check", str(tmp_path / "recipe.yaml"), "--data", "--cpu"],
        ["preview", str(tmp_path / "recipe.yaml")],
        ["check", str(tmp_path / "recipe.yaml"), "--set", "output=語", "--set", "語=1"],
        ["語"],
    )
    codes, texts = [], []
    for arguments in commands:
        streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2)]
        monkeypatch.setattr(sys, "stdout", streams[0])
        monkeypatch.setattr(sys, "stderr", streams[1])
        with pytest.raises(SystemExit) as end:
            main(arguments)
        codes.append(end.value.code)
        for stream in streams:
            stream.flush()
        texts.append(b"".join(stream.detach().getvalue() for stream in streams).decode(encoding, "replace"))
    assert codes == [0, 0, 2, 2], texts
    assert "lengths" in texts[0] and "#####" in texts[0]
    assert all("\\u8a9e" in text for text in texts[:3])  # click writes UTF-8 if a stream is ASCII
    assert not any("Traceback" in text for text in texts)


@pytest.mark.parametrize("command", ["tokenize", "check --data", "preview", "train --cpu", "fetch"])
def test_commands_with_a_cache_folder_that_cannot_be_written_name_its_variable(
    command: str, inputs: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    (tmp_path / "file").touch()
    recipe = cell(inputs, "sft-tied").model_dump(mode="json", exclude_unset=True)
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    name, *options = command.split()
    arguments = [name, "smoke/sft" if name == "fetch" else tmp_path / "recipe.yaml", *options]
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        ended = run_cli(*arguments, FTCLI_CACHE=str(folder))
        assert (ended.code, "Traceback" in ended.text) == (2, False), ended.text
        assert f"the cache folder {folder} cannot be written" in ended.err and "FTCLI_CACHE" in ended.err
