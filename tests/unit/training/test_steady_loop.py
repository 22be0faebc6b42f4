"""No step reads a value of the device. On the CPU, the tests record the operations that would make the host wait.

These are operations that convert the values of a tensor to a number or to the size of another tensor. Each is recorded
with the line that called it. tests/gpu/test_steady_loop_on_gpus.py uses CUDA's sync debug mode instead.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...support.cells import cell

STEPS, FIRST, LAST = 9, 3, 7  # listened to from after step FIRST until after step LAST
READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero", "repeat_interleave")
# What these read is on the host: of the step before, once it has arrived; rows that are collated; the count of updates.
ON_THE_HOST = ("ftcli/training/nonfinite.py", "ftcli/training/batches/window.py", "torch/optim/")


class Listening(TorchDispatchMode):
    """Notes where each operation stands whose result depends on values the host would have to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put") and any(i is not None and i.dtype == torch.bool for i in args[1])
        if name in READS or by_mask:
            frames = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_stack()[:-1]]
            if not any(part in frame for frame in frames for part in ON_THE_HOST):
                self.places.append(f"{name}: {' < '.join(reversed(frames[-6:]))}")
        return func(*args, **(kwargs or {}))


def reads(folder: Path, name: str, change: Callable[[Any], None] = lambda run: None, **changes: Any) -> list[str]:
    from ftcli.training.setup import prepare

    run = prepare(cell(folder, name, train={"max_steps": STEPS}, **changes), cpu=True)
    change(run)
    return reads_of(run)


def reads_of(run: Any) -> list[str]:
    """Train a run of `STEPS` steps, and return the places that read values of the device after the first steps."""
    from ftcli.loop import steps

    training = steps(run)
    for _ in range(FIRST):
        next(training)
    with Listening() as listening:
        for _ in range(FIRST, LAST):
            next(training)
    training.close()  # type: ignore[attr-defined]
    return listening.places


def of_chats(folder: Path, **more: Any) -> dict[str, Any]:
    return {"train": {"path": str(folder / "chats.jsonl")}, "max_length": 128} | more


def test_steady_loop_on_padded_rows_reads_no_value(inputs: Path) -> None:
    assert reads(inputs, "sft-tied") == []


def test_steady_loop_on_padding_free_rows_reads_no_value_before_attention(inputs: Path) -> None:
    values_read = reads(inputs, "sft-untied", data=of_chats(inputs, padding_free=True))
    assert [
        place for place in values_read if "ftcli/models/kernels/document_attention.py" not in place
    ] == []  # the CPU goes through documents


def test_steady_loop_of_bidirectional_attention_reads_no_value(inputs: Path) -> None:
    assert reads(inputs, "text-lora") == []


def test_steady_loop_on_images_reads_no_value(inputs: Path) -> None:
    assert reads(inputs, "vit") == []


def test_steady_loop_with_a_loss_that_is_read_synchronises(inputs: Path) -> None:
    def read(run: Any) -> None:
        loss = run.task.loss
        run.task.loss = lambda model, batch: loss(model, batch) * float(bool((batch["input_ids"] >= 0).all()))

    values_read = reads(inputs, "sft-tied", read)
    assert len(values_read) >= LAST - FIRST and all("test_steady_loop.py" in place for place in values_read)


def test_steady_loop_with_an_undeclared_mask_synchronises(inputs: Path) -> None:
    from ftcli.training.setup import prepare

    run = prepare(cell(inputs, "sft-tied"), cpu=True)
    batch = run.any_batch()
    with Listening() as listening:
        run.task.loss(run.model, batch)
    assert listening.places and all("masking_utils.py" in place for place in listening.places)


def test_seed_of_a_step_seeds_all_devices_as_pytorch_does(inputs: Path) -> None:
    from ftcli.runtime.seeds import seed_of
    from ftcli.training.setup import prepare

    run = prepare(cell(inputs, "sft-tied"), cpu=True)
    run.reseed(7)
    actual = torch.rand(5)
    torch.manual_seed(seed_of(run.recipe.seed, 7, 0))
    assert torch.equal(actual, torch.rand(5))


def test_steady_loop_sets_training_mode_in_every_step(inputs: Path) -> None:
    from ftcli.loop import steps
    from ftcli.training.setup import prepare

    run = prepare(cell(inputs, "sft-tied"), cpu=True)
    for step in steps(run):
        assert all(module.training for module in run.model.modules())
        (run.model if step.number % 2 else run.hardware.unwrap(run.model)).eval()
