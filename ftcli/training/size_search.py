"""Find the largest size that fits into a limit, from few measurements."""

from __future__ import annotations

from collections.abc import Callable

MAX_GROWTH = 4  # from one measured size to the next, because a linear fit does not predict much larger sizes


def largest_that_fits(
    sizes: list[int], measure: Callable[[int], int | None], limit: int
) -> tuple[int, dict[int, int | None]]:
    """Find the largest of `sizes` that uses no more than `limit` bytes.

    A line through the two largest sizes that fit predicts the next size to measure. It is at most `MAX_GROWTH` times as
    large as the largest size that fits.

    Args:
        sizes: Sizes to choose from, ascending.
        measure: Returns the bytes that a size uses, or None if it does not fit at all. Size 0 gives the bytes that do
            not depend on the size.
        limit: Bytes that may be used.

    Returns:
        The largest size that fits, and all measurements by size. The smallest size is returned even if it uses more
        than the limit, because it ran.
    """
    measured: dict[int, int | None] = {0: measure(0), sizes[0]: measure(sizes[0])}
    too_large = sizes[-1] + 1  # this size and larger ones do not fit

    def fitting() -> list[tuple[int, int]]:
        pairs = measured.items()
        return sorted((size, peak) for size, peak in pairs if peak is not None and (peak <= limit or not size))

    while len(fits := fitting()) > 1:
        (a, low), (b, high) = fits[-2:]
        slope = max((high - low) / (b - a), 0)
        nearby = [size for size in sizes if b < size < too_large and size <= MAX_GROWTH * b]
        candidates = [size for size in nearby or sizes if b < size < too_large and high + slope * (size - b) <= limit]
        if not candidates:
            break
        measured[candidates[-1]] = peak = measure(candidates[-1])
        if peak is None or peak > limit:
            too_large = candidates[-1]
    return max(fits[-1][0], sizes[0]), measured
