"""A checkpoint does not know which hardware wrote it: saved on any profile, resumed on any, in any world.

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

from ftcli.checkpoint_folder import checkpoint_path, damage, publish, read_state, write_durably
from ftcli.testing import run_on_cpu

from .cells import SAVED_AT, cell, go_on, save_and_resume, save_cell, write_inputs

NAMES = ["sft-tied", "sft-lora"]
TEN = {"train": {"max_steps": 10}}
PROFILES = {"single": 1, "ddp": 2, "fsdp": 2, "zero2": 2, "zero3": 2}

Curves = dict[str, Any]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saves")


def launch(
    inputs: Path, saves: Path, profile: str, sources: list[str], *, processes: int = 0, save: bool = True
) -> tuple[Curves, Curves]:
    output = saves / profile if save else None
    arguments = (inputs, NAMES, TEN, output, [saves / source for source in sources])
    ranks = run_on_cpu(save_and_resume, *arguments, processes=processes or PROFILES[profile], profile=profile)
    return ranks[0]


@pytest.fixture(scope="module")
def single(inputs: Path, saves: Path) -> Curves:
    return launch(inputs, saves, "single", [])[0]


def assert_goes_on(single: Curves, resumed: Curves) -> None:
    for name in NAMES:
        wanted, found = single[name]["rows"][SAVED_AT:], resumed[name]["rows"]
        assert len(found) == len(wanted) == 10 - SAVED_AT
        for (loss, norm, samples), (found_loss, found_norm, found_samples) in zip(wanted, found, strict=True):
            assert found_samples == samples
            assert found_loss == pytest.approx(loss, rel=1e-6)
            assert found_norm == pytest.approx(norm, rel=1e-5)
        after, goal = (
            np.concatenate([v.ravel() for v in run["after"].values()]) for run in (resumed[name], single[name])
        )
        assert list(resumed[name]["after"]) == list(single[name]["after"])
        assert np.linalg.norm(after - goal) < 1e-4 * np.linalg.norm(goal)


def assert_same_bits(wanted: Curves, resumed: Curves) -> None:
    for name in NAMES:
        assert resumed[name]["rows"] == wanted[name]["rows"][SAVED_AT:]
        for key, value in wanted[name]["after"].items():
            assert np.array_equal(resumed[name]["after"][key], value), key


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_profile_goes_on_from_every_other(inputs: Path, saves: Path, single: Curves) -> None:
    curves = {profile: launch(inputs, saves, profile, [])[0] for profile in PROFILES}
    for profile in PROFILES:
        resumed = launch(inputs, saves, profile, list(PROFILES), save=False)[1]
        for source in PROFILES:
            assert_goes_on(single, resumed[source])
        assert_same_bits(curves[profile], resumed[profile])
    for profile in ("ddp", "fsdp", "zero2", "zero3"):
        resumed = launch(inputs, saves, profile, list(PROFILES), processes=3, save=False)[1]
        for source in PROFILES:
            assert_goes_on(single, resumed[source])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_copies_of_shards_and_state_on_the_host_go_on_too(inputs: Path, saves: Path, single: Curves) -> None:
    more = {"hsdp": 4, "fsdp_offload": 2, "zero3_offload": 2}
    for profile, processes in more.items():
        saved, resumed = launch(inputs, saves, profile, ["single", profile], processes=processes)
        assert_goes_on(single, resumed["single"])
        assert_same_bits(saved, resumed[profile])
    for resumed in launch(inputs, saves, "single", list(more), save=False)[1].values():
        assert_goes_on(single, resumed)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16_pure"])
@pytest.mark.parametrize("profile", ["single", "fsdp", "zero2", "zero3"])
def test_every_precision_goes_on_bit_for_bit(precision: str, profile: str, inputs: Path, tmp_path: Path) -> None:
    changes = TEN | {"precision": precision}
    arguments = (inputs, NAMES, changes, tmp_path / "saved", [tmp_path / "saved"])
    saved, resumed = run_on_cpu(save_and_resume, *arguments, processes=PROFILES[profile], profile=profile)[0]
    assert_same_bits(saved, resumed["saved"])


def stop_anywhere(folder: Path, output: Path, changes: dict[str, Any]) -> list[str]:
    """Return in what a run that goes on after each step differs from the one that never stopped."""
    recipe = cell(folder, "sft-tied", checkpoint={"keep": None}, train={"max_steps": 7}, **changes)
    wanted = save_cell(recipe, output, at=(1, 2, 3, 4, 5, 6))
    different = []
    for step in range(1, 7):  # an epoch has three
        found = go_on(recipe, checkpoint_path(output, step))
        same = all(np.array_equal(found["after"][name], value) for name, value in wanted["after"].items())
        if found["rows"] != wanted["rows"][step:] or not same:
            different.append(f"after step {step}")
    return different


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_stopping_after_any_step_changes_no_bit(workers: int, processes: int, inputs: Path, tmp_path: Path) -> None:
    data = {"train": {"path": str(inputs / "chats.jsonl")}, "eval_rows": 5, "max_length": 128, "workers": workers}
    profile = "single" if processes == 1 else "ddp"
    arguments = (inputs, tmp_path / "saved", {"data": data})
    assert run_on_cpu(stop_anywhere, *arguments, processes=processes, profile=profile) == [[]] * processes


@pytest.mark.slow
def test_three_copies_add_up_gradients_in_the_same_order_after_a_resume(inputs: Path, tmp_path: Path) -> None:
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
    assert damage(target) == ""


@contextmanager
def stale_weights(fault: str) -> Iterator[None]:
    """Leave out what forward passes compute with when a checkpoint is loaded, where it is not what is stepped."""
    from ftcli.hardware import deepspeed, zero3_steps

    cuts = {name: getattr(deepspeed, name) for name in ("_cut_at_stage_2", "_cut_at_stage_3")}
    share = zero3_steps._step_what_is_gathered
    if fault == "stale weights":
        zero3_steps._step_what_is_gathered = lambda zero: None  # as where one of them waits on the host
        for name, cut in cuts.items():
            setattr(deepspeed, name, lambda *a, cut=cut: (piece for piece in cut(*a) if piece.kept != slice(0, 0)))
    yield
    zero3_steps._step_what_is_gathered = share
    for name, value in cuts.items():
        setattr(deepspeed, name, value)


def go_on_spoiled(folder: Path, spoiled: list[Path]) -> dict[str, list[float]]:
    """Return fault -> the losses of the steps after a checkpoint that was spoiled by it."""
    found = {}
    for target in spoiled:
        with stale_weights(target.name):
            found[target.name] = [row[0] for row in go_on(cell(folder, "sft-tied", **TEN), target)["rows"]]
    return found


def assert_all_are_seen(inputs: Path, saves: Path, single: Curves, work: Path, profile: str, faults: list[str]) -> None:
    spoiled = [work / fault for fault in faults]
    for target in spoiled:
        spoil(checkpoint_path(saves / "single" / "sft-tied", SAVED_AT), target, target.name)
    found = run_on_cpu(go_on_spoiled, inputs, spoiled, processes=PROFILES[profile], profile=profile)[0]
    wanted = [row[0] for row in single["sft-tied"]["rows"][SAVED_AT:]]
    for fault, losses in found.items():
        seen = losses != pytest.approx(wanted, rel=1e-6)
        assert seen == (fault != "none"), fault


def test_a_lost_step_count_and_lost_moments_are_seen(inputs: Path, saves: Path, single: Curves, tmp_path: Path) -> None:
    assert_all_are_seen(inputs, saves, single, tmp_path, "single", ["none", "step count", "moments"])


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["zero2", "zero3"])
def test_stale_compute_weights_are_seen(
    profile: str, inputs: Path, saves: Path, single: Curves, tmp_path: Path
) -> None:
    faults = ["none", "step count", "moments", "stale weights"]
    assert_all_are_seen(inputs, saves, single, tmp_path, profile, faults)


def refuse_another_model(folder: Path, saved: Path) -> str:
    """Return what resuming a checkpoint of the whole model says when an adapter is trained."""
    from ftcli.errors import InputError

    with pytest.raises(InputError) as caught:
        go_on(cell(folder, "sft-lora", **TEN), checkpoint_path(saved / "sft-tied", SAVED_AT))
    return str(caught.value)


def test_a_checkpoint_of_another_model_is_refused_by_the_name_of_a_parameter(
    inputs: Path, saves: Path, single: Curves
) -> None:
    told = run_on_cpu(refuse_another_model, inputs, saves / "single", processes=1, profile="single")[0]
    assert "is of another model" in told and "lora_A" in told


def test_an_adapter_run_stores_the_adapter_alone(saves: Path, single: Curves) -> None:
    state = read_state(checkpoint_path(saves / "single" / "sft-lora", SAVED_AT))
    assert state["parameters"] and all("lora_" in name for name in state["parameters"])
    tied = read_state(checkpoint_path(saves / "single" / "sft-tied", SAVED_AT))
    assert "model.embed_tokens.weight" in tied["parameters"] and "lm_head.weight" not in tied["parameters"]
