"""ZeRO-3 gathers weights of matrix products in 16 bits without changing a result, and each layer's weights at once."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ftcli.testing import run_on_cpu, save_tiny_causal

from ...support.cells import cell, weights
from ...support.patching import patching
from ...support.runner import MakeInputs

pytestmark = pytest.mark.timeout(600)  # one launch does what six did
NAMES = ("sft-untied", "sft-tied", "sft-lora", "text")
LANGUAGE = NAMES[:3]


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    """Return a folder of this module's own, because its tests write into it."""
    return make_inputs()


def digest(run: Any) -> str:
    """Return a digest of all weights, each read whole."""
    return hashlib.sha256(b"".join(value.tobytes() for value in weights(run).values())).hexdigest()


@patching
def gathered(
    patch: pytest.MonkeyPatch, folder: Path, precision: str, **zero: Any
) -> dict[str, list[tuple[Any, list[str], Counter[str]]]]:
    """Return for each recipe (curve, digests of weights, bytes gathered by dtype), without and with 16-bit gathering.

    The weights of these models are so small that DeepSpeed would not shard them by default.
    """
    from deepspeed.runtime.zero import partition_parameters

    from ftcli.hardware import deepspeed
    from ftcli.loop import steps
    from ftcli.training.evaluation import evaluate
    from ftcli.training.setup import prepare

    patch.setattr(deepspeed, "STAGE_3", {"reduce_bucket_size": 10**8, "stage3_param_persistence_threshold": 100} | zero)
    after_prepare, gather = deepspeed.DeepSpeed.after_prepare, partition_parameters._dist_allgather_fn
    results: dict[str, list[tuple[Any, list[str], Counter[str]]]] = {}
    for name in NAMES:
        for configures in (
            lambda self, model, dtype, skips: after_prepare(self, model, None, skips=skips),
            after_prepare,
        ):
            patch.setattr(deepspeed.DeepSpeed, "after_prepare", configures)
            sent = Counter[str]()

            def count(mine: Any, whole: Any, group: Any = None, sent: Counter[str] = sent) -> Any:
                sent[str(whole.dtype).removeprefix("torch.")] += whole.numel() * whole.element_size()
                return gather(mine, whole, group)

            patch.setattr(partition_parameters, "_dist_allgather_fn", count)
            run = prepare(cell(folder, name, precision=precision, train={"max_steps": 3}), cpu=True)
            sent.clear()
            curve: list[Any] = [(step.loss, step.grad_norm) for step in steps(run)]
            trained = Counter(sent)
            read = [digest(run)]
            curve.append(evaluate(run))  # leaves weights whole
            read.append(digest(run))
            results.setdefault(name, []).append((curve, read, trained))
    return results


def everything(folder: Path) -> dict[str, Any]:
    """Return the results of the functions that differ only in settings; they share one launch."""
    return {
        **{precision: gathered(folder, precision) for precision in ("bf16", "fp16", "fp32")},
        "small buckets": gathered(folder, "bf16", contiguous_gradients=True, reduce_bucket_size=1500),
        "layers": gatherings(folder),
        "recomputed": recomputed(folder),
    }


@pytest.fixture(scope="module")
def ranks(inputs: Path) -> list[dict[str, Any]]:
    return run_on_cpu(everything, inputs, processes=2, profile="zero3")


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "half"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", None)])
def test_zero3_gathers_products_in_half_the_bytes_and_no_bit_changes(
    precision: str, half: str | None, ranks: list[dict[str, Any]]
) -> None:
    for rank in ranks:
        for name, ((curve, read, before), (same_curve, same_read, after)) in rank[precision].items():
            assert (same_curve, same_read) == (curve, read) and len(set(read)) == 1, name
            if half is None or name not in LANGUAGE:
                assert after == before, name
                continue
            moved = before["float32"] - after["float32"]
            assert moved > 0 and after[half] - before[half] == moved / 2, name


@pytest.mark.slow
def test_zero3_sums_gradients_larger_than_a_bucket_in_float32(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for name, (before, after) in rank["small buckets"].items():  # sums of gradients are DeepSpeed's own
            assert after[:2] == before[:2], name


def losses(folder: Path) -> list[float]:
    from ftcli.loop import steps
    from ftcli.training.setup import prepare

    run = prepare(cell(folder, "sft-untied", precision="bf16", train={"max_steps": 3}), cpu=True)
    return [step.loss for step in steps(run)]


@pytest.mark.slow
def test_zero3_with_all_reduce_fetch_leaves_float32_shards(inputs: Path, tmp_path: Path) -> None:
    results = []
    for by_sums in (False, True):  # of whole weights that are zero but for a rank's piece
        zero = {"stage": 3, "stage3_use_all_reduce_for_fetch_params": by_sums}
        config, profile = tmp_path / f"{by_sums}.json", tmp_path / f"{by_sums}.yaml"
        zero |= {"stage3_param_persistence_threshold": 100, "reduce_bucket_size": "auto"}
        config.write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": "auto"}}))
        section = {"deepspeed_config_file": str(config), "zero3_init_flag": True}
        profile.write_text(yaml.safe_dump({"distributed_type": "DEEPSPEED", "deepspeed_config": section}))
        results.append(run_on_cpu(losses, inputs, processes=2, profile=str(profile))[0])
    assert results[1] == pytest.approx(results[0], rel=1e-6)


@patching
def dtypes(patch: pytest.MonkeyPatch, folder: Path) -> dict[str, Any]:
    """Return the dtypes of a layer's weight and of its shard in training, between steps and after a failed step."""
    from ftcli.hardware import deepspeed
    from ftcli.hardware.zero3_leaf_modules import GATHER_STREAM
    from ftcli.loop import steps
    from ftcli.training.evaluation import evaluate
    from ftcli.training.setup import prepare

    patch.setattr(deepspeed, "STAGE_3", deepspeed.STAGE_3 | {"stage3_param_persistence_threshold": 100})
    run = prepare(
        cell(folder, "sft-untied", precision="bf16", train={"max_steps": 3}, batch={"global_size": 8, "micro_size": 2}),
        cpu=True,
    )
    model: Any = run.hardware.unwrap(run.model)
    module = model.model.layers[1].mlp.up_proj
    seen: list[tuple[str, str]] = []

    def look(*_: Any) -> None:
        seen.append((str(module.weight.dtype), str(module.weight.ds_tensor.dtype)))

    module.register_forward_hook(look)
    results: dict[str, Any] = {"accumulation": run.plan.accumulation}
    training = steps(run)
    for name in ("first", "second"):
        if name == "second":
            evaluate(run)  # leaves weights whole
            results["evaluated"], seen = set(seen), []
        next(training)
        results[name], seen = set(seen), []
        look()
        results[f"after {name}"], seen = set(seen), []
    before = module.weight.ds_tensor.clone()

    def fail(*_: Any) -> None:
        raise ArithmeticError("a step that does not get far")

    module.register_forward_hook(fail)
    with pytest.raises(ArithmeticError):
        next(training)
    seen.clear()
    look()
    results["failed"] = {shard for _, shard in seen}
    results["same weights"] = torch.equal(module.weight.ds_tensor, before)
    results["has a stream"] = hasattr(run.model.optimizer.parameter_offload, GATHER_STREAM)
    return results


def test_zero3_shards_are_rounded_in_an_accumulation_window_and_exact_outside(inputs: Path) -> None:
    exact, rounded = {("torch.float32", "torch.float32")}, {("torch.bfloat16", "torch.bfloat16")}
    for rank in run_on_cpu(dtypes, inputs, processes=2, profile="zero3"):
        assert rank["accumulation"] == 2
        assert rank["first"] == rank["second"] == rounded
        assert rank["evaluated"] == rank["after first"] == rank["after second"] == exact
        assert rank["failed"] == {"torch.float32"} and rank["same weights"]
        assert rank["has a stream"], "on GPUs gatherings must not begin before pieces are rounded"


@patching
def gatherings(patch: pytest.MonkeyPatch, folder: Path) -> dict[str, list[tuple[int, list[float]]]]:
    """Return for each recipe (number of gathers in its first step, losses), by module and by layer."""
    from deepspeed.runtime.zero import partition_parameters

    from ftcli.hardware import deepspeed
    from ftcli.loop import steps
    from ftcli.training.setup import prepare

    # Sums are sent several times a backward pass: a gradient that came after its layer was done would be left out.
    patch.setattr(deepspeed, "STAGE_3", {"reduce_bucket_size": 4000, "stage3_param_persistence_threshold": 100})
    leaves_of, gather = deepspeed.leaves_of, partition_parameters._dist_allgather_fn
    calls = 0

    def count(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        return gather(*given)

    patch.setattr(partition_parameters, "_dist_allgather_fn", count)
    results: dict[str, list[tuple[int, list[float]]]] = {}
    for name in NAMES:
        for leaves in (lambda model: [], leaves_of):
            patch.setattr(deepspeed, "leaves_of", leaves)
            run = prepare(cell(folder, name, precision="bf16", train={"max_steps": 3}), cpu=True)
            calls, first, losses = 0, 0, []
            for step in steps(run):
                first = first or calls
                losses.append(step.loss)
            results.setdefault(name, []).append((first, losses))
    return results


@pytest.mark.slow
def test_zero3_layer_gathers_its_weights_at_once_unless_some_are_frozen(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for name, ((modules, expected), (layers, actual)) in rank["layers"].items():
            assert actual == pytest.approx(expected, rel=1e-4), name
            assert layers == modules if name == "sft-lora" else layers < modules / 2, name


@patching
def recomputed(patch: pytest.MonkeyPatch, folder: Path) -> dict[str, list[list[float]]]:
    """Return the losses of each recipe without and with selective recomputation, if only some weights stay gathered."""
    from ftcli.hardware import deepspeed
    from ftcli.loop import steps
    from ftcli.training.setup import prepare

    few = dict.fromkeys(("stage3_max_live_parameters", "stage3_max_reuse_distance"), 3000)
    ahead = {"stage3_prefetch_bucket_size": 1000, "stage3_param_persistence_threshold": 100}
    patch.setattr(deepspeed, "STAGE_3", deepspeed.STAGE_3 | few | ahead)
    results: dict[str, list[list[float]]] = {}
    for name in ("sft-untied", "sft-lora"):
        for mode in ("none", "selective"):
            section = {"name": str(folder / "untied"), "dropout": 0.0, "gradient_checkpointing": mode}
            run = prepare(cell(folder, name, model=section, train={"max_steps": 3}), cpu=True)
            results.setdefault(name, []).append([step.loss for step in steps(run)])
    return results


@pytest.mark.slow
def test_zero3_with_selective_recomputation_gives_the_curve_without_it(ranks: list[dict[str, Any]]) -> None:
    """The weights of a layer are gathered again between its forward and its recomputation."""
    for rank in ranks:
        for name, (without, again) in rank["recomputed"].items():
            assert again == pytest.approx(without, rel=1e-6), name


@patching
def read_after_evaluation(patch: pytest.MonkeyPatch, folder: Path) -> dict[str, int]:
    """Return how many weights were in flight after an evaluation, and how many this rank was given then."""
    from ftcli.hardware import deepspeed
    from ftcli.loop import steps
    from ftcli.training.evaluation import evaluate
    from ftcli.training.setup import prepare

    # An eighth of the model may be whole at a time, and what is kept until it is used again is less than that.
    few = {"stage3_max_live_parameters": 39_000, "stage3_max_reuse_distance": 20_000}
    patch.setattr(
        deepspeed, "STAGE_3", {**few, "stage3_param_persistence_threshold": 100, "stage3_prefetch_bucket_size": 9300}
    )
    section = {"name": str(folder / "deep"), "dropout": 0.0}
    run: Any = prepare(cell(folder, "sft-untied", model=section, train={"max_steps": 2}), cpu=True)
    list(steps(run))
    evaluate(run)
    status = [parameter.ds_status.name for parameter in run.hardware.unwrap(run.model).parameters()]
    return {"in flight": status.count("INFLIGHT"), "read": len(weights(run)), "all": len(status)}


def test_zero3_weights_are_readable_after_an_evaluation_with_few_live_parameters(inputs: Path) -> None:
    save_tiny_causal(inputs / "deep", tied=False, num_hidden_layers=32)
    main, other = run_on_cpu(read_after_evaluation, inputs, processes=2, profile="zero3")
    assert main["in flight"] > 0 and main["read"] == main["all"] and other["read"] == 0


@patching
def ahead(patch: pytest.MonkeyPatch, folder: Path) -> list[tuple[Any, Any, int]]:
    """Return the prefetch settings of a run whose profile does not set them, then of a run whose profile does.

    That is (elements gathered ahead, elements whole at a time, elements of a layer that are gathered at all).
    """
    from ftcli.hardware import deepspeed
    from ftcli.models.structure import layers_of
    from ftcli.training.setup import prepare

    results = []
    patch.setattr(deepspeed, "PREFETCH_SIZE", 0)
    patch.setattr(deepspeed, "MAX_LIVE_SIZE", 0)
    for settings in ({}, {"stage3_prefetch_bucket_size": 5, "stage3_max_live_parameters": 6}):
        patch.setattr(deepspeed, "STAGE_3", {"stage3_param_persistence_threshold": 100, **settings})
        run: Any = prepare(cell(folder, "sft-untied"), cpu=True)
        zero = run.hardware.accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
        sizes = [weight.ds_numel for weight in layers_of(run.hardware.unwrap(run.model))[0].parameters()]
        cut = sum(size for size in sizes if size > 100)
        assert cut < sum(sizes)
        results.append((zero["stage3_prefetch_bucket_size"], zero["stage3_max_live_parameters"], cut))
    return results


def test_zero3_prefetch_size_is_one_layer_unless_the_profile_sets_it(inputs: Path) -> None:
    for silent, settings in run_on_cpu(ahead, inputs, processes=2, profile="zero3"):
        assert silent == (silent[2], 3 * silent[2], silent[2])
        assert settings[:2] == (5, 6)
