"""The format: stretches of flattened tensors in files, read back in any other cut; how many stand on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ftcli import parts
from ftcli.checkpoint import Stored, standing
from ftcli.checkpoint_folder import write_durably
from ftcli.errors import InputError
from ftcli.hardware.state import MOMENTS, Piece, Slot, make_missing, set_updates, updates
from ftcli.parts import size_on_host, stretches
from ftcli.recipe import Checkpoint

VALUES = torch.arange(10.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten elements in three stretches of two files, as three ranks may have written them."""
    save_file({"weight/w@0": VALUES[:4].clone(), "weight/w@7": VALUES[7:].clone()}, tmp_path / "a.safetensors")
    save_file({"weight/w@4": VALUES[4:7].clone(), "buffer/w@0": torch.tensor([9])}, tmp_path / "b.safetensors")
    return tmp_path


def test_any_stretch_is_read_whatever_the_cut_was(folder: Path) -> None:
    with Stored(folder, ["a.safetensors", "b.safetensors"]) as stored:
        for start in range(11):
            for end in range(start, 11):
                assert torch.equal(stored.read("weight", "w", start, end - start), VALUES[start:end])
        assert stored.read("buffer", "w", 0, 1).dtype == torch.int64
        assert stored.has("weight", "w") and not stored.has("exp_avg", "w")


def test_elements_that_were_not_saved_are_told(folder: Path) -> None:
    with Stored(folder, ["a.safetensors"]) as stored:
        assert torch.equal(stored.read("weight", "w", 1, 3), VALUES[1:4])
        for start, length in ((2, 3), (5, 1), (9, 2)):
            with pytest.raises(InputError, match="lacks elements from"):
                stored.read("weight", "w", start, length)
        with pytest.raises(InputError, match="lacks elements from 0 on of exp_avg w"):
            stored.read("exp_avg", "w", 0, 10)


def test_a_large_piece_is_cut_so_that_no_file_is_larger_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 12)  # three float32
    piece = Piece("w", 100, {"weight": VALUES.view(2, 5), "exp_avg": VALUES.view(2, 5)}, slice(2, 10))
    nothing = Piece("v", 0, {"weight": VALUES}, slice(0, 0))
    found = list(stretches([nothing, piece]))
    assert [[key for key, _ in part] for part in found][:3] == [
        ["weight/w@102"],
        ["weight/w@105"],
        ["weight/w@108", "exp_avg/w@102"],
    ]
    assert [sum(values.nbytes for _, values in part) for part in found] == [12, 12, 12, 12, 12, 4]
    assert torch.equal(torch.cat([v for part in found for _, v in part]), torch.cat([VALUES[2:], VALUES[2:]]))
    assert size_on_host([nothing, piece]) == 64


def test_a_part_is_a_safetensors_file_of_every_dtype_and_holds_the_values_of_the_moment(tmp_path: Path) -> None:
    live = {f"weight/{dtype}@0": torch.arange(3).to(dtype) for dtype in parts.DTYPES}
    before = {key: values.clone() for key, values in live.items()}
    part = parts.copy(list(live.items()))
    for values in live.values():
        values.fill_(1)
    record = write_durably(tmp_path / "part.safetensors", part.header, part.data.numpy().data)
    assert record["size"] == (tmp_path / "part.safetensors").stat().st_size
    found = load_file(tmp_path / "part.safetensors")
    assert set(found) == set(before)
    for key, values in before.items():
        assert found[key].dtype == values.dtype and torch.equal(found[key], values)
    with Stored(tmp_path, ["part.safetensors"]) as stored:
        for dtype in parts.DTYPES:
            assert torch.equal(stored.read("weight", str(dtype), 1, 2), before[f"weight/{dtype}@0"][1:])


@pytest.mark.parametrize(
    ("every", "keep", "best", "first", "most"),
    [
        (None, 2, False, 0, 1),  # only the last
        (3, 2, False, 0, 3),  # of 3, 6, 9 and 10: two and the one that is written
        (3, None, False, 0, 4),
        (3, None, False, 6, 2),
        (3, 1, True, 0, 3),
        (1, 2, True, 0, 4),
        (20, 2, False, 0, 1),
        (3, 2, False, 10, 1),
    ],
)
def test_the_checkpoints_that_stand_at_the_same_time_are_counted(
    every: int | None, keep: int | None, best: bool, first: int, most: int
) -> None:
    keep_best = {"metric": "loss", "direction": "min"} if best else None
    section = Checkpoint.model_validate({"every_steps": every, "keep": keep, "keep_best": keep_best})
    assert standing(section, first, 10) == most


def test_the_state_of_a_new_optimizer_is_made_as_its_first_step_would() -> None:
    def slots(optimizer: torch.optim.Optimizer) -> list[Slot]:
        return [Slot(g, p, optimizer.state[p]) for g in optimizer.param_groups for p in g["params"]]

    weights = [torch.nn.Parameter(torch.ones(2, 3)) for _ in range(2)]
    made, stepped = (torch.optim.AdamW([weight]) for weight in weights)
    weights[1].grad = torch.zeros(2, 3)
    stepped.step()
    make_missing(slots(made))
    set_updates(slots(made), 1)
    for kind in ("step", *MOMENTS):
        a, b = made.state[weights[0]][kind], stepped.state[weights[1]][kind]
        assert torch.equal(a, b) and a.dtype == b.dtype and a.device == b.device
    assert made.state[weights[0]].keys() == stepped.state[weights[1]].keys()


def test_parameters_that_were_not_stepped_equally_often_are_an_error() -> None:
    plain = [Slot({"fused": None}, VALUES, {}, counts_plainly=True) for _ in range(2)]
    assert updates(plain) == 0
    make_missing(plain)
    set_updates(plain, 7)
    assert updates(plain) == 7
    plain[1].state["step"] = 6
    with pytest.raises(RuntimeError, match="not equally often"):
        updates(plain)
