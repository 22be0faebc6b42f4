"""Trained statistics of batch norm: those of all processes equal one process with the same rows in a forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ftcli.checkpoint.folder import read_state
from ftcli.checkpoint.reader import CheckpointReader
from ftcli.runtime.checkpoint_names import checkpoint_path
from ftcli.runtime.errors import InputError
from ftcli.testing import run_on_cpu

from ...support.cells import cell, resume_cell, save_cell
from ..conftest import Launch

SETTINGS: dict[str, dict[str, Any]] = {
    "2d": {"shape": (6, 5, 3, 4)},
    "rows only": {"shape": (6, 5)},
    "no weights": {"shape": (6, 5, 4), "affine": False},
    "no running statistics": {"shape": (6, 5, 4), "track_running_stats": False},
    "cumulative average": {"shape": (6, 5), "momentum": None},
    "far from zero": {"shape": (6, 5, 3, 4), "offset": 100.0},
    "other numbers of rows": {"shape": (6, 5, 3, 4), "first": 5},
    "bfloat16": {"shape": (6, 5, 3, 4), "dtype": "bfloat16"},
    "channels last": {"shape": (6, 5, 3, 4), "last": True},
}
KINDS = {2: "BatchNorm1d", 3: "BatchNorm1d", 4: "BatchNorm2d"}


def normalise(name: str, mode: str) -> dict[str, Any]:
    """Return outputs, gradients and statistics of this rank's rows after two steps; all rows on one process."""
    import torch

    from ftcli.hardware.batch_norm import set_batch_norm
    from ftcli.runtime.process import current_rank, world_size

    settings = dict(SETTINGS[name])
    shape, offset, first = settings.pop("shape"), settings.pop("offset", 0.0), settings.pop("first", 3)
    dtype = getattr(torch, settings.pop("dtype", "float32"))
    layout = torch.channels_last if settings.pop("last", False) else torch.contiguous_format
    draw = torch.Generator().manual_seed(0)
    norm: Any = getattr(torch.nn, KINDS[len(shape)])(shape[1], **settings)
    if norm.affine:
        norm.weight.data, norm.bias.data = torch.randn(2, shape[1], generator=draw)
    set_batch_norm(torch.nn.Sequential(norm), mode)
    mine = [slice(None)] if world_size() == 1 else [slice(0, first), slice(first, shape[0])]
    outputs, gradients = [], []
    for _ in range(2):
        rows, factors = torch.randn(2, *shape, generator=draw)
        inputs = (rows * 3 + offset)[mine[current_rank()]].to(dtype).contiguous(memory_format=layout).requires_grad_()
        with torch.no_grad():
            norm(inputs)  # as the first pass of a loss does: no update
        output = norm(inputs)
        (output * factors[mine[current_rank()]].to(dtype)).square().sum().backward()
        outputs.append(output.detach().float().numpy())
        gradients.append(inputs.grad.float().numpy())  # type: ignore[union-attr]
    weights = {key: value.grad.numpy() for key, value in norm.named_parameters()}
    buffers = {key: value.float().numpy() for key, value in norm.named_buffers()}
    return {"outputs": outputs, "inputs": gradients, "weights": weights, "buffers": buffers}


def normalise_and_resume(folder: Path, output: Path, source: Path | None) -> dict[str, Any]:
    """Return the results of all settings, the curve of a run that is saved, and the curve that resumes another one."""
    from accelerate import PartialState

    PartialState(cpu=True)
    results = {name: normalise(name, "sync") for name in SETTINGS}
    recipe = cell(folder, "resnet-sync")
    saved = save_cell(recipe, output, at=(2,))
    if source is None:
        return results | {"saved": saved["rows"]}
    halves = recipe.model_copy(update={"batch": recipe.batch.model_copy(update={"micro_size": 6})})  # the same 12 rows
    resumed = {
        name: resume_cell(each, checkpoint_path(source, 2))["rows"]
        for name, each in (("resumed", recipe), ("halves", halves))
    }
    few = recipe.model_copy(update={"batch": recipe.batch.model_copy(update={"micro_size": 3})})
    try:
        resume_cell(few, checkpoint_path(source, 2))
    except InputError as error:
        return results | {"saved": saved["rows"], **resumed, "refusal": str(error)}
    raise AssertionError("a resume with 6 rows in a forward pass was accepted")


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saves")


@pytest.fixture(scope="module")
def one(inputs: Path, saves: Path) -> dict[str, Any]:
    return run_on_cpu(normalise_and_resume, inputs, saves / "one", None, processes=1, profile="single")[0]


@pytest.fixture(scope="module")
def two(inputs: Path, saves: Path, one: dict[str, Any]) -> list[dict[str, Any]]:
    return run_on_cpu(normalise_and_resume, inputs, saves / "two", saves / "one", processes=2, profile="ddp")


def test_resume_of_batch_norm_sync_on_two_processes_reads_the_statistics_of_one(
    one: dict[str, Any], two: list[dict[str, Any]], saves: Path
) -> None:
    both = zip(one["saved"][2:], two[0]["resumed"], two[0]["halves"], strict=True)
    for (loss, norm, samples), actual, halves in both:
        assert halves == actual == (pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-4), samples)
    stored = []
    for name in ("one", "two"):
        folder = checkpoint_path(saves / name, 2)
        with CheckpointReader(folder, list(read_state(folder)["files"])) as reader:
            names = [key for key in read_state(folder)["buffers"] if key.endswith("running_var")]
            stored.append([reader.read("buffer", key, 0, 4).tolist() for key in names])
    assert len(stored[0]) > 3
    for a, b in zip(*stored, strict=True):
        assert b == pytest.approx(a, rel=1e-4, abs=1e-6) and b != [1.0] * 4


def test_resume_of_batch_norm_sync_with_other_rows_in_a_forward_pass_is_refused(two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert "12 rows when the checkpoint was written, 6 rows with 2 processes" in rank["refusal"]
        assert "whose product is 12, or accept another loss curve with --resume-anyway" in rank["refusal"]


@pytest.mark.parametrize("name", SETTINGS)
def test_batch_norm_sync_on_two_processes_equals_one_with_all_rows(
    name: str, one: dict[str, Any], two: list[dict[str, Any]]
) -> None:
    # Each output and gradient of bfloat16 is rounded to 8 bits; far from zero a variance loses digits.
    close = {"bfloat16": 2e-2, "far from zero": 1e-4}.get(name, 1e-5)
    expected, ranks = one[name], [rank[name] for rank in two]
    for step in range(2):
        for part in ("outputs", "inputs"):
            actual = np.concatenate([rank[part][step] for rank in ranks])
            np.testing.assert_allclose(actual, expected[part][step], rtol=close, atol=close)
    for key, value in expected["weights"].items():
        np.testing.assert_allclose(ranks[0]["weights"][key] + ranks[1]["weights"][key], value, rtol=close, atol=close)
    for key, value in expected["buffers"].items():
        np.testing.assert_allclose(ranks[0]["buffers"][key], value, rtol=close, atol=close)
        assert np.array_equal(ranks[0]["buffers"][key], ranks[1]["buffers"][key])


@pytest.mark.parametrize("profile", ["ddp", "fsdp", "zero3"])
def test_train_with_batch_norm_sync_has_the_statistics_of_one_process(profile: str, trained: Launch) -> None:
    expected = trained("single")[0]["resnet-sync"]["statistics"]
    assert expected
    for rank in trained(profile):
        found = {key.removeprefix("module."): value for key, value in rank["resnet-sync"]["statistics"].items()}
        for key, value in expected.items():
            assert found[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize("profile", ["ddp", "fsdp", "zero3"])
def test_train_with_batch_norm_train_keeps_the_curve_and_averages_statistics(profile: str, trained: Launch) -> None:
    expected = trained("single")[0]["resnet-train"]  # the same rows in each forward pass: curve, not statistics
    ranks = [rank["resnet-train"] for rank in trained(profile)]
    for a, b in zip(expected["rows"], ranks[0]["rows"], strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
        assert b["samples"] == a["samples"]
    assert ranks[0]["statistics"] == ranks[1]["statistics"]
    assert ranks[0]["eval"] == ranks[1]["eval"]
