"""TRL for comparison, where it can be imported.

FTCLI_TRL names a folder that TRL was installed into on its own: pip install --no-deps --target FOLDER trl
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest


@pytest.fixture(scope="session")
def trl() -> Any:
    """Return the module, or skip the test."""
    folder = os.environ.get("FTCLI_TRL")
    if folder is not None and folder not in sys.path:
        sys.path.append(folder)
    return pytest.importorskip("trl")
