"""What an upload changes in an export, without a hub. tests/end_to_end/test_hub_pushes.py uploads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ftcli.reports.push import _base_of_recipe


@pytest.mark.parametrize(
    ("name", "written", "warns"),
    [("org/model", "org/model", False), ("../model", "../model", True), ("/models/base", "/models/base", True)],
)
def test_adapter_names_its_base_as_the_recipe_does_while_it_is_uploaded(
    name: str, written: str, warns: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, content = tmp_path / "adapter_config.json", json.dumps({"base_model_name_or_path": "/local/copy", "r": 4})
    config.write_text(content)
    with _base_of_recipe(config, name):
        assert json.loads(config.read_text()) == {"base_model_name_or_path": written, "r": 4}
    assert config.read_text() == content
    assert ("so others cannot load it" in capsys.readouterr().err) == warns
