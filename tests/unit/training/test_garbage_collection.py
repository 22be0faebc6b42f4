"""Garbage is collect_between_steps after steps that their numbers decide, and by Python's own rule again afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from ftcli.training.garbage_collection import (
    STEPS_BETWEEN_COLLECTIONS,
    WARM_UP_STEPS,
    automatic_collection,
    collect_between_steps,
)


@dataclass
class Numbered:
    number: int


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """Which generations were searched, in order."""
    generations: list[int] = []

    def hear(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            generations.append(info["generation"])

    gc.callbacks.append(hear)
    yield generations
    gc.callbacks.remove(hear)


def steps(first: int, last: int) -> Any:
    return (Numbered(number) for number in range(first + 1, last + 1))


def searched(first: int, last: int, objects: int, collections: list[int]) -> list[int]:
    """Return the steps before which everything was searched, where each step makes so many objects that refer."""
    results = []
    for step in collect_between_steps(steps(first, last), first):
        if 2 in collections:
            results.append(step.number)
        collections.clear()
        objects_alive = [[number] for number in range(objects)]
        if step.number > first + WARM_UP_STEPS:
            assert collections == [] and len(objects_alive) == objects  # not in between
        collections.clear()
    return results


@pytest.mark.parametrize("first", [0, 33, STEPS_BETWEEN_COLLECTIONS - 1])
def test_garbage_collection_steps_depend_on_the_step_number_only(first: int, collections: list[int]) -> None:
    last = first + 2 * STEPS_BETWEEN_COLLECTIONS
    expected = {first + WARM_UP_STEPS} | {
        number for number in range(first + WARM_UP_STEPS + 1, last + 1) if number % STEPS_BETWEEN_COLLECTIONS == 0
    }
    assert searched(first, last, 10, collections) == sorted(expected) == searched(first, last, 5000, collections)


def test_garbage_collection_freezes_objects_of_the_first_steps() -> None:
    before = gc.get_freeze_count()
    running = collect_between_steps(steps(0, 10), 0)
    for _ in range(WARM_UP_STEPS):
        next(running)
    assert gc.get_freeze_count() > before and not gc.isenabled()
    running.close()  # type: ignore[attr-defined]
    assert gc.get_freeze_count() == 0 and gc.isenabled()


def test_garbage_collection_after_an_error_is_pythons_default() -> None:
    def breaking() -> Iterator[Any]:
        yield from steps(0, WARM_UP_STEPS)
        assert not gc.isenabled()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(collect_between_steps(breaking(), 0))
    assert gc.isenabled()


def test_automatic_enables_garbage_collection_in_its_block_only() -> None:
    gc.disable()
    with automatic_collection():
        assert gc.isenabled()
    assert not gc.isenabled()
    gc.enable()
    with automatic_collection():
        assert gc.isenabled()
    assert gc.isenabled()


def test_loop_after_one_that_was_left_and_not_closed_restores_automatic_collection() -> None:
    assert gc.isenabled()
    left = iter(collect_between_steps(steps(0, 9), 0))
    for _ in range(WARM_UP_STEPS + 1):
        next(left)
    assert not gc.isenabled()
    assert len(list(collect_between_steps(steps(WARM_UP_STEPS + 1, 9), WARM_UP_STEPS + 1))) == 9 - WARM_UP_STEPS - 1
    assert gc.isenabled()
    del left
    assert gc.isenabled()
