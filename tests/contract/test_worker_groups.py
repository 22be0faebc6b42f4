"""How tests are shared out over workers: those that start ranks to one, the others by file."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ..support.worker_groups import TESTS, make_scheduler, starts_ranks

RANKS = "multiprocess/test_profile_matrix.py"
BY_COMMAND = "end_to_end/test_bare_launch.py"  # all its tests are slow
NO_RANKS = "unit/data/test_packing.py"


def groups(expression: str, distribution: str = "loadgroup") -> Any:
    """Return the groups of the three files in a run with this option -m."""
    options = {"dist": distribution, "markexpr": expression, "tx": ["2*popen"], "maxschedchunk": None}
    config: Any = SimpleNamespace(getvalue=options.__getitem__, rootpath=TESTS.parent, option=SimpleNamespace())
    scheduler = make_scheduler(config, None)
    return scheduler and [
        scheduler._split_scope(f"tests/{file}::test_it[a/b]") for file in (RANKS, BY_COMMAND, NO_RANKS)
    ]


def test_make_scheduler_puts_all_files_that_start_ranks_into_one_group() -> None:
    assert groups("slow and not gpu") == ["ranks", "ranks", f"tests/{NO_RANKS}"]
    assert groups("not gpu and not slow") == ["ranks", f"tests/{BY_COMMAND}", f"tests/{NO_RANKS}"]
    assert groups("", "loadfile") is None


def test_starts_ranks_of_every_module_that_imports_the_rank_server_is_true() -> None:
    for path in TESTS.rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        if "import run_on_cpu" in text or "import run_forked" in text:
            assert starts_ranks(path, slow=False), path
