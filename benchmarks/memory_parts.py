"""Train a cell on GPUs and write which places of the source hold the first GPU's memory at its peak.

    python benchmarks/memory_parts.py REPORT --peer ftcli --shape llama-3.1-8b ... --work FOLDER --facts FILE

REPORT is a text file. The other arguments are those of cell.py. The allocator records each allocation with its Python
stack, which makes steps slower, so the line in FILE says nothing about speed.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import cell as cells_script
from cells.cell import Cell, Inputs, Measured

MOST_PLACES, MOST_EVENTS = 60, 4_000_000
OWNERS = re.compile(r"/(ftcli|transformers|peft|fsdp|deepspeed|bitsandbytes)/")
SHORTENED = re.compile(r".*?/(site-packages|dist-packages|ftcli|torchinductor_[^/]*)/")
REPORT = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()

_train_cell = cells_script.on_rank


def train_recorded(cell: Cell, inputs: Inputs, started: float) -> Measured:
    """Train a cell on this process. Rank 0 writes the table of its memory into REPORT."""
    import torch

    is_first = os.environ.get("RANK", "0") == "0"
    if is_first:
        torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS, context="alloc", stacks="python")
    measured = _train_cell(cell, inputs, started)
    if is_first:
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        REPORT.write_text("\n".join(table(events)) + "\n")
    return measured


def table(events: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of a table: GiB and blocks of each place that holds memory at the peak of some events.

    Args:
        events: One device's events of `torch.cuda.memory._snapshot()`, from the first allocation of the process.
    """
    last = peak_event(events)
    sizes, blocks = Counter[str](), Counter[str]()
    for event in live_blocks(events[: last + 1]):
        place = place_of(event.get("frames", []))
        sizes[place] += event["size"]
        blocks[place] += 1
    total = sum(sizes.values())
    lines = [f"{total / 2**30:.2f} GiB at the peak (event {last + 1} of {len(events)})", "    GiB  blocks  place"]
    shown = sizes.most_common(MOST_PLACES)
    lines += [f"{size / 2**30:7.3f} {blocks[place]:7d}  {place}" for place, size in shown]
    rest = total - sum(size for _, size in shown)
    return [*lines, *([f"{rest / 2**30:7.3f}          {len(sizes) - len(shown)} other places"] if rest else [])]


def peak_event(events: Iterable[dict[str, Any]]) -> int:
    """Return the number of the event after which most bytes are allocated."""
    allocated = highest = last = 0
    for number, event in enumerate(events):
        if event["action"] == "alloc":
            allocated += event["size"]
        elif event["action"] == "free_requested":
            allocated -= event["size"]
        if allocated > highest:
            highest, last = allocated, number
    return last


def live_blocks(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the allocations that are not freed after the last event."""
    live: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["action"] == "alloc":
            live[event["addr"]] = event
        elif event["action"] == "free_requested":
            live.pop(event["addr"], None)
    return list(live.values())


def place_of(frames: Sequence[dict[str, Any]]) -> str:
    """Return the innermost Python frame of a stack and, if it belongs to another library, the first that does not."""
    if not frames:
        return "without a Python stack"
    owner = next((frame for frame in frames if OWNERS.search(frame["filename"])), frames[-1])
    return short(frames[0]) if owner is frames[0] else f"{short(frames[0])}  <-  {short(owner)}"


def short(frame: dict[str, Any]) -> str:
    """Return file, line and function of a frame, without the folder of the package."""
    return f"{SHORTENED.sub('', frame['filename'])}:{frame['line']} {frame['name']}"


def main() -> None:
    """Measure the cell and write the table."""
    cells_script.on_rank = train_recorded
    print(cells_script.measure(sys.argv[2:]))


if __name__ == "__main__":
    main()
