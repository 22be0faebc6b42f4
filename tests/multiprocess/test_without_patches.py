"""Runs without one of the optional patches train the same curve; runs without a required one are refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ftcli.reports.comparison import TOLERANCES
from ftcli.runtime import patches
from ftcli.runtime.patches import REGISTRY, WITHOUT
from ftcli.testing import environment, run_on_cpu

from ..contract.test_patched_apis_exist import PATCHES
from ..support.cells import cell
from ..support.patching import patching
from ..support.runner import MakeInputs

STEPS = 3
BF16: dict[str, Any] = {"precision": "bf16"}
COMPILED = {"model": {"torch_compile": True}}
SELECTIVE = {"model": {"gradient_checkpointing": "selective"}}
# profile -> patch -> (cell, changes) of a run that uses the patch. Runs of one profile share their processes.
RUNS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "single": {
        "padding-masks": ("sft-tied", {}),
        "template-environment": ("sft-tied", {}),
        "foreach-gradients": ("sft-tied", {}),
        "attention-schemas": ("sft-tied", SELECTIVE),
        "views-of-weights": ("sft-tied", {"model": {"activation_offloading": True}}),
        "compiled-layers": ("sft-tied", COMPILED),
        "compile-options": ("sft-tied", COMPILED),
        "compiled-checkpoints": ("sft-tied", COMPILED),
        "layers-of-a-model": ("sft-tied", COMPILED),
        "lora-scaling": ("sft-lora", BF16),
    },
    "fsdp": {
        "fsdp-small-unit": ("sft-untied", BF16),
        "fsdp-16-bit-gradients": ("sft-untied", BF16),
        "fsdp-constant-sizes": ("sft-untied", BF16 | COMPILED),
        "foreach-gradients": ("sft-untied", BF16),
    },
    "zero3": {
        "zero3-step": ("sft-untied", BF16),
        "zero3-16-bit-gradients": ("sft-untied", BF16),
        "zero3-16-bit-weights": ("sft-untied", BF16),
        "zero3-rounded-shards": ("sft-untied", BF16),
        "zero3-gather-stream": ("sft-untied", BF16),
        "zero3-compiled-linear": ("sft-untied", BF16),
        "zero3-exact-bias": ("text", BF16),
        "layers-of-a-model": ("sft-untied", BF16),
        "zero3-leaf-passes": ("sft-untied", BF16),
        "deepspeed-release": ("sft-untied", BF16),
        "zero3-small-weights": ("sft-untied", BF16),
        "zero3-gradient-buffer": ("sft-untied", BF16),
        "zero3-gradient-memory": ("sft-untied", BF16),
        "zero3-quiet-hooks": ("sft-untied", BF16),
        "zero3-gathered-layers": ("sft-untied", BF16),
        "zero3-unread-norm": ("sft-untied", BF16),
    },
}
# Optional patches that runs on CPU processes do not use, and the reason.
ELSEWHERE = {
    "compiling-processes": "needs Triton, and so a GPU",
    "deepspeed-cpu-extension": "without it DeepSpeed compiles an extension",
    "flash-attention-calls": "needs a GPU",
    "float32-modules": "changes a check, and no run",
    "four-bit-outputs": "needs bitsandbytes",
    "fork-server": "starts test processes",
    "import-structure": "applies to the first import of a process: unit/hardware/test_import_structure.py",
    "fused-lengths": "needs a GPU",
    "liger-kernels": "needs a GPU",
    "liger-rotary": "needs a GPU",
    "nccl-pending-works": "needs a GPU",
    "tensor-versions": "needs bitsandbytes",
    "zero3-stream-waits": "needs a GPU",
}
REFUSED = {
    "single": {
        "json-columns": "text",  # the first: a process registers the column type once
        "accelerate-state": "sft-tied",
        "attention-of-a-model": "sft-tied",
        "causal-loss": "sft-tied",
        "launcher-variables": "sft-tied",
        "new-heads": "text",
        "weight-names-in-files": "sft-tied",
    },
    "fsdp": {"fsdp-on-cpu": "sft-tied", "fsdp-embeddings": "vit"},
    "zero3": {"deepspeed-partitions": "sft-tied", "zero3-hidden-hooks": "sft-tied", "zero3-hook-functions": "sft-tied"},
}


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    """Return a folder of this module's own, because its tests write into it."""
    return make_inputs()


def curve(folder: Path, name: str, changes: dict[str, Any]) -> list[tuple[float, float, int]]:
    """Train a cell for some steps; return loss, gradient norm and samples of each."""
    from ftcli.loop import steps
    from ftcli.training.setup import prepare

    plain = cell(folder, name)
    model = {"name": plain.model.name, "dropout": 0.0} | changes.get("model", {})
    run = prepare(cell(folder, name, **changes | {"model": model, "train": {"max_steps": STEPS}}), cpu=True)
    results = [(step.loss, step.grad_norm, step.samples) for step in steps(run)]
    run.hardware.release(run.model)
    return results


@patching
def train_without_each(
    monkeypatch: pytest.MonkeyPatch, folder: Path, runs: dict[str, tuple[str, dict[str, Any]]]
) -> dict[str, Any]:
    """Return patch -> (curve with it, curve without it, whether the run without it left it out)."""
    import torch

    from ftcli.hardware import deepspeed

    # Without the time of a C++ compiler.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    # Else all weights stay whole.
    monkeypatch.setattr(deepspeed, "STAGE_3", deepspeed.STAGE_3 | {"stage3_param_persistence_threshold": 100})
    curves: dict[str, Any] = {}
    results = {}
    for patch, (name, changes) in runs.items():
        key = f"{name} {changes}"
        if key not in curves:
            curves[key] = curve(folder, name, changes)
        patches.clear_caches()
        with environment(**{WITHOUT: patch, "FTCLI_CACHE": str(folder / f"rows-without-{patch}")}):
            without = curve(folder, name, changes)
        results[patch] = (curves[key], without, patch in patches._logged)
    return results


@pytest.mark.slow
@pytest.mark.parametrize("profile", RUNS)
def test_train_without_an_optional_patch_gives_the_same_curve(profile: str, inputs: Path) -> None:
    processes = 1 if profile == "single" else 2
    results = run_on_cpu(train_without_each, inputs, RUNS[profile], processes=processes, profile=profile)[0]
    for patch, (with_it, without, is_left_out) in results.items():
        tolerance = TOLERANCES[RUNS[profile][patch][1].get("precision", "fp32")]
        assert is_left_out, f"the run without {patch} did not ask for it"
        assert len(with_it) == len(without) == STEPS
        for one, other in zip(with_it, without, strict=True):
            assert other[0] == pytest.approx(one[0], rel=tolerance.loss), patch
            assert other[1] == pytest.approx(one[1], rel=tolerance.grad_norm), patch
            assert other[2] == one[2], patch


def test_every_optional_patch_has_a_run_without_it_or_a_reason() -> None:
    optional = {patch.name for patch in PATCHES if not patch.required}
    here = {patch for runs in RUNS.values() for patch in runs}
    assert here | set(ELSEWHERE) == optional and not here & set(ELSEWHERE)


def refusals(folder: Path, cells: dict[str, str]) -> dict[str, str]:
    """Return patch -> the message with which a run without it is refused before its first step."""
    from ftcli.runtime.errors import InputError
    from ftcli.training.setup import prepare

    results = {}
    for number, (patch, name) in enumerate(cells.items()):
        # Rows in a cache would be opened without the patch that is needed to encode them.
        empty = {"FTCLI_CACHE": str(folder / f"cache-{number}-{len(cells)}")}
        with environment(**{WITHOUT: patch}, **empty), pytest.raises(InputError) as error:
            prepare(cell(folder, name), cpu=True, output=folder / f"run-{number}-{len(cells)}")
        results[patch] = str(error.value)
    return results


@pytest.mark.parametrize("profile", REFUSED)
def test_prepare_without_a_required_patch_is_refused(profile: str, inputs: Path) -> None:
    processes = 1 if profile == "single" else 2
    for rank in run_on_cpu(refusals, inputs, REFUSED[profile], processes=processes, profile=profile):
        for name, message in rank.items():
            patch = REGISTRY[name]
            assert f"patch {name}, tested with {patch.library}{patch.versions}" in message
            assert f"pip install '{patch.library}{patch.versions}'; {patch.installed} is installed" in message


@pytest.mark.slow
def test_train_command_without_a_required_patch_exits_with_code_2(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from ftcli.__main__ import main

    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(cell(inputs, "sft-tied").model_dump_json())
    monkeypatch.setenv(WITHOUT, "deepspeed-partitions")
    line = [
        "train",
        str(recipe),
        "--profile",
        "zero3",
        "--num-processes",
        "2",
        "--cpu",
        "--output",
        str(tmp_path / "run"),
    ]
    with pytest.raises(SystemExit) as end:
        main(line)
    assert end.value.code == 2
    assert "patch deepspeed-partitions, tested with deepspeed>=0.19.8,<0.20" in capfd.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
