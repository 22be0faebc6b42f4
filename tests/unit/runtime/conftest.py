"""Fixtures of the tests of ftcli/runtime."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from ...support import stand_in_nvml


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Put the stand-in before the real nvidia-ml-py."""
    monkeypatch.syspath_prepend(str(Path(next(iter(stand_in_nvml.__path__)))))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    import pynvml

    yield pynvml
    del sys.modules["pynvml"]
