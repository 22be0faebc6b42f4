"""transformers lists the modules of its models once in a process, and the list is the one that it would make."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from ftcli.hardware.environment import quiet_libraries
from ftcli.hardware.import_structure import PREFIX, without_prefix
assert "transformers" not in sys.modules
import os, transformers
listed, scan = [], os.scandir
os.scandir = lambda path=".": listed.append(str(path)) or scan(path)
quiet_libraries()
import transformers.models
folder = os.path.join(os.path.dirname(transformers.__file__), PREFIX)
print(sum(path == folder for path in listed))
from transformers.utils.import_utils import define_import_structure
from pathlib import Path
made = without_prefix(define_import_structure(Path(folder), prefix=PREFIX))
print(made == define_import_structure(os.path.join(folder, "__init__.py")), len(made) > 5)
from transformers import LlamaForCausalLM
from transformers.models.qwen3 import Qwen3Config
print(LlamaForCausalLM.__module__, Qwen3Config.__name__)
"""


@pytest.mark.parametrize(("left_out", "again"), [("", 0), ("import-structure", 1)])
def test_quiet_libraries_imports_models_without_listing_them_again(
    left_out: str, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTCLI_WITHOUT_PATCHES", left_out)
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    expected = [str(again), "True True", "transformers.models.llama.modeling_llama Qwen3Config"]
    assert [line for line in result.stdout.splitlines() if not line.startswith("ftcli: ")] == expected
