"""Generate reference/profiles.md: the keys that a profile may have, and the profiles that come with ftcli."""

from __future__ import annotations

from typing import Any

from markup import code, header, table

from ftcli.config.profile_schema import REFUSED, SECTIONS, TOP
from ftcli.runtime.resources import shipped_files

FOLDER = "accelerate_configs"
HEAD = """\
A profile is an Accelerate configuration file that describes the hardware. [Choose a
profile](../how-to/choose-a-profile.md) compares them. A profile of your own is a file that you
name with `--profile my_profile.yaml`; `accelerate config` writes one. Copy a profile from this page to start.

Values that can change the loss belong in the recipe. ftcli refuses them in a profile, because Accelerate would
silently prefer them. Unknown keys are errors.
"""


def page() -> str:
    """Return the text of the page."""
    lines = [*header("Profiles", "`accelerate_configs/` and the list of known keys"), *HEAD.splitlines()]
    lines += ["", "## Keys", "", *table(("Key", "Values"), _keys("", TOP))]
    for section, keys in SECTIONS.items():
        lines += ["", f"### {section}", "", *table(("Key", "Values"), _keys(f"{section}.", keys))]
    lines += ["", "## Refused keys", ""]
    lines += ["A refused key may have the value in the last column, because that value changes nothing.", ""]
    refused = [(code(key), reason, _values(allowed)) for key, (reason, allowed) in REFUSED.items()]
    lines += table(("Key", "Reason, or what to do", "Allowed value"), refused)
    for name, file in shipped_files(FOLDER).items():
        text = file.read_text(encoding="utf-8")
        lines += ["", f"## {name}", "", "```yaml", text.rstrip("\n"), "```"]
    return "\n".join(lines) + "\n"


def _keys(prefix: str, keys: dict[str, Any]) -> list[tuple[str, str]]:
    return [(code(prefix + key), kind if isinstance(kind, str) else _values(kind)) for key, kind in keys.items()]


def _values(values: tuple[object, ...]) -> str:
    shown = ["empty" if value in (None, {}, []) else code(_value(value)) for value in values]
    return ", ".join(dict.fromkeys(shown))


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
