"""Measure several cells one after the other: their ranks fork from one process that has imported everything.

    python benchmarks/cells_in_turn.py LANE --work FOLDER --facts FILE [--seconds N]

LANE has a line for each: a name, the seconds it may take, and the words of cell.py (without --work and --facts). A cell
that fails or takes too long is told and costs no other; one that is done is noted in FOLDER and not measured again;
none begins when a third of its time is no longer left of `--seconds`. Starting Python anew for each of them took half
of the time of a 1B cell on a GPU machine.
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
    """Measure; the exit code is 1 when a cell is missing in the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lane", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--facts", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=86400, help="for all of them")
    given = parser.parse_args()
    ends, all_there = time.monotonic() + given.seconds, True
    given.work.mkdir(parents=True, exist_ok=True)
    for line in given.lane.read_text().splitlines():
        name, limit, *words = shlex.split(line)
        done, left = given.work / f"{name}.done", ends - time.monotonic()
        if done.exists():
            told = "done before"
        elif left < int(limit) / 3:
            told, all_there = "NOT BEGUN, the time is over", False
        else:
            began = time.monotonic()
            try:
                with limited(int(min(left, int(limit)))):
                    found = measure([*words, "--work", str(given.work), "--facts", str(given.facts)])
                told = f"{time.monotonic() - began:.0f} s; {found}"
                done.touch()
            except (Exception, SystemExit):  # of one cell: the others are worth having
                traceback.print_exc()
                told, all_there = f"FAILED after {time.monotonic() - began:.0f} s", False
        print(f"{name}: {told}", flush=True)
    sys.exit(not all_there)


if __name__ == "__main__":
    main()
