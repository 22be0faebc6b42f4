"""How the largest micro size is looked for, and where its number is from when nothing can be tried."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftcli.errors import InputError
from ftcli.micro_size import RECORD, _known, _stretched, largest_that_fits, settle_micro_size, settled
from ftcli.planning import derive_plan

from .test_memory import recipe

SIZES = [1, 2, 3, 4, 6, 8, 12, 24]


def looked_for(peak_of: Callable[[int], int | None], limit: int) -> tuple[int, list[int]]:
    tried: list[int] = []

    def measure(size: int) -> int | None:
        tried.append(size)
        return peak_of(size)

    return largest_that_fits(SIZES, measure, limit)[0], tried


@pytest.mark.parametrize("limit", range(30, 400, 7))
def test_memory_that_grows_along_a_line_is_never_overfilled(limit: int) -> None:
    found, tried = looked_for(lambda rows: 20 + 10 * rows, limit)
    fitting = [size for size in SIZES if 20 + 10 * size <= limit]
    assert found == max(fitting, default=1)
    assert all(20 + 10 * size <= limit for size in tried[2:]), "nothing larger was tried"
    assert len(tried) <= 5


def test_what_grows_slower_later_is_looked_for_again() -> None:
    found, tried = looked_for(lambda rows: 10 + 40 * min(rows, 2) + 2 * rows, 150)
    assert found == 24 and len(tried) <= 6


def test_what_takes_more_than_the_line_said_is_left_for_less() -> None:
    assert looked_for(lambda rows: 10 + rows**2, 100)[0] == 8
    assert looked_for(lambda rows: 10 + rows if rows < 5 else None, 100)[0] == 4


def test_a_line_that_does_not_rise_is_followed_a_few_rows_at_a_time() -> None:
    seen = looked_for(lambda rows: 50 if rows < 8 else 10 * rows, 100)
    assert seen == (8, [0, 1, 4, 12, 8])


def test_one_row_is_kept_even_above_the_limit() -> None:
    assert looked_for(lambda rows: 1000 * rows, 10) == (1, [0, 1])


def test_without_a_gpu_and_for_finished_weights_the_number_is_a_stated_one(tmp_path: Path) -> None:
    auto = recipe(batch={"global_size": 24, "micro_size": "auto"})
    for cpu, weights in ((True, None), (False, tmp_path)):
        found, told = settle_micro_size(auto, output=tmp_path, cpu=cpu, weights=weights)
        assert found.batch.micro_size == 8 and "at most 8 rows, untried" in told[0]
    assert settle_micro_size(found, output=None, cpu=True, weights=None) == (found, [])
    assert derive_plan(auto, 2).micro_size == 6 and list(tmp_path.iterdir()) == []


def test_what_a_trial_computed_again_is_computed_again_in_the_run() -> None:
    auto = recipe(batch={"global_size": 24, "micro_size": "auto"})
    found = settled(auto, 3, "selective")
    assert (found.batch.micro_size, found.model.gradient_checkpointing) == (3, "selective")
    assert settled(auto, 3).model.gradient_checkpointing == "auto"


def test_a_document_of_a_stream_is_made_as_long_as_any_may_be() -> None:
    document: dict[str, Any] = {"input_ids": [1, 2, 3], "trained": [False, True, True], "items": 2, "source": 0}
    found = _stretched(document, 7)
    assert found["input_ids"] == [1, 2, 3, 1, 2, 3, 1] and sum(found["trained"]) == 4 and found["source"] == 0


def found_before(folder: Path, monkeypatch: pytest.MonkeyPatch, *, size: int, world: str) -> Any:
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setattr("ftcli.micro_size._device_bytes", lambda: size)  # no GPU to ask
    return _known(folder / RECORD, "k")


def test_what_was_found_holds_on_devices_as_large_and_smaller_ones_try_anew_or_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found_before(tmp_path, monkeypatch, size=80, world="2") is None
    record = {"for": "k", "micro_size": 3, "gradient_checkpointing": "none", "device_bytes": 80}
    (tmp_path / RECORD).write_text(json.dumps(record))
    for size in (79, 80, 140):
        assert found_before(tmp_path, monkeypatch, size=size, world="2") == record
    assert found_before(tmp_path, monkeypatch, size=40, world="1") is None
    with pytest.raises(InputError, match="found on devices of 0 GB") as told:
        found_before(tmp_path, monkeypatch, size=40, world="2")
    assert RECORD in str(told.value) and "delete that file" in str(told.value)
    (tmp_path / RECORD).write_text(json.dumps(record | {"for": "other"}))
    assert found_before(tmp_path, monkeypatch, size=80, world="2") is None
