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
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
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


COMMAND = "import sys, ftcli.__main__ as m; sys.argv = ['ftcli', *{!r}.split()]; m.main()"
MODULE = "import runpy, sys; sys.argv = ['ftcli', 'train', 'no.yaml']; runpy.run_module('ftcli', run_name='__main__')"
# How torch comes to be loaded -> whether the user asked for the CPU there. Otherwise a machine without GPUs counts.
STARTS = {
    COMMAND.format("train no.yaml --cpu"): True,
    COMMAND.format("parity no.yaml --profiles ddp --cpu"): True,
    COMMAND.format("evaluate no-run --cpu"): True,
    COMMAND.format("check no.yaml"): False,
    MODULE: True,  # of `accelerate launch --cpu -m ftcli train`, which sets ACCELERATE_USE_CPU
    "import ftcli; ftcli.train('no.yaml', cpu=True)": True,
    "import ftcli; ftcli.prepare('no.yaml', cpu=True)": True,
    "import ftcli; ftcli.generate('no-run', ['text'], cpu=True)": True,
    "from ftcli import check": False,
    "from ftcli import preview_data": False,
}
WATCH = """
import os, sys

class Watch:
    def find_spec(self, name, *rest):
        if name == "torch":  # the first import of it
            print(os.environ.get({policy!r}))
            sys.stdout.flush()
            os._exit(0)

sys.meta_path.insert(0, Watch())
try:
    {start}
except BaseException:
    pass
import torch
"""


@pytest.mark.parametrize("start", STARTS)
def test_policy_is_set_before_torch_is_loaded_in_every_way_of_starting(start: str, tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    has_gpus = {"CUDA_VISIBLE_DEVICES": "0", "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    variables = os.environ | {"PYTHONPATH": str(ROOT)} | (has_gpus if STARTS[start] else {})
    variables |= {"ACCELERATE_USE_CPU": "True"} if start == MODULE else {}
    command = [sys.executable, "-c", WATCH.format(policy=POLICY, start=start)]
    ended = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "PASSIVE"


def test_openmp_of_a_process_that_trains_on_the_cpu_does_not_spin() -> None:
    code = "import ftcli\ntry: ftcli.train('no.yaml', cpu=True)\nexcept ftcli.InputError: pass\nimport torch"
    variables = os.environ | {"OMP_DISPLAY_ENV": "VERBOSE", "PYTHONPATH": str(ROOT)}
    shown = {}
    for policy in ("", "ACTIVE"):
        chosen = variables | ({POLICY: policy} if policy else {})
        ended = subprocess.run([sys.executable, "-c", code], env=chosen, capture_output=True, text=True, check=True)
        shown[policy] = [line.split("'")[1] for line in ended.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
        if not shown[policy]:
            pytest.skip("the OpenMP of this torch is not GNU's, and shows no count")
    assert shown[""] == ["0"] and shown["ACTIVE"] != ["0"]
