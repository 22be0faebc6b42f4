"""Checks before processes are started: names of patches beside files."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftcli.launch.preflight import check_inputs
from ftcli.runtime.errors import InputError
from ftcli.runtime.patches import WITHOUT

from ...support.cells import cell, write_inputs


def test_check_inputs_with_a_misspelt_patch_names_it_beside_missing_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_inputs(tmp_path)
    monkeypatch.setenv(WITHOUT, "lora-scalings")
    with pytest.raises(InputError) as error:
        check_inputs(cell(tmp_path, "sft-tied", data={"train": str(tmp_path / "gone.jsonl")}), cpu=True)
    assert "contains lora-scalings, and no patch has this name\n    did you mean 'lora-scaling'?" in str(error.value)
    assert "gone.jsonl" in str(error.value)
    monkeypatch.setenv(WITHOUT, "lora-scaling")
    check_inputs(cell(tmp_path, "sft-tied"), cpu=True)
