"""Let transformers list the modules of its models once in a process instead of twice.

When transformers is imported, it opens each of its two thousand files to find the names that it exports. When its
package `models` is imported, it does so again. The module imports transformers inside functions only.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ftcli.runtime.patches import declare

IMPORT_STRUCTURE = declare(
    __name__,
    "import-structure",
    library="transformers",
    versions=">=5.17,<5.25",
    purpose="Gives transformers' package of models the list of modules that transformers has already made",
    without="transformers then opens its files twice, which takes 0.7 s of processor time in each process.",
    alternative="None: transformers keeps the list under another key than the one that its package of models asks for.",
    apis=(
        "transformers.utils.import_utils:define_import_structure.module_path",
        "transformers.utils.import_utils:define_import_structure.prefix",
    ),
    measurement="The import of transformers' package of models takes "
    "[0.01 s](../explanation/performance.md#two-h100s) of processor time, without it 0.70 to 0.84 s, in three pairs "
    "of processes on a CPU. A step does not depend on it.",
)
PREFIX = "models"


def import_models() -> None:
    """Import `transformers.models`, with the list of modules that the import of transformers has made."""
    import transformers
    from transformers.utils import import_utils

    if f"transformers.{PREFIX}" in sys.modules or not IMPORT_STRUCTURE.is_usable():
        return
    folder, plain = Path(str(transformers.__file__)).parent / PREFIX, import_utils.define_import_structure

    def define(module_path: Any, prefix: str | None = None) -> Any:
        if prefix is None and Path(module_path) == folder / "__init__.py":
            return without_prefix(plain(folder, prefix=PREFIX))
        return plain(module_path, prefix)

    import_utils.define_import_structure = define  # type: ignore[assignment]
    try:
        import transformers.models
    finally:
        import_utils.define_import_structure = plain


def without_prefix(structure: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Return the modules of the package of models, by names that are relative to it.

    Args:
        structure: Required packages -> module -> exported names, of all of transformers: it adds its other modules.
    """
    start = f"{PREFIX}."
    return {
        packages: {name.removeprefix(start): names for name, names in modules.items() if name.startswith(start)}
        for packages, modules in structure.items()
    }
