"""Metrics that a task returns become Python's floats, or an error that names them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ftcli.runtime.errors import InputError
from ftcli.training.evaluation import _as_floats


def test_numbers_of_all_kinds_become_floats() -> None:
    numbers: list[Any] = [2, True, np.float32(2), np.int64(2), np.array(2), torch.tensor(2), torch.tensor([2.0])]
    floats = _as_floats({str(key): number for key, number in enumerate(numbers)})
    assert list(floats.values()) == [2, 1, 2, 2, 2, 2, 2] and {type(value) for value in floats.values()} == {float}


@pytest.mark.parametrize("value", [None, "2", 2j, [2], {}, 10**400, np.ones(2), torch.ones(2)])
def test_other_values_are_refused_by_name(value: Any) -> None:
    with pytest.raises(InputError, match=r"the task's `metrics` returned .* for mean, not a"):
        _as_floats({"mean": value})
