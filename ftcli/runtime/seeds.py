"""Random seeds and digests as pure functions of (seed, name, numbers)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PADDING = -1  # index of a row that fills a micro-batch and weighs nothing

FEW = 32  # up to this many numbers, a Python loop is faster than an array operation


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each value (the finaliser of SplitMix64, Steele et al. 2014).

    Args:
        values: uint64, any shape.

    Returns:
        uint64, the same shape.
    """
    z = values + np.uint64(0x9E3779B97F4A7C15)  # modulo 2^64
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def seed_of(*parts: int) -> int:
    """Return one 63-bit seed that depends on every number and on their order.

    Args:
        parts: Whole numbers; each is taken modulo 2^64.
    """
    state = 0
    for part in parts:
        state = _mix_one(state ^ (part % 2**64))
    return state >> 1


def _mix_one(value: int) -> int:
    """Return `mix` of one 64-bit number. For a few numbers this is faster than an array."""
    z = (value + 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def digest(ids: NDArray[np.int64]) -> int:
    """Return the sum modulo 2^64 of a hash of each sample id. It does not depend on the order of the rows.

    Args:
        ids: Sample ids `[N]`. `PADDING` is skipped.
    """
    if len(ids) <= FEW:
        return sum(_mix_one(number) for number in ids.tolist() if number != PADDING) % 2**64
    real = ids[ids != PADDING].astype(np.uint64)
    return int(np.sum(mix(real), dtype=np.uint64))
