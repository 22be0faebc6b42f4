r"""Save under one profile and resume under others: compare the curves, and time saving and loading.

    python benchmarks/checkpoint_matrix.py llama-3.2-1b FOLDER "fsdp:4>zero3:2,single:1" "zero3:2>fsdp:4" \
        "single:1>fsdp:4"

Each source trains to the end and saves half-way: once while training waits, twice in the background (the first of these
also pins the host memory that later saves reuse). Each reader resumes from that checkpoint. The losses of the steps
after the checkpoint are compared with those of one uninterrupted process. Prints a Markdown table. `--facts FILE`
receives one JSON line per part: one training or one resumption. Results are kept in FOLDER, so an interrupted call can
be repeated. A part that fails or exceeds `--piece-seconds` is reported, and the next part starts. No part starts after
`--seconds`. The exit code is 1 if a curve differs or a part is missing. To try it on a CPU: shape tiny, `--cpu`, two
processes.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ftcli.testing import run_on_cpu, run_on_processes

# Largest relative difference of a loss. bf16: the tolerance of `ftcli parity`. fp32: about one rounding error per step.
TOLERANCES = {"bf16": 4e-3, "fp32": 1e-5}
WAYS = ("waited", "background", "background again")
COLUMNS = ["saved by", "resumed by", "loss from one process", "loss from its own"]
COLUMNS += ["pause, disk", "pause, background", "the first", "complete", "load", "until ready", "GB", "files"]


def train_and_save(recipe: str, output: str, overrides: list[str], at: int, cpu: bool) -> dict[str, Any]:
    """Train to the end and save step `at` in each way; return the losses and the seconds of each way."""
    from ftcli.checkpoint.folder import folder_size
    from ftcli.config.load import load_recipe
    from ftcli.loop import steps
    from ftcli.runtime.checkpoint_names import checkpoint_path
    from ftcli.training.checkpointing import save_checkpoint
    from ftcli.training.setup import prepare

    began = time.perf_counter()
    run = prepare(load_recipe(recipe, overrides), cpu=cpu, output=output)
    result: dict[str, Any] = {"ready": _synchronized_time(run, cpu) - began, "losses": []}
    for step in steps(run):
        result["losses"].append(step.loss)
        if step.number == at:
            for way in WAYS:
                before, clock = _synchronized_time(run, cpu), time.time()
                save_checkpoint(run, at, background=way != "waited")
                result[way] = max(run.hardware.ranks.collect(time.perf_counter() - before))
                run.saving.wait()
                complete = checkpoint_path(Path(output), at) / "COMPLETE"
                result["complete"], result["bytes"] = complete.stat().st_mtime - clock, folder_size(complete.parent)
            result["in background"] = run.saving.has_room
            result["files"] = len(list(complete.parent.glob("*.safetensors")))
    run.hardware.close()
    return result


def resume(recipe: str, checkpoint: str, overrides: list[str], cpu: bool) -> dict[str, Any]:
    """Resume from a checkpoint and train to the end; return the losses, and the seconds of loading and of preparing."""
    from ftcli.config.load import load_recipe
    from ftcli.loop import steps
    from ftcli.training.checkpointing import load
    from ftcli.training.setup import prepare

    began = time.perf_counter()
    run = prepare(load_recipe(recipe, overrides), cpu=cpu, resume=checkpoint)
    ready = _synchronized_time(run, cpu) - began
    before = _synchronized_time(run, cpu)
    load(run, Path(checkpoint))
    loading = _synchronized_time(run, cpu) - before
    losses = [step.loss for step in steps(run)]
    run.hardware.close()
    return {"ready": ready, "load": loading, "losses": losses}


def _synchronized_time(run: Any, cpu: bool) -> float:
    """Wait for the device and for all ranks, and return the time. A collective."""
    import torch

    if not cpu:
        torch.cuda.synchronize()
    run.hardware.ranks.wait_for_slowest()
    return time.perf_counter()


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise `TimeoutError` in the block after this many seconds."""

    def end(number: int, frame: Any) -> None:
        raise TimeoutError(f"not done in {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Matrix:
    """The parts of one matrix. Each runs once, and its result is kept in a file of the folder."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.recipe = arguments, str(arguments.folder / "recipe.yaml")
        self.overrides = [f"train.max_steps={arguments.steps}", "evaluate.at_start=false", "data.eval=null"]
        self.overrides += ["checkpoint.keep=null", f"precision={arguments.precision}"]
        self.ends = time.monotonic() + arguments.seconds

    def saved(self, place: str) -> dict[str, Any] | None:
        """Return the result of saving on `place` (`profile:processes`); None if it failed or did not start."""
        output = str(self.arguments.folder / place.replace(":", "-"))
        return self._piece(f"save {place}", place, train_and_save, output, self.overrides, self.arguments.at)

    def resumed(self, source: str, place: str) -> dict[str, Any] | None:
        """Return the result of resuming the source's checkpoint on `place`; None if it failed or did not start."""
        checkpoint = self.arguments.folder / source.replace(":", "-") / "checkpoints" / f"step-{self.arguments.at:06d}"
        return self._piece(f"resume {source} {place}", place, resume, str(checkpoint), self.overrides)

    def _piece(self, name: str, place: str, function: Any, *arguments: Any) -> dict[str, Any] | None:
        kept = self.arguments.folder / f"{name.replace(':', '-').replace(' ', '-')}.json"
        if not kept.exists():
            left = min(self.arguments.piece_seconds, int(self.ends - time.monotonic()))
            if left < self.arguments.piece_seconds // 3:
                print(f"{name}: not started, no time left", file=sys.stderr, flush=True)
                return None
            profile, _, processes = place.partition(":")
            start, began = run_on_cpu if self.arguments.cpu else run_on_processes, time.monotonic()
            try:
                with limited(left):
                    values = (self.recipe, *arguments, self.arguments.cpu)
                    result = start(function, *values, processes=int(processes), profile=profile)[0]
            except Exception:  # the other parts still run
                traceback.print_exc()
                print(f"{name}: FAILED after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
                return None
            result = {"piece": name, "seconds": time.monotonic() - began} | result
            kept.write_text(json.dumps(result))
            print(f"{name}: {result['seconds']:.0f} s", file=sys.stderr, flush=True)
            if self.arguments.facts is not None:
                with self.arguments.facts.open("a") as file:
                    file.write(f"{json.dumps(result)}\n")
        stored: dict[str, Any] = json.loads(kept.read_text())
        return stored


def largest_difference(losses: list[float], reference: list[float]) -> float:
    """Return the largest relative difference of two curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))


def row(source: str, reader: str, saved: dict[str, Any], resumed: dict[str, Any], differences: list[str]) -> str:
    """Return the table row of one source and one reader."""
    seconds = [saved[way] for way in ("waited", "background again", "background", "complete")]
    times = [f"{value:.2f} s" for value in [*seconds, resumed["load"], resumed["ready"]]]
    size = [f"{saved['bytes'] / 1e9:.2f}", str(saved["files"])]
    return f"| {' | '.join([source.replace(':', ' x'), reader.replace(':', ' x'), *differences, *times, *size])} |"


def main() -> None:
    """Run the missing parts, print the table, and exit with 1 if a curve differs or a part is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", help="one of benchmarks/random_model.py")
    parser.add_argument("folder", type=Path, help="model, checkpoints and results; large")
    parser.add_argument("cells", nargs="+", help="source>reader,reader; each is profile:processes")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--at", type=int, default=6, help="step at which the checkpoint is saved")
    parser.add_argument("--precision", choices=TOLERANCES, default="bf16")
    parser.add_argument("--facts", type=Path, help="file that receives a JSON line for each part")
    parser.add_argument("--seconds", type=int, default=7200, help="no part starts after this many")
    parser.add_argument("--piece-seconds", type=int, default=540, help="time limit of one part")
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    if not (arguments.folder / "recipe.yaml").exists():
        maker = Path(__file__).with_name("random_model.py")
        subprocess.run(
            [sys.executable, str(maker), arguments.shape, str(arguments.folder), "--rows", "512"], check=True
        )
    matrix, lines, holds = Matrix(arguments), [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"], True
    one = matrix.saved("single:1")
    for cell in arguments.cells:
        source, _, readers = cell.partition(">")
        saved = matrix.saved(source)
        for reader in readers.split(","):
            resumed = None if saved is None else matrix.resumed(source, reader)
            if saved is None or resumed is None:
                holds = False
                continue
            references = [None if curve is None else curve["losses"][arguments.at :] for curve in (one, saved)]
            differences = [
                None if losses is None else largest_difference(resumed["losses"], losses) for losses in references
            ]
            holds = holds and all(d is not None and d <= TOLERANCES[arguments.precision] for d in differences)
            lines.append(row(source, reader, saved, resumed, ["-" if d is None else f"{d:.1e}" for d in differences]))
    print("\n".join(lines))
    at, steps, precision = arguments.at, arguments.steps, arguments.precision
    compared = f"steps {at + 1} to {steps}, {precision}, tolerance {TOLERANCES[precision]:g}"
    verdict = "All resumed curves agree" if holds else "A resumed curve DIFFERS or is missing"
    print(f"\n{verdict}: {compared}")
    sys.exit(not holds)


if __name__ == "__main__":
    main()
