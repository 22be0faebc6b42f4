"""What an error about a full device recommends. The error itself: tests/end_to_end/test_faults.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ftcli.training.out_of_memory import _remedies, describe_other_processes

GB = 10**9


def test_describe_other_processes_names_memory_that_is_neither_free_nor_our_own() -> None:
    words = describe_other_processes(free=1 * GB, total=80 * GB, own=19 * GB)
    assert words == ["end the other processes on this device: about 60 GB of 80 GB are theirs"]


def test_describe_other_processes_allows_what_cuda_needs_beside_reserved_memory() -> None:
    assert describe_other_processes(free=1 * GB, total=80 * GB, own=77 * GB) == []


def test_remedies_of_whole_frozen_weights_under_fsdp_shard_them() -> None:
    plan = SimpleNamespace(global_size=8, processes=2, micro_size=1, passes=None)
    recipe = SimpleNamespace(model=SimpleNamespace(batch_norm="frozen"))
    for is_replicated, words in ((True, "set model.shard_frozen to true"), (False, "use more GPUs")):
        hardware = SimpleNamespace(is_replicated=is_replicated, distributed_type="FSDP")
        run: Any = SimpleNamespace(plan=plan, recipe=recipe, recomputed="tiled", hardware=hardware)
        assert _remedies(run)[-1].startswith(words)
