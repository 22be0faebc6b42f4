"""Damage to bits, bytes or whole files of a checkpoint is detected. One real checkpoint serves all tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftcli.checkpoint.folder import find_damage, newest_intact
from ftcli.config.recipe import Recipe
from ftcli.runtime.checkpoint_names import COMPLETE, STATE, checkpoint_path
from ftcli.runtime.errors import InputError
from ftcli.runtime.run_folder import RunFolder
from ftcli.training.resume import find_start

from ...support.cells import cell, save_cell
from ...support.runner import MakeInputs

FILES = ["rank-00000-0000.safetensors", STATE, COMPLETE]
many = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def recipe(make_inputs: MakeInputs) -> Recipe:
    folder = make_inputs()
    return cell(folder, "sft-tied", batch={"global_size": 4, "micro_size": 4}, checkpoint={"keep": None})


@pytest.fixture(scope="module")
def saved(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run folder with real checkpoints of steps 1 and 2."""
    run = tmp_path_factory.mktemp("saved") / "run"
    save_cell(recipe, run, at=(1, 2))
    assert sorted(file.name for file in checkpoint_path(run, 2).iterdir()) == sorted(FILES)
    return run


@pytest.fixture(scope="module")
def spoiled(saved: Path) -> Path:
    """Return the newest checkpoint of a copy of the run; a test that damages it repairs it."""
    return checkpoint_path(Path(shutil.copytree(saved, saved.parent / "spoiled")), 2)


def assert_refused(folder: Path, file: str, recipe: Recipe) -> None:
    """Check that a damaged checkpoint is named and refused, and skipped if an older one is intact."""
    problem = find_damage(folder)
    assert file in problem
    with pytest.raises(InputError, match=r"step-000002.*"):
        find_start(RunFolder(folder.parent.parent), recipe, str(folder))
    checkpoint, problems = newest_intact(folder.parent.parent)
    assert checkpoint == checkpoint_path(folder.parent.parent, 1)
    assert problems == [problem] or not (folder / COMPLETE).is_file()
    assert find_start(RunFolder(folder.parent.parent), recipe, "auto") == checkpoint


@many
@given(data=st.data(), file=st.sampled_from(FILES))
def test_damage_of_one_flipped_bit_names_the_file(
    data: st.DataObject, file: str, spoiled: Path, recipe: Recipe
) -> None:
    path = spoiled / file
    content = path.read_bytes()
    # The newline that ends COMPLETE is no part of the digest.
    at = data.draw(st.integers(0, len(content) - (2 if file == COMPLETE else 1)))
    bit = data.draw(st.integers(0, 7))
    path.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
    assert_refused(spoiled, STATE if file == COMPLETE else file, recipe)
    path.write_bytes(content)
    assert find_damage(spoiled) == ""


@many
@given(data=st.data(), file=st.sampled_from(FILES))
def test_damage_of_a_file_of_another_size_names_it(
    data: st.DataObject, file: str, spoiled: Path, recipe: Recipe
) -> None:
    path = spoiled / file
    content = path.read_bytes()
    length = data.draw(st.integers(0, len(content) - (2 if file == COMPLETE else 1)))
    more = data.draw(st.binary(min_size=1, max_size=5).filter(bytes.strip))
    path.write_bytes(data.draw(st.sampled_from([content[:length], content + more])))
    assert_refused(spoiled, STATE if file == COMPLETE else file, recipe)
    path.write_bytes(content)


@pytest.mark.parametrize("file", FILES)
def test_damage_of_a_missing_file_names_it(file: str, spoiled: Path, recipe: Recipe) -> None:
    content = (spoiled / file).read_bytes()
    (spoiled / file).unlink()
    assert_refused(spoiled, file, recipe)
    (spoiled / file).write_bytes(content)


def test_damage_of_a_foreign_file_names_it(spoiled: Path, recipe: Recipe) -> None:
    extra = spoiled / "rank-00001-0000.safetensors"
    shutil.copy(spoiled / FILES[0], extra)
    assert_refused(spoiled, extra.name, recipe)
    extra.unlink()
    assert find_damage(spoiled) == ""


@pytest.mark.parametrize("file", FILES)
def test_damage_of_a_link_out_of_the_folder_does_not_follow_it(
    file: str, spoiled: Path, saved: Path, recipe: Recipe
) -> None:
    content = (spoiled / file).read_bytes()
    (spoiled / file).unlink()
    (spoiled / file).symlink_to(checkpoint_path(saved, 2) / file)
    assert_refused(spoiled, file, recipe)
    (spoiled / file).unlink()
    (spoiled / file).write_bytes(content)
