"""Draw a second image for each image of a set: of the same person, or of another one.

Everything depends on numbers that the caller draws, so pairs are equal on any hardware. Imports numpy inside functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from numpy.typing import NDArray


class People(NamedTuple):
    """The rows of each person.

    Attributes:
        person: Number of the person of each of N rows, `[N]`.
        order: Numbers of the rows, those of a person together, `[N]`.
        place: Position of each row in `order`, `[N]`.
        starts: Position in `order` where each of P persons begins, and N, `[P + 1]`.
    """

    person: NDArray[np.int64]
    order: NDArray[np.int64]
    place: NDArray[np.int64]
    starts: NDArray[np.int64]


def index_people(rows: Dataset, column: str) -> People:
    """Return which rows show the same person.

    Args:
        rows: Prepared rows.
        column: Column with the name of the person.
    """
    import numpy as np

    names = np.asarray(rows.with_format("numpy")[column][:])
    person = np.unique(names, return_inverse=True)[1].astype(np.int64)
    order = np.argsort(person, kind="stable").astype(np.int64)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    starts = np.concatenate([[0], np.cumsum(np.bincount(person))]).astype(np.int64)
    return People(person, order, place, starts)


def partner_of(people: People, row: int, draw: int, *, is_same: bool) -> int:
    """Return the number of a row to pair a row with.

    Args:
        people: The rows of each person.
        row: Number of the row.
        draw: A random whole number, 0 or more.
        is_same: Whether to return another row of the same person: the row itself if it is the only one. Otherwise a row
            of another person is returned, if there is another person.
    """
    first, end = (int(people.starts[people.person[row] + offset]) for offset in (0, 1))
    others = len(people.order) - (end - first)
    if is_same or others == 0:
        if end - first == 1:
            return row
        position = first + draw % (end - first - 1)
        return int(people.order[position + (position >= people.place[row])])
    position = draw % others
    return int(people.order[position + (end - first if position >= first else 0)])
