"""Weights are read once and sent to all ranks: memory while loading, and the weights of every rank afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ftcli.testing import run_on_cpu, save_tiny_causal

from ...support.cells import cell
from ...support.patching import patching
from ...support.runner import MakeInputs
from ..conftest import Launch

HANDED_OUT = ["fsdp", "zero3"]
# Memory of several processes in bytes, summed, with the moment it was looked at; a page that two share counts once.
SAMPLER = """
import sys, time
paths = [f"/proc/{pid}/smaps_rollup" for pid in sys.argv[1:]]
while True:
    lines = [line for path in paths for line in open(path) if line.startswith("Pss:")]
    print(time.monotonic(), 1024 * sum(int(line.split()[1]) for line in lines), flush=True)
    time.sleep(0.005)
"""


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    """Return a folder of this module's own, because its tests write into it."""
    return make_inputs()


def save_large_causal(folder: Path, *, tied: bool) -> Path:
    """Write a Llama of some 320 MB in float32."""
    return save_tiny_causal(
        folder,
        tied=tied,
        vocab_size=24000 if tied else 12000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=12,
    )


@patching
def load_and_watch(patch: pytest.MonkeyPatch, folder: Path, name: str) -> tuple[int, int]:
    """Return the largest growth of all ranks' memory while a model was loaded, and the number of samples.

    Loading ends where every rank has its part: what DeepSpeed then makes of it (float32 masters, buffers for
    gradients) is training's memory.
    """
    import deepspeed
    import torch.distributed as dist

    from ftcli.training.setup import prepare

    prepare(cell(folder, "sft-tied"), cpu=True)  # imports, and what libraries keep
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    command = [sys.executable, "-c", SAMPLER, *map(str, pids)]
    sampler = subprocess.Popen(command, stdout=subprocess.PIPE, text=True) if dist.get_rank() == 0 else None
    time.sleep(1)
    dist.barrier()
    began, ended, initialize = time.monotonic(), [], deepspeed.initialize

    def loaded(*args: Any, **kwargs: Any) -> Any:
        dist.barrier()
        ended.append(time.monotonic())
        return initialize(*args, **kwargs)

    patch.setattr(deepspeed, "initialize", loaded)
    prepare(cell(folder, "sft-tied", model={"name": str(folder / name), "dropout": 0.0}), cpu=True)
    dist.barrier()
    ended.append(time.monotonic())
    if sampler is None:
        return 0, 0
    sampler.kill()
    looks = [line.split() for line in sampler.communicate()[0].splitlines()[:-1]]
    sizes = [int(size) for moment, size in looks if began <= float(moment) <= ended[0]]
    return max(sizes) - sizes[0], len(sizes)


@pytest.fixture(scope="module", params=["ddp", *HANDED_OUT])
def insides(request: pytest.FixtureRequest, trained: Launch) -> tuple[str, list[dict[str, Any]]]:
    ranks = trained(request.param)
    return request.param, [{name: results["insides"] for name, results in rank.items()} for rank in ranks]


def test_prepare_leaves_tied_weights_tied(insides: tuple[str, list[dict[str, Any]]]) -> None:
    for rank in insides[1]:
        assert {name: facts["tied"] for name, facts in rank.items() if name.startswith("sft")} == {
            "sft-tied": True,
            "sft-untied": False,
            "sft-dora": False,
            "sft-lora": True,
        }


def test_prepare_gives_every_rank_the_buffers_of_one_process(insides: tuple[str, list[dict[str, Any]]]) -> None:
    for name, facts in insides[1][0].items():
        assert insides[1][1][name]["buffers"] == facts["buffers"]
    rotary = [value for key, value in insides[1][1]["sft-tied"]["buffers"].items() if key.endswith(".inv_freq")]
    assert rotary == [pytest.approx([1.0, 0.1, 0.01, 0.001])]  # 10000 ** (-2 i / 8), heads of 8
    statistics = insides[1][1]["mobilenet"]["buffers"]
    assert any(key.endswith("running_var") for key in statistics)


def test_prepare_leaves_no_meta_tensor_and_optimizes_trained_weights(
    insides: tuple[str, list[dict[str, Any]]],
) -> None:
    for rank in insides[1]:
        for name, facts in rank.items():
            assert facts["empty"] == [], name
            assert facts["optimized"] or insides[0] == "zero3", name  # DeepSpeed's optimizer holds flat copies
            assert facts["dtypes"] == insides[1][0][name]["dtypes"]


def evaluate_adapter(folder: Path, weights: Path) -> dict[str, float]:
    """Return the metrics of a trained adapter on its model."""
    from ftcli.training.evaluation import evaluate
    from ftcli.training.setup import prepare

    return evaluate(prepare(cell(folder, "text-lora"), cpu=True, weights=weights))


def train_adapter(folder: Path, output: Path) -> None:
    from ftcli.loop import train
    from ftcli.training.setup import prepare

    train(prepare(cell(folder, "text-lora"), output=output, cpu=True))


@pytest.mark.slow
@pytest.mark.parametrize("profile", HANDED_OUT)
def test_evaluate_with_a_loaded_adapter_equals_one_process(profile: str, inputs: Path, tmp_path: Path) -> None:
    run_on_cpu(train_adapter, inputs, tmp_path / "run", processes=1, profile="single")
    final = tmp_path / "run" / "final"
    expected = run_on_cpu(evaluate_adapter, inputs, final, processes=1, profile="single")[0]
    for actual in run_on_cpu(evaluate_adapter, inputs, final, profile=profile):
        assert actual == pytest.approx(expected, rel=1e-5)


def load_a_broken_file(folder: Path) -> str:
    """Return this rank's error for truncated weights, which only the reading rank detects."""
    from ftcli.runtime.errors import InputError
    from ftcli.training.setup import prepare

    with pytest.raises(InputError) as caught:
        prepare(cell(folder, "sft-tied", model={"name": str(folder / "broken"), "dropout": 0.0}), cpu=True)
    return str(caught.value)


@pytest.mark.parametrize("profile", ["fsdp", pytest.param("zero3", marks=pytest.mark.slow)])
def test_load_model_with_unreadable_weights_raises_on_every_rank(profile: str, inputs: Path) -> None:
    shutil.copytree(inputs / "tied", inputs / "broken", dirs_exist_ok=True)
    whole = (inputs / "tied" / "model.safetensors").read_bytes()
    (inputs / "broken" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    first, second = run_on_cpu(load_a_broken_file, inputs, profile=profile)
    assert first == second
    assert "cannot load" in first


def wait_for_a_slow_main_rank(folder: Path) -> tuple[int, str]:
    """Make rank 0 pause longer than the collective timeout: while it gathers, while it reports, and before the end."""
    from datetime import timedelta

    from torch.distributed.distributed_c10d import _set_pg_timeout

    from ftcli.hardware import weight_broadcast
    from ftcli.training.setup import prepare

    run = prepare(cell(folder, "sft-tied"), cpu=True)
    ranks = run.hardware.ranks
    for group in (None, ranks._group):
        _set_pg_timeout(timedelta(seconds=1.5), group)
    gathered = 0
    for gathered, _ in enumerate(run.hardware.parameters(run.model, trained_only=False), start=1):
        if ranks.is_main and gathered == 1:
            time.sleep(2)  # as a full shard on its way to a slow disk does
    if ranks.is_main:
        time.sleep(2)
    message = weight_broadcast._broadcast("read" if ranks.is_main else None)
    if ranks.is_main:
        time.sleep(2)
    run.hardware.close()
    return gathered, message


def test_ranks_wait_for_a_main_rank_beyond_the_collective_timeout(inputs: Path) -> None:
    first, second = run_on_cpu(wait_for_a_slow_main_rank, inputs, profile="fsdp")
    assert first == second and first[0] > 1 and first[1] == "read"


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("name", ["large-tied", "large-untied"])
@pytest.mark.parametrize("profile", HANDED_OUT)
def test_load_model_peak_memory_over_all_ranks_is_below_one_and_a_half_times_the_weights(
    profile: str, name: str, processes: int, inputs: Path
) -> None:
    if not (inputs / name).exists():
        save_large_causal(inputs / name, tied=name == "large-tied")
    size = (inputs / name / "model.safetensors").stat().st_size
    most, looks = run_on_cpu(load_and_watch, inputs, name, processes=processes, profile=profile)[0]
    print(f"{profile}, {processes} processes, {name}: {most / size:.2f} of {size / 1e6:.0f} MB, {looks} looks")
    assert size > 300e6
    assert looks > 5
    assert 0.5 * size < most < 1.5 * size
