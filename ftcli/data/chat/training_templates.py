"""List the chat templates that are part of ftcli, for models whose own template does not support training.

Each is a file in `templates/`. A recipe selects one with `task_options.chat_template: NAME`. The first line of a file
is a comment with the added tokens that the format needs. Light: never imports transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from ftcli.runtime.errors import InputError, nearest
from ftcli.runtime.reader_errors import user_path
from ftcli.runtime.resources import PACKAGE

_FOLDER = PACKAGE / "data" / "chat" / "templates"


@dataclass(frozen=True)
class TrainingTemplate:
    """A shipped chat template."""

    name: str
    tokens: tuple[str, ...]  # added tokens that the template writes
    source: str  # Jinja text


@cache
def training_templates() -> dict[str, TrainingTemplate]:
    """Return the shipped templates by name."""
    templates = {}
    for path in sorted(_FOLDER.glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        head = source.partition("\n")[0]
        tokens = head.removeprefix("{#- tokens:").removesuffix("-#}").split()
        templates[path.stem] = TrainingTemplate(path.stem, tuple(tokens), source)
    return templates


def read_template(name: str) -> str:
    """Read the text of `task_options.chat_template`.

    Args:
        name: Path of a file, or name of a shipped template.

    Raises:
        InputError: There is no such file and no such template, or the file is not UTF-8 text.
    """
    key = "task_options.chat_template"
    path = user_path(name, key)
    if not path.exists() and name in training_templates():
        return training_templates()[name].source
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        names = ", ".join(training_templates())
        hint = nearest(name, list(training_templates())) or f"give a file with a Jinja template, or one of {names}"
        raise InputError(f"{key}: cannot read {path.absolute()}: {reason}", hint=hint) from None
