"""Two kinds of run in one process: each trains as it does alone, and leaves the settings of the process as before."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ftcli.testing import run_on_cpu

from ...support.cells import LORA, cell, train_recipe

KINDS = ["compiled LoRA in bf16", "fp32", "encoder"]


def recipe_of(folder: Path, kind: str) -> Any:
    if kind == "compiled LoRA in bf16":
        section = {"name": str(folder / "tied"), "dropout": 0.0, "torch_compile": True}
        return cell(folder, "sft-lora", precision="bf16", model=section, adapter=LORA)
    return cell(folder, "sft-untied" if kind == "fp32" else "text")


def settings() -> dict[str, Any]:
    """Return the settings of other libraries that hold for the whole process."""
    import torch._dynamo
    import torch._functorch.config
    import torch._inductor.config
    import torch.fx.experimental._config
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.models.llama import modeling_llama

    own = ("documents", "documents_by_torch")  # names of ftcli's attention, which no other model uses
    return {
        "dynamo": torch._dynamo.config.get_config_copy(),
        "inductor": torch._inductor.config.get_config_copy(),
        "functorch": torch._functorch.config.get_config_copy(),
        "fx": torch.fx.experimental._config.get_config_copy(),
        "masks": {name: function for name, function in ALL_MASK_ATTENTION_FUNCTIONS.items() if name not in own},
        "rotary": modeling_llama.apply_rotary_pos_emb,
        "zero3": is_deepspeed_zero3_enabled(),
    }


def differences(before: dict[str, Any]) -> list[str]:
    """Return the names of the changed settings."""
    return [
        f"{part}.{name}"
        for part, values in settings().items()
        for name, value in (values if isinstance(values, dict) else {"": values}).items()
        if value != (before[part] if name == "" else before[part].get(name))
    ]


def train(folder: Path, kinds: list[str]) -> dict[str, tuple[Any, list[str]]]:
    """Train one kind of run after the other; return (curve and weights, settings that the run left changed) of each."""
    import torch

    from ftcli.models.kernels import compile_options

    torch.compile = partial(torch.compile, backend="aot_eager")  # without the time of a C++ compiler
    compile_options.ROUNDS_ON_CPUS = "0"  # such graphs round as the layers with every torch
    results = {}
    before = settings()
    for kind in kinds:
        result = train_recipe(recipe_of(folder, kind))
        gc.collect()
        shown = (result["rows"], result["eval"], {name: value.tobytes() for name, value in result["after"].items()})
        results[kind] = (shown, differences(before))
    return results


@pytest.mark.slow
def test_run_after_one_of_another_kind_gives_its_own_curve_and_restores_settings(inputs: Path) -> None:
    in_turn = run_on_cpu(train, inputs, KINDS, processes=1, profile="single")[0]
    assert [(kind, changed) for kind, (_, changed) in in_turn.items() if changed] == []
    for kind in KINDS:
        alone = run_on_cpu(train, inputs, [kind], processes=1, profile="single")[0]
        assert in_turn[kind][0] == alone[kind][0], kind


def settings_during_and_after(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """Return what differs while a run is prepared, after its training, and after another run is dropped."""
    import torch

    from ftcli.loop import train as train_run
    from ftcli.models.kernels import compile_options
    from ftcli.training.setup import prepare

    torch.compile = partial(torch.compile, backend="aot_eager")  # without the time of a C++ compiler
    compile_options.ROUNDS_ON_CPUS = "0"  # such graphs round as the layers with every torch
    before = settings()
    run = prepare(recipe_of(folder, KINDS[0]), cpu=True)
    during = differences(before)
    train_run(run)
    after = differences(before)
    dropped = prepare(recipe_of(folder, KINDS[0]), cpu=True)
    del dropped
    gc.collect()
    return during, after, differences(before)


@pytest.mark.slow
def test_process_settings_are_restored_when_a_run_ends_or_is_dropped(inputs: Path) -> None:
    during, after, dropped = run_on_cpu(settings_during_and_after, inputs, processes=1, profile="single")[0]
    assert {"dynamo.specialize_float", "inductor.emulate_precision_casts", "masks.sdpa"} <= set(during)
    assert (after, dropped) == ([], [])
