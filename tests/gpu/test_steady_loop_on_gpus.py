"""The steady loop never waits for the device: no operation that does so between two steps, under NCCL too.

The test listens by torch's own means, which hears all of torch but its collectives. What waits on purpose lies
outside of what is listened to: the look at gradients (step 20, or the last), a log line, a save, an evaluation.
ZeRO is left out: DeepSpeed reads the gradient norm on the host in every step.
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

from ..multiprocess.cells import cell, write_inputs

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
ON_TWO = ("packed", "padded")
Heard = Callable[[str], list[dict[str, list[str]]]]
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@contextmanager
def listening(found: list[str]) -> Iterator[None]:
    """Add to `found` where each operation of the block stands that makes the host wait for the device."""

    def hear(message: Any, *rest: Any) -> None:
        if "called a synchronizing" in str(message):  # not the note that the mode is a prototype
            stack = traceback.extract_stack()[:-1]
            found.append(" < ".join(f"{frame.filename}:{frame.lineno}" for frame in reversed(stack[-8:])))

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
    return {case: waits(folder, *ON_ONE[case]) for case in cases}


def waits(folder: Path, name: str, layout: str | None, reads: bool) -> list[str]:
    """Return where the loop waited for the device in its steady steps; `reads`: the caller looks at every loss."""
    from ftcli import linear_nll
    from ftcli.loop import steps
    from ftcli.run import prepare

    linear_nll.PIECE = 2**12  # logits in pieces, as large vocabularies have them
    changes = {"precision": "bf16"} if layout is None else changed(folder, layout)
    run = prepare(cell(folder, name, train={"max_steps": STEPS}, **changes))
    assert run.hardware.accelerator.device.type == "cuda"
    found: list[str] = []
    training = steps(run)
    for _ in range(FIRST):
        next(training)
    with listening(found):
        for _ in range(FIRST, LAST):
            step = next(training)
            if reads:
                float(step.loss_tensor)
    assert [step.number for step in training] == list(range(LAST + 1, STEPS + 1))
    run.hardware.release(run.model)
    return found


def changed(folder: Path, layout: str) -> dict[str, Any]:
    data = {"train": {"path": str(folder / "chats.jsonl")}, "eval_rows": 5, "max_length": 256} | LAYOUTS[layout]
    batch = {"global_size": 4, "micro_size": 1} if layout == "packed" else {"global_size": 12, "micro_size": 3}
    return {"data": data, "precision": "bf16", "batch": batch}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def heard(inputs: Path) -> Heard:
    """Return what gives, for a profile, where each rank waited in each case."""

    @cache
    def listen(profile: str) -> list[dict[str, list[str]]]:
        cases, processes = (list(ON_ONE), 1) if profile == "single" else (list(ON_TWO), 2)
        return run_on_processes(all_waits, inputs, cases, processes=processes, profile=profile)

    return listen


@pytest.mark.parametrize("case", [case for case, (_, _, reads) in ON_ONE.items() if not reads])
def test_no_step_on_one_gpu_waits_for_the_device(case: str, heard: Heard) -> None:
    assert heard("single")[0][case] == []


def test_micro_batches_come_from_pinned_memory_beside_what_is_computed() -> None:
    from ftcli.copies import Copies

    device = torch.device("cuda", 0)
    batches = [{"ids": torch.full((512, 4096), number), "count": number} for number in range(6)]
    busy = torch.ones(4096, 4096, device=device)
    sums: list[tuple[torch.Tensor, int]] = []
    found: list[str] = []
    with listening(found):
        for batch in Copies(device).ahead(batches):
            for _ in range(20):
                busy = busy @ busy / 4096  # so that copies overtake what is computed, if they could
            sums.append((batch["ids"].sum(), batch["count"]))
            del batch
    assert found == []
    assert [(int(total), count) for total, count in sums] == [(512 * 4096 * number, number) for number in range(6)]


def test_a_loss_that_is_read_in_every_step_is_heard(heard: Heard) -> None:
    found = heard("single")[0]["every loss is read"]
    assert len(found) == LAST - FIRST and all("test_steady_loop_on_gpus.py" in place for place in found), found


@TWO
@pytest.mark.parametrize("layout", ON_TWO)
@pytest.mark.parametrize("profile", ["ddp", "fsdp"])
def test_no_step_on_two_gpus_waits_for_the_device(profile: str, layout: str, heard: Heard) -> None:
    for found in heard(profile):
        assert found[layout] == []
