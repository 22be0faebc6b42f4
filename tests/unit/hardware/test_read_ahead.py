"""Weight files that are read ahead: all bytes of all shards, only if they fit into memory, and once in a process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil
import pytest

from ftcli.config.recipe import Recipe
from ftcli.hardware import read_ahead as module
from ftcli.hardware.read_ahead import read_ahead, reads_ahead

from ...support.recipes import minimal_values

SIZES = {"model-1.safetensors": 5000, "model-2.safetensors": 1, "model-3.safetensors": 4096}


def model_of(folder: Path) -> Recipe:
    folder.mkdir()
    for name, size in SIZES.items():
        (folder / name).write_bytes(os.urandom(size))
    (folder / "rows.txt").write_bytes(bytes(9000))
    (folder / "config.json").write_text("{}")
    index = {"weight_map": {f"weight {number}": name for number, name in enumerate(SIZES)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return Recipe.model_validate(minimal_values(model={"name": str(folder)}, data={"train": "rows.jsonl"}))


@pytest.fixture(autouse=True)
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_BYTES", 0)


def wait(recipe: Recipe) -> int:
    """Read ahead to the end, and return the number of threads."""
    threads = read_ahead(recipe)
    for thread in threads:
        thread.join()
    return len(threads)


def bytes_read() -> int:
    """Return the number of bytes that this process has read, from the page cache too."""
    return int(psutil.Process().io_counters().read_chars)


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts bytes by Linux's counter")
def test_read_ahead_reads_all_weight_files_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(module, "THREADS", 2)
    small, total = model_of(tmp_path / "small"), sum(SIZES.values())
    blocks = [block for name in SIZES for block in module._blocks(tmp_path / "small" / name)]
    assert len(blocks) == 5 + 1 + 5
    before = bytes_read()
    index = bytes_read() - before  # what the counter itself reads
    before = bytes_read()
    assert wait(small) == 2
    read = bytes_read() - before - index
    assert total <= read < total + 4000, "the index too, but no other file"
    assert wait(small) == 0, "a trial run of the same process"


def test_read_ahead_leaves_out_models_that_are_small_or_larger_than_the_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = model_of(tmp_path / "model")
    with monkeypatch.context() as larger:
        larger.setattr(module, "LEAST_BYTES", sum(SIZES.values()) + 1)
        assert wait(recipe) == 0
    huge = tmp_path / "model" / "model-2.safetensors"
    with huge.open("r+b") as file:
        file.truncate(psutil.virtual_memory().total + 1)  # a file with a hole, which takes no space
    assert wait(recipe) == 0
    huge.unlink()
    assert wait(recipe) == 0, "the checks of the run report a missing shard"


@pytest.mark.parametrize("index", ["[]", '{"weight_map": 3}', "{"])
def test_read_ahead_leaves_a_broken_index_to_the_checks_of_the_run(tmp_path: Path, index: str) -> None:
    recipe = model_of(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors.index.json").write_text(index)
    assert wait(recipe) == 0


def test_read_ahead_with_a_limit_of_threads_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []

    def start(thread: module.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        plain(thread)

    plain = module.Thread.start
    monkeypatch.setattr(module.Thread, "start", start)
    assert wait(model_of(tmp_path / "model")) == 1


@pytest.mark.parametrize(("rank", "launch", "reads"), [("0", "", True), ("1", "", False), ("0", "a token", False)])
def test_the_first_rank_of_a_machine_reads_ahead_unless_its_parent_does(
    rank: str, launch: str, reads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ftcli import testing
    from ftcli.runtime.process import LAUNCHED
    from ftcli.training import setup

    model = testing.save_tiny_causal(tmp_path / "model")
    recipe = Recipe.model_validate(minimal_values(model={"name": str(model)}, data={"train": "rows.jsonl"}))
    monkeypatch.setenv("LOCAL_RANK", rank)
    if launch:
        monkeypatch.setenv(LAUNCHED, launch)
    setup._read_start(recipe, (), None, dry_run=False, anyway=False, weights=None)
    assert (model in module._begun) == reads


def test_the_parent_reads_ahead_before_it_starts_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ftcli import testing
    from ftcli.launch import launcher

    model = testing.save_tiny_causal(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    values = minimal_values(model={"name": str(model)}, data={"train": str(rows), "max_length": 16})
    seen: list[bool] = []
    monkeypatch.setattr(launcher, "launch", lambda *_, **__: seen.append(model in module._begun))
    launcher.train(Recipe.model_validate(values), "single", cpu=True, output=tmp_path / "run")
    assert seen == [True]


@pytest.mark.parametrize(("profile", "once"), [("ddp", False), ("hsdp", False), ("fsdp", True), ("zero3", True)])
def test_the_first_rank_of_another_machine_reads_ahead_only_if_it_reads_the_weights(
    profile: str, once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"LOCAL_RANK": "0", "RANK": "2", "WORLD_SIZE": "4", "FTCLI_PROFILE": profile}.items():
        monkeypatch.setenv(name, value)
    assert reads_ahead() == (not once)
    monkeypatch.setenv("RANK", "0")
    assert reads_ahead()


@pytest.mark.parametrize("name", ["someone/model", "./missing"])
def test_read_ahead_of_a_model_that_is_not_on_this_machine_reads_nothing(name: str) -> None:
    values = minimal_values(model={"name": name}, data={"train": "rows.jsonl"})
    assert wait(Recipe.model_validate(values)) == 0, "other checks report the missing folder"
