"""Tiny models are written like `save_pretrained` writes them, without an import of DeepSpeed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ftcli import tiny_models

ON_IMPORT = """
import sys
from ftcli.testing import save_tiny_causal
save_tiny_causal(sys.argv[1])
print("deepspeed" in sys.modules)
"""
BUILDERS = [
    tiny_models.save_tiny_causal,
    tiny_models.save_tiny_encoder,
    tiny_models.save_tiny_vit,
    tiny_models.save_tiny_mobilenet,
]


@pytest.mark.parametrize("build", BUILDERS)
def test_save_tiny_models_writes_the_bytes_of_save_pretrained(
    build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = tiny_models._save
    saved: list[Any] = []

    def save(model: Any, processor: Any, folder: Path) -> Path:
        saved.append((model, processor))
        return write(model, processor, folder)

    monkeypatch.setattr(tiny_models, "_save", save)
    folder, expected = build(tmp_path / "model"), tmp_path / "expected"
    for part in saved[0]:
        part.save_pretrained(expected)
    contents = [{path.name: path.read_bytes() for path in place.iterdir()} for place in (folder, expected)]
    assert contents[0] == contents[1]


def test_save_tiny_causal_in_a_new_process_prints_nothing_and_imports_no_deepspeed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ON_IMPORT, str(tmp_path / "model")], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("False\n", "")
