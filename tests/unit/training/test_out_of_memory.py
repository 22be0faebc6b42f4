"""What an error about a full device recommends. The error itself: tests/end_to_end/test_faults.py."""

from __future__ import annotations

from ftcli.training.out_of_memory import describe_other_processes

GB = 10**9


def test_describe_other_processes_names_memory_that_is_neither_free_nor_our_own() -> None:
    words = describe_other_processes(free=1 * GB, total=80 * GB, own=19 * GB)
    assert words == ["end the other processes on this device: about 60 GB of 80 GB are theirs"]


def test_describe_other_processes_allows_what_cuda_needs_beside_reserved_memory() -> None:
    assert describe_other_processes(free=1 * GB, total=80 * GB, own=77 * GB) == []
