"""What `ftcli quickstart` prints, and where it writes."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from ftcli.quickstart import FUNCTIONS, WIDEST_ANSWER, free_folder, print_story, shorten

METRICS = [
    {"step": 0, "eval/loss": 3.88, "eval/perplexity": 48.2},
    {"step": 1, "loss": 3.9},
    {"step": 40, "eval/loss": 2.9, "eval/perplexity": 18.2},
]


def test_the_next_free_folder_keeps_earlier_runs(tmp_path: Path) -> None:
    wanted = tmp_path / "quickstart"
    assert free_folder(wanted) == wanted
    wanted.mkdir()
    assert free_folder(wanted) == tmp_path / "quickstart-2"
    (tmp_path / "quickstart-2").mkdir()
    assert free_folder(wanted) == tmp_path / "quickstart-3"


@pytest.mark.parametrize("width", [50, 80, 160])
def test_the_story_fits_the_terminal_and_needs_no_colour(width: int) -> None:
    out = io.StringIO()
    before = ["[bold]a rambling answer[/bold] " * 20, "", "```python\nclass Stack:\n```"]
    print_story(
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


def test_a_long_answer_is_cut_at_a_word() -> None:
    assert shorten("two\n\n  lines") == "two lines"
    cut = shorten("word " * 100)
    assert cut.endswith("word ...") and len(cut) <= WIDEST_ANSWER + 4
