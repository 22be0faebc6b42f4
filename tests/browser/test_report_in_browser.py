"""Reports in a real headless Chromium: charts are drawn without a network, and nothing of a run folder is executed."""

from __future__ import annotations

import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest
from PIL import Image

import ftcli
from ftcli.reports.report_charts import COLOURS

from ..support.run_folders import FOLDERS, MARKUP, SCRIPT, hostile_run

pytestmark = pytest.mark.browser
OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=10000"]
NO_NETWORK = "--proxy-server=127.0.0.1:9"  # the port that discards everything


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the report of a hostile run beside a run under DDP."""
    folder = tmp_path_factory.mktemp("browser")
    return ftcli.write_report(hostile_run(folder), FOLDERS / "sft_ddp", output=folder / "page.html")


def chromium(page: Path, *arguments: str) -> str:
    """Open a page in a new profile of Chromium and return its standard output."""
    program = shutil.which("chromium")
    assert program, "install the Debian package chromium"
    command = [program, *OPTIONS, NO_NETWORK, f"--user-data-dir={page.parent / 'profile'}", *arguments, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def title_of(document: str) -> str:
    (title,) = re.findall(r"<title>(.*?)</title>", document, re.DOTALL)
    return unescape(title)


def test_report_in_a_browser_shows_markup_as_text(page: Path) -> None:
    document = chromium(page, "--dump-dom")
    assert title_of(document) == f"a {MARKUP} run, sft_ddp"  # a script of the run would have changed it
    text = unescape(re.sub(r"<[^>]*>", "\n", re.sub(r"<script.*?</script>", "", document, flags=re.DOTALL)))
    for words in ("prompt ", "answer ", "model ", "event "):
        assert f"{words}{SCRIPT}" in text, words
    assert f"a {MARKUP} run" in text and "<img" not in document


def test_report_in_a_browser_runs_no_script_that_was_added(page: Path) -> None:
    """If text were not escaped, the content security policy would still stop it."""
    script = "<script>document.title = 'owned'</script>"
    changed = page.with_name("changed.html")
    changed.write_text(page.read_text().replace("</body>", f"{script}</body>"))
    assert title_of(chromium(changed, "--dump-dom")) == f"a {MARKUP} run, sft_ddp"
    changed.write_text(re.sub(r"<meta http-equiv[^>]*>", "", changed.read_text()))
    assert title_of(chromium(changed, "--dump-dom")) == "owned"


def coloured_pixels(page: Path) -> list[int]:
    """Take a picture of a page and return the number of its pixels in the colours of the first three runs."""
    picture = page.with_suffix(".png")
    chromium(page, "--window-size=1300,6000", f"--screenshot={picture}")
    with Image.open(picture) as image:
        counts = {colour: count for count, colour in image.convert("RGB").getcolors(2**24)}
    return [counts.get(tuple(bytes.fromhex(colour[1:])), 0) for colour in COLOURS[:3]]


def test_report_in_a_browser_draws_the_curves_of_both_runs(page: Path) -> None:
    without = page.with_name("without.html")
    without.write_text(re.sub(r"<script>.*?</script>", "", page.read_text(), flags=re.DOTALL))
    legends, drawn = coloured_pixels(without), coloured_pixels(page)
    assert legends[0] == legends[1] > 0 and legends[2] == drawn[2] == 0
    assert drawn[0] > 1.5 * legends[0] and drawn[1] > 1.5 * legends[1]
