"""The real command line on the GPUs of this machine, with its environment."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import torch

from ..end_to_end.test_preemption import shell


def ftcli_on_gpus(folder: Path, *line: object, **more: str) -> subprocess.CompletedProcess[str]:
    """Run `ftcli LINE` in a folder; it sees the GPUs that this process sees, and imports from where this one does."""
    every = ",".join(map(str, range(torch.cuda.device_count())))
    inherited = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", every)}
    if "PYTHONPATH" in os.environ:
        inherited["PYTHONPATH"] = os.environ["PYTHONPATH"]
    return shell(folder, "ftcli", *line, **inherited, **more)
