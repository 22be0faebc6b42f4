"""Optional packages are found, and folders that only share their name are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftcli.config.compatibility import check_trackers
from ftcli.config.recipe import Recipe
from ftcli.runtime.installed import is_installed

from ...support.recipes import minimal_values


def test_is_installed_folder_of_that_name_in_the_working_directory_is_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb" / "run-1").mkdir(parents=True)  # what Weights & Biases leaves behind
    monkeypatch.syspath_prepend(str(tmp_path))
    assert is_installed("yaml") and is_installed("json") and not is_installed("no_such_package")
    assert not is_installed("wandb")
    recipe = Recipe.model_validate(
        minimal_values(
            model={"name": "m"},
            data={"train": "rows.jsonl"},
            batch={"global_size": 1, "micro_size": 1},
            log={"trackers": ["wandb"]},
        )
    )
    assert [problem.what for problem in check_trackers(recipe)] == ["log.trackers: wandb is not installed"]
