"""A checkpoint that any profile wrote can be resumed on any profile and number of processes.

One launch per profile saves and resumes many cells. The tied model's sizes (259 tokens, 63 inner features) are divided
by no world. Two steps at least are compared: a lost step count does not show in the first.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ftcli.checkpoint.folder import find_damage, publish, read_state
from ftcli.runtime.checkpoint_names import checkpoint_path
from ftcli.runtime.durable_files import write_durably
from ftcli.testing import run_on_cpu

from ...support.cells import SAVED_AT, cell, resume_cell, save_and_resume, save_cell

NAMES = ["sft-tied", "sft-lora", "resnet", "vit-mixed", "faces"]
WITH_SGD = ("resnet",)
STEPS = 8  # three after the checkpoint; the second of these begins an epoch
EIGHT = {"train": {"max_steps": STEPS}}
PROFILES = {"single": 1, "ddp": 2, "fsdp": 2, "zero2": 2, "zero3": 2}

Curves = dict[str, Any]


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saves")


def launch(
    inputs: Path, saves: Path, profile: str, sources: list[str], *, processes: int = 0, save: bool = True
) -> tuple[Curves, Curves]:
    output = saves / profile if save else None
    arguments = (inputs, NAMES, EIGHT, output, [saves / source for source in sources])
    ranks = run_on_cpu(save_and_resume, *arguments, processes=processes or PROFILES[profile], profile=profile)
    return ranks[0]


@pytest.fixture(scope="module")
def single(inputs: Path, saves: Path) -> Curves:
    return launch(inputs, saves, "single", [])[0]


def assert_resumes(single: Curves, resumed: Curves) -> None:
    for name in NAMES:
        expected, actual = single[name]["rows"][SAVED_AT:], resumed[name]["rows"]
        assert len(actual) == len(expected) == STEPS - SAVED_AT
        for (loss, norm, samples), (found_loss, found_norm, found_samples) in zip(expected, actual, strict=True):
            assert found_samples == samples
            assert found_loss == pytest.approx(loss, rel=1e-6)
            assert found_norm == pytest.approx(norm, rel=1e-5)
        after, goal = (
            np.concatenate([v.ravel() for v in run["after"].values()]) for run in (resumed[name], single[name])
        )
        assert list(resumed[name]["after"]) == list(single[name]["after"])
        assert np.linalg.norm(after - goal) < 1e-4 * np.linalg.norm(goal)


def assert_same_bits(expected: Curves, resumed: Curves, names: list[str] = NAMES) -> None:
    for name in names:
        assert resumed[name]["rows"] == expected[name]["rows"][SAVED_AT:]
        for key, value in expected[name]["after"].items():
            assert np.array_equal(resumed[name]["after"][key], value), key


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_resume_from_every_profile_on_every_profile_gives_the_same_curve(
    inputs: Path, saves: Path, single: Curves
) -> None:
    curves = {profile: launch(inputs, saves, profile, [])[0] for profile in PROFILES}
    for profile in PROFILES:
        resumed = launch(inputs, saves, profile, list(PROFILES), save=False)[1]
        for source in PROFILES:
            assert_resumes(single, resumed[source])
        assert_same_bits(curves[profile], resumed[profile])
    for profile in ("ddp", "fsdp", "zero2", "zero3"):
        resumed = launch(inputs, saves, profile, list(PROFILES), processes=3, save=False)[1]
        for source in PROFILES:
            assert_resumes(single, resumed[source])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_resume_of_hsdp_and_offload_profiles_gives_the_same_curve(inputs: Path, saves: Path, single: Curves) -> None:
    more = {"hsdp": 4, "fsdp_offload": 2, "zero3_offload": 2}
    for profile, processes in more.items():
        saved, resumed = launch(inputs, saves, profile, ["single", profile], processes=processes)
        assert_resumes(single, resumed["single"])
        assert_same_bits(saved, resumed[profile])
    for resumed in launch(inputs, saves, "single", list(more), save=False)[1].values():
        assert_resumes(single, resumed)


PRECISIONS = ("bf16", "fp16", "bf16_pure")


def resume_in_every_precision(folder: Path, output: Path) -> dict[str, tuple[Curves, dict[str, Curves]]]:
    """Return precision -> what `save_and_resume` returns of a profile's own checkpoints."""
    return {
        precision: save_and_resume(
            folder, names_in(precision), EIGHT | {"precision": precision}, output / precision, [output / precision]
        )
        for precision in PRECISIONS
    }


def names_in(precision: str) -> list[str]:
    """Return the cells that can train in a precision: SGD refuses bfloat16 weights."""
    without = WITH_SGD if precision == "bf16_pure" else ()
    return [name for name in NAMES if name not in without]


@pytest.mark.slow
@pytest.mark.timeout(600)  # one launch does what three did
@pytest.mark.parametrize("profile", ["single", "fsdp", "zero2", "zero3"])
def test_resume_in_every_precision_is_bit_exact(profile: str, inputs: Path, tmp_path: Path) -> None:
    results = run_on_cpu(resume_in_every_precision, inputs, tmp_path, processes=PROFILES[profile], profile=profile)[0]
    for precision in PRECISIONS:
        saved, resumed = results[precision]
        assert_same_bits(saved, resumed[precision], names_in(precision))


def stop_anywhere(folder: Path, output: Path, changes: dict[str, Any]) -> list[str]:
    """Return the differences between a run that resumes after each step and an uninterrupted run."""
    recipe = cell(folder, "sft-tied", checkpoint={"keep": None}, train={"max_steps": 7}, **changes)
    expected = save_cell(recipe, output, at=(1, 2, 3, 4, 5, 6))
    different = []
    for step in range(1, 7):  # an epoch has three
        actual = resume_cell(recipe, checkpoint_path(output, step))
        same = all(np.array_equal(actual["after"][name], value) for name, value in expected["after"].items())
        if actual["rows"] != expected["rows"][step:] or not same:
            different.append(f"after step {step}")
    return different


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_resume_after_any_step_is_bit_exact(workers: int, processes: int, inputs: Path, tmp_path: Path) -> None:
    data = {"train": {"path": str(inputs / "chats.jsonl")}, "eval_rows": 5, "max_length": 128, "workers": workers}
    profile = "single" if processes == 1 else "ddp"
    arguments = (inputs, tmp_path / "saved", {"data": data})
    assert run_on_cpu(stop_anywhere, *arguments, processes=processes, profile=profile) == [[]] * processes


@pytest.mark.slow
def test_resume_of_ddp_on_three_ranks_sums_gradients_in_the_same_order(inputs: Path, tmp_path: Path) -> None:
    assert run_on_cpu(stop_anywhere, inputs, tmp_path / "saved", {}, processes=3, profile="ddp") == [[]] * 3


def spoil(checkpoint: Path, target: Path, fault: str) -> None:
    """Copy a checkpoint with its step count or its moments lost; the copy is as intact as the original."""
    from safetensors.torch import load, save

    shutil.copytree(checkpoint, target.with_suffix(".tmp"))
    state = read_state(checkpoint)
    if fault == "step count":
        state["optimizer_updates"] = 0
    for name in state["files"] if fault == "moments" else ():
        tensors = load((checkpoint / name).read_bytes())
        tensors |= {key: value * 0 for key, value in tensors.items() if key.startswith("exp_avg")}
        state["files"][name] = write_durably(target.with_suffix(".tmp") / name, save(tensors))
    publish(target.with_suffix(".tmp"), target, state)
    assert find_damage(target) == ""


@contextmanager
def stale_weights(fault: str) -> Iterator[None]:
    """Under the fault `stale weights`, do not load the weights of the forward pass from a checkpoint."""
    from ftcli.hardware import deepspeed, zero3_patches

    with pytest.MonkeyPatch.context() as patch:
        if fault == "stale weights":
            # As where one of them waits on the host.
            patch.setattr(zero3_patches, "_share_master_weights", lambda zero: None)
            for name in ("shards_at_stage_2", "shards_at_stage_3"):
                cut = getattr(deepspeed, name)
                without = lambda *a, cut=cut: (shard for shard in cut(*a) if shard.saved != slice(0, 0))  # noqa: E731
                patch.setattr(deepspeed, name, without)
        yield


def resume_spoiled(folder: Path, spoiled: list[Path]) -> dict[str, list[float]]:
    """Return fault -> the losses of the steps after a checkpoint that was spoiled by it."""
    results = {}
    for target in spoiled:
        with stale_weights(target.name):
            results[target.name] = [row[0] for row in resume_cell(cell(folder, "sft-tied", **EIGHT), target)["rows"]]
    return results


def assert_all_are_seen(inputs: Path, saves: Path, single: Curves, work: Path, profile: str, faults: list[str]) -> None:
    spoiled = [work / fault for fault in faults]
    for target in spoiled:
        spoil(checkpoint_path(saves / "single" / "sft-tied", SAVED_AT), target, target.name)
    actual = run_on_cpu(resume_spoiled, inputs, spoiled, processes=PROFILES[profile], profile=profile)[0]
    expected = [row[0] for row in single["sft-tied"]["rows"][SAVED_AT:]]
    for fault, losses in actual.items():
        seen = losses != pytest.approx(expected, rel=1e-6)
        assert seen == (fault != "none"), fault


def test_resume_with_a_lost_step_count_or_moments_changes_the_losses(
    inputs: Path, saves: Path, single: Curves, tmp_path: Path
) -> None:
    assert_all_are_seen(inputs, saves, single, tmp_path, "single", ["none", "step count", "moments"])


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["zero2", "zero3"])
def test_resume_with_stale_compute_weights_changes_the_first_loss(
    profile: str, inputs: Path, saves: Path, single: Curves, tmp_path: Path
) -> None:
    faults = ["none", "step count", "moments", "stale weights"]
    assert_all_are_seen(inputs, saves, single, tmp_path, profile, faults)


def refuse_another_model(folder: Path, saved: Path) -> str:
    """Return the error of resuming a full-model checkpoint in an adapter run."""
    from ftcli.runtime.errors import InputError

    with pytest.raises(InputError) as caught:
        resume_cell(cell(folder, "sft-lora", **EIGHT), checkpoint_path(saved / "sft-tied", SAVED_AT))
    return str(caught.value)


def test_resume_of_a_checkpoint_of_another_model_names_a_parameter(inputs: Path, saves: Path, single: Curves) -> None:
    message = run_on_cpu(refuse_another_model, inputs, saves / "single", processes=1, profile="single")[0]
    assert "is of another model" in message and "lora_A" in message


def test_save_checkpoint_of_an_adapter_run_stores_only_the_adapter(saves: Path, single: Curves) -> None:
    state = read_state(checkpoint_path(saves / "single" / "sft-lora", SAVED_AT))
    assert state["parameters"] and all("lora_" in name for name in state["parameters"])
    assert "helpers" not in state  # only a task with frozen networks has them
    tied = read_state(checkpoint_path(saves / "single" / "sft-tied", SAVED_AT))
    assert "model.embed_tokens.weight" in tied["parameters"] and "lm_head.weight" not in tied["parameters"]
