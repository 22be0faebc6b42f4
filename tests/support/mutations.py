"""Seeded mutations of recipes, profiles and data files: of bytes, of lines, and of values inside a YAML document.

Every mutation is a pure function of its seed, so that a failure is repeated by its number alone.
"""

from __future__ import annotations

import copy
import datetime
import functools
import random
from collections.abc import Iterator
from typing import Any

import yaml

# Fragments that readers of YAML, JSON, CSV and text treat specially.
FRAGMENTS = [
    *(": ", "- ", "? ", "| ", "> ", "&a ", "*a", "!foo ", "!!python/name:os.system ", "!!binary ", "%YAML 9.9\n"),
    *("{", "}", "[", "]", ",", "#", '"', "'", "\\", "---\n", "...\n", "\t", "\r", "\0", "\x1b", "\x85", "\ufeff"),
    *("\u2028", "é", "😀", "=", "<<: 5\n", "{[a]: b}", "x: =\n", "2024-13-45", "1:2:3", "0o9", "0x", "-", "+", "."),
    *(".inf", "-.inf", ".nan", "1e999", "9" * 400, "9" * 5000, "[" * 400, "{" * 400, "yes", "NO", "~", "null", "true"),
    *('"\\ud800"', "\\ud800", "\\", "\\x", "\n\n", "a: b: c", "  ", " " * 300, "- - - -", "@", "`", "<<: *a\n"),
]

# Values that a key may wrongly have.
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, 2**64, 10**400, 10**4000, "@huge@", 0.5, -0.5, 1e-300, 1e308),
    *(float("inf"), float("nan"), "", " ", "a", "none", "auto", "null", "1", "1e-4", "0x10", "true", "lora"),
    *("~nouser/x", "~nouser/x.jsonl", "~", "/", ".", "..", "/dev/null", "/proc/self/mem", "/etc/shadow", "./x\0y"),
    *("n" * 300, "n/" * 3000, "n" * 300 + ".jsonl", "é" * 200, "\ud800", "a\nb", "*.jsonl", "[", "data/**/*.jsonl"),
    *("asset:", "asset:nothing", "asset:digits/../../x", "nobody/nothing", "http://", "s3://", "://", "x://y", "hf://"),
    *("%s%s%n", "{}", "${HOME}", "-1", "model", "rows.jsonl", "images", "recipe.yaml"),
    *([], [None], [[]], ["a", "a"], [1, "a"], {}, {"a": 1}, {"path": None}, {"a": {"b": {"c": []}}}, [{}] * 3),
    *(datetime.date(2024, 1, 1), b"bytes"),
]


def mutate_bytes(content: bytes, random_: random.Random) -> bytes:
    """Return content with one to three changes at random places: bytes flipped, cut, doubled or put in."""
    for _ in range(random_.randint(1, 3)):
        at = random_.randrange(len(content) + 1)
        end = min(len(content), at + random_.randint(1, 30))
        kind = random_.randrange(6)
        if kind == 0 and at < len(content):
            content = content[:at] + bytes([content[at] ^ 1 << random_.randrange(8)]) + content[at + 1 :]
        elif kind == 1:
            content = content[:at] + content[end:]
        elif kind == 2:
            content = content[:end] + content[at:end] * random_.choice([1, 2, 50]) + content[end:]
        elif kind == 3:
            content = content[:at]
        elif kind == 4:
            content = content[:at] + bytes(random_.randrange(256) for _ in range(random_.randint(1, 8))) + content[at:]
        else:
            content = content[:at] + random_.choice(FRAGMENTS).encode("utf-8", "surrogatepass") + content[at:]
    return content


def mutate_lines(content: bytes, random_: random.Random) -> bytes:
    """Return content with one line doubled, taken out, moved, indented, or exchanged with another one."""
    lines = content.split(b"\n")
    at, other = random_.randrange(len(lines)), random_.randrange(len(lines))
    kind = random_.randrange(6)
    if kind == 0:
        lines.insert(other, lines[at])
    elif kind == 1:
        del lines[at]
    elif kind == 2:
        lines[at], lines[other] = lines[other], lines[at]
    elif kind == 3:
        lines[at] = b" " * random_.randint(1, 5) + lines[at]
    elif kind == 4:
        lines[at] = lines[at].lstrip()
    else:
        lines[at] += random_.choice(FRAGMENTS).encode("utf-8", "surrogatepass")
    return b"\n".join(lines)


def mutate_values(content: bytes, random_: random.Random, keys: list[str]) -> bytes:
    """Return a YAML document with one or two values exchanged, keys renamed, taken out or added (`keys`: known)."""
    document = copy.deepcopy(_parsed(content))
    for _ in range(random_.randint(1, 2)):
        places = list(_places(document))
        holder, key = random_.choice(places)
        kind = random_.randrange(8)
        if kind < 4:
            holder[key] = copy.deepcopy(random_.choice(VALUES))
        elif kind == 4:
            del holder[key]
        elif kind == 5 and isinstance(holder, dict):
            holder[random_.choice([key[:-1] + "x", key.upper(), key + key, 3, "", "a.b", "x" * 300])] = holder.pop(key)
        elif kind == 6 and isinstance(holder, dict):
            holder[random_.choice(keys)] = copy.deepcopy(random_.choice(VALUES))
        else:
            *above, last = random_.choice(keys).split(".")
            section: Any = document
            for name in above:
                inner = section.get(name)
                section[name] = inner if isinstance(inner, dict) else {}
                section = section[name]
            section[last] = copy.deepcopy(random_.choice(VALUES))
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    return text.replace("'@huge@'", "9" * 5000).encode("utf-8", "surrogatepass")  # Python cannot write it


@functools.cache
def _parsed(content: bytes) -> Any:
    """Return a document as `yaml.safe_load` does. A few files are mutated thousands of times."""
    return yaml.safe_load(content)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (holder, key) of everything in a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)
