"""The digest of the frozen weights that an adapter is trained beside."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ftcli import testing
from ftcli.config.recipe import Recipe
from ftcli.models.frozen_weights import FORMULA, frozen_digest
from ftcli.models.trained_on import check_trained_on
from ftcli.runtime.errors import InputError

from ...support.recipes import minimal_values


def recipe_of(model: Path, adapter: str = "lora") -> Recipe:
    return Recipe.model_validate(
        minimal_values(model={"name": str(model)}, data={"train": "rows.jsonl"}, adapter={"type": adapter})
    )


def digest(model: Path) -> str | None:
    return frozen_digest(recipe_of(model))


def test_frozen_digest_sees_every_tensor_and_the_configuration_and_no_place(tmp_path: Path) -> None:
    model = testing.save_tiny_causal(tmp_path / "model")
    expected, file = digest(model), model / "model.safetensors"
    assert expected is not None and frozen_digest(recipe_of(model, "none")) is None
    assert digest(Path(shutil.copytree(model, tmp_path / "copy"))) == expected
    weights = load_file(file)
    for name, value in weights.items():
        changed = value.clone()
        changed.view(-1)[-1] += 1
        save_file(weights | {name: changed}, file, {"format": "pt"})
        assert digest(model) != expected, name
    names, half = list(weights), len(weights) // 2  # the same tensors in two files
    shards = {"model-1.safetensors": names[:half], "model-2.safetensors": names[half:]}
    for shard, inside in shards.items():
        save_file({name: weights[name] for name in inside}, model / shard, {"format": "pt"})
    index = {"weight_map": {name: shard for shard, inside in shards.items() for name in inside}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    file.unlink()
    assert digest(model) == expected
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"transformers_version": "9", "dtype": "float16"}))
    assert digest(model) == expected
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert digest(model) != expected


def test_frozen_digest_samples_both_ends_of_large_tensors_and_files_of_other_formats(tmp_path: Path) -> None:
    model, size = testing.save_hollow(tmp_path / "model", model_type="llama"), 3 * 2**20

    def written(at: int | None, name: str) -> str | None:
        content = bytearray(size)
        if at is not None:
            content[at] = 1
        if name.endswith(".bin"):
            (model / name).write_bytes(content)
        else:
            save_file({"w": torch.frombuffer(content, dtype=torch.uint8)}, model / name)
        return digest(model)

    for name in ("model.safetensors", "pytorch_model.bin"):
        digests = {written(at, name) for at in (None, 0, size // 2, size - 1)}
        assert len(digests) == (4 if name.endswith(".bin") else 3)  # the middle byte of a large tensor is in no piece
        (model / name).unlink()


def test_check_trained_on_of_an_earlier_version_names_both_digests(tmp_path: Path) -> None:
    model = testing.save_tiny_causal(tmp_path / "new")
    entry: dict[str, Any] = {"formula": FORMULA, "name": "old", "digest": digest(model)}
    for stored in (entry, None, {}, entry | {"formula": "samples-9", "digest": "aa"}):
        check_trained_on(stored, str(model), None)
    check_trained_on(entry, "org/not-on-this-machine", None)
    message = rf"weights of {model} are not those .*: digest aa then \(of old\), {digest(model)} now"
    with pytest.raises(InputError, match=message):
        check_trained_on(entry | {"digest": "aa"}, str(model), None)
