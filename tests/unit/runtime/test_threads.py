"""Threads of computations on the CPU sleep while they wait, in every way of starting them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ftcli.runtime.threads import CHOSEN, POLICY, passive_waiting, wait_passively

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CHOSEN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize("name", CHOSEN)
def test_passive_waiting_keeps_what_the_user_chose(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert passive_waiting() == passive_waiting(cpu=True) == {POLICY: "PASSIVE"}
    monkeypatch.setenv(name, "1")
    assert passive_waiting() == passive_waiting(cpu=True) == {}


def test_passive_waiting_on_a_machine_with_gpus_is_for_the_cpu_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for visible, expected in (("0", {}), ("", {POLICY: "PASSIVE"}), ("-1", {POLICY: "PASSIVE"})):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert passive_waiting() == expected
        assert passive_waiting(cpu=True) == {POLICY: "PASSIVE"}


def test_wait_passively_after_torch_is_loaded_changes_nothing() -> None:
    import torch

    assert torch.get_num_threads() and POLICY not in os.environ
    wait_passively(cpu=True)
    assert POLICY not in os.environ


STARTS = {
    "command line": "import sys, ftcli.__main__ as m; sys.argv = ['ftcli', 'train', 'no.yaml', '--cpu']; m.main()",
    "train": "import ftcli; ftcli.train('no.yaml', cpu=True)",
    "prepare": "import ftcli; ftcli.prepare('no.yaml', cpu=True)",
}


@pytest.mark.parametrize("start", STARTS)
def test_openmp_of_a_process_that_trains_on_the_cpu_does_not_spin(start: str) -> None:
    code = f"try:\n    {STARTS[start]}\nexcept BaseException: pass\nimport torch"
    variables = os.environ | {"OMP_DISPLAY_ENV": "VERBOSE", "PYTHONPATH": str(ROOT)}
    shown = {}
    for policy in ("", "ACTIVE"):
        chosen = variables | ({POLICY: policy} if policy else {})
        ended = subprocess.run([sys.executable, "-c", code], env=chosen, capture_output=True, text=True, check=True)
        shown[policy] = [line.split("'")[1] for line in ended.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
        if not shown[policy]:
            pytest.skip("the OpenMP of this torch is not GNU's, and shows no count")
    assert shown[""] == ["0"] and shown["ACTIVE"] != ["0"]
