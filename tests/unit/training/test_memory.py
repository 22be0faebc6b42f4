"""How the largest micro size is looked for, and where its number is from when nothing can be tried."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ftcli.config.plan import derive_plan
from ftcli.models.estimates.memory_saving import MemorySaving
from ftcli.runtime.errors import InputError
from ftcli.training.batches.passes import RowSizes
from ftcli.training.memory import (
    RESULT_FILE,
    _longest_rows,
    _read_result,
    _repeat_tokens,
    _train_window,
    choose_micro_batch_size,
    find_micro_batch_size,
    with_micro_size,
)
from ftcli.training.out_of_memory import _remedies
from ftcli.training.setup import prepare
from ftcli.training.size_search import largest_that_fits

from ...support.cells import cell
from ...support.runner import MakeInputs
from ..models.estimates.test_memory_estimate import recipe

SIZES = [1, 2, 3, 4, 6, 8, 12, 24]


def looked_for(peak_of: Callable[[int], int | None], limit: int) -> tuple[int, list[int]]:
    tried: list[int] = []

    def measure(size: int) -> int | None:
        tried.append(size)
        return peak_of(size)

    return largest_that_fits(SIZES, measure, limit)[0], tried


@pytest.mark.parametrize("limit", range(30, 400, 7))
def test_size_search_with_linear_memory_never_exceeds_the_limit(limit: int) -> None:
    size_found, tried = looked_for(lambda rows: 20 + 10 * rows, limit)
    fitting = [size for size in SIZES if 20 + 10 * size <= limit]
    assert size_found == max(fitting, default=1)
    assert all(20 + 10 * size <= limit for size in tried[2:]), "nothing larger was tried"
    assert len(tried) <= 5


def test_try_out_with_slower_growth_tries_more_rows() -> None:
    size, tried = looked_for(lambda rows: 10 + 40 * min(rows, 2) + 2 * rows, 150)
    assert size == 24 and len(tried) <= 6


def test_try_out_above_the_prediction_takes_fewer_rows() -> None:
    assert looked_for(lambda rows: 10 + rows**2, 100)[0] == 8
    assert looked_for(lambda rows: 10 + rows if rows < 5 else None, 100)[0] == 4


def test_try_out_with_flat_memory_adds_a_few_rows_at_a_time() -> None:
    seen = looked_for(lambda rows: 50 if rows < 8 else 10 * rows, 100)
    assert seen == (8, [0, 1, 4, 12, 8])


def test_try_out_above_the_limit_returns_one_row() -> None:
    assert looked_for(lambda rows: 1000 * rows, 10) == (1, [0, 1])


def test_choose_micro_batch_size_without_a_gpu_is_the_stated_number(tmp_path: Path) -> None:
    auto = recipe(batch={"global_size": 24, "micro_size": "auto"})
    for cpu, weights in ((True, None), (False, tmp_path)):
        size, message = choose_micro_batch_size(auto, prepare, output=tmp_path, cpu=cpu, weights=weights)
        assert size.batch.micro_size == 8 and "at most 8 rows, not measured" in message[0]
    assert choose_micro_batch_size(size, prepare, output=None, cpu=True, weights=None) == (size, [])
    assert derive_plan(auto, 2).micro_size == 6 and list(tmp_path.iterdir()) == []
    one = np.ones(1, dtype=np.int64)
    known = {"output": tmp_path, "cpu": True, "weights": None, "sizes": RowSizes(one, one, one)}
    assert choose_micro_batch_size(auto, prepare, **known) == (auto, [])  # passes are formed by tokens


def test_with_micro_size_takes_the_memory_saving_of_the_trial() -> None:
    auto = recipe(batch={"global_size": 24, "micro_size": "auto"})
    changed = with_micro_size(auto, 3, MemorySaving("full", True, True))
    assert (changed.batch.micro_size, changed.model.gradient_checkpointing) == (3, "full")
    assert changed.model.activation_offloading is changed.model.embeddings_on_host is True
    assert with_micro_size(auto, 3).model.gradient_checkpointing == "auto"


def test_search_measures_passes_without_cuda_graphs() -> None:
    tried: list[Any] = []

    def trial(changed: Any) -> Any:
        tried.append(changed)
        raise LookupError("no further than this")

    asked = recipe(
        batch={"global_size": 24, "micro_size": "auto"},
        model={"name": "m", "cuda_graphs": True},
        task="image_classification",
    )
    with pytest.raises(LookupError):
        find_micro_batch_size(asked, lambda: pytest.fail("no run was prepared"), trial)
    assert [(one.batch.micro_size, one.model.cuda_graphs) for one in tried] == [(1, False)]


def test_search_counts_gradients_that_the_last_backward_pass_frees(make_inputs: MakeInputs) -> None:
    class Falling:
        """ZeRO-3 steps in the last backward pass, and then frees its gradients."""

        limit, left = 10, [7, 4]

        def start(self) -> None:
            pass

        def held(self) -> int:
            return self.left.pop(0)

        def peak(self) -> int:
            return 9

    run = prepare(cell(make_inputs(), "sft-tied"), cpu=True)
    assert _train_window(run, _longest_rows(run, 2), 1, 2, Falling()) == 7


def test_remedies_name_the_host_if_recomputed_layers_keep_their_inputs_on_the_device(make_inputs: MakeInputs) -> None:
    def remedies(**model: Any) -> str:
        recipe = cell(make_inputs(), "sft-tied")
        changed = recipe.model_copy(update={"model": recipe.model.model_copy(update=model)})
        return "\n".join(_remedies(prepare(changed, cpu=True)))

    assert "activation_offloading to true" in remedies(gradient_checkpointing="full", activation_offloading=False)
    assert "activation_offloading" not in remedies(gradient_checkpointing="full", activation_offloading=True)
    assert "activation_offloading" not in remedies(gradient_checkpointing="none")


def test_try_out_of_a_stream_uses_rows_of_maximum_length() -> None:
    document: dict[str, Any] = {"input_ids": [1, 2, 3], "trained": [False, True, True], "items": 2, "source": 0}
    repeated = _repeat_tokens(document, 7)
    assert repeated["input_ids"] == [1, 2, 3, 1, 2, 3, 1] and sum(repeated["trained"]) == 4 and repeated["source"] == 0


def found_before(folder: Path, monkeypatch: pytest.MonkeyPatch, *, size: int, world: str) -> Any:
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setattr("ftcli.training.memory._device_bytes", lambda: size)  # no GPU to ask
    return _read_result(folder / RESULT_FILE, "k")


def test_try_out_result_is_reused_on_devices_as_large_and_repeated_or_refused_on_smaller_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found_before(tmp_path, monkeypatch, size=80, world="2") is None
    record = {"for": "k", "micro_size": 3, "memory_saving": {"mode": "none"}, "device_bytes": 80}
    (tmp_path / RESULT_FILE).write_text(json.dumps(record))
    for size in (79, 80, 140):
        assert found_before(tmp_path, monkeypatch, size=size, world="2") == record
    assert found_before(tmp_path, monkeypatch, size=40, world="1") is None
    with pytest.raises(InputError, match="measured on devices of 0 GB") as caught:
        found_before(tmp_path, monkeypatch, size=40, world="2")
    assert RESULT_FILE in str(caught.value) and "delete that file" in str(caught.value)
    earlier = {key: value for key, value in record.items() if key != "memory_saving"}
    for other in (record | {"for": "other"}, earlier):
        (tmp_path / RESULT_FILE).write_text(json.dumps(other))
        assert found_before(tmp_path, monkeypatch, size=80, world="2") is None
