"""Measure speed and fill of best-fit-decreasing packing on document lengths as in instruction and chat data.

    python benchmarks/packing.py [DOCUMENTS]

Lengths are log-normal, as token counts of public chat data sets are, and limited to the capacity. Prints for each shape
the sequences packed per second, the fill, the number of packs, and its lower bound from the sum of lengths.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from ftcli.data.packing import pack

SHAPES = {  # median tokens, spread of the logarithm, capacity of a pack
    "short chats": (180, 0.9, 2048),
    "long chats": (700, 1.0, 4096),
    "documents": (900, 1.3, 8192),
    "long context": (2500, 1.4, 32768),
    "one length": (300, 0.0, 4096),
}


def main() -> None:
    """Pack each shape once and print one line for it."""
    documents = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    for name, (median, spread, capacity) in SHAPES.items():
        drawn = np.random.default_rng(0).lognormal(np.log(median), spread, documents)
        lengths = np.clip(drawn.astype(np.int64), 1, capacity)
        started = time.perf_counter()
        packs = pack(lengths, capacity)
        seconds = time.perf_counter() - started
        least = -(-int(lengths.sum()) // capacity)
        fill = lengths.sum() / (len(packs) * capacity)
        print(
            f"{name:14} capacity {capacity:6} {documents / seconds / 1e6:5.2f} M sequences/s  fill {100 * fill:.2f} %  "
            f"{len(packs)} packs, at least {least}"
        )


if __name__ == "__main__":
    main()
