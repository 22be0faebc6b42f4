"""Micro-batches on the device: in order, one ahead, with facts about their padding."""

from __future__ import annotations

from typing import Any

import torch

from ftcli.models.kernels import padding_masks
from ftcli.training.batches.prefetch import DevicePrefetcher


class Noted:
    """A value of a batch that says when it is copied."""

    def __init__(self, number: int, copied: list[int]) -> None:
        self.number, self.copied = number, copied

    def to(self, device: Any, **options: Any) -> int:
        self.copied.append(self.number)
        return self.number


def test_prefetch_with_a_micro_batch_is_copied_while_the_one_before_is_computed_and_no_sooner() -> None:
    copied: list[int] = []
    batches = [{"value": Noted(number, copied), "name": "kept"} for number in range(4)]
    ahead = DevicePrefetcher(torch.device("cpu")).ahead(batches)
    assert copied == [0]  # on its way before anybody asks
    assert next(ahead) == {"value": 0, "name": "kept"} and copied == [0, 1]
    assert next(ahead)["value"] == 1 and copied == [0, 1, 2]
    assert [batch["value"] for batch in ahead] == [2, 3] and copied == [0, 1, 2, 3]


def test_prefetch_sets_padding_only_while_the_caller_has_the_micro_batch() -> None:
    whole, ended = torch.ones(1, 3, dtype=torch.int64), torch.tensor([[1, 1, 0]])
    seen = []
    for _ in DevicePrefetcher(torch.device("cpu")).ahead([{"attention_mask": whole}, {"attention_mask": ended}, {}]):
        seen.append([known.where for known, _ in padding_masks._current])
    assert seen == [["nowhere"], ["at the end"], []] and padding_masks._current == []


def test_prefetch_with_a_window_without_micro_batches_has_none_on_the_device() -> None:
    assert list(DevicePrefetcher(torch.device("cpu")).ahead([])) == []


def test_prefetch_leaves_entries_removed_by_the_caller_on_the_host() -> None:
    batch = {"ids": torch.arange(3), "more": torch.arange(2)}
    for on_device in DevicePrefetcher(torch.device("cpu")).ahead([batch]):
        on_device.pop("more")
    assert set(batch) == {"ids", "more"}
