"""Settings of the process that end with the run that changed them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ftcli.runtime.process_settings import change, owns_settings, restore_all


class Run:
    """Stands for a run: only its lifetime counts."""

    settings: Any


@pytest.fixture
def library() -> Iterator[SimpleNamespace]:
    yield SimpleNamespace(level=1)
    restore_all()


@owns_settings
def prepare(library: SimpleNamespace, level: int, *, fails: bool = False) -> Run:
    change(library, "level", level)
    if fails:
        raise ValueError("no such model")
    return Run()


def test_change_is_undone_when_the_run_is_closed(library: SimpleNamespace) -> None:
    run = prepare(library, 2)
    with run.settings:
        assert library.level == 2
    assert library.level == 1


def test_change_is_undone_when_the_run_is_dropped(library: SimpleNamespace) -> None:
    run = prepare(library, 2)
    assert library.level == 2
    del run
    gc.collect()
    assert library.level == 1


def test_change_is_undone_when_prepare_raises(library: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match="no such model"):
        prepare(library, 2, fails=True)
    assert library.level == 1


def test_prepare_after_another_run_starts_from_the_settings_before_both(library: SimpleNamespace) -> None:
    first = prepare(library, 2)
    second = prepare(library, 3)
    assert library.level == 3
    first.settings.restore()
    assert library.level == 3, "another run owns the settings"
    second.settings.restore()
    assert library.level == 1


def test_prepare_inside_of_prepare_leaves_the_settings_to_the_outer_one(library: SimpleNamespace) -> None:
    @owns_settings
    def outer() -> Run:
        trial = prepare(library, 2)
        del trial
        gc.collect()
        assert library.level == 1
        change(library, "level", 3)
        return Run()

    run = outer()
    assert library.level == 3
    run.settings.restore()
    assert library.level == 1
