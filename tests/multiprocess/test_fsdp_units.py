"""What travels between ranks in 16 bits under FSDP2 is what autocast multiplies in them, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ftcli.testing import run_on_cpu

from .cells import cell, write_inputs

NAMES = ("sft-tied", "sft-untied", "sft-lora", "text")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


def gathered(folder: Path, precision: str) -> dict[str, dict[str, Any]]:
    """Return of each recipe in which dtype each kind of module had its weight while it computed, and the losses."""
    from ftcli.loop import steps
    from ftcli.run import prepare

    found: dict[str, dict[str, Any]] = {}
    for name in NAMES:
        run = prepare(cell(folder, name, precision=precision, train={"max_steps": 3}), cpu=True)
        seen: dict[str, set[str]] = {}

        def look(module: Any, inputs: Any, seen: dict[str, set[str]] = seen) -> None:
            kind = type(module).__name__.removeprefix("FSDP")
            seen.setdefault(kind, set()).add(str(module.weight.dtype).removeprefix("torch."))

        for key, module in run.hardware.unwrap(run.model).named_modules():
            if isinstance(getattr(module, "weight", None), torch.Tensor) and "lora" not in key:
                module.register_forward_pre_hook(look)
        losses = [step.loss for step in steps(run)]
        found[name] = {kind: " ".join(sorted(dtypes)) for kind, dtypes in seen.items()} | {"losses": losses}
    return found


@pytest.mark.parametrize(("precision", "multiplied"), [("bf16", "bfloat16"), ("fp32", "float32")])
def test_products_of_layers_travel_as_they_are_multiplied_and_the_rest_as_it_is(
    precision: str, multiplied: str, inputs: Path
) -> None:
    (single,) = run_on_cpu(gathered, inputs, precision, processes=1, profile="single")
    for rank in run_on_cpu(gathered, inputs, precision, processes=2, profile="fsdp"):
        for name in ("sft-tied", "sft-untied"):
            layers = rank[name]
            assert layers["LlamaRMSNorm"] == layers["Embedding"] == "float32"
            assert layers["Linear"] == " ".join(sorted({multiplied, "float32"}))  # the head stays float32
        assert "float32" in rank["text"]["Linear"], "an encoder has no head like that, and travels as it is"
        for name in NAMES:
            assert rank[name]["losses"] == pytest.approx(single[name]["losses"], rel=1e-4)
