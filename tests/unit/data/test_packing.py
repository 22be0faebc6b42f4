"""Every document in exactly one bin, no bin too long, as few bins as best-fit decreasing gives, and always the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from ftcli.data.packing import Bins, pack, pack_rows
from ftcli.data.sampler import TrainOrder
from ftcli.models.architectures import architecture_of
from ftcli.reports.check import check
from ftcli.runtime.errors import InputError
from ftcli.runtime.seeds import PADDING, digest
from ftcli.tasks.shared.batches import flat_batch
from ftcli.testing import save_hollow
from ftcli.training.batches.dataloaders import Collate, Rows

from ...support.counting import count_lines
from ..runtime.test_torn_files import Order

SETS = st.integers(1, 40).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(1, capacity), max_size=60), st.just(capacity))
)


def loads(bins: Bins, lengths: np.ndarray) -> list[int]:
    return [int(lengths[bins[index]].sum()) for index in range(len(bins))]


def one_at_a_time(lengths: list[int], capacity: int) -> list[int]:
    """Return what best-fit decreasing leaves free in each bin, done as the textbook says."""
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [number for number, room in enumerate(free) if room >= length]
        if fitting:
            free[min(fitting, key=lambda number: free[number])] -= length
        else:
            free.append(capacity - length)
    return free


@given(SETS)
def test_pack_puts_every_document_into_one_pack_within_capacity(drawn: tuple[list[int], int]) -> None:
    lengths, capacity = np.array(drawn[0], dtype=np.int64), drawn[1]
    bins = pack(lengths, capacity)
    numbers = [number for index in range(len(bins)) for number in bins[index]]
    assert sorted(numbers) == list(range(len(lengths)))
    assert all(0 < load <= capacity for load in loads(bins, lengths))
    assert all(bins[index] == sorted(bins[index]) for index in range(len(bins)))


@given(SETS)
def test_pack_equals_best_fit_decreasing_one_by_one(drawn: tuple[list[int], int]) -> None:
    lengths, capacity = np.array(drawn[0], dtype=np.int64), drawn[1]
    free = sorted(capacity - load for load in loads(pack(lengths, capacity), lengths))
    assert free == sorted(one_at_a_time(drawn[0], capacity))
    assert len(free) >= -(-int(lengths.sum()) // capacity)


@settings(deadline=None)  # two cores, shared
@given(SETS)
def test_pack_is_reproducible(drawn: tuple[list[int], int]) -> None:
    lengths, capacity = np.array(drawn[0], dtype=np.int64), drawn[1]
    first, again = pack(lengths, capacity), pack(lengths.copy(), capacity)
    assert first.documents.tolist() == again.documents.tolist()
    assert first.starts.tolist() == again.starts.tolist()


def test_pack_two_hundred_thousand_short_documents_fill_98_percent_without_a_loop_over_documents() -> None:
    drawn = np.random.default_rng(0).lognormal(np.log(180), 0.9, 200_000)
    lengths = np.clip(drawn.astype(np.int64), 1, 2048)
    bins = pack(lengths, 2048)
    assert lengths.sum() / (len(bins) * 2048) > 0.98
    few, many = (count_lines(lambda some=some: pack(some, 2048)) for some in (lengths[:20_000], lengths))
    assert many < 2 * few  # the loop is one over different lengths


def test_pack_with_a_document_that_fits_no_bin_raises() -> None:
    with pytest.raises(ValueError, match="do not fit bins of 8"):
        pack(np.array([3, 9]), 8)
    with pytest.raises(ValueError, match="lengths from 0"):
        pack(np.array([3, 0]), 8)


class Task:
    """Documents whose batch is their ids."""

    @staticmethod
    def blank(row: dict[str, Any]) -> dict[str, Any]:
        return row | {"items": 0}

    @staticmethod
    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {"items": [row["items"] for row in rows]}


DOCUMENTS = [{"id": number, "items": number} for number in range(7)]
BINS = pack(np.array([5, 4, 3, 3, 2, 2, 1]), 6)


def test_packed_row_is_the_documents_of_its_bin_and_padding_is_one_blank_document() -> None:
    rows = Rows(DOCUMENTS, Task(), training=True, bins=BINS)  # type: ignore[arg-type]
    bins_in_rows = [[document["id"] for document in rows[0, index]] for index in range(len(rows))]
    assert bins_in_rows == [BINS[index] for index in range(len(BINS))] == [[0, 6], [1, 4], [2, 3], [5]]
    assert [(row["id"], row["items"]) for row in rows[0, PADDING]] == [(PADDING, 0)]


def test_packed_rows_with_a_document_that_is_left_out_leaves_the_others_of_its_bin() -> None:
    rows = Rows(DOCUMENTS, Task(), training=True, bins=BINS, excluded={2})  # type: ignore[arg-type]
    batch = Collate(Task())([rows[0, 2], rows[0, PADDING]])  # type: ignore[arg-type]
    assert batch["sample_ids"].tolist() == [3, PADDING]
    assert batch["items"] == [3, 0]


def test_excluded_document_is_replaced_by_another_because_its_values_may_not_be_finite() -> None:
    named = [row | {"name": str(row["id"])} for row in DOCUMENTS]
    plain = Rows(named, Task(), training=True, excluded={0, 2}, stand_ins=[0, 3, 1])  # type: ignore[arg-type]
    shown = [[(row["id"], row["name"], row["items"]) for row in plain[0, index]] for index in (0, 1, 2, PADDING)]
    assert shown == [[(PADDING, "3", 0)], [(1, "1", 1)], [(PADDING, "3", 0)], [(PADDING, "3", 0)]]
    packed = Rows(named, Task(), training=True, bins=BINS, excluded={2, 3}, stand_ins=[2, 5])  # type: ignore[arg-type]
    assert [(row["id"], row["name"]) for row in packed[0, 2]] == [(PADDING, "5")]  # no document of the bin is left
    other = Rows(named, Task(), training=True, excluded={0, 3}, stand_ins=[0, 3])  # type: ignore[arg-type]
    assert [(row["id"], row["name"]) for row in other[0, 3]] == [(PADDING, "1")]  # none of the best is left
    every = Rows(named, Task(), training=True, excluded={row["id"] for row in DOCUMENTS})  # type: ignore[arg-type]
    assert [(row["id"], row["items"]) for row in every[0, 4]] == [(PADDING, 0)]


def test_excluded_document_of_a_stream_is_replaced_by_the_shortest_other_one() -> None:
    from ftcli.training.batches.streaming_loader import _BatchDataset

    made = [row | {"input_ids": [0] * (9 - row["id"])} for row in DOCUMENTS]
    data = _BatchDataset(None, Collate(Task()), {0, 2, 6})  # type: ignore[arg-type]
    rows = data._without_excluded([[made[0]], [made[1], made[2]], [made[6], made[4]], [made[5]]])
    assert [[(row["id"], len(row["input_ids"])) for row in row_] for row_ in rows] == [
        [(PADDING, 4)], [(1, 8)], [(4, 5)], [(5, 4)]
    ]  # fmt: skip
    assert [row["id"] for row_ in data._without_excluded([[made[0]]]) for row in row_] == [PADDING]


def test_pack_rows_of_a_folder_that_cannot_be_written_packs_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Dataset.from_dict({"input_ids": [[1, 2], [3], [4, 5, 6]]})
    monkeypatch.setattr("os.access", lambda path, mode: False)  # as on a read-only mount; root may write elsewhere
    (tmp_path / "rows").mkdir()
    bins = pack_rows(rows, tmp_path / "rows", 4)
    assert sorted(document for index in range(len(bins)) for document in bins[index]) == [0, 1, 2]
    assert list((tmp_path / "rows").iterdir()) == [] and len(list(tmp_path.iterdir())) == 1


@given(st.sampled_from([1, 2, 4]), st.integers(0, 3))
def test_packed_rows_with_an_epoch_of_packed_rows_delivers_every_document_once_at_any_micro_size(
    micro: int, seed: int
) -> None:
    order = TrainOrder(len(BINS), global_size=4, micro_size=micro, seed=seed, first_step=0, steps=1, steps_per_epoch=1)
    rows, collate = Rows(DOCUMENTS, Task(), training=True, bins=BINS), Collate(Task())  # type: ignore[arg-type]
    ids = np.concatenate([collate([rows[key] for key in keys])["sample_ids"].numpy() for keys in order])
    assert digest(ids) == digest(np.array([row["id"] for row in DOCUMENTS]))


def test_pack_rows_syncs_bins_before_their_name_and_then_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Dataset.from_dict({"input_ids": [[1, 2], [3], [4, 5, 6]]})
    order = Order(tmp_path, monkeypatch)
    pack_rows(rows, tmp_path, 4)
    named = next(event for event in order.events if event.startswith("name "))
    final_name = named.removeprefix("name ")
    assert sorted(order.events[:2]) == [f"sync {final_name}.tmp/{name}.npy" for name in ("documents", "starts")]
    assert order.events[2:] == [f"sync {final_name}.tmp", named, "sync ."]


def recipe(folder: Path, kind: str, *, task: str = "sft", data: str = "packing: true", model: str = "") -> Path:
    """Write a recipe for a model of which there is a configuration and no weight: `check` must not need more."""
    values = {"model_type": kind, "rope_scaling": {"rope_type": "longrope"}, "original_max_position_embeddings": 64}
    save_hollow(folder / "model", **values if kind == "phi3" else {"model_type": kind})
    rows = {"prompt": "a", "completion": "b", "text": "a", "label": "b"}
    (folder / "rows.jsonl").write_text(f"{json.dumps(rows)}\n")
    path = folder / "recipe.yaml"
    path.write_text(
        f"task: {task}\nmodel: {{name: {folder / 'model'}{model}}}\n"
        f"data: {{train: {folder / 'rows.jsonl'}, max_length: 128, {data}}}\n"
        "batch: {global_size: 1}\ntrain: {max_steps: 1}\noptimizer: {learning_rate: 0.1}\n"
    )
    return path


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        check(path)
    return str(caught.value)


def test_check_architecture_accepts_isolated_documents(tmp_path: Path) -> None:
    assert "at most 128" in "\n".join(check(recipe(tmp_path, "llama")).lines())


@pytest.mark.parametrize("kind", ["mamba", "qwen3_next", "bloom"])
@pytest.mark.parametrize("key", ["packing", "padding_free"])
def test_check_refuses_an_architecture_that_is_not_known_by_name(tmp_path: Path, kind: str, key: str) -> None:
    assert architecture_of(kind).packed_attention is None
    message = refusal(recipe(tmp_path, kind, data=f"{key}: true"))
    assert f"data.{key}: several documents in one row are not tested for models of type {kind}" in message
    assert f"set data.{key} to false" in message
    check(recipe(tmp_path, kind, data=f"{key}: false"))


def test_check_refuses_to_pack_rows_that_are_not_documents(tmp_path: Path) -> None:
    message = refusal(recipe(tmp_path, "llama", task="text_classification"))
    assert "data.packing: the rows of task text_classification are not documents of a language model" in message


def test_check_packing_refuses_a_kernel_without_document_bounds(tmp_path: Path) -> None:
    message = refusal(recipe(tmp_path, "llama", model=", attn_implementation: eager"))
    assert "model.attn_implementation: eager cannot separate documents in one row (data.packing)" in message
    for known in ("flash_attention_2", "sdpa"):
        check(recipe(tmp_path, "llama", model=f", attn_implementation: {known}"))


@pytest.mark.parametrize("packing", ["true", "false"])
def test_check_refuses_a_kernel_that_is_wrong_for_narrow_heads(tmp_path: Path, packing: str) -> None:
    sections = {"model": ", attn_implementation: flash_attention_4", "data": f"packing: {packing}"}
    path = recipe(tmp_path, "llama", **sections)
    sizes = {"model_type": "llama", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "model" / "config.json").write_text(json.dumps(sizes))
    message = refusal(path)
    assert "flash_attention_4 supports heads of 64, 96, 128 features; this model's have 32" in message
    assert "delete model.attn_implementation" in message
    (tmp_path / "model" / "config.json").write_text(json.dumps(sizes | {"head_dim": 64}))
    check(path)


def test_check_refuses_rotary_positions_that_look_at_the_whole_micro_batch(tmp_path: Path) -> None:
    message = refusal(recipe(tmp_path, "phi3"))
    assert "rotary positions of type longrope depend on the longest row" in message
    assert "set data.max_length to 64 at most" in message


def test_load_recipe_with_packing_and_length_grouping_is_refused(tmp_path: Path) -> None:
    message = refusal(recipe(tmp_path, "llama", data="packing: true, group_by_length: true"))
    assert "packing and group_by_length exclude each other" in message


def test_flat_batch_is_padded_to_a_multiple_of_16_by_a_row_without_targets() -> None:
    rows = [{"input_ids": [5, 6, 7], "trained": [False, True, True]}, {"input_ids": [8, 9], "trained": [True, True]}]
    batch = flat_batch(rows, None)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, *[0] * 11]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, *range(11)]]
    assert batch["attention_mask"].flatten().tolist() == [0, 3, 5, 16]
    assert (batch["positions"].tolist(), batch["targets"].tolist()) == ([0, 1, 3], [6, 7, 9])
    full = flat_batch([{"input_ids": list(range(16)), "trained": [True] * 16}], "flash_attention_2")
    assert full["input_ids"].shape == (1, 16) and full["cu_seq_lens_q"].tolist() == [0, 16]
