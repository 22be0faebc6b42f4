"""On GPUs: the estimate beside the measured peak, the trial of sizes, optimizers' kernels, the host as a store.

Two minutes on one GPU, three more on two. Run by itself: peaks are those of this process.
"""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ftcli.testing import run_on_processes, save_tiny_causal

from ..support.cells import cell
from ..support.modes import MODES, Curve, apart, curves, what_differs
from ..support.runner import MakeInputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
LENGTH = 1024


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    """Return a folder with the small cells, and with a model large enough that memory is a matter of its sizes."""
    folder = make_inputs()
    save_tiny_causal(
        folder / "medium",
        tied=False,
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
    )
    text = "a long text " * 200  # bytes are tokens
    rows = [json.dumps({"prompt": f"{number}", "completion": text}) for number in range(80)]
    (folder / "long.jsonl").write_text("\n".join(rows) + "\n")
    draw = random.Random(0)
    rows = [json.dumps({"prompt": f"{number}", "completion": text[: draw.randint(20, 900)]}) for number in range(160)]
    (folder / "mixed.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def medium(folder: Path, mode: str = "none", precision: str = "bf16", **batch: Any) -> Any:
    return cell(
        folder,
        "sft-tied",
        model={"name": str(folder / "medium"), "dropout": 0.0, "gradient_checkpointing": mode},
        data={"train": str(folder / "long.jsonl"), "max_length": LENGTH, "padding_free": True},
        batch={"global_size": 16} | batch,
        train={"max_steps": 3},
        precision=precision,
    )


def peaks_of_both(folder: Path) -> dict[str, dict[str, tuple[float, float]]]:
    return {precision: peaks(folder, precision) for precision in ("bf16", "bf16_pure")}


def peaks(folder: Path, precision: str) -> dict[str, tuple[float, float]]:
    """Return mode -> (measured peak, estimated) in GB of a few steps of this rank."""
    import gc
    import re

    from ftcli.loop import steps
    from ftcli.training.setup import prepare

    results = {}
    for mode in ("none", "selective", "full"):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        run = prepare(medium(folder, mode, precision, micro_size=8))
        for _ in steps(run):
            pass
        estimate = re.search(r"memory about ([\d.]+)", run.log_lines[-1])
        assert estimate is not None
        results[mode] = (torch.cuda.max_memory_allocated() / 1e9, float(estimate[1]))
        run.hardware.release(run.model)
        del run
    return results


def test_memory_estimate_is_near_the_peak_of_one_gpu(inputs: Path) -> None:
    (both,) = run_on_processes(peaks_of_both, inputs, processes=1, profile="single")
    print(both)
    for peaks_by_mode in both.values():
        for mode, (measured, estimated) in peaks_by_mode.items():
            assert estimated == pytest.approx(measured, rel=0.25), (mode, both)
        assert peaks_by_mode["none"][0] > peaks_by_mode["selective"][0] > peaks_by_mode["full"][0]


@TWO
@pytest.mark.parametrize("profile", ["ddp", "fsdp", "zero3"])
def test_memory_estimate_is_near_the_peak_of_two_gpus(profile: str, inputs: Path) -> None:
    for peaks_by_mode in run_on_processes(peaks, inputs, "bf16", processes=2, profile=profile):
        for mode, (measured, estimated) in peaks_by_mode.items():
            assert estimated == pytest.approx(measured, rel=0.35), (mode, peaks_by_mode)


def tried(folder: Path) -> tuple[int, int, int, list[float]]:
    """Return (the size found, its limit, bytes held after the trial, losses of a run at that size)."""
    from ftcli.loop import steps
    from ftcli.training.memory import DeviceMeter, find_micro_batch_size, with_micro_size
    from ftcli.training.setup import prepare

    class Small(DeviceMeter):
        def __init__(self) -> None:
            super().__init__()
            self.limit = 11 * 10**9

    auto = medium(folder, micro_size="auto")
    size, saving, message = find_micro_batch_size(auto, Small, prepare)
    bytes_left = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run = prepare(with_micro_size(auto, size, saving))
    losses = [step.loss for step in steps(run)]
    print(message)
    return size, torch.cuda.max_memory_allocated(), bytes_left, losses


@pytest.mark.parametrize(
    ("profile", "processes"),
    [("single", 1), *(pytest.param(name, 2, marks=TWO) for name in ("ddp", "fsdp", "zero2", "zero3"))],
)
def test_try_out_finds_a_size_that_fits_and_frees_its_memory(profile: str, processes: int, inputs: Path) -> None:
    ranks = run_on_processes(tried, inputs, processes=processes, profile=profile)
    for size, peak, bytes_left, losses in ranks:
        assert size == ranks[0][0] and size in (1, 2, 4, 8, 16)
        assert peak < 1.03 * 11e9 or size == 1
        assert bytes_left < 100e6, "the model alone is 0.8 GB"
        assert losses == ranks[0][3]


def test_auto_micro_size_is_stored_in_the_run_folder_and_reused(inputs: Path, tmp_path: Path) -> None:
    (first, second) = run_on_processes(choose_twice, inputs, tmp_path, processes=1, profile="single")[0]
    record = json.loads((tmp_path / "micro_size.json").read_text())
    assert "rows fit into" in first and "rows, from micro_size.json" in second
    assert f"{record['micro_size']} rows" in second


def choose_twice(folder: Path, output: Path) -> list[str]:
    from ftcli.training.memory import choose_micro_batch_size
    from ftcli.training.setup import prepare

    auto = cell(folder, "sft-tied", batch={"global_size": 12, "micro_size": "auto"})
    return [choose_micro_batch_size(auto, prepare, output=output, cpu=False, weights=None)[1][0] for _ in range(2)]


def test_adamw_bf16_kernel_equals_its_formula_without_synchronising() -> None:
    from ftcli.training.optim.adamw_bf16 import AdamWBf16, _step, join, update

    draw = torch.Generator().manual_seed(0)
    weights = [torch.randn(size, generator=draw).bfloat16().cuda() for size in ((7,), (64, 33), (4096, 512))]
    optimizer = AdamWBf16([{"params": [torch.nn.Parameter(weight.clone()) for weight in weights]}], lr=1e-5)
    clones = [[weight.clone().view(-1), *moments(weight)] for weight in weights]
    for step in range(1, 5):
        if step == 3:
            torch.cuda.set_sync_debug_mode("error")  # compiled by now
        for parameter, copy in zip(optimizer.param_groups[0]["params"], clones, strict=True):
            parameter.grad = torch.ones_like(parameter) * (step % 3 - 0.5)
            numbers = (1 - 1e-5 * 1e-2, 1e-5 / (1 - 0.9**step), 1 - 0.9, 0.999, 1 - 0.999, (1 - 0.999**step) ** -0.5)
            update(copy[0], parameter.grad.view(-1), *copy[1:], None, *(torch.tensor(n) for n in (*numbers, 1e-8)))
        optimizer.step()
    torch.cuda.set_sync_debug_mode("default")
    assert _step.problem is None
    for parameter, copy in zip(optimizer.param_groups[0]["params"], clones, strict=True):
        actual = join(parameter.detach().view(-1), optimizer.state[parameter]["remainder"].view(-1))
        torch.testing.assert_close(actual, join(copy[0], copy[3]), rtol=1e-6, atol=0)


def moments(weight: Any) -> list[Any]:
    from ftcli.training.optim.adamw_bf16 import KINDS

    return [torch.zeros(weight.numel(), dtype=dtype, device="cuda") for dtype in KINDS.values()]


def curves_in_both(folder: Path) -> dict[str, dict[str, Curve]]:
    """Return precision -> mode -> curve; float32 attends to one document after another, bf16 to all at once."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"name": str(folder / "medium"), "dropout": 0.0},
        "data": {"train": str(folder / "mixed.jsonl"), "max_length": LENGTH, "packing": True},
        "batch": {"global_size": 8, "micro_size": 2},
    }
    return {precision: curves(folder, 5e-6, precision, list(MODES), **sections) for precision in ("bf16", "fp32")}


@pytest.mark.parametrize(
    ("profile", "processes"), [("single", 1), *(pytest.param(name, 2, marks=TWO) for name in ("ddp", "fsdp", "zero3"))]
)
def test_recomputation_and_offloading_give_the_plain_curve(profile: str, processes: int, inputs: Path) -> None:
    for rank in run_on_processes(curves_in_both, inputs, processes=processes, profile=profile):
        for precision, curves_by_mode in rank.items():
            plain = curves_by_mode["none"]
            for name, curve in curves_by_mode.items():
                print(precision, name, {what: f"{far:.1e}" for what, far in apart(curve, plain).items()}, curve.losses)
            assert what_differs(curves_by_mode, precision) == []
            assert plain.losses[-1] < 0.99 * plain.losses[0], "the weights moved by more than any bound"


def save_and_go_on(folder: Path, output: Path) -> tuple[list[float], list[float], list[float]]:
    """Return losses of AdamW with 8 bits, of the same after a checkpoint, and of plain AdamW."""
    from ftcli.loop import steps
    from ftcli.runtime.checkpoint_names import checkpoint_path
    from ftcli.training.checkpointing import save_checkpoint
    from ftcli.training.setup import prepare

    save_tiny_causal(folder / "tied")
    options = {"learning_rate": 5e-3, "weight_decay": 0.1}
    packed, plain = (
        cell(folder, "sft-tied", train={"max_steps": 8}, optimizer=options | {"name": name})
        for name in ("adamw_8bit", "adamw")
    )
    run = prepare(packed, output=output)
    results = []
    for step in steps(run):
        results.append(step.loss)
        if step.number == 5:
            save_checkpoint(run, 5)
    again = [step.loss for step in steps(prepare(packed, resume=checkpoint_path(output, 5)))]
    return results, again, [step.loss for step in steps(prepare(plain))]


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize(("profile", "processes"), [("single", 1), pytest.param("fsdp", 2, marks=TWO)])
def test_adamw_8bit_resume_restores_the_moments(profile: str, processes: int, inputs: Path, tmp_path: Path) -> None:
    results, again, plain = run_on_processes(save_and_go_on, inputs, tmp_path, processes=processes, profile=profile)[0]
    assert again == pytest.approx(results[5:], rel=1e-6)
    assert results == pytest.approx(plain, rel=2e-2) and results != plain
