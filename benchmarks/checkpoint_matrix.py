"""Save under one profile, resume under others: does the curve go on, and what do saving and loading take?

    python benchmarks/checkpoint_matrix.py llama-3.2-1b FOLDER "fsdp:4>zero3:2,single:1" "zero3:2>fsdp:4" \\
        "single:1>fsdp:4"

Each source trains without a pause and saves half-way: once while training waits, twice in the background (the first of
those also pins the memory that later ones use again). Each reader goes on from there. Compared are the losses of the
steps after the checkpoint with those of one process that never stopped. Prints a table in markdown; `--facts FILE` gets
one JSON line for each piece. Pieces that are done are kept in FOLDER, so a call that was cut off is called again; one
that fails or takes longer than `--piece-seconds` is told and costs no other; none begins when `--seconds` are over.
The exit code is 1 when a curve does not go on, or a piece is missing. `--cpu` rehearses: shape tiny, two processes.
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

# Largest relative difference of a loss. Bfloat16: as `ftcli parity` allows; float32: a rounding or so a step.
TOLERANCES = {"bf16": 4e-3, "fp32": 1e-5}
WAYS = ("waited", "background", "background again")
COLUMNS = ["saved by", "resumed by", "loss from one process", "loss from its own"]
COLUMNS += ["pause, disk", "pause, background", "the first", "complete", "load", "until ready", "GB", "files"]


def train_and_save(recipe: str, output: str, given: list[str], at: int, cpu: bool) -> dict[str, Any]:
    """Train to the end, saving step `at` both ways; return losses, and the seconds of each way."""
    from ftcli.checkpoint import save
    from ftcli.checkpoint_folder import checkpoint_path, size_of
    from ftcli.loop import steps
    from ftcli.recipe_file import load_recipe
    from ftcli.run import prepare

    began = time.perf_counter()
    run = prepare(load_recipe(recipe, given), cpu=cpu, output=output)
    found: dict[str, Any] = {"ready": _settled(run, cpu) - began, "losses": []}
    for step in steps(run):
        found["losses"].append(step.loss)
        if step.number == at:
            for way in WAYS:
                before, clock = _settled(run, cpu), time.time()
                save(run, at, background=way != "waited")
                found[way] = max(run.hardware.ranks.collect(time.perf_counter() - before))
                run.saving.wait()
                complete = checkpoint_path(Path(output), at) / "COMPLETE"
                found["complete"], found["bytes"] = complete.stat().st_mtime - clock, size_of(complete.parent)
            found["in background"] = run.saving.has_room
            found["files"] = len(list(complete.parent.glob("*.safetensors")))
    run.hardware.close()
    return found


def go_on(recipe: str, checkpoint: str, given: list[str], cpu: bool) -> dict[str, Any]:
    """Go on from a checkpoint to the end; return the losses, and the seconds of loading and until the run is ready."""
    from ftcli.checkpoint import load
    from ftcli.loop import steps
    from ftcli.recipe_file import load_recipe
    from ftcli.run import prepare

    began = time.perf_counter()
    run = prepare(load_recipe(recipe, given), cpu=cpu, resume=checkpoint)
    ready = _settled(run, cpu) - began
    before = _settled(run, cpu)
    load(run, Path(checkpoint))
    found = {"ready": ready, "load": _settled(run, cpu) - before, "losses": [step.loss for step in steps(run)]}
    run.hardware.close()
    return found


def _settled(run: Any, cpu: bool) -> float:
    """Return the time when every rank is here and its device has nothing left to do."""
    import torch

    if not cpu:
        torch.cuda.synchronize()
    run.hardware.ranks.barrier()
    return time.perf_counter()


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise `TimeoutError` in the block when it takes longer."""

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
    """The pieces of one matrix: each is run once, and kept in a file of the folder."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.recipe = given, str(given.folder / "recipe.yaml")
        self.overrides = [f"train.max_steps={given.steps}", "evaluate.at_start=false", "data.eval=null"]
        self.overrides += ["checkpoint.keep=null", f"precision={given.precision}"]
        self.ends = time.monotonic() + given.seconds

    def saved(self, place: str) -> dict[str, Any] | None:
        """Return what training and saving in a place, `profile:processes`, showed; None when it did not come to it."""
        output = str(self.given.folder / place.replace(":", "-"))
        return self._piece(f"save {place}", place, train_and_save, output, self.overrides, self.given.at)

    def resumed(self, source: str, place: str) -> dict[str, Any] | None:
        """Return what going on in a place from a source's checkpoint showed; None when it did not come to it."""
        checkpoint = self.given.folder / source.replace(":", "-") / "checkpoints" / f"step-{self.given.at:06d}"
        return self._piece(f"resume {source} {place}", place, go_on, str(checkpoint), self.overrides)

    def _piece(self, name: str, place: str, function: Any, *arguments: Any) -> dict[str, Any] | None:
        kept = self.given.folder / f"{name.replace(':', '-').replace(' ', '-')}.json"
        if not kept.exists():
            left = min(self.given.piece_seconds, int(self.ends - time.monotonic()))
            if left < self.given.piece_seconds // 3:
                print(f"{name}: not begun, the time is over", file=sys.stderr, flush=True)
                return None
            profile, _, processes = place.partition(":")
            start, began = run_on_cpu if self.given.cpu else run_on_processes, time.monotonic()
            try:
                with limited(left):
                    values = (self.recipe, *arguments, self.given.cpu)
                    found = start(function, *values, processes=int(processes), profile=profile)[0]
            except Exception:  # of one piece: the others are worth having
                traceback.print_exc()
                print(f"{name}: FAILED after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
                return None
            found = {"piece": name, "seconds": time.monotonic() - began} | found
            kept.write_text(json.dumps(found))
            print(f"{name}: {found['seconds']:.0f} s", file=sys.stderr, flush=True)
            if self.given.facts is not None:
                with self.given.facts.open("a") as file:
                    file.write(f"{json.dumps(found)}\n")
        piece: dict[str, Any] = json.loads(kept.read_text())
        return piece


def largest(found: list[float], wanted: list[float]) -> float:
    """Return the largest relative difference of two curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


def row(source: str, reader: str, saved: dict[str, Any], found: dict[str, Any], differences: list[str]) -> str:
    """Return a cell of the matrix as a row of the table."""
    seconds = [saved[way] for way in ("waited", "background again", "background", "complete")]
    times = [f"{value:.2f} s" for value in [*seconds, found["load"], found["ready"]]]
    size = [f"{saved['bytes'] / 1e9:.2f}", str(saved["files"])]
    return f"| {' | '.join([source.replace(':', ' x'), reader.replace(':', ' x'), *differences, *times, *size])} |"


def main() -> None:
    """Run what is missing, print the table, and say whether every curve goes on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", help="one of benchmarks/random_model.py")
    parser.add_argument("folder", type=Path, help="model, checkpoints and results; large")
    parser.add_argument("cells", nargs="+", help="source>reader,reader; each is profile:processes")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--at", type=int, default=6, help="step that is saved")
    parser.add_argument("--precision", choices=TOLERANCES, default="bf16")
    parser.add_argument("--facts", type=Path, help="file that gets a JSON line for each piece that was run")
    parser.add_argument("--seconds", type=int, default=7200, help="no piece begins after so many")
    parser.add_argument("--piece-seconds", type=int, default=540, help="most that one piece may take")
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    if not (given.folder / "recipe.yaml").exists():
        maker = Path(__file__).with_name("random_model.py")
        subprocess.run([sys.executable, str(maker), given.shape, str(given.folder), "--rows", "512"], check=True)
    matrix, lines, holds = Matrix(given), [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"], True
    one = matrix.saved("single:1")
    for cell in given.cells:
        source, _, readers = cell.partition(">")
        saved = matrix.saved(source)
        for reader in readers.split(","):
            found = None if saved is None else matrix.resumed(source, reader)
            if saved is None or found is None:
                holds = False
                continue
            wanted = [None if curve is None else curve["losses"][given.at :] for curve in (one, saved)]
            differences = [None if curve is None else largest(found["losses"], curve) for curve in wanted]
            holds = holds and all(d is not None and d <= TOLERANCES[given.precision] for d in differences)
            lines.append(row(source, reader, saved, found, ["-" if d is None else f"{d:.1e}" for d in differences]))
    print("\n".join(lines))
    told = f"steps {given.at + 1} to {given.steps}, {given.precision}, tolerance {TOLERANCES[given.precision]:g}"
    print(f"\nEvery curve goes on: {told}" if holds else f"\nNOT every curve goes on, or was run: {told}")
    sys.exit(not holds)


if __name__ == "__main__":
    main()
