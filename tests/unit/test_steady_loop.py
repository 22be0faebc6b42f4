"""No step reads a value of the device: held on the CPU by listening to the operations that would make a host wait.

On a GPU tests/gpu/test_steady_loop_on_gpus.py hears all of them, by CUDA's own means; here every operation that turns
the values of a tensor into a number, or into the size of another, is heard together with the place that asked for it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..multiprocess.cells import cell, write_inputs

STEPS, FIRST, LAST = 9, 3, 7  # listened to from after step FIRST until after step LAST
READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero", "repeat_interleave")
# What these read is on the host: of the step before, once it has arrived; rows that are collated; the count of updates.
ON_THE_HOST = ("ftcli/nonfinite.py", "ftcli/windows.py", "torch/optim/")


class Listening(TorchDispatchMode):
    """Notes where each operation stands whose result depends on values the host would have to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put") and any(i is not None and i.dtype == torch.bool for i in args[1])
        if name in READS or by_mask:
            frames = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_stack()[:-1]]
            if not any(part in frame for frame in frames for part in ON_THE_HOST):
                self.found.append(f"{name}: {' < '.join(reversed(frames[-6:]))}")
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


def reads(folder: Path, name: str, change: Callable[[Any], None] = lambda run: None, **changes: Any) -> list[str]:
    from ftcli.loop import steps
    from ftcli.run import prepare

    run = prepare(cell(folder, name, train={"max_steps": STEPS}, **changes), cpu=True)
    change(run)
    training = steps(run)
    for _ in range(FIRST):
        next(training)
    with Listening() as listening:
        for _ in range(FIRST, LAST):
            next(training)
    training.close()  # type: ignore[attr-defined]
    return listening.found


def of_chats(folder: Path, **more: Any) -> dict[str, Any]:
    return {"train": {"path": str(folder / "chats.jsonl")}, "max_length": 128} | more


def test_no_step_on_padded_rows_reads_a_value(inputs: Path) -> None:
    assert reads(inputs, "sft-tied") == []


def test_no_step_on_rows_end_to_end_reads_a_value_before_attention(inputs: Path) -> None:
    found = reads(inputs, "sft-untied", data=of_chats(inputs, padding_free=True))
    assert [place for place in found if "ftcli/attention.py" not in place] == []  # the CPU goes through documents


def test_no_step_of_attention_in_both_directions_reads_a_value(inputs: Path) -> None:
    assert reads(inputs, "text-lora") == []


def test_no_step_on_images_reads_a_value(inputs: Path) -> None:
    assert reads(inputs, "vit") == []


def test_a_loss_that_is_read_is_heard(inputs: Path) -> None:
    def read(run: Any) -> None:
        loss = run.task.loss
        run.task.loss = lambda model, batch: loss(model, batch) * float(bool((batch["input_ids"] >= 0).all()))

    found = reads(inputs, "sft-tied", read)
    assert len(found) >= LAST - FIRST and all("test_steady_loop.py" in place for place in found)


def test_a_mask_that_nobody_told_of_is_heard(inputs: Path) -> None:
    from ftcli.run import prepare

    run = prepare(cell(inputs, "sft-tied"), cpu=True)
    batch = run.any_batch()
    with Listening() as listening:
        run.task.loss(run.model, batch)
    assert listening.found and all("masking_utils.py" in place for place in listening.found)


def test_a_step_is_seeded_as_pytorch_seeds_all_devices(inputs: Path) -> None:
    from ftcli.run import prepare
    from ftcli.sampling import seed_of

    run = prepare(cell(inputs, "sft-tied"), cpu=True)
    run.reseed(7)
    found = torch.rand(5)
    torch.manual_seed(seed_of(run.recipe.seed, 7, 0))
    assert torch.equal(found, torch.rand(5))


def test_a_model_goes_back_to_training_whichever_part_the_caller_left_it_in(inputs: Path) -> None:
    from ftcli.loop import steps
    from ftcli.run import prepare

    run = prepare(cell(inputs, "sft-tied"), cpu=True)
    for step in steps(run):
        assert all(module.training for module in run.model.modules())
        (run.model if step.number % 2 else run.hardware.unwrap(run.model)).eval()
