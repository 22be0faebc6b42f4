"""Remove credentials from everything that ftcli writes or logs. No other module does this.

Three kinds of credentials are recognised: parts of addresses (userinfo, secrets and signatures in the query), known
forms of tokens and headers, and the values of environment variables with names such as `*_TOKEN`. Redacting twice has
the same result as redacting once. Imports the standard library only, because errors.py imports this module.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

MARK = "REDACTED"
SHORTEST = 8  # least length of a secret in an environment variable, in characters

# An address. It ends at the characters that follow an address in prose, in quotes and in escaped JSON.
_ADDRESS = re.compile(r"(?<![A-Za-z0-9+.-])([A-Za-z][A-Za-z0-9+.-]*://)([^\s\"'<>\\`]+)")
# Userinfo ends at the last @ before the path. A password may contain an unescaped slash. Therefore a name, a colon and
# anything but a port number are the start of userinfo too.
_USERINFO = re.compile(r"^(?:[^/?#]*@|[^/?#:@]+:(?!\d{1,5}(?:[/?#]|$))[^\s@]*@)")
_PARAMETER = re.compile(r"([?&;#])([^=&;#?]+)=([^&;#]*)")
# Names of parameters, of keys in a mapping and of headers.
_SECRET_NAME = re.compile(
    r"token|secret|passw|passphrase|pwd|api[-_]?key|access[-_]?key|private[-_]?key|credential|auth|signature|jwt|sas$"
    r"|^(?:sig|key|pass|code|session|policy|x-(?:amz|goog|ms|oss|cos)-.*)$",
    re.IGNORECASE,
)
_SIGNED = re.compile(r"^(?:sig|signature|x-(?:amz|goog)-signature|hmac)$", re.IGNORECASE)
_RANDOM = re.compile(r"^(?=.*[0-9])(?=.*[A-Za-z])[A-Za-z0-9_\-+/=%.~]{20,}$")  # a long value with letters and digits
_SECRET_KEY = re.compile(
    r"^(?:.*[_-])?(?:api_?key|access_?key|secret(?:_?key)?|private_?key|password|passwd|passphrase|credentials?"
    r"|authorization|(?:access|auth|hf|hub|api|bearer|session|refresh)_?token)$",
    re.IGNORECASE,
)
# Prose, such as "password: reset it": a colon, white space and a plain word. A secret of this form is not redacted.
# The word may end a quoted text, a line of JSON or a tag.
_WORD_END = r"[.,;:!?)\u2026]*(?:\s|$|<|\\[nrt\"]|[\"'\u2019\u201d\u00bb\]})]+[.,;:!?]*(?:\s|$|[\"']))"
_WORD = rf"(?-i:[A-Z]?(?:[^\W\d_A-Z]|['\u2019-]){{0,19}}|[A-Z]{{1,19}}|[\u2013\u2014\u2026]){_WORD_END}"
_SCHEME = r"(?:Bearer|Basic|Digest|Negotiate|Token)"
_SECRET_WORD = r"(?:secret|password|passwd|pwd|passphrase)"
_SHAPES = [
    (re.compile(pattern, flags), MARK if not groups else rf"\g<1>{MARK}")
    for pattern, flags, groups in (
        # Headers and assignments: the text before the secret stays.
        (
            rf"((?!(?<!-)Authorization:\s+(?!{_SCHEME}\s){_WORD})"
            rf"\b(?:Proxy-)?Authorization[\"']?\s*[:=]\s*[\"']?(?:{_SCHEME}\s+)?)"
            rf"(?!{_SCHEME}\s)[^\s\"',;\\]+",
            re.IGNORECASE,
            1,
        ),
        # Words of prose ("Basic Programming") stay: a secret has a digit, a sign, or two capitals after small letters.
        (
            r"((?i:\b(?:Bearer|Basic)\s+))(?=[^\s\"']*(?:[0-9=_]|[a-z][A-Z][^\s\"']*[a-z][A-Z]))"
            r"[A-Za-z0-9_\-.~+/=]{8,}",
            0,
            1,
        ),
        (r"(\b(?:Set-)?Cookie[\"']?\s*:\s*[\"']?)(?=[^\s=;\"']+=)[^\r\n\"'\\]+", re.IGNORECASE, 1),
        (
            rf"((?<![A-Za-z0-9])(?!(?<![_-]){_SECRET_WORD}:\s+{_WORD})"
            rf"(?:api[-_]?key|(?:shared[-_]?)?access[-_]?key(?:[-_]?id)?|account[-_]?key|{_SECRET_WORD}"
            r"|secret[-_]?(?:access[-_]?)?key|(?:access|api|auth|bearer|hf|hub|session|security|refresh)[-_]?token)"
            r"[\"']?\s*[:=]\s*[\"']?)[^\s\"',;&)}\]\\]+",
            re.IGNORECASE,
            1,
        ),
        # An option of a command line and its value, also in the list of a subprocess's arguments.
        (
            r"((?<![\w-])--(?:(?:access|api|auth|bearer|hf|hub|refresh|session)[-_])?"
            r"(?:token|api[-_]key|password|secret)[\"']?,?[=\s]\s*[\"']?)"
            r"(?=[^\s\"',;0-9]{0,200}[0-9])[^\s\"',;]{8,}",
            0,
            1,
        ),
        # Templates and tokenizers have values called token too. These are short, or have other signs.
        (
            r"((?<![A-Za-z0-9_-])token[\"']?\s*[:=]\s*[\"']?)(?=[^\W\d]{0,200}[0-9])(?=[0-9]{0,200}[A-Za-z])"
            r"[A-Za-z0-9_\-]{20,}",
            re.IGNORECASE,
            1,
        ),
        # Tokens with a prefix that identifies the service.
        (r"\bhf_[A-Za-z0-9]{16,}\b", 0, 0),
        (r"\b(?:ghp|gho|ghu|ghs|ghr)_[A-Za-z0-9]{20,}\b|\bgithub_pat_[A-Za-z0-9_]{20,}\b", 0, 0),
        (r"\bglpat-[A-Za-z0-9_\-]{16,}", 0, 0),
        # A name such as sk-learn-text-classification has words between hyphens; a key has a long part with digits.
        (
            r"\bsk-(?=[A-Za-z0-9_\-]{60}|[A-Za-z0-9_\-]{0,60}(?<![A-Za-z0-9])(?=[A-Za-z]{0,40}[0-9])[A-Za-z0-9]{12})"
            r"[A-Za-z0-9_\-]{16,}",
            0,
            0,
        ),
        (r"\bxox[abprs]-[A-Za-z0-9-]{10,}", 0, 0),
        (r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b", 0, 0),
        (r"\bAIza[A-Za-z0-9_\-]{30,}", 0, 0),
        (r"\bey[A-Za-z0-9_\-]{8,}\.ey[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]*", 0, 0),
        (r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", 0, 0),
    )
]
_SECRET_VARIABLE = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASSW|PASSPHRASE|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|CREDENTIAL|_KEY$|_PAT$|_PWD$|AUTH(?!OR(?!I))",
    re.IGNORECASE,
)
_PLAIN_WORD = re.compile(r"[a-z_\-]{1,19}|[A-Z_\-]{1,19}|[0-9.,:\-]+|(?:[A-Za-z]:)?[/\\~].*", re.DOTALL)


def redact(value: T) -> T:
    """Return a value without credentials: a text, or lists and mappings that hold texts.

    In a mapping, a text under a key such as `api_key` or `password` is replaced as a whole. Other types and all keys
    stay as they are.

    Args:
        value: Any value. It is not changed.

    Returns:
        A value of the same type. Credentials are replaced by `REDACTED`.
    """
    return _redacted(value, functools.cache(_environment))  # reads the environment only if the value has a text


def redact_address(address: str) -> str:
    """Return an address without credentials. Unlike `redact`, the result does not depend on the environment."""
    return _ADDRESS.sub(_address, address)


def is_redacted(address: str) -> bool:
    """Return whether `redact` has removed credentials from an address. Such an address cannot be opened."""
    return f"{MARK}@" in address or f"={MARK}" in address


def redact_error(error: BaseException) -> None:
    """Remove credentials from the texts of an exception and of those that caused it, in place."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        each.args = redact(each.args)
        for name in ("filename", "filename2"):  # the text of an OSError contains these, its arguments do not
            if isinstance(path := getattr(each, name, None), str):
                setattr(each, name, redact(path))
        notes = getattr(each, "__notes__", None)
        if notes:
            notes[:] = redact(notes)
        each = each.__cause__ or each.__context__


def _redacted(value: Any, secrets: Callable[[], list[str]]) -> Any:
    """Return a value without credentials; `secrets` returns the secret values of the environment."""
    if isinstance(value, str):
        return _text(value, secrets)
    if isinstance(value, dict):
        return {
            key: MARK
            if isinstance(key, str) and isinstance(item, str) and item and _is_secret_entry(key, item)
            else _redacted(item, secrets)
            for key, item in value.items()
        }
    if type(value) is list or type(value) is tuple:
        return type(value)(_redacted(item, secrets) for item in value)
    return value


def _is_secret_entry(key: str, item: str) -> bool:
    """Return whether the text under a key of a mapping is a credential."""
    return bool(_SECRET_KEY.match(key) or (key.lower() == "token" and _RANDOM.match(item)))


def _text(text: str, secrets: Callable[[], list[str]]) -> str:
    """Return a text without credentials."""
    if "://" in text:
        text = redact_address(text)
    for pattern, replacement in _SHAPES:
        text = pattern.sub(replacement, text)
    for secret in secrets():
        text = text.replace(secret, MARK)
    return text


def _address(match: re.Match[str]) -> str:
    """Return a matched address without userinfo, secret parameters and signatures."""
    scheme, rest = match.groups()
    rest = _USERINFO.sub(f"{MARK}@", rest)
    path, mark, query = rest.partition("?")
    if not mark:
        path, mark, query = rest.partition("#")
    if not mark:
        return scheme + rest
    query = mark + query
    signed = any(_SIGNED.match(name) for _, name, _ in _PARAMETER.findall(query))

    def parameter(match: re.Match[str]) -> str:
        separator, name, value = match.groups()
        is_secret = signed or _SECRET_NAME.search(name) or _RANDOM.match(value)
        return f"{separator}{name}={MARK}" if value and is_secret else match[0]

    query = _PARAMETER.sub(parameter, query)
    if "=" not in query and _RANDOM.match(query[1:]):
        query = mark + MARK
    return scheme + path + query


def _environment() -> list[str]:
    """Return the secret values of this process's environment, the longest first.

    Plain words, numbers and paths are not included, because they occur in ordinary text.
    """
    values = {
        value
        for name, value in os.environ.items()
        if len(value) >= SHORTEST and _SECRET_VARIABLE.search(name) and not _PLAIN_WORD.fullmatch(value)
    }
    return sorted(values, key=len, reverse=True)
