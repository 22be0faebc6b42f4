"""Tests for an export onto a full disk, and for a run folder that cannot be written."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from safetensors import SafetensorError

from ftcli.runtime.durable_files import explain_full_disk
from ftcli.runtime.errors import InputError, RunError
from ftcli.runtime.run_folder import RunFolder

FULL = os.strerror(errno.ENOSPC)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, FULL),
        shutil.Error([("a", "b", f"[Errno 28] {FULL}: 'a'")]),
        SafetensorError(f"Error while serializing: I/O error: {FULL} (os error 28)"),
    ],
)
def test_export_on_a_full_disk_names_the_folder(error: Exception) -> None:
    with pytest.raises(RunError, match="new could not be written: No space left"), explain_full_disk(Path("new")):
        raise error


def test_export_with_another_error_keeps_it() -> None:
    with pytest.raises(SafetensorError, match="header"), explain_full_disk(Path("new")):
        raise SafetensorError("invalid header")


def test_claim_of_a_folder_that_cannot_be_written_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # root may write everywhere
    with pytest.raises(InputError, match=r"run cannot be written to\n.*--output"):
        RunFolder(tmp_path / "run").claim()
    assert list((tmp_path / "run").iterdir()) == []
