"""MLPs in tiles of tokens give the curve of whole MLPs on every profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ftcli.testing import run_on_cpu

from ....support.cells import cell

RECIPES: dict[str, dict[str, Any]] = {
    "all weights": {},
    "adapter": {"adapter": {"type": "lora", "r": 4, "lora_alpha": 8}},
}


def curves(folder: Path, tile_tokens: int) -> dict[str, tuple[list[tuple[float, float]], bool]]:
    """Return losses and gradient norms of recomputed runs, and whether the log says that their MLPs have tiles."""
    from ftcli.loop import steps
    from ftcli.models.estimates import memory_estimate
    from ftcli.training.setup import prepare

    results = {}
    before, memory_estimate.TILE_TOKENS = memory_estimate.TILE_TOKENS, tile_tokens
    for name, sections in RECIPES.items():
        model = {"name": str(folder / "tied"), "gradient_checkpointing": "tiled"}
        run = prepare(cell(folder, "sft-tied", model=model, train={"max_steps": 3}, **sections), cpu=True)
        curve = [(float(step.loss), float(step.grad_norm)) for step in steps(run)]
        results[name] = curve, any("MLPs in tiles of tokens: 2" in line for line in run.log_lines)
    memory_estimate.TILE_TOKENS = before
    return results


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["ddp", "fsdp", "zero2", "zero3"])
def test_tiled_mlps_give_the_curve_of_whole_ones(profile: str, inputs: Path) -> None:
    (whole,) = run_on_cpu(curves, inputs, 10**9, processes=1, profile="single")
    (tiled, _) = run_on_cpu(curves, inputs, 8, processes=2, profile=profile)
    for name, (curve, has_tiles) in tiled.items():
        assert has_tiles == ((profile, name) != ("zero3", "adapter")), "there DeepSpeed gathers modules inside layers"
        for found, expected in zip(curve, whole[name][0], strict=True):
            assert found == pytest.approx(expected, rel=1e-5), (name, curve, whole[name][0])
