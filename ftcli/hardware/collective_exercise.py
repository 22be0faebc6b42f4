"""Run each collective once with values whose result is known, and each pair of ranks once: `ftcli doctor`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

ELEMENTS = 1024  # numbers that each rank sends to each other


def partners(rank: int, world: int) -> Iterator[int | None]:
    """Yield the partner of a rank in each round of a tournament in which each pair meets once; None: it pauses.

    The circle method: in round r, ranks meet whose numbers add up to r modulo the number of rounds.

    Args:
        rank: The rank.
        world: Number of ranks.
    """
    even = world + world % 2
    for turn in range(even - 1):
        if rank == even - 1:
            other = turn * (even // 2) % (even - 1)
        else:
            other = (turn - rank) % (even - 1)
            other = even - 1 if other == rank else other
        yield other if other < world else None


def exercise_pairs(device: torch.device, begin: Callable[[str], None]) -> None:
    """Exchange a message between each two ranks. A collective.

    Messages go through the communicator of the whole group, so that NCCL's lines have the ranks of the group.

    Args:
        device: Device of the tensors.
        begin: Called with the name of each exchange before it starts.

    Raises:
        RuntimeError: A message arrived with other values.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    for other in partners(rank, world):
        low, high = sorted((rank, world if other is None else other))
        begin("pause" if other is None else f"pair {low}-{high}")
        if other is None:
            continue
        sent = torch.full((ELEMENTS,), float(rank), device=device)
        received = torch.empty_like(sent)
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)])
        for work in works:
            work.wait()
        _check(f"pair {low}-{high}", received, float(other))


def exercise_collectives(device: torch.device, begin: Callable[[str], None]) -> None:
    """Run each collective once and check its result. A collective.

    Args:
        device: Device of the tensors.
        begin: Called with the name of each collective before it starts.

    Raises:
        RuntimeError: A result is wrong.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    own = torch.full((ELEMENTS,), rank + 1.0, device=device)
    wide = torch.full((world * ELEMENTS,), rank + 1.0, device=device)
    total, expected = world * (world + 1) / 2, torch.arange(1.0, world + 1, device=device).repeat_interleave(ELEMENTS)

    begin("broadcast")
    value = own.clone()
    dist.broadcast(value, 0)
    _check("broadcast", value, 1.0)

    begin("all_reduce")
    value = own.clone()
    dist.all_reduce(value)
    _check("all_reduce", value, total)

    begin("all_gather")
    gathered = torch.empty_like(wide)
    dist.all_gather_into_tensor(gathered, own)
    _check("all_gather", gathered, expected)

    begin("reduce_scatter")
    value = torch.empty_like(own)
    dist.reduce_scatter_tensor(value, wide)
    _check("reduce_scatter", value, total)

    begin("all_to_all")
    gathered = torch.empty_like(wide)
    dist.all_to_all_single(gathered, wide)
    _check("all_to_all", gathered, expected)


def _check(name: str, value: torch.Tensor, expected: torch.Tensor | float) -> None:
    """Raise `RuntimeError` if a result has other values. Waits for the device."""
    if not bool((value == expected).all()):
        raise RuntimeError(f"{name} gave wrong values: data is corrupted on its way")
