"""Compare the step time of two checkouts of ftcli on the CPU. Each trains in a process of its own, in turns.

    python benchmarks/two_trees.py OTHER_CHECKOUT RECIPE [--block 20] [--blocks 60]

The other checkout is usually an earlier commit in a second clone. Both train the same recipe on one thread. They take
turns in blocks of steps, so that noise of the machine affects both. Prints one JSON line: median milliseconds of a step
by processor time and by the clock, the median and the quartiles of the ratio of neighbouring blocks (this checkout to
the other one), and the last losses.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
WORKER = "--worker"


def train_on_request(recipe: str) -> None:
    """Train as many steps as each line of stdin says, and answer with seconds, processor seconds and the loss."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # log lines of libraries
    import torch

    import ftcli

    torch.set_num_threads(1)
    steps = ftcli.steps(ftcli.prepare(recipe, cpu=True))
    print(ftcli.__file__, file=answers, flush=True)
    for line in sys.stdin:
        began, busy = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            step = next(steps)
        print(time.perf_counter() - began, time.process_time() - busy, step.loss, file=answers, flush=True)


class Checkout:
    """A process that trains with the code of one checkout."""

    def __init__(self, folder: Path, recipe: str) -> None:
        command = [sys.executable, __file__, WORKER, recipe]
        environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, env=environment, text=True, **pipes)  # type: ignore[call-overload]
        imported = self._answer()
        assert Path(imported).is_relative_to(folder), f"{imported!r} is not in {folder}"

    def _answer(self) -> str:
        return str(self.process.stdout.readline().strip())  # type: ignore[union-attr]

    def train(self, steps: int) -> tuple[float, float, float]:
        """Return (milliseconds, processor milliseconds) of a step, and the last loss."""
        print(steps, file=self.process.stdin, flush=True)
        seconds, busy, loss = map(float, self._answer().split())
        return 1000 * seconds / steps, 1000 * busy / steps, loss


def main() -> None:
    """Measure two checkouts in turns and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="folder of the other checkout")
    parser.add_argument("recipe")
    parser.add_argument("--block", type=int, default=20, help="steps of a block")
    parser.add_argument("--blocks", type=int, default=60)
    arguments = parser.parse_args()
    checkouts = [Checkout(folder, arguments.recipe) for folder in (arguments.other.resolve(), HERE)]
    for checkout in checkouts:
        checkout.train(max(arguments.block // 2, 1))  # the first steps also allocate
    blocks: list[list[tuple[float, float, float]]] = [[], []]
    for number in range(arguments.blocks):
        for index in (0, 1) if number % 2 else (1, 0):
            blocks[index].append(checkouts[index].train(arguments.block))
    result: dict[str, object] = {"recipe": arguments.recipe, "losses": [times[-1][2] for times in blocks]}
    for column, name in enumerate(("milliseconds", "processor milliseconds")):
        other, own = ([block[column] for block in times] for times in blocks)
        ratios = [a / b for a, b in zip(own, other, strict=True)]
        result[name] = {
            "other": statistics.median(other),
            "this": statistics.median(own),
            "ratio": statistics.median(ratios),
            "quartiles": statistics.quantiles(ratios, n=4)[::2],
        }
    print(json.dumps(result), flush=True)
    for checkout in checkouts:
        checkout.process.kill()


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        train_on_request(sys.argv[2])
    else:
        main()
