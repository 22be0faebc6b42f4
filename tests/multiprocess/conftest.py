"""One launch for each profile: all small recipes, on one process and under the profile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ftcli.testing import run_on_cpu

from ..support.cells import CELLS, train_cells
from ..support.runner import MakeInputs

Launch = Callable[[str], list[dict[str, Any]]]
WITH_TOWER = ("vision", "vision-lora")  # rows of text do not reach a part of these models
PROCESSES = {"single": 1, "hsdp": 4}  # two copies, each in two shards; 2 for any other profile


@pytest.fixture(scope="session")
def trained(make_inputs: MakeInputs) -> Launch:
    """Return a function that trains all small recipes under a profile, once, and gives what each rank returned.

    What a further test needs to know about these runs is a fact that `train_cells` returns, not a launch.
    """
    folder = make_inputs()
    done: dict[str, list[dict[str, Any]]] = {}

    def launch(profile: str) -> list[dict[str, Any]]:
        if profile not in done:
            names = [*CELLS, "pretrain", "resnet-train", *WITH_TOWER]
            done[profile] = run_on_cpu(train_cells, folder, names, processes=PROCESSES.get(profile, 2), profile=profile)
        return done[profile]

    return launch
