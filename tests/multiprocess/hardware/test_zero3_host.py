"""Patches of ZeRO-3 that spare the host's time and memory: what each one does, and the same bits without it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftcli.runtime import patches
from ftcli.runtime.patches import WITHOUT
from ftcli.testing import environment, run_on_cpu

from ...support.cells import cell
from ...support.patching import patching
from ...unit.training.test_steady_loop import reads

STEPS = 4
NAMES = ("zero3-small-weights", "zero3-gradient-buffer", "zero3-gradient-memory", "zero3-quiet-hooks")
NAMES += ("zero3-gathered-layers", "zero3-unread-norm")  # zero3-stream-waits needs a GPU


@patching
def counted(patch: pytest.MonkeyPatch, folder: Path, precision: str, **changes: Any) -> dict[str, Any]:
    """Return the curve of a run, and what the host did in its last step."""
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero import partition_parameters, stage3

    from ftcli.hardware import deepspeed
    from ftcli.hardware.zero3_step import PARTITIONS
    from ftcli.loop import steps
    from ftcli.training.setup import prepare

    sizes = {"reduce_bucket_size": 20_000, "stage3_param_persistence_threshold": 100, "sub_group_size": 4000}
    patch.setattr(deepspeed, "STAGE_3", sizes)
    count = Counter[str]()

    def counting(owner: Any, name: str, what: str) -> None:
        plain = getattr(owner, name)
        patch.setattr(owner, name, lambda *a, **k: (count.update([what]), plain(*a, **k))[1])

    run: Any = prepare(cell(folder, "sft-untied", precision=precision, train={"max_steps": STEPS}, **changes), cpu=True)
    zero = run.model.optimizer
    partitions, held = getattr(zero, PARTITIONS).values(), []

    def memory() -> dict[int, int]:
        return {part.untyped_storage().data_ptr(): part.untyped_storage().size() for part in partitions}

    counting(torch.distributed, "all_gather_into_tensor", "gathers")
    counting(comm, "all_gather_into_tensor", "gathers")  # DeepSpeed's own
    counting(torch.nn.Module, "named_parameters", "searches for weights")
    counting(torch, "_foreach_copy_", "copies of many")
    counting(torch, "split_with_sizes_copy", "copies of layers")
    counting(partition_parameters.MultipleAllGatherHandles, "wait", "waits")
    counting(get_accelerator(), "range_push", "ranges")
    counting(stage3, "is_invalid_grad_norm", "norms read")
    run.hardware.unwrap(run.model).register_forward_pre_hook(lambda *_: held.append(sum(memory().values())))
    update, on_buffer = zero._optimizer_step, []

    def observed(group: int) -> None:
        gradient = zero.fp32_partitioned_groups_flat[group].grad
        on_buffer.append(gradient.untyped_storage().data_ptr() in memory())
        update(group)

    zero._optimizer_step = observed
    add, during = zero.partition_grads, []

    def recorded(*arguments: Any) -> Any:
        added = add(*arguments)
        during.append(sum(memory().values()))
        return added

    zero.partition_grads = recorded
    step, in_step = zero.step, Counter[str]()

    def counted_step() -> None:
        before = count["gathers"]
        step()
        in_step["gathers"] = count["gathers"] - before

    zero.step = counted_step
    losses = []
    for one in steps(run):
        losses.append((one.loss, one.grad_norm))
        last = dict(count)
        count.clear()
    small = len(zero.persistent_parameters)
    run.hardware.release(run.model)
    return {
        "curve": losses,
        "gathers in a step": in_step["gathers"],
        "small weights": small,
        "on buffer": all(on_buffer),
        "bytes held": max(held[2 * run.plan.accumulation :: run.plan.accumulation]),
        "bytes after each bucket": during[: len(during) // STEPS],
        "windows": run.plan.accumulation,
        **last,
    }


def all_and_without_each(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the results of `counted` with all patches (under ""), and without each of them; then both in float32.

    Those under "skipping" are from a run with all patches that skips steps that are not finite. "reads" are the places
    where steps read a value of the device, with all patches and without the one for the norm.
    """
    results = {"skipping": counted(folder, "bf16", faults={"non_finite": "skip"}), "reads": {}}
    for name in ("", "zero3-unread-norm"):
        patches.clear_caches()
        with environment(**{WITHOUT: name}):
            results["reads"][name] = reads(folder, "sft-untied", precision="bf16")
    for name in ("", *NAMES):
        patches.clear_caches()
        with environment(**{WITHOUT: name}):
            results[name] = counted(folder, "bf16")
    for name in ("", ",".join(NAMES)):
        patches.clear_caches()
        with environment(**{WITHOUT: name}):
            results[f"fp32 {name}".strip()] = counted(folder, "fp32")
    return results


@pytest.fixture(scope="module")
def ranks(inputs: Path) -> list[dict[str, dict[str, Any]]]:
    return run_on_cpu(all_and_without_each, inputs, processes=2, profile="zero3")


def test_zero3_host_patches_do_not_change_a_bit_of_the_curve(ranks: list[dict[str, dict[str, Any]]]) -> None:
    for rank in ranks:
        curve = rank[""]["curve"]
        assert len(curve) == STEPS
        assert {name: rank[name]["curve"] == curve for name in NAMES} == dict.fromkeys(NAMES, True)
        in_float32 = [result["curve"] for name, result in rank.items() if name.startswith("fp32")]
        assert len(in_float32) == 2 and in_float32[0] == in_float32[1]


def test_zero3_step_gathers_all_small_weights_at_once(ranks: list[dict[str, dict[str, Any]]]) -> None:
    for rank in ranks:
        without = rank["zero3-small-weights"]
        assert without["gathers in a step"] == without["small weights"] > 1
        assert rank[""]["gathers in a step"] == 1


def test_zero3_step_uses_the_buffer_of_gradients_itself(ranks: list[dict[str, dict[str, Any]]]) -> None:
    for rank in ranks:
        without = rank["zero3-gradient-buffer"]
        assert not without["on buffer"] and rank[""]["on buffer"]
        assert rank[""]["copies of many"] > without["copies of many"]


def test_zero3_gradients_have_no_memory_in_the_next_forward_pass(ranks: list[dict[str, dict[str, Any]]]) -> None:
    for rank in ranks:
        assert rank[""]["windows"] > 1
        assert rank["zero3-gradient-memory"]["bytes held"] > 0 == rank[""]["bytes held"]


def test_zero3_gradients_are_allocated_one_sub_group_after_another(ranks: list[dict[str, dict[str, Any]]]) -> None:
    for rank in ranks:
        growing, at_once = (rank[name]["bytes after each bucket"] for name in ("", "zero3-gradient-memory"))
        assert growing == sorted(growing) and 0 < growing[0] < growing[-1]
        assert set(at_once) == {growing[-1]}


def test_zero3_step_does_not_read_the_norm_unless_bad_steps_are_skipped(ranks: list[dict[str, dict[str, Any]]]) -> None:
    for rank in ranks:
        assert "norms read" not in rank[""]
        assert rank["zero3-unread-norm"]["norms read"] == rank["skipping"]["norms read"] == 1


def test_steady_loop_under_zero3_reads_no_value(ranks: list[dict[str, dict[str, Any]]]) -> None:
    for rank in ranks:
        assert rank["reads"][""] == []
        assert any("deepspeed/runtime" in place for place in rank["reads"]["zero3-unread-norm"])


def test_zero3_hooks_do_not_search_for_weights_or_mark_ranges(ranks: list[dict[str, dict[str, Any]]]) -> None:
    for rank in ranks:
        without = rank["zero3-quiet-hooks"]
        assert without["ranges"] > 100 and "ranges" not in rank[""]
        assert rank[""].get("searches for weights", 0) < without["searches for weights"] / 3


def test_zero3_layer_is_copied_and_waited_for_once(ranks: list[dict[str, dict[str, Any]]]) -> None:
    for rank in ranks:
        without = rank["zero3-gathered-layers"]
        assert "copies of layers" in rank[""] and rank[""]["waits"] < without["waits"] / 3
        assert rank[""]["copies of layers"] > without["copies of layers"]  # those of small weights


SIZES = ((7,), (64,), (1,), (5, 6), (3,))


def gathered() -> list[tuple[bool, int]]:
    """Return for each of some small weights whether it is whole again, and the last bits of its address."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    from ftcli.hardware.cpu_simulation import start_on_cpu
    from ftcli.hardware.zero3_step import gather

    start_on_cpu()
    group = torch.distributed.group.WORLD
    rank, ranks = torch.distributed.get_rank(), group.size()
    weights, values = [], []
    for number, size in enumerate(SIZES):
        value = torch.arange(torch.Size(size).numel()).add(100 * number).view(size)
        value = value.to(torch.bfloat16 if number == 1 else torch.float32)
        length = -(-value.numel() // ranks)
        padded = torch.nn.functional.pad(value.flatten(), (0, ranks * length - value.numel()), value=-1.0)
        weights.append(
            SimpleNamespace(
                data=value.new_empty(0),
                ds_tensor=padded[rank * length :][:length].clone(),
                ds_numel=value.numel(),
                ds_shape=value.shape,
                ds_process_group=group,
                ds_status=ZeroParamStatus.NOT_AVAILABLE,
            )
        )
        values.append(value)
    weights[-1].ds_status = ZeroParamStatus.AVAILABLE  # left alone
    gather(weights)
    assert weights[-1].data.numel() == 0
    assert all(weight.ds_status == ZeroParamStatus.AVAILABLE for weight in weights)
    first = {weight.data.dtype: weight.data.untyped_storage().data_ptr() for weight in weights[:-1]}
    return [
        (torch.equal(weight.data, value), (weight.data.data_ptr() - first[weight.data.dtype]) % 512)
        for weight, value in zip(weights[:-1], values[:-1], strict=True)
    ]


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_gather_makes_small_weights_whole_at_aligned_places(processes: int) -> None:
    for rank in run_on_cpu(gathered, processes=processes, profile="ddp"):
        assert rank == [(True, 0)] * (len(SIZES) - 1)
