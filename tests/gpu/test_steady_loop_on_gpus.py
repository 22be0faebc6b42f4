"""The steady loop never waits for the device: no operation that does so between two steps, under NCCL too.

torch's own sync debug mode reports all waits except those of collectives. Intended waits are outside the measured
block: the check of gradients (step 20, or the last), a save, an evaluation. Rows of metrics are written during the next
step, so they cause no wait.
ZeRO is left out: DeepSpeed waits for all but two of the sums and gathers under way. It reads no value
(multiprocess/hardware/test_zero3_host.py).
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ftcli.testing import run_on_processes

from ..support.cells import cell

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
STEPS, FIRST, LAST = 16, 4, 14  # listened to from after step FIRST until after step LAST
LAYOUTS: dict[str, dict[str, Any]] = {
    "packed": {"packing": True},
    "padding-free": {"padding_free": True},
    "padded": {"padding_free": False},
    "padded, by a loader process": {"padding_free": False, "workers": 1},
}
# name -> (cell, layout of its rows or None for its own, whether each loss is read): what one start of ranks listens to
ON_ONE: dict[str, tuple[str, str | None, bool]] = {
    **{layout: ("sft-tied", layout, False) for layout in LAYOUTS},
    "text": ("text", None, False),
    "vit": ("vit", None, False),
    "every loss is read": ("sft-tied", "packed", True),
}
WITH_ROWS = "a row of metrics in every step"
ON_ONE[WITH_ROWS] = ("sft-tied", "packed", False)
ON_TWO = ("packed", "padded")
Heard = Callable[[str], list[dict[str, list[str]]]]
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@contextmanager
def listening(places: list[str]) -> Iterator[None]:
    """Add to `places` the source line of each operation in the block that makes the host wait for the device."""

    def hear(message: Any, *rest: Any) -> None:
        if "called a synchronizing" in str(message):  # not the note that the mode is a prototype
            stack = traceback.extract_stack()[:-1]
            places.append(" < ".join(f"{frame.filename}:{frame.lineno}" for frame in reversed(stack[-8:])))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = hear  # type: ignore[assignment]
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def all_waits(folder: Path, cases: list[str]) -> dict[str, list[str]]:
    """Return where the loop waited for the device in each of some cases: a start of ranks takes longer than a case."""
    return {case: waits(folder, *ON_ONE[case], has_rows=case == WITH_ROWS) for case in cases}


def waits(folder: Path, name: str, layout: str | None, reads: bool, *, has_rows: bool = False) -> list[str]:
    """Return where the loop waited for the device in its steady steps.

    `reads`: the caller looks at every loss. `has_rows`: a reporter writes a row of metrics for every step.
    """
    from ftcli.loop import steps
    from ftcli.models.kernels import linear_cross_entropy
    from ftcli.training.reporter import Reporter
    from ftcli.training.setup import prepare

    linear_cross_entropy.MAX_LOGITS_PER_CHUNK = 2**12  # logits in pieces, as large vocabularies have them
    changes = {"precision": "bf16"} if layout is None else changed(folder, layout)
    run = prepare(cell(folder, name, train={"max_steps": STEPS}, **changes))
    assert run.hardware.accelerator.device.type == "cuda"
    places: list[str] = []
    training, report = steps(run), Reporter(run, quiet=True, late=True)
    for _ in range(FIRST):
        next(training)
    with listening(places):
        for _ in range(FIRST, LAST):
            step = next(training)
            if has_rows:
                report.step(step)
            if reads:
                float(step.loss_tensor)
    assert [step.number for step in training] == list(range(LAST + 1, STEPS + 1))
    run.hardware.release(run.model)
    return places


def changed(folder: Path, layout: str) -> dict[str, Any]:
    data = {"train": {"path": str(folder / "chats.jsonl")}, "eval_rows": 5, "max_length": 256} | LAYOUTS[layout]
    batch = {"global_size": 4, "micro_size": 1} if layout == "packed" else {"global_size": 12, "micro_size": 3}
    return {"data": data, "precision": "bf16", "batch": batch}


@pytest.fixture(scope="module")
def heard(inputs: Path) -> Heard:
    """Return what gives, for a profile, where each rank waited in each case."""

    @cache
    def listen(profile: str) -> list[dict[str, list[str]]]:
        cases, processes = (list(ON_ONE), 1) if profile == "single" else (list(ON_TWO), 2)
        return run_on_processes(all_waits, inputs, cases, processes=processes, profile=profile)

    return listen


@pytest.mark.parametrize("case", [case for case, (_, _, reads) in ON_ONE.items() if not reads])
def test_steady_loop_on_one_gpu_does_not_synchronise(case: str, heard: Heard) -> None:
    assert heard("single")[0][case] == []


def test_micro_batches_are_copied_from_pinned_memory_during_computation() -> None:
    from ftcli.training.batches.prefetch import DevicePrefetcher

    device = torch.device("cuda", 0)
    batches = [{"ids": torch.full((512, 4096), number), "count": number} for number in range(6)]
    busy = torch.ones(4096, 4096, device=device)
    sums: list[tuple[torch.Tensor, int]] = []
    places: list[str] = []
    with listening(places):
        for batch in DevicePrefetcher(device).ahead(batches):
            for _ in range(20):
                busy = busy @ busy / 4096  # so that copies overtake what is computed, if they could
            sums.append((batch["ids"].sum(), batch["count"]))
            del batch
    assert places == []
    assert [(int(total), count) for total, count in sums] == [(512 * 4096 * number, number) for number in range(6)]


def test_steady_loop_with_a_loss_read_every_step_synchronises(heard: Heard) -> None:
    places = heard("single")[0]["every loss is read"]
    assert len(places) == LAST - FIRST and all("test_steady_loop_on_gpus.py" in place for place in places), places


@TWO
@pytest.mark.parametrize("layout", ON_TWO)
@pytest.mark.parametrize("profile", ["ddp", "fsdp"])
def test_steady_loop_on_two_gpus_does_not_synchronise(profile: str, layout: str, heard: Heard) -> None:
    for places in heard(profile):
        assert places[layout] == []
