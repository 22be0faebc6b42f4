"""Change settings of other libraries that are valid for the whole process, and restore them when a run ends.

At most one run owns the changes. The next `prepare` in the process restores the changes of the previous run.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
_undo: list[Callable[[], object]] = []  # the newest last
_owner: Settings | None = None


class Settings:
    """The settings that one run changed; a context manager that restores them."""

    def __init__(self) -> None:
        self._has_owned = False

    def __enter__(self) -> Settings:
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()

    def own(self) -> None:
        """Make this run the owner of all changes that are not restored yet."""
        global _owner
        _owner, self._has_owned = self, True

    def is_replaced(self) -> bool:
        """Return whether a later run has begun to change settings, which restored those of this run."""
        return self._has_owned and _owner is not self

    def restore(self) -> None:
        """Restore all settings, the newest first, unless another run owns them."""
        if _owner is self:
            restore_all()


def change(owner: Any, name: str, value: Any) -> None:
    """Set an attribute of a module or a configuration object until the run ends.

    Args:
        owner: The object that has the attribute.
        name: The attribute, which exists.
        value: Its new value.
    """
    on_restore(functools.partial(setattr, owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def on_restore(undo: Callable[[], object]) -> None:
    """Add a function that is called when the settings are restored. The functions are called newest first.

    Args:
        undo: A function without arguments. Its result is ignored.
    """
    _undo.append(undo)


def restore_all() -> None:
    """Restore all settings, the newest first."""
    while _undo:
        _undo.pop()()


def owns_settings(prepare: Callable[P, R]) -> Callable[P, R]:
    """Return a function that gives the object it returns, a run, the settings that were changed meanwhile.

    The settings of an earlier run are restored first. Those of this run are restored when it raises, when the run is
    deleted by Python, and by `run.settings.restore()`. Calls may be nested: the outer one then owns the settings.
    """

    @functools.wraps(prepare)
    def owning(*args: P.args, **kwargs: P.kwargs) -> R:
        restore_all()
        settings = Settings()
        settings.own()
        try:
            run: Any = prepare(*args, **kwargs)
        except BaseException:
            restore_all()
            raise
        settings.own()
        run.settings = settings
        weakref.finalize(run, settings.restore).atexit = False
        return run

    return owning
