"""The format: slices of flattened tensors in files, read with any other sharding; pruning of old checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ftcli.checkpoint import tensor_files
from ftcli.checkpoint.reader import CheckpointReader
from ftcli.checkpoint.tensor_files import saved_bytes, split_into_files
from ftcli.config.recipe_training import Checkpoint
from ftcli.hardware.optimizer_state import (
    MOMENTS,
    OptimizerSlot,
    StateShard,
    count_updates,
    create_missing_state,
    set_update_count,
)
from ftcli.runtime.durable_files import write_durably
from ftcli.runtime.errors import InputError
from ftcli.training.disk_space import max_stored_checkpoints

VALUES = torch.arange(10.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten elements in three slices of two files, as three ranks may have written them."""
    save_file({"weight/w@0": VALUES[:4].clone(), "weight/w@7": VALUES[7:].clone()}, tmp_path / "a.safetensors")
    save_file({"weight/w@4": VALUES[4:7].clone(), "buffer/w@0": torch.tensor([9])}, tmp_path / "b.safetensors")
    return tmp_path


def test_any_stretch_is_read_whatever_the_cut_was(folder: Path) -> None:
    with CheckpointReader(folder, ["a.safetensors", "b.safetensors"]) as stored:
        for start in range(11):
            for end in range(start, 11):
                assert torch.equal(stored.read("weight", "w", start, end - start), VALUES[start:end])
        assert stored.read("buffer", "w", 0, 1).dtype == torch.int64
        assert stored.has("weight", "w") and not stored.has("exp_avg", "w")


def test_stored_read_of_missing_elements_is_refused(folder: Path) -> None:
    with CheckpointReader(folder, ["a.safetensors"]) as stored:
        assert torch.equal(stored.read("weight", "w", 1, 3), VALUES[1:4])
        for start, length in ((2, 3), (5, 1), (9, 2)):
            with pytest.raises(InputError, match="lacks elements from"):
                stored.read("weight", "w", start, length)
        with pytest.raises(InputError, match="lacks elements from 0 on of exp_avg w"):
            stored.read("exp_avg", "w", 0, 10)


def test_save_checkpoint_with_a_large_piece_is_cut_so_that_no_file_is_larger_than_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensor_files, "FILE_BYTES", 12)  # three float32
    shard = StateShard("w", 100, {"weight": VALUES.view(2, 5), "exp_avg": VALUES.view(2, 5)}, slice(2, 10))
    nothing = StateShard("v", 0, {"weight": VALUES}, slice(0, 0))
    files = list(split_into_files([nothing, shard]))
    assert [[key for key, _ in part] for part in files][:3] == [
        ["weight/w@102"],
        ["weight/w@105"],
        ["weight/w@108", "exp_avg/w@102"],
    ]
    assert [sum(values.nbytes for _, values in part) for part in files] == [12, 12, 12, 12, 12, 4]
    assert torch.equal(torch.cat([v for part in files for _, v in part]), torch.cat([VALUES[2:], VALUES[2:]]))
    assert saved_bytes([nothing, shard]) == 64


def test_save_checkpoint_with_a_part_is_a_safetensors_file_of_every_dtype_and_holds_the_values_of_the_moment(
    tmp_path: Path,
) -> None:
    live = {f"weight/{dtype}@0": torch.arange(3).to(dtype) for dtype in tensor_files.DTYPES}
    before = {key: values.clone() for key, values in live.items()}
    part = tensor_files.copy_to_host(list(live.items()))
    for values in live.values():
        values.fill_(1)
    record = write_durably(tmp_path / "part.safetensors", part.header, part.data.numpy().data)
    assert record["size"] == (tmp_path / "part.safetensors").stat().st_size
    tensors = load_file(tmp_path / "part.safetensors")
    assert set(tensors) == set(before)
    for key, values in before.items():
        assert tensors[key].dtype == values.dtype and torch.equal(tensors[key], values)
    with CheckpointReader(tmp_path, ["part.safetensors"]) as stored:
        for dtype in tensor_files.DTYPES:
            assert torch.equal(stored.read("weight", str(dtype), 1, 2), before[f"weight/{dtype}@0"][1:])


@pytest.mark.parametrize(
    ("every", "keep", "best", "first", "stored", "most"),
    [
        (None, 2, False, 0, 0, 1),  # only the last
        (None, 2, False, 6, 1, 2),  # that of the stop stays until the last one is complete
        (3, 2, False, 0, 0, 3),  # of 3, 6, 9 and 10: two and the one that is written
        (3, 2, False, 6, 2, 3),
        (3, None, False, 0, 0, 4),
        (3, None, False, 6, 0, 2),  # into another run folder
        (3, None, False, 6, 2, 4),
        (3, 1, True, 0, 0, 3),
        (1, 2, True, 0, 0, 4),
        (20, 2, False, 0, 0, 1),
        (3, 2, False, 10, 0, 1),
    ],
)
def test_save_checkpoint_checkpoints_that_stand_at_the_same_time_are_counted(
    every: int | None, keep: int | None, best: bool, first: int, stored: int, most: int
) -> None:
    keep_best = {"metric": "loss", "direction": "min"} if best else None
    section = Checkpoint.model_validate({"every_steps": every, "keep": keep, "keep_best": keep_best})
    assert max_stored_checkpoints(section, first, 10, stored) == most


def test_save_checkpoint_state_of_a_new_optimizer_is_made_as_its_first_step_would() -> None:
    def slots(optimizer: torch.optim.Optimizer) -> list[OptimizerSlot]:
        return [OptimizerSlot(g, p, optimizer.state[p]) for g in optimizer.param_groups for p in g["params"]]

    weights = [torch.nn.Parameter(torch.ones(2, 3)) for _ in range(2)]
    made, stepped = (torch.optim.AdamW([weight]) for weight in weights)
    weights[1].grad = torch.zeros(2, 3)
    stepped.step()
    create_missing_state(slots(made))
    set_update_count(slots(made), 1)
    for kind in ("step", *MOMENTS):
        a, b = made.state[weights[0]][kind], stepped.state[weights[1]][kind]
        assert torch.equal(a, b) and a.dtype == b.dtype and a.device == b.device
    assert made.state[weights[0]].keys() == stepped.state[weights[1]].keys()


def test_count_updates_with_uneven_step_counts_raises() -> None:
    plain = [OptimizerSlot({"fused": None}, VALUES, {}, has_int_step=True) for _ in range(2)]
    assert count_updates(plain) == 0
    create_missing_state(plain)
    set_update_count(plain, 7)
    assert count_updates(plain) == 7
    plain[1].state["step"] = 6
    with pytest.raises(RuntimeError, match="not equally often"):
        count_updates(plain)
