"""Under bf16 a trained weight is cast once for all micro-batches of a window, and the curve is the one without that."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ftcli import hardware
from ftcli.hardware import precision
from ftcli.loop import steps
from ftcli.run import Run, prepare

from ..multiprocess.cells import cell, weights, write_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


class Casts(TorchDispatchMode):
    """Counts casts of weights to bfloat16 by autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.count: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._to_copy.default and isinstance(args[0], torch.nn.Parameter):
            self.count[id(args[0])] = self.count.get(id(args[0]), 0) + 1
        return function(*args, **(kwargs or {}))


def bf16(folder: Path, **model: Any) -> Run:
    section = {"name": str(folder / "untied"), "dropout": 0.0} | model
    return prepare(cell(folder, "sft-untied", precision="bf16", model=section), cpu=True)


@pytest.mark.parametrize("again", [False, True])
def test_a_weight_is_cast_once_a_window_also_where_layers_are_computed_again(inputs: Path, again: bool) -> None:
    run = bf16(inputs, gradient_checkpointing=again)
    head = run.hardware.unwrap(run.model).get_output_embeddings().weight  # type: ignore[operator]
    assert run.plan.accumulation == 4
    training = steps(run)
    for _ in range(2):
        with Casts() as casts:
            next(training)
        casts.count.pop(id(head))  # cast by the loss itself, not by autocast
        assert len(casts.count) == 2 * 7 and set(casts.count.values()) == {1}


def test_losses_and_weights_are_those_of_casts_in_every_micro_batch(
    inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = bf16(inputs)
    losses = [step.loss for step in steps(shared)]
    monkeypatch.setattr(precision, "cast_once", lambda device_type: contextlib.nullcontext())
    apart = bf16(inputs)
    with Casts() as casts:
        assert [step.loss for step in steps(apart)] == losses
    assert max(casts.count.values()) == 4 * shared.plan.accumulation
    assert all((a == b).all() for a, b in zip(weights(shared).values(), weights(apart).values(), strict=True))


def test_a_window_that_fails_leaves_no_cast_behind(inputs: Path) -> None:
    run, layer = bf16(inputs), torch.nn.Linear(2, 2, bias=False)

    def compute() -> list[float]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found: list[float] = layer(torch.ones(1, 2)).flatten().tolist()
        return found

    with pytest.raises(ZeroDivisionError) as kept:  # and its traceback, as a notebook does
        for _ in run.hardware.micro_batches([{}, {}]):
            compute()
            raise ZeroDivisionError
    with torch.no_grad():
        layer.weight.fill_(1.0)
    assert compute() == [2.0, 2.0] and kept.traceback


def test_no_cast_is_kept_where_weights_are_gathered_and_freed(inputs: Path) -> None:
    run = bf16(inputs)
    sharded = hardware.Hardware(
        **{name: getattr(run.hardware, name) for name in ("accelerator", "ranks", "distributed_type", "loss_scale")},
        skips=False,
        backend=hardware.fsdp,
    )
    for first, seen in ((run.hardware, 1), (sharded, 2)):
        layer = torch.nn.Linear(2, 2, bias=False)
        with Casts() as casts:
            for _ in first.micro_batches([{}, {}]):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    layer(torch.ones(1, 2))
        assert casts.count == {id(layer.weight): seen}
