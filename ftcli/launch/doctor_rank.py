"""Be one rank of `ftcli doctor`: join the others, exchange with each of them, and report each step to a store.

The parent process writes one JSON object to stdin: the address of the store and the settings. Torch is imported before,
so that all ranks import it at the same time.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ftcli.runtime.process import current_rank, local_rank, world_size

BEAT = 0.5  # seconds between two signs of life


def main() -> None:
    """Run the rank: exit code 0 if all steps succeeded, else 1 with the reason in the store."""
    import torch.distributed

    settings = json.loads(sys.stdin.readline())
    rank, store = current_rank(), connect(settings)
    threading.Thread(target=_beat, args=(settings, rank), daemon=True).start()
    steps = iter(range(10**9))
    now = [""]

    def begin(name: str) -> None:
        now[0] = name
        store.set(f"phase/{rank}", json.dumps([next(steps), name]))

    begin("start")
    try:
        _run(torch, store, settings, begin)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        store.set(f"error/{rank}", f"{now[0]}: {reason}")
        store.set("failed", str(rank))
        sys.stdout.flush()
        os._exit(1)  # destroying a group whose peers hang may wait for them
    begin("done")


def connect(settings: dict[str, Any]) -> Any:
    """Return a client of the store."""
    from torch.distributed import TCPStore

    limit = timedelta(seconds=settings["seconds"])
    return TCPStore(settings["host"], settings["port"], is_master=False, wait_for_workers=False, timeout=limit)


def _beat(settings: dict[str, Any], rank: int) -> None:
    """Write a growing number to the store, by a client of its own, until the process ends."""
    store, count = connect(settings), 0
    while True:
        count += 1
        store.set(f"beat/{rank}", str(count))
        time.sleep(BEAT)


def _run(torch: Any, store: Any, settings: dict[str, Any], begin: Callable[[str], None]) -> None:
    """Join the group, exercise it, and measure it if the settings say so. A collective."""
    from ftcli.hardware.collective_exercise import exercise_collectives, exercise_pairs

    on_gpu = settings["device"] == "cuda"
    device = torch.device("cuda", local_rank()) if on_gpu else torch.device("cpu")
    if on_gpu:
        begin("device")
        torch.cuda.set_device(device)
        torch.ones(1, device=device).item()
    if world_size() == 1:
        _measure(store, settings, device, begin)
        return
    begin("join")
    torch.distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=torch.distributed.PrefixStore("group", store),
        rank=current_rank(),
        world_size=world_size(),
        timeout=timedelta(seconds=settings["group_seconds"]),
        device_id=device if on_gpu else None,  # NCCL connects at once
    )
    exercise_pairs(device, begin)
    exercise_collectives(device, begin)
    _measure(store, settings, device, begin)
    torch.distributed.destroy_process_group()


def _measure(store: Any, settings: dict[str, Any], device: Any, begin: Callable[[str], None]) -> None:
    """Measure the device on one rank of each machine, then the collectives, if the settings say so. A collective."""
    if not settings.get("bench"):
        return
    import torch.distributed as dist

    from ftcli.hardware.speed_tests import measure_collectives, measure_device

    begin("bench of the device")
    speeds: dict[str, Any] = measure_device(device) if local_rank() == 0 else {}
    speeds |= {"processes": world_size(), "collectives": []}
    if world_size() > 1:
        dist.barrier()
        begin("bench of collectives")
        speeds["collectives"] = measure_collectives(device)
    if local_rank() == 0:
        store.set(f"speeds/{settings['machine']}", json.dumps(speeds))


if __name__ == "__main__":
    main()
