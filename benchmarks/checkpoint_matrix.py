"""Save under one profile, resume under others: does the curve go on, and what do saving and loading take?

    python benchmarks/checkpoint_matrix.py llama-3.2-1b FOLDER "fsdp:4>zero3:2,single:1" "zero3:2>fsdp:4" \\
        "single:1>fsdp:4"

Each source trains without a pause and saves half-way, first while training waits and then in the background; each
reader goes on from there. Compared are the losses of the steps after the checkpoint with those of one process that
never stopped. Pieces that are done are kept in FOLDER, so a call that was cut off is called again. Prints one table in
markdown; the exit code is 1 when a curve does not go on. `--cpu` rehearses: shape tiny, two processes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ftcli.testing import run_on_cpu, run_on_processes

# Largest relative difference of a loss. Bfloat16: as `ftcli parity` allows; float32: a rounding or so a step.
TOLERANCES = {"bf16": 4e-3, "fp32": 1e-5}
COLUMNS = ["saved by", "resumed by", "loss from one process", "loss from its own"]
COLUMNS += ["wait, background", "wait, disk", "complete", "load", "until ready", "GB"]


def train_and_save(recipe: str, output: str, given: list[str], at: int, cpu: bool) -> dict[str, Any]:
    """Train to the end, saving step `at` both ways; return losses, and the seconds of each way."""
    from ftcli.checkpoint import save
    from ftcli.checkpoint_folder import checkpoint_path, size_of
    from ftcli.loop import steps
    from ftcli.recipe_file import load_recipe
    from ftcli.run import prepare

    run = prepare(load_recipe(recipe, given), cpu=cpu, output=output)
    found: dict[str, Any] = {"losses": []}
    for step in steps(run):
        found["losses"].append(step.loss)
        if step.number == at:
            for way in ("waited", "background"):
                before, clock = _settled(run, cpu), time.time()
                save(run, at, background=way == "background")
                found[way] = max(run.hardware.ranks.collect(time.perf_counter() - before))
                run.saving.wait()
                complete = checkpoint_path(Path(output), at) / "COMPLETE"
                found["complete"], found["bytes"] = complete.stat().st_mtime - clock, size_of(complete.parent)
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


class Matrix:
    """The pieces of one matrix: each is run once, and kept in a file of the folder."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.recipe = given, str(given.folder / "recipe.yaml")
        self.overrides = [f"train.max_steps={given.steps}", "evaluate.at_start=false", "data.eval=null"]
        self.overrides += ["checkpoint.keep=null", f"precision={given.precision}"]

    def saved(self, place: str) -> dict[str, Any]:
        """Return what training and saving in a place, `profile:processes`, showed."""
        output = str(self.given.folder / place.replace(":", "-"))
        return self._piece(f"save-{place}", place, train_and_save, output, self.overrides, self.given.at)

    def resumed(self, source: str, place: str) -> dict[str, Any]:
        """Return what going on in a place from a source's checkpoint showed."""
        checkpoint = self.given.folder / source.replace(":", "-") / "checkpoints" / f"step-{self.given.at:06d}"
        return self._piece(f"resume-{source}-{place}", place, go_on, str(checkpoint), self.overrides)

    def _piece(self, name: str, place: str, function: Any, *arguments: Any) -> dict[str, Any]:
        kept = self.given.folder / f"{name.replace(':', '-')}.json"
        if not kept.exists():
            profile, _, processes = place.partition(":")
            start, began = run_on_cpu if self.given.cpu else run_on_processes, time.monotonic()
            given = (self.recipe, *arguments, self.given.cpu)
            found = start(function, *given, processes=int(processes), profile=profile)[0]
            kept.write_text(json.dumps(found))
            print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        piece: dict[str, Any] = json.loads(kept.read_text())
        return piece


def largest(found: list[float], wanted: list[float]) -> float:
    """Return the largest relative difference of two curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


def main() -> None:
    """Run what is missing, print the table, and say whether every curve goes on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", help="one of benchmarks/random_model.py")
    parser.add_argument("folder", type=Path, help="model, checkpoints and results; large")
    parser.add_argument("cells", nargs="+", help="source>reader,reader; each is profile:processes")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--at", type=int, default=6, help="step that is saved")
    parser.add_argument("--precision", choices=TOLERANCES, default="bf16")
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    if not (given.folder / "recipe.yaml").exists():
        maker = Path(__file__).with_name("random_model.py")
        subprocess.run([sys.executable, str(maker), given.shape, str(given.folder), "--rows", "512"], check=True)
    matrix, lines, holds = Matrix(given), [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"], True
    wanted = matrix.saved("single:1")["losses"][given.at :]
    for cell in given.cells:
        source, _, readers = cell.partition(">")
        saved = matrix.saved(source)
        own = saved["losses"][given.at :]
        for reader in readers.split(","):
            found = matrix.resumed(source, reader)
            from_one, from_own = largest(found["losses"], wanted), largest(found["losses"], own)
            holds = holds and from_one <= TOLERANCES[given.precision]
            seconds = [saved["background"], saved["waited"], saved["complete"], found["load"], found["ready"]]
            values = [
                f"{from_one:.1e}",
                f"{from_own:.1e}",
                *(f"{s:.2f} s" for s in seconds),
                f"{saved['bytes'] / 1e9:.2f}",
            ]
            lines.append(f"| {source.replace(':', ' x')} | {reader.replace(':', ' x')} | {' | '.join(values)} |")
    print("\n".join(lines))
    told = f"steps {given.at + 1} to {given.steps}, {given.precision}, tolerance {TOLERANCES[given.precision]:g}"
    print(f"\nEvery curve goes on: {told}" if holds else f"\nA CURVE DOES NOT GO ON: {told}")
    sys.exit(not holds)


if __name__ == "__main__":
    main()
