"""Garbage is collected after steps that their numbers decide, and by Python's own rule again afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from ftcli.garbage import EVERY, WARM, automatic, collected


@dataclass
class Numbered:
    number: int


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """Which generations were searched, in order."""
    found: list[int] = []

    def hear(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(info["generation"])

    gc.callbacks.append(hear)
    yield found
    gc.callbacks.remove(hear)


def steps(first: int, last: int) -> Any:
    return (Numbered(number) for number in range(first + 1, last + 1))


def searched(first: int, last: int, objects: int, collections: list[int]) -> list[int]:
    """Return the steps before which everything was searched, where each step makes so many objects that refer."""
    found = []
    for step in collected(steps(first, last), first):
        if 2 in collections:
            found.append(step.number)
        collections.clear()
        kept = [[number] for number in range(objects)]
        if step.number > first + WARM:
            assert collections == [] and len(kept) == objects  # not in between
        collections.clear()
    return found


@pytest.mark.parametrize("first", [0, 33, EVERY - 1])
def test_the_steps_of_a_collection_depend_on_numbers_alone(first: int, collections: list[int]) -> None:
    last = first + 2 * EVERY
    wanted = {first + WARM} | {number for number in range(first + WARM + 1, last + 1) if number % EVERY == 0}
    assert searched(first, last, 10, collections) == sorted(wanted) == searched(first, last, 5000, collections)


def test_what_is_there_after_the_first_steps_is_never_searched_again() -> None:
    before = gc.get_freeze_count()
    running = collected(steps(0, 10), 0)
    for _ in range(WARM):
        next(running)
    assert gc.get_freeze_count() > before and not gc.isenabled()
    running.close()  # type: ignore[attr-defined]
    assert gc.get_freeze_count() == 0 and gc.isenabled()


def test_an_error_between_steps_leaves_pythons_own_rule() -> None:
    def breaking() -> Iterator[Any]:
        yield from steps(0, WARM)
        assert not gc.isenabled()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(collected(breaking(), 0))
    assert gc.isenabled()


def test_pythons_own_rule_holds_in_a_block_of_its_own() -> None:
    gc.disable()
    with automatic():
        assert gc.isenabled()
    assert not gc.isenabled()
    gc.enable()
    with automatic():
        assert gc.isenabled()
    assert gc.isenabled()
