"""The comparison of runs that `gpu/` makes between modes of recomputation: exact on the CPU, and faults are found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftcli.testing import run_on_cpu

from .cells import write_inputs
from .modes import MODES, PLAIN, Curve, curves, what_differs

RECOMPUTED = [*PLAIN, "selective", "full"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


def small(folder: Path, precision: str, modes: list[str], dropout: float = 0.0) -> dict[str, Curve]:
    return curves(
        folder,
        1e-3,
        precision,
        modes,
        model={"name": str(folder / "tied"), "dropout": dropout},
        data={"train": str(folder / "chats.jsonl"), "max_length": 128, "packing": True},
        batch={"global_size": 4, "micro_size": 2},
        train={"max_steps": 2},
    )


def without_a_fault(folder: Path) -> dict[str, Curve]:
    from ftcli import activations

    activations.LEAST_MOVED = 0
    return small(folder, "fp32", list(MODES))


@pytest.mark.slow
def test_on_the_cpu_every_mode_gives_the_curve_of_the_plain_run(inputs: Path) -> None:
    for found in run_on_cpu(without_a_fault, inputs, processes=2, profile="fsdp"):
        assert what_differs(found, "fp32") == []
        assert all(max(curve.apart) < 1e-6 for curve in found.values()), "no more than another order of sums"
        assert found["none"].losses[-1] < 0.999 * found["none"].losses[0]


def another_input(folder: Path) -> dict[str, Curve]:
    """Let attention of the last layer see an input of another size when it is computed again."""
    import torch
    from transformers.models.llama.modeling_llama import LlamaAttention

    forward = LlamaAttention.forward

    def changed(layer: Any, hidden_states: Any, **more: Any) -> Any:
        is_again = layer.layer_idx == 1 and torch._C._current_graph_task_id() != -1
        return forward(layer, hidden_states * (1.05 if is_again else 1.0), **more)

    LlamaAttention.forward = changed  # type: ignore[method-assign]
    return small(folder, "bf16", RECOMPUTED)


def other_random_numbers(folder: Path) -> dict[str, Curve]:
    """Let layers draw other dropout when they are computed again."""
    from ftcli import activations

    def forgetful(model: Any, mode: str) -> None:
        if mode != "none":
            model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})

    activations.recompute = forgetful
    return small(folder, "fp32", RECOMPUTED, dropout=0.1)


def a_copy_that_is_late(folder: Path) -> dict[str, Curve]:
    """Let what comes back from the host lack one number in a hundred."""
    import torch

    from ftcli import activations

    from_host = activations._from_host

    def late(kept: Any) -> Any:
        found = from_host(kept)
        return found * (torch.arange(found.numel()).view(found.shape) % 100 > 0) if isinstance(kept, tuple) else found

    activations._from_host, activations.LEAST_MOVED = late, 0
    return small(folder, "bf16", [*PLAIN, "none, on the host"])


@pytest.mark.parametrize(
    ("plant", "precision", "modes"),
    [
        (another_input, "bf16", RECOMPUTED[3:]),
        (other_random_numbers, "fp32", RECOMPUTED[3:]),
        (a_copy_that_is_late, "bf16", ["none, on the host"]),
    ],
)
def test_a_fault_that_is_planted_is_found(
    plant: Callable[..., Any], precision: str, modes: list[str], inputs: Path
) -> None:
    (found,) = run_on_cpu(plant, inputs, processes=1, profile="single")
    lines = what_differs(found, precision)
    for mode in modes:
        assert any(line.startswith(f"{mode}, {precision}, gradients of the first step") for line in lines), lines
