"""The registry of patches: every replacement or use of a private part of another library.

Each module declares the patches that it uses, with `declare`. This module imports no library.

An optional patch improves speed or memory. Outside its tested versions, or when a name that it uses is missing, ftcli
leaves the library alone and logs one warning. A required patch makes a feature or a profile work at all. When a name
that it uses is missing, ftcli raises `InputError` before the first step.
"""

from __future__ import annotations

import dis
import hashlib
import importlib
import importlib.metadata
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from types import CodeType, ModuleType
from typing import Any

from ftcli.runtime.errors import InputError, nearest
from ftcli.runtime.log import log_line

# Names of patches, separated by commas. The optional ones are left out; a required one is refused.
WITHOUT = "FTCLI_WITHOUT_PATCHES"
# All names, because a misspelt one must be noticed before the module of each patch is imported.
NAMES = (
    "accelerate-state", "adamw-8bit-kernels", "adapter-merging", "adapter-switch", "attention-of-a-model",
    "attention-schemas", "causal-loss", "compile-options", "compiled-checkpoints", "compiled-layers",
    "compiling-processes", "deepspeed-cpu-extension", "deepspeed-partitions", "deepspeed-release", "document-scores",
    "flash-attention-calls", "float32-modules", "float8-products", "foreach-gradients", "fork-server",
    "four-bit-outputs", "fsdp-16-bit-gradients", "fsdp-constant-sizes", "fsdp-embeddings", "fsdp-on-cpu",
    "fsdp-small-unit", "fused-lengths", "import-structure", "json-columns", "launcher-environment",
    "launcher-variables", "layers-of-a-model", "liger-kernels", "liger-rotary", "lora-scaling", "nccl-pending-works",
    "new-heads", "padding-masks", "template-environment", "tensor-versions", "views-of-weights",
    "weight-names-in-files", "zero3-16-bit-gradients", "zero3-16-bit-weights", "zero3-compiled-linear",
    "zero3-exact-bias", "zero3-gather-stream", "zero3-gathered-layers", "zero3-gradient-buffer",
    "zero3-gradient-memory", "zero3-hidden-hooks", "zero3-hook-functions", "zero3-leaf-passes", "zero3-quiet-hooks",
    "zero3-rounded-shards", "zero3-small-weights", "zero3-step", "zero3-stream-waits", "zero3-unread-norm",
)  # fmt: skip
REGISTRY: dict[str, Patch] = {}
_logged: set[str] = set()  # patches whose warning was logged in this process


@dataclass(frozen=True)
class Patch:
    """One patch, or one use of private names, of one library.

    `apis` are the names in use, each as `module:name`. A name with dots leads through attributes. Its last part may
    also be an attribute that the code of its owner assigns, or a parameter or a text constant of a function.
    `newer_apis` are names that only some of the tested versions have; the code that uses one looks for it first.
    """

    name: str
    module: str
    library: str
    versions: str
    purpose: str
    without: str
    alternative: str
    apis: tuple[str, ...]
    newer_apis: tuple[str, ...] = ()
    required: bool = False
    measurement: str = ""
    unmeasured: str = ""
    also: Callable[[], str | None] | None = None

    @property
    def installed(self) -> str | None:
        """The installed version of the library; None when it is not installed."""
        return _installed(self.library)

    def missing(self) -> str | None:
        """Return the first name that the installed library lacks, as text; None when it has all of them.

        Imports the modules that the names are in.
        """
        for api in self.apis:
            if not has_api(api):
                return f"{self.library} {self.installed} has no {api.replace(':', '.')}"
        return None if self.also is None else self.also()

    def untested(self) -> str | None:
        """Return a text that names the installed and the tested versions; None when the installed version is tested."""
        from packaging.specifiers import SpecifierSet

        if self.installed is None or SpecifierSet(self.versions).contains(self.installed, prereleases=True):
            return None
        return f"{self.library} {self.installed} is installed, and the patch was tested with {self.versions}"

    def problem(self) -> str | None:
        """Return the reason why an optional patch is not used, as text; None when the patch is used."""
        if self.name in names_left_out():
            return f"{WITHOUT} contains {self.name}"
        return _problem(self.name)

    def is_usable(self) -> bool:
        """Return whether an optional patch is used. The first refusal of a process is logged on rank 0.

        A library that is not installed needs no warning: the code that needs it reports that.
        """
        problem = self.problem()
        if problem is not None and self.installed is not None:
            self._log(f"patch {self.name} is left out: {problem}. {self.without}")
        return problem is None

    def require(self) -> None:
        """Check a required patch. An untested version that has all names is logged once and accepted.

        Raises:
            InputError: A name is missing. The message has the library, its version, the tested range and a remedy.
        """
        problem = f"{WITHOUT} leaves {self.name} out" if self.name in names_left_out() else _missing(self.name)
        if problem is not None:
            raise InputError(
                f"{problem}, and ftcli needs it (patch {self.name}, tested with {self.library}{self.versions}). "
                f"{self.purpose}. {self.without}",
                hint=f"pip install '{self.library}{self.versions}'; {self.installed or 'no version'} is installed"
                + (f", and {WITHOUT} must not contain {self.name}" if self.name in names_left_out() else ""),
            )
        if (untested := _untested(self.name)) is not None:
            self._log(f"patch {self.name}: {untested}; all names that it uses exist, so ftcli uses it")

    def _log(self, text: str) -> None:
        if self.name not in _logged:
            log_line(text)
        _logged.add(self.name)


def declare(
    module: str,
    name: str,
    *,
    library: str,
    versions: str,
    purpose: str,
    without: str,
    alternative: str,
    apis: tuple[str, ...],
    newer_apis: tuple[str, ...] = (),
    required: bool = False,
    measurement: str = "",
    unmeasured: str = "",
    also: Callable[[], str | None] | None = None,
) -> Patch:
    """Add a patch to the registry and return it. An optional patch needs a measurement, or a reason why it has none.

    Args:
        module: The module that uses the patch, `__name__`.
        name: A short name that is unique in the registry.
        library: The name of the distribution, as pip installs it; `python` for the standard library.
        versions: The tested versions, as pip writes them.
        purpose: What the patch does.
        without: What happens without the patch.
        alternative: The public way to do the same, or why there is none.
        apis: The private names in use (see `Patch`).
        newer_apis: Private names that only some of the tested versions have.
        required: Whether a missing name is an error and not a slower run.
        measurement: What a run takes with and without the patch, on which cell. Each time and size is in
            docs/explanation/performance.md, or on a page that the text links to (Markdown, from docs/reference).
        unmeasured: Why there is no such measurement, in Markdown.
        also: A further check, which returns a problem as text or None.

    Raises:
        ValueError: Another module has declared a patch of this name.
    """
    patch = Patch(
        name=name,
        module=module,
        library=library,
        versions=versions,
        purpose=purpose,
        without=without,
        alternative=alternative,
        apis=apis,
        newer_apis=newer_apis,
        required=required,
        measurement=measurement,
        unmeasured=unmeasured,
        also=also,
    )
    if (other := REGISTRY.get(name)) is not None and other.module != module:
        raise ValueError(f"{module} declares the patch {name}, which {other.module} has declared")
    REGISTRY[name] = patch
    return patch


def has_api(api: str) -> bool:
    """Return whether a name exists, written as in `Patch.apis`. Imports its module.

    Args:
        api: `module:name`. The last part of a dotted name may be an attribute that is assigned in the code of its
            owner (a class, a function or a module), an annotated field of a class, or a parameter or a text constant
            of a function.
    """
    module, _, path = api.partition(":")
    try:
        owner: Any = importlib.import_module(module)
    except ImportError:
        return False
    parts = path.split(".")
    for number, part in enumerate(parts, start=1):
        if not hasattr(owner, part):
            return number == len(parts) and part in _names_inside(owner)
        owner = getattr(owner, part)
    return True


def source_digest(api: str) -> str:
    """Return a short digest of the source text of a function, without decorators of other libraries.

    Args:
        api: `module:name`; a name with dots leads through attributes. Imports its module.
    """
    module, _, path = api.partition(":")
    owner: Any = importlib.import_module(module)
    for part in path.split("."):
        owner = getattr(owner, part)
    library = f"{os.sep}{module.partition('.')[0]}{os.sep}"
    text = "".join(sorted(inspect.getsource(code) for code in _codes(owner) if library in code.co_filename))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _digest_or_none(api: str) -> str | None:
    """Return the digest of a function; None if it or its source text does not exist."""
    try:
        return source_digest(api)
    except (AttributeError, ImportError, OSError, TypeError):
        return None


def has_changed(known: dict[str, str]) -> Callable[[], str | None]:
    """Return a check for `Patch.also`: the functions that a patch replaces have the text that it was written for.

    Args:
        known: The digest of the text of each function, as `source_digest` returns it.
    """

    def check() -> str | None:
        changed = [api for api, digest in known.items() if _digest_or_none(api) != digest]
        return f"the code of {changed[0].replace(':', '.')} is not the code that was tested" if changed else None

    return check


def private_names(patch: Patch) -> Iterator[str]:
    """Yield every part of the patch's names that begins with one underscore."""
    for api in (*patch.apis, *patch.newer_apis):
        yield from (part for part in api.replace(":", ".").split(".") if part.startswith("_") and part[1:2] != "_")


@cache
def _names_inside(owner: Any) -> frozenset[str]:
    """Return the attributes that the code of an object assigns, its annotated fields, and its parameters."""
    names = {name for code in _codes(owner) for name in _assigned(code)}
    if isinstance(owner, type):
        return frozenset(names.union(*(vars(base).get("__annotations__", ()) for base in owner.__mro__)))
    if callable(owner):
        names |= set(inspect.signature(owner).parameters)
        names |= {text for code in _codes(owner) for text in code.co_consts if isinstance(text, str)}
    return frozenset(names)


def _codes(owner: Any) -> Iterator[CodeType]:
    """Yield the code of a function, of the methods of a class, or of the functions of a module."""
    if isinstance(owner, ModuleType):
        values = [value for value in vars(owner).values() if getattr(value, "__module__", None) == owner.__name__]
    elif isinstance(owner, type):
        values = [value for base in owner.__mro__ for value in vars(base).values()]
    else:
        values = [owner]
    for value in values:
        for function in (value, getattr(value, "__func__", None), getattr(value, "fget", None)):
            yield from _code_of(function)


def _code_of(function: Any) -> Iterator[CodeType]:
    """Yield the code of a function and of those that it closes over, as a decorator does with what it decorates."""
    seen: list[Any] = [function]
    for each in seen:
        if inspect.isfunction(each):
            yield each.__code__
            for cell in each.__closure__ or ():
                inner = getattr(cell, "cell_contents", None) if _is_filled(cell) else None
                if inspect.isfunction(inner) and inner not in seen:
                    seen.append(inner)


def _is_filled(cell: Any) -> bool:
    return cell != type(cell)()


def _assigned(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_ATTR":
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _assigned(constant)


@cache
def _installed(library: str) -> str | None:
    if library == "python":
        import platform

        return platform.python_version()
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def _missing(name: str) -> str | None:
    patch = REGISTRY[name]
    return f"{patch.library} is not installed" if patch.installed is None else patch.missing()


@cache
def _untested(name: str) -> str | None:
    return REGISTRY[name].untested()


def clear_caches() -> None:
    """Clear the cached results of version and name checks; for tests that change them."""
    for function in (_installed, _missing, _untested):
        function.cache_clear()
    _logged.clear()


def _problem(name: str) -> str | None:
    """Return why an optional patch cannot be used. The names are looked up in tested versions only."""
    return _untested(name) or _missing(name)


def names_left_out() -> list[str]:
    """Return the names in the variable; raises `InputError` if it contains a name that no patch has."""
    names = [name.strip() for name in os.environ.get(WITHOUT, "").split(",") if name.strip()]
    for name in names:
        if name not in NAMES and name not in REGISTRY:
            hint = nearest(name, NAMES) or "docs/reference/patches.md lists the names"
            raise InputError(f"{WITHOUT} contains {name}, and no patch has this name", hint=hint)
    return names
