"""Measure the time to the first step through `accelerate launch -m ftcli train`, with an empty cache and after it.

    python benchmarks/first_step.py --work FOLDER [--processes 2] [--starts 3] [--shape llama-3.1-8b] [--cpu]

Trains four steps of LoRA r16 on packed rows, with compiled layers. The first start has an empty cache of graphs and
kernels, the others have what it left. Prints one line for each start: the seconds of the whole command until the first
step, the seconds by the run's own log, and the parts of loading. FOLDER gets the weights (8B: 16 GB); memory files
(/dev/shm/...) are faster than most disks. To try it without a GPU: `--shape tiny --length 128 --cpu`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HOME = Path(__file__).resolve().parent
sys.path[:0] = [str(HOME), str(HOME.parent)]

from cell import make_inputs  # noqa: E402
from cells.cell import Cell, Inputs  # noqa: E402

RANK = 16
FIRST, LOADING = re.compile(r"first step after (\S+) s"), re.compile(r"loading: (.*)")


def main() -> None:
    """Measure all starts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument(
        "--set", action="append", default=[], help="KEY=VALUE of the recipe; default: layers are compiled"
    )
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    profile = "single" if arguments.processes == 1 else "ddp"
    sizes = {"shape": arguments.shape, "length": arguments.length, "micro_size": 2, "processes": arguments.processes}
    cell = Cell(peer="ftcli", task="pretrain", profile=profile, lora=RANK, cpu=arguments.cpu, **sizes)
    inputs = make_inputs(cell, arguments.work)
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        for number in range(arguments.starts):
            print(f"start {number + 1}: {start(cell, inputs, Path(folder), arguments.set)}", flush=True)


def start(cell: Cell, inputs: Inputs, folder: Path, settings: list[str]) -> str:
    """Start one run, with the caches in a folder, and return its times as text; raises `RuntimeError` if it fails."""
    caches = {"XDG_CACHE_HOME": "", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    environment = os.environ | {name: str(folder / "cache" / each) for name, each in caches.items()}
    environment["PYTHONPATH"] = os.pathsep.join([str(HOME.parent), os.environ.get("PYTHONPATH", "")])
    file = HOME.parent / "accelerate_configs" / f"{cell.profile}.yaml"
    launch = ["accelerate", "launch", "--config_file", str(file), "--num_processes", str(cell.processes)]
    adapter = {"type": "lora", "r": RANK, "lora_alpha": 2 * RANK, "path": inputs.adapter.resolve()}
    changes = [*(f"adapter.{key}={value}" for key, value in adapter.items()), "train.max_steps=4"]
    changes += settings or ["model.torch_compile=true"]
    command = [*launch, "-m", "ftcli", "train", str(inputs.recipe)]
    command += ["--output", str(folder / "run"), *(word for change in changes for word in ("--set", change))]
    command += ["--cpu"] if cell.cpu else []
    began, lines, seconds = time.monotonic(), [], 0.0
    with subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
        assert run.stdout is not None
        for line in run.stdout:
            lines.append(line)
            if FIRST.search(line):
                seconds = time.monotonic() - began
    shutil.rmtree(folder / "run", ignore_errors=True)
    text = "".join(lines)
    first, loading = FIRST.search(text), LOADING.search(text)
    if run.returncode or first is None or loading is None:
        raise RuntimeError(f"{' '.join(command)} failed:\n{text[-3000:]}")
    return f"{seconds:.1f} s of the command, {first[1]} s by the log; loading: {loading[1]}"


if __name__ == "__main__":
    main()
