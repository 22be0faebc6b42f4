"""Commits of models and data sets on the hub: a run keeps those that it was trained with, whatever main is later.

The tests use the hub's cache on this machine, as `ftcli fetch` leaves it, and no network.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ftcli import testing
from ftcli.checkpoint.final import describe_other_base
from ftcli.checkpoint.folder import read_state
from ftcli.config.load import load_recipe
from ftcli.config.recipe_data import Source
from ftcli.data.hub_commits import COMMITS, commit_of
from ftcli.data.hub_data import hub_builder, read_hub
from ftcli.data.revisions import commit_environment, resolve
from ftcli.inference.generator import load_generator
from ftcli.reports.check import check
from ftcli.runtime.checkpoint_names import checkpoints_of
from ftcli.runtime.errors import InputError
from ftcli.runtime.run_folder import RunFolder

from ..support.runner import RunCli

OLD, NEW = "a" * 40, "b" * 40
RECIPE: dict[str, Any] = {
    "task": "sft",
    "model": {"name": "org/tiny", "dropout": 0.0},
    "data": {"train": "chats.jsonl", "max_length": 64},
    "adapter": {"type": "lora", "r": 2},
    "batch": {"global_size": 2, "micro_size": 2},
    "train": {"max_steps": 2},
    "optimizer": {"learning_rate": 1e-2},
    "checkpoint": {"every_steps": 1},
}


def point(commit: str, kind: str = "models", name: str = "org/tiny", ref: str = "main") -> None:
    """Point a branch of a repository in the hub's cache to a commit."""
    refs = Path(os.environ["HF_HUB_CACHE"], f"{kind}--{name.replace('/', '--')}", "refs")
    refs.mkdir(parents=True, exist_ok=True)
    (refs / ref).write_text(commit)
    commit_of.cache_clear()  # what a process of its own begins with


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Put a model with two commits into the hub's cache; the second has other weights."""
    snapshots = Path(os.environ["HF_HUB_CACHE"], "models--org--tiny", "snapshots")
    testing.save_tiny_causal(snapshots / OLD)
    testing.save_tiny_causal(snapshots / NEW)
    from safetensors.torch import load_file, save_file

    weights = {name: torch.flip(value, [0]) for name, value in load_file(snapshots / NEW / "model.safetensors").items()}
    save_file({k: v.contiguous() for k, v in weights.items()}, snapshots / NEW / "model.safetensors", {"format": "pt"})
    return snapshots


@pytest.fixture
def folder(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": "p" * (n + 1), "completion": "c"} for n in range(8)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    point(OLD)
    yield tmp_path
    point(OLD)


@pytest.fixture
def ftcli(run_cli: RunCli) -> Callable[..., tuple[int, str]]:
    def run(*arguments: object) -> tuple[int, str]:
        ended = run_cli(*arguments)
        return ended.code, ended.text

    return run


@pytest.mark.slow
def test_adapter_run_records_and_uses_the_commit_of_its_base_everywhere(
    folder: Path, hub: Path, ftcli: Callable[..., tuple[int, str]]
) -> None:
    line = f"model org/tiny: revision main, commit {OLD}"
    assert check("recipe.yaml").facts["model at"] == line.removeprefix("model ")
    code, output = ftcli("train", "recipe.yaml", "--output", "run")
    assert code == 0 and line in output, output
    entry = {"key": "model", "name": "org/tiny", "revision": None, "commit": OLD}
    (first, last) = checkpoints_of(folder / "run")
    assert read_state(last)["resolution"] == [entry]
    assert json.loads((folder / "run/environment.json").read_text())["resolution"] == [entry]
    assert load_recipe("run/recipe.yaml").model.revision == OLD
    assert json.loads((folder / "run/final/adapter_config.json").read_text())["revision"] == OLD
    assert f"Commits: org/tiny {OLD}." in (folder / "run/final/README.md").read_text()
    answers = ("generate", "run", "--prompt", "hello", "--cpu")
    before = ftcli(*answers)
    point(NEW)
    assert ftcli(*answers) == before and before[0] == 0
    code, output = ftcli("export", "run", "merged", "--merge")
    assert code == 0 and "its logits are within" in output, output

    shutil.rmtree(last)  # the run resumes after its first step, though main has moved
    shutil.copytree("run/final", "expected")
    RunFolder("run").write_status("running", 1, 0)
    code, output = ftcli("train", "recipe.yaml", "--output", "run", "--resume", "auto")
    assert code == 0 and "resumed after step 1" in output and line in output, output
    adapter = "adapter_model.safetensors"
    assert Path("run/final", adapter).read_bytes() == Path("expected", adapter).read_bytes()
    code, output = ftcli("train", "recipe.yaml", "--output", "x", "--resume", first, "--set", "model.revision=main")
    assert code == 2 and f"model.revision: '{OLD}' -> '{NEW}'" in output

    config = Path("run/final/adapter_config.json")  # as older versions wrote it
    config.write_text(json.dumps(json.loads(config.read_text()) | {"revision": None}))
    assert ftcli(*answers) == before
    assert ftcli("export", "run", "adapter")[0] == 0
    assert json.loads(Path("adapter/adapter_config.json").read_text())["revision"] == OLD


def test_adapter_folders_are_opened_on_the_commit_of_their_base(
    folder: Path, hub: Path, ftcli: Callable[..., tuple[int, str]]
) -> None:
    from safetensors.torch import load_file

    code, output = ftcli("train", "recipe.yaml", "--output", "run", "--cpu")
    assert code == 0, output
    name = "model.embed_tokens.weight"
    trained = load_file(hub / OLD / "model.safetensors")[name]
    shutil.copytree("run/final", "exported")
    shutil.copytree("run/final", "of-peft")
    Path("of-peft/trained_on.json").unlink()
    point(NEW)
    for target in ("run/final", "exported", "of-peft"):
        loaded = load_generator(target, cpu=True).model.get_input_embeddings().weight
        assert torch.equal(loaded, trained), target
    weights = "the frozen weights of org/tiny are not those with which the run was trained"
    commits = f"it was trained on org/tiny at {OLD}, and model.name is org/tiny at {NEW}"
    for target, warning in (("run/final", weights), ("of-peft", commits)):
        recipe = load_recipe("recipe.yaml", [f"adapter.path={target}"])
        assert any(warning in line for line in describe_other_base(resolve(recipe).recipe))
        same = load_recipe("recipe.yaml", [f"adapter.path={target}", f"model.revision={OLD}"])
        assert describe_other_base(resolve(same).recipe) == []
    state = read_state(checkpoints_of(folder / "run")[-1])
    assert state["frozen"]["revision"] == OLD


def test_resolve_takes_stored_commits_for_the_same_words_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("recipe.yaml", ["data.train=[{path: org/rows, revision: v1}, chats.jsonl]"])
    point(OLD, "datasets", "org/rows", "v1")
    resolved = resolve(recipe)
    assert [source.revision for source in resolved.recipe.data.train_sources] == [OLD, None]
    assert [entry["commit"] for entry in resolved.entries] == [OLD, OLD]
    point(NEW, "datasets", "org/rows", "v1")
    assert resolve(recipe).entries[1]["commit"] == NEW
    assert resolve(recipe, {"resolution": resolved.entries}).entries == resolved.entries
    assert [entry["commit"] for entry in resolve(resolved.recipe).entries] == [OLD, OLD]
    with monkeypatch.context() as patch:  # a launched rank takes what its parent found
        for name, value in commit_environment(resolved).items():
            patch.setenv(name, value)
        commit_of.cache_clear()
        assert resolve(recipe).entries == resolved.entries and COMMITS in os.environ
    commit_of.cache_clear()
    unknown = resolve(recipe.model_copy(update={"model": recipe.model.model_copy(update={"name": "org/unheard-of"})}))
    assert unknown.recipe.model.revision is None
    assert unknown.lines()[0] == "model org/unheard-of: revision main, commit unknown on this machine"


def test_read_hub_of_another_commit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a network, `datasets` reads the newest copy on this machine and ignores the requested revision."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "prepared")
    for number, commit in enumerate((OLD, NEW)):
        (tmp_path / "rows.jsonl").write_text(json.dumps({"text": commit}) + "\n")
        builder = datasets.load_dataset_builder("json", data_files=str(tmp_path / "rows.jsonl"))
        builder.download_and_prepare()
        place = tmp_path / "prepared" / "org___rows" / "default" / "0.0.0" / commit
        shutil.copytree(builder.cache_dir, place)
        (place / "json-train.arrow").rename(place / "rows-train.arrow")
        info = json.loads((place / "dataset_info.json").read_text())
        info |= {"config_name": "default", "dataset_name": "rows"}
        (place / "dataset_info.json").write_text(json.dumps(info))
        os.utime(place, (number, number))
    for commit in (OLD, NEW):
        read = hub_builder("org/rows", None, commit)
        read.download_and_prepare()
        assert read.as_dataset(split="train")["text"][0] == commit
    assert read_hub(Source(path="org/rows", revision=OLD))["text"][0] == OLD
    assert (
        "data set org/rows is stored as json and read through the library datasets" in capsys.readouterr().err
    )  # its values may not be those of the files
    with pytest.raises(InputError, match=f"commit {'c' * 40} is needed, but this machine has commit {NEW}"):
        hub_builder("org/rows", None, "c" * 40)
