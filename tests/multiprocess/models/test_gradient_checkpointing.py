"""The comparison of runs that `gpu/` makes between modes of recomputation: exact on the CPU, and faults are found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftcli.testing import run_on_cpu

from ...support.modes import MODES, PLAIN, Curve, curves, what_differs
from ...support.patching import patching

RECOMPUTED = [*PLAIN, "selective", "full"]


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


@patching
def without_a_fault(patch: pytest.MonkeyPatch, folder: Path) -> dict[str, Curve]:
    from ftcli.models.kernels import activation_offloading

    patch.setattr(activation_offloading, "MIN_OFFLOAD_BYTES", 0)
    return small(folder, "fp32", list(MODES))


@pytest.mark.slow
def test_gradient_checkpointing_in_every_mode_gives_the_plain_curve(inputs: Path) -> None:
    for rank in run_on_cpu(without_a_fault, inputs, processes=2, profile="fsdp"):
        assert what_differs(rank, "fp32") == []
        assert all(max(curve.apart) < 1e-6 for curve in rank.values()), "no more than another order of sums"
        assert rank["none"].losses[-1] < 0.999 * rank["none"].losses[0]


@patching
def another_input(patch: pytest.MonkeyPatch, folder: Path) -> dict[str, Curve]:
    """Change the input size of the last layer's attention in the recomputation."""
    import torch
    from transformers.models.llama.modeling_llama import LlamaAttention

    forward = LlamaAttention.forward

    def changed(layer: Any, hidden_states: Any, **more: Any) -> Any:
        is_again = layer.layer_idx == 1 and torch._C._current_graph_task_id() != -1
        return forward(layer, hidden_states * (1.05 if is_again else 1.0), **more)

    patch.setattr(LlamaAttention, "forward", changed)
    return small(folder, "bf16", RECOMPUTED)


@patching
def other_random_numbers(patch: pytest.MonkeyPatch, folder: Path) -> dict[str, Curve]:
    """Make layers draw other dropout in the recomputation."""
    from ftcli.models.kernels import activation_checkpointing

    def forgetful(model: Any, mode: str) -> None:
        if mode != "none":
            model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})

    patch.setattr(activation_checkpointing, "enable_recomputation", forgetful)
    return small(folder, "fp32", RECOMPUTED, dropout=0.1)


@patching
def a_copy_that_is_late(patch: pytest.MonkeyPatch, folder: Path) -> dict[str, Curve]:
    """Set one number in a hundred of the tensors from the host to 0."""
    import torch

    from ftcli.models.kernels import activation_offloading

    load = activation_offloading.load

    def late(stored: Any) -> Any:
        loaded = load(stored)
        is_copy = isinstance(stored, activation_offloading.HostActivation)
        return loaded * (torch.arange(loaded.numel()).view(loaded.shape) % 100 > 0) if is_copy else loaded

    patch.setattr(activation_offloading, "load", late)
    patch.setattr(activation_offloading, "MIN_OFFLOAD_BYTES", 0)
    return small(folder, "bf16", [*PLAIN, "none, on the host"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "precision", "modes"),
    [
        (another_input, "bf16", RECOMPUTED[3:]),
        (other_random_numbers, "fp32", RECOMPUTED[3:]),
        (a_copy_that_is_late, "bf16", ["none, on the host"]),
    ],
)
def test_what_differs_of_a_planted_fault_finds_it(
    plant: Callable[..., Any], precision: str, modes: list[str], inputs: Path
) -> None:
    (results,) = run_on_cpu(plant, inputs, processes=1, profile="single")
    lines = what_differs(results, precision)
    for mode in modes:
        assert any(line.startswith(f"{mode}, {precision}, gradients of the first step") for line in lines), lines
