"""Folders of final weights that earlier launches left: what ftcli wrote is removed, what others wrote is kept.

Checkpoints: test_folder.py. A whole run: tests/end_to_end/test_resume.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ftcli.checkpoint.foreign_files import remove_rewritten, set_aside

WRITTEN = ("config.json", "model.safetensors", "tokenizer.json")


def write(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_text(name)
    return folder


def finish(run: Path) -> None:
    """Do what a launch does that is not killed."""
    asides = set_aside(run / "final.tmp")
    temporary = write(run / "final.tmp", *WRITTEN)
    asides += set_aside(run / "final")
    temporary.rename(run / "final")
    for aside in asides:
        remove_rewritten(aside, run / "final")


@pytest.mark.parametrize("kills", [1, 2, 3])
def test_set_aside_after_several_killed_launches_leaves_nothing_of_ours(kills: int, tmp_path: Path) -> None:
    for number in range(kills):  # each was killed while it wrote the folder
        set_aside(tmp_path / "final.tmp")
        write(tmp_path / "final.tmp", *WRITTEN[: number + 1])
    finish(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_set_aside_after_several_killed_launches_keeps_files_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "final", *WRITTEN, "notes.txt")
    set_aside(tmp_path / "final")  # killed afterwards
    write(tmp_path / "final.tmp", "config.json", "loss.png")
    finish(tmp_path)
    kept = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    ours = {f"final/{name}" for name in WRITTEN}
    assert kept == ours | {"not-by-ftcli-final/notes.txt", "not-by-ftcli-final.tmp/loss.png"}
    assert "notes.txt: ftcli did not write it" in capsys.readouterr().err


def test_set_aside_of_a_linked_folder_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere", *WRITTEN)
    (tmp_path / "final").symlink_to(tmp_path / "elsewhere")
    assert set_aside(tmp_path / "final") == []
    assert (tmp_path / "final").is_symlink() and len(list((tmp_path / "elsewhere").iterdir())) == 3
