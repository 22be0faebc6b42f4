"""Define the base class of recipe sections, and the types and texts that several sections use.

Light: never imports torch.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ftcli.runtime.reader_errors import path_problem

MOST = 10**12  # rows, steps or tokens: far above any real number, and far below the limit of 64 bits


def _possible(path: str) -> str:
    """Return a path, or a name on the hub; raise `ValueError` for a text that can be neither."""
    if problem := path_problem(path):
        raise ValueError(f"this path {problem}")
    return path


def _countable(number: float) -> float:
    """Return a number of rows, steps or tokens; raise `ValueError` for an impossibly large one."""
    if number > MOST:
        raise ValueError(f"is more than {MOST:,}")
    return number


def repository_problem(name: str) -> str:
    """Return why a text cannot name a repository on the hub; an empty string if it can.

    The rules are those of `huggingface_hub.utils.validate_repo_id`, without its import.
    """
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name, re.ASCII) or re.search(r"[.-](/|$)", name):
        return "has the form owner/name or name, of letters, digits, -, _ and . (- and . not at an end)"
    if "--" in name or ".." in name or name.endswith(".git"):
        return "contains no '--' and no '..', and does not end in '.git'"
    return f"has at most 96 characters, but these are {len(name)}" if len(name) > 96 else ""


def _repository(name: str) -> str:
    """Return the name of a repository; raise `ValueError` if no repository can have it."""
    if problem := repository_problem(name):
        raise ValueError(f"is not the name of a repository, which {problem}")
    return name


Countable = AfterValidator(_countable)
PositiveInt = Annotated[int, Field(ge=1), Countable]
CountInt = Annotated[int, Countable]
CountFloat = Annotated[float, Countable]
RepositoryName = Annotated[str, AfterValidator(_repository)]
PathText = Annotated[str, AfterValidator(_possible)]
MACHINE_HINT = "Machine hint: does not affect the loss."


class Section(BaseModel):
    """A section of a recipe: unknown keys are errors, types are strict, and values are frozen."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True, allow_inf_nan=False)
