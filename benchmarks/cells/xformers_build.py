"""Let xformers run PyTorch's flash kernel where its compiled part is for another version of CUDA.

The wheel of xformers 0.0.35 is built for CUDA 12.8. Beside a torch for CUDA 13 its compiled part cannot be loaded, and
Unsloth then uses PyTorch's attention, which has no kernel for several documents in one row. The flash kernel that
xformers chooses is the one in PyTorch, which does not need this part.
"""

from __future__ import annotations

import importlib
import importlib.util


def accept_other_build() -> None:
    """Make xformers usable if its compiled part cannot be loaded. Call it before `unsloth` is imported."""
    if importlib.util.find_spec("xformers") is None:
        return
    build = importlib.import_module("xformers._cpp_lib")
    if not build._built_with_cuda:
        build._register_extensions = OtherBuild
        build._built_with_cuda = True


class OtherBuild:
    """What xformers returns about its compiled part, for one that was not loaded."""

    def __init__(self) -> None:
        self.build_env: dict[str, str] = {}
