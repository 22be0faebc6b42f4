"""What `ftcli quickstart` prints, and where it writes."""

from __future__ import annotations

import io
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from ftcli.__main__ import main
from ftcli.cli import quickstart
from ftcli.cli.quickstart import FUNCTIONS, WIDEST_ANSWER, choose_run_folder, print_results, shorten
from ftcli.runtime.run_folder import RunFolder
from ftcli.tasks import sft
from ftcli.testing import save_tiny_causal

from ...support.recipes import minimal_values

METRICS = [
    {"step": 0, "eval/loss": 3.88, "eval/perplexity": 48.2},
    {"step": 1, "loss": 3.9},
    {"step": 40, "eval/loss": 2.9, "eval/perplexity": 18.2},
]


def test_next_folder_with_earlier_runs_is_new_or_that_of_a_stopped_run(tmp_path: Path) -> None:
    expected = tmp_path / "quickstart"
    assert choose_run_folder(expected) == expected
    expected.mkdir()
    assert choose_run_folder(expected) == tmp_path / "quickstart-2"
    RunFolder(tmp_path / "quickstart-2").write_status("done", 40, 0)
    assert choose_run_folder(expected) == tmp_path / "quickstart-3"
    RunFolder(tmp_path / "quickstart-2").write_status("stopped", 3, 75)
    assert choose_run_folder(expected) == tmp_path / "quickstart-2"


def test_quickstart_interrupted_prints_the_resume_command_and_the_next_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_causal(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b c d"}\n' * 12)
    values = minimal_values(
        model={"name": str(tmp_path / "model"), "dropout": 0.0},
        data={"train": str(tmp_path / "rows.jsonl"), "eval_rows": 4},
        batch={"global_size": 2, "micro_size": 2},
        train={"max_steps": 4},
        evaluate={"at_start": True},
    )
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(values))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(quickstart, "RECIPE", str(tmp_path / "small.yaml"))
    monkeypatch.setattr(quickstart, "MAX_NEW_TOKENS", 2)
    loss = sft.Task.loss

    def interrupted(*arguments: Any) -> Any:
        if not (tmp_path / "interrupted").exists():
            (tmp_path / "interrupted").touch()
            signal.raise_signal(signal.SIGINT)
        return loss(*arguments)

    monkeypatch.setattr(sft.Task, "loss", interrupted)
    with pytest.raises(SystemExit) as end:
        main(["quickstart"])
    assert end.value.code == 75
    assert "run the same command again to continue runs/small" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        main(["quickstart"])
    captured = capsys.readouterr()
    assert not end.value.code, captured.err
    assert "resumed after step 1" in captured.err and "after 4 steps" in captured.out
    assert [folder.name for folder in (tmp_path / "runs").iterdir()] == ["small"]


@pytest.mark.parametrize("width", [50, 80, 160])
def test_print_story_fits_the_terminal_without_colour(width: int) -> None:
    out = io.StringIO()
    before = ["[bold]a rambling answer[/bold] " * 20, "", "```python\nclass Stack:\n```"]
    print_results(
        Console(file=out, width=width),
        METRICS,
        before,
        ["Decompress a file.", "Push it.", "Copy it."],
        seconds=61.7,
        folder=Path("runs/quickstart"),
    )
    text = out.getvalue()
    assert "\x1b" not in text
    table = text[: text.index("Perplexity")].splitlines()
    assert max(len(line) for line in table) <= width
    words = " ".join(text.split())
    assert "48.2 before, 18.2 after 40 steps" in words
    squeezed = "".join(character for character in text if character.isalnum() or character in "[]`")
    assert "[bold]" in squeezed and "(nothing)" in text  # an answer is never read as mark-up
    if width == 160:
        assert all(function in text for function in FUNCTIONS)


def test_shorten_with_a_long_answer_is_cut_at_a_word() -> None:
    assert shorten("two\n\n  lines") == "two lines"
    cut = shorten("word " * 100)
    assert cut.endswith("word ...") and len(cut) <= WIDEST_ANSWER + 4
