"""Measure several cells one after the other, on ranks that are forked from one process with all imports.

    python benchmarks/cells_in_turn.py LANE --work FOLDER --facts FILE [--seconds N]

LANE has one line per cell: a name, a time limit in seconds, and the arguments of cell.py (without --work and --facts).
If a cell fails or exceeds its limit, a line is printed and the next cell starts. Finished cells are recorded in FOLDER
and not measured again. A cell starts only if a third of its limit is left of `--seconds`. One process serves all cells,
because starting Python for each cell took half of the time of a 1B cell on a GPU machine.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cell import measure
from checkpoint_matrix import limited


def main() -> None:
    """Measure the cells. The exit code is 1 if a cell is missing at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lane", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--facts", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=86400, help="time limit of all cells")
    arguments = parser.parse_args()
    ends, is_complete = time.monotonic() + arguments.seconds, True
    arguments.work.mkdir(parents=True, exist_ok=True)
    for line in arguments.lane.read_text().splitlines():
        name, limit, *words = shlex.split(line)
        done, left = arguments.work / f"{name}.done", ends - time.monotonic()
        if done.exists():
            status = "done before"
        elif left < int(limit) / 3:
            status, is_complete = "NOT STARTED: no time left", False
        else:
            began = time.monotonic()
            try:
                with limited(int(min(left, int(limit)))):
                    result = measure([*words, "--work", str(arguments.work), "--facts", str(arguments.facts)])
                status = f"{time.monotonic() - began:.0f} s; {result}"
                done.touch()
            except (Exception, SystemExit):  # the other cells are still measured
                traceback.print_exc()
                status, is_complete = f"FAILED after {time.monotonic() - began:.0f} s", False
        print(f"{name}: {status}", flush=True)
    sys.exit(not is_complete)


if __name__ == "__main__":
    main()
