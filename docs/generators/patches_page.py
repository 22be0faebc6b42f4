"""Generate reference/patches.md from the patches that ftcli's modules declare."""

from __future__ import annotations

import importlib
from pathlib import Path

from markup import code, header, table

import ftcli
from ftcli.runtime.patches import REGISTRY, WITHOUT, Patch

HEAD = """\
ftcli replaces or uses some private parts of other libraries. Each use is declared once, in the module that contains it,
with `declare` of `ftcli/runtime/patches.py`. A fast test, `tests/contract/test_patched_apis_exist.py`, checks every
private name against the installed versions. It also fails for a private name that is not declared.

- An **optional** patch improves speed or memory. If the library has another version, or a name is missing, ftcli leaves
  the library alone, logs one warning, and trains the same curve.
- A **required** patch makes a feature or a profile work at all. If a name is missing, ftcli refuses the run before the
  first step with exit code 2. If only the version differs, ftcli logs one line and continues.

Settings that hold for the whole process are restored when the run ends.

The section of an optional patch has the median time of a step and the peak of allocated memory, with the patch and
without it, or the reason why they were not measured.
"""
RECORD = "../explanation/performance.md#what-optional-patches-are-worth"
SWITCH = f"""\
To find out whether a patch causes a problem, leave it out: `{WITHOUT}=NAME,NAME ftcli train RECIPE`. With several
machines, set the variable on all of them. A run that needs a required patch cannot leave the patch out.
"""


def page() -> str:
    """Return the text of the page."""
    package = Path(ftcli.__file__).parent
    for path in sorted(package.rglob("*.py")):
        if " = declare(\n" in path.read_text(encoding="utf-8"):
            importlib.import_module(".".join(path.relative_to(package.parent).with_suffix("").parts))
    patches = sorted((p for p in REGISTRY.values() if p.module.startswith("ftcli.")), key=lambda patch: patch.name)
    lines = [*header("Patches of other libraries", "the patches that ftcli's modules declare"), *HEAD.splitlines(), ""]
    lines += SWITCH.splitlines()
    for title, is_required in (("Optional patches", False), ("Required patches", True)):
        selected = [patch for patch in patches if patch.required is is_required]
        columns = ("Patch", "Library", "Tested versions", "Module")
        rows = [(f"[{p.name}](#{p.name})", p.library, code(p.versions), code(_file(p))) for p in selected]
        lines += ["", f"## {title}", "", *table(columns, rows)]
        for patch in selected:
            lines += ["", *_section(patch)]
    return "\n".join(lines) + "\n"


def _section(patch: Patch) -> list[str]:
    names = [f"- {code(api.replace(':', '.'))}" for api in patch.apis]
    names += [f"- {code(api.replace(':', '.'))} (in newer versions only)" for api in patch.newer_apis]
    lines = [f"### {patch.name}", "", f"{patch.purpose}.", "", f"Without it: {patch.without}", ""]
    lines += [f"Public alternative: {patch.alternative}", ""]
    if patch.measurement:
        has_link = "](../" in patch.measurement.partition(". ")[0]  # else the first sentence is in the record
        lines += [f"{'Measured' if has_link else f'[Measured]({RECORD})'}: {patch.measurement}", ""]
    if patch.unmeasured:
        lines += [f"Not measured: {patch.unmeasured}", ""]
    return [*lines, "Names in use:", "", *names]


def _file(patch: Patch) -> str:
    return patch.module.replace(".", "/") + ".py"
