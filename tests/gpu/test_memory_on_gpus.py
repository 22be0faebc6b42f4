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

from ..multiprocess.cells import cell, write_inputs
from ..multiprocess.modes import MODES, Curve, apart, curves, what_differs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
LENGTH = 1024


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the small cells, and with a model large enough that memory is a matter of its sizes."""
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
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
    from ftcli.run import prepare

    found = {}
    for mode in ("none", "selective", "full"):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        run = prepare(medium(folder, mode, precision, micro_size=8))
        for _ in steps(run):
            pass
        told = re.search(r"memory about ([\d.]+)", run.facts[-1])
        assert told is not None
        found[mode] = (torch.cuda.max_memory_allocated() / 1e9, float(told[1]))
        run.hardware.release(run.model)
        del run
    return found


def test_the_estimate_is_near_the_peak_of_one_gpu(inputs: Path) -> None:
    (both,) = run_on_processes(peaks_of_both, inputs, processes=1, profile="single")
    print(both)
    for found in both.values():
        for mode, (measured, estimated) in found.items():
            assert estimated == pytest.approx(measured, rel=0.25), (mode, both)
        assert found["none"][0] > found["selective"][0] > found["full"][0]


@TWO
@pytest.mark.parametrize("profile", ["ddp", "fsdp", "zero3"])
def test_the_estimate_is_near_the_peak_of_two_gpus(profile: str, inputs: Path) -> None:
    for found in run_on_processes(peaks, inputs, "bf16", processes=2, profile=profile):
        for mode, (measured, estimated) in found.items():
            assert estimated == pytest.approx(measured, rel=0.35), (mode, found)


def tried(folder: Path) -> tuple[int, int, int, list[float]]:
    """Return (the size found, its limit, bytes held after the trial, losses of a run at that size)."""
    from ftcli.loop import steps
    from ftcli.micro_size import DeviceMeter, settled, try_out
    from ftcli.run import prepare

    class Small(DeviceMeter):
        def __init__(self) -> None:
            super().__init__()
            self.limit = 11 * 10**9

    auto = medium(folder, micro_size="auto")
    size, mode, told = try_out(auto, Small, cpu=False)
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run = prepare(settled(auto, size, mode))
    losses = [step.loss for step in steps(run)]
    print(told)
    return size, torch.cuda.max_memory_allocated(), held, losses


@pytest.mark.parametrize(
    ("profile", "processes"),
    [("single", 1), *(pytest.param(name, 2, marks=TWO) for name in ("ddp", "fsdp", "zero2", "zero3"))],
)
def test_a_trial_finds_a_size_that_fits_and_leaves_nothing_behind(profile: str, processes: int, inputs: Path) -> None:
    ranks = run_on_processes(tried, inputs, processes=processes, profile=profile)
    for size, peak, held, losses in ranks:
        assert size == ranks[0][0] and size in (1, 2, 4, 8, 16)
        assert peak < 1.03 * 11e9 or size == 1
        assert held < 100e6, "the model alone is 0.8 GB"
        assert losses == ranks[0][3]


def test_an_automatic_size_is_kept_in_the_run_folder_and_taken_again(inputs: Path, tmp_path: Path) -> None:
    (first, second) = run_on_processes(settle_twice, inputs, tmp_path, processes=1, profile="single")[0]
    record = json.loads((tmp_path / "micro_size.json").read_text())
    assert "rows fit into" in first and "as found before (micro_size.json)" in second
    assert f"{record['micro_size']} rows" in second


def settle_twice(folder: Path, output: Path) -> list[str]:
    from ftcli.micro_size import settle_micro_size

    auto = cell(folder, "sft-tied", batch={"global_size": 12, "micro_size": "auto"})
    return [settle_micro_size(auto, output=output, cpu=False, weights=None)[1][0] for _ in range(2)]


def test_the_kernel_of_adamw_in_bfloat16_gives_the_numbers_of_its_formula_and_waits_for_nothing() -> None:
    from ftcli.adamw_bf16 import AdamWBf16, _step, join, update

    draw = torch.Generator().manual_seed(0)
    weights = [torch.randn(size, generator=draw).bfloat16().cuda() for size in ((7,), (64, 33), (4096, 512))]
    optimizer = AdamWBf16([{"params": [torch.nn.Parameter(weight.clone()) for weight in weights]}], lr=1e-5)
    copies = [[weight.clone().view(-1), *moments(weight)] for weight in weights]
    for step in range(1, 5):
        if step == 3:
            torch.cuda.set_sync_debug_mode("error")  # compiled by now
        for parameter, copy in zip(optimizer.param_groups[0]["params"], copies, strict=True):
            parameter.grad = torch.ones_like(parameter) * (step % 3 - 0.5)
            numbers = (1 - 1e-5 * 1e-2, 1e-5 / (1 - 0.9**step), 1 - 0.9, 0.999, 1 - 0.999, (1 - 0.999**step) ** -0.5)
            update(copy[0], parameter.grad.view(-1), *copy[1:], *(torch.tensor(n) for n in (*numbers, 1e-8)))
        optimizer.step()
    torch.cuda.set_sync_debug_mode("default")
    assert _step.problem is None
    for parameter, copy in zip(optimizer.param_groups[0]["params"], copies, strict=True):
        found = join(parameter.detach().view(-1), optimizer.state[parameter]["remainder"].view(-1))
        torch.testing.assert_close(found, join(copy[0], copy[3]), rtol=1e-6, atol=0)


def moments(weight: Any) -> list[Any]:
    from ftcli.adamw_bf16 import KINDS

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
def test_recomputation_and_the_host_leave_the_curve(profile: str, processes: int, inputs: Path) -> None:
    for rank in run_on_processes(curves_in_both, inputs, processes=processes, profile=profile):
        for precision, found in rank.items():
            plain = found["none"]
            for name, curve in found.items():
                print(precision, name, {what: f"{far:.1e}" for what, far in apart(curve, plain).items()}, curve.losses)
            assert what_differs(found, precision) == []
            assert plain.losses[-1] < 0.99 * plain.losses[0], "the weights moved by more than any bound"


def save_and_go_on(folder: Path, output: Path) -> tuple[list[float], list[float], list[float]]:
    """Return losses of AdamW with 8 bits, of the same after a checkpoint, and of plain AdamW."""
    from ftcli.checkpoint import save
    from ftcli.checkpoint_folder import checkpoint_path
    from ftcli.loop import steps
    from ftcli.run import prepare

    save_tiny_causal(folder / "tied")
    options = {"learning_rate": 5e-3, "weight_decay": 0.1}
    packed, plain = (
        cell(folder, "sft-tied", train={"max_steps": 8}, optimizer=options | {"name": name})
        for name in ("adamw_8bit", "adamw")
    )
    run = prepare(packed, output=output)
    found = []
    for step in steps(run):
        found.append(step.loss)
        if step.number == 5:
            save(run, 5)
    again = [step.loss for step in steps(prepare(packed, resume=checkpoint_path(output, 5)))]
    return found, again, [step.loss for step in steps(prepare(plain))]


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize(("profile", "processes"), [("single", 1), pytest.param("fsdp", 2, marks=TWO)])
def test_moments_of_8_bits_go_on_as_they_were(profile: str, processes: int, inputs: Path, tmp_path: Path) -> None:
    found, again, plain = run_on_processes(save_and_go_on, inputs, tmp_path, processes=processes, profile=profile)[0]
    assert again == pytest.approx(found[5:], rel=1e-6)
    assert found == pytest.approx(plain, rel=2e-2) and found != plain
