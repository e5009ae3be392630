"""The values of secret variables, in all encodings that a text may contain."""

import html
import json
import os
import re
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from urllib.parse import quote, quote_plus

from megarl.platform.secret_names import is_secret

MIN_VALUE = 8  # D103
"""Characters of the shortest value that is searched for. A shorter value may be a common word."""

_MIN_LINE = 20
_NUM_ESCAPES = 2  # a message may quote a message
_HEX = re.compile(r"\\u([0-9a-f]{4})")
_MARKUP = re.compile("[<>&]")
_PERCENT = re.compile(r"%[0-9A-F]{2}")


def _json_with_capital_digits(text: str) -> str:
    return _HEX.sub(lambda found: f"\\u{found[1].upper()}", json.dumps(text)[1:-1])


def _json_without_markup(text: str) -> str:
    return _MARKUP.sub(lambda sign: f"\\u{ord(sign[0]):04x}", json.dumps(text, ensure_ascii=False)[1:-1])


_ESCAPES: tuple[Callable[[str], str], ...] = (
    lambda text: repr(text)[1:-1],
    lambda text: repr(f"{text}'\"")[1:-4],  # quotes of both kinds make repr escape one
    lambda text: repr(text.encode(errors="surrogateescape"))[2:-1],
    lambda text: json.dumps(text)[1:-1],
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: ascii(text)[1:-1],
    _json_with_capital_digits,
    lambda text: json.dumps(text)[1:-1].replace("/", "\\/"),
    _json_without_markup,
    html.escape,
)
"""Python's forms, and those of JSON in several languages: PHP escapes the slash, and Go the signs of HTML."""
_SHELL: tuple[Callable[[str], str], ...] = (
    lambda text: text.replace("'", "'\"'\"'"),
    lambda text: text.replace("'", "'\\''"),
    lambda text: re.sub(r"([^\w@%+=:,./-])", r"\\\1", text),
    lambda text: re.sub(r"([\\\"$`])", r"\\\1", text),
)


def values(environ: Mapping[str, str]) -> list[str]:
    """Return the strings to search for, longest first, because one form may be a part of another."""
    secrets = {value for name, value in environ.items() if is_secret(name) and not _is_path(value)}
    return sorted({form for secret in secrets for form in _forms(secret)}, key=len, reverse=True)


def _is_path(value: str) -> bool:
    """Return whether a value is the path of a file, as in GOOGLE_APPLICATION_CREDENTIALS."""
    return value.startswith("/") and os.path.exists(value)  # noqa: PTH110 - Path raises an error if a value is too long for a name


@lru_cache(maxsize=1024)
def _forms(value: str) -> frozenset[str]:
    """Return a value unchanged, escaped, quoted for a shell, percent-encoded and in base64."""
    found = set[str]()
    for plain in _plain(value):
        forms = {plain, *(escape(plain) for escape in _SHELL)}
        for _ in range(_NUM_ESCAPES):
            forms |= {escape(form) for escape in _ESCAPES for form in forms}
        for percent in _quoted(plain):
            forms |= {percent, _PERCENT.sub(lambda match: match[0].lower(), percent)}
        found |= forms | set(_base64(plain.encode(errors="surrogateescape")))
    return frozenset(form for form in found if len(form) >= MIN_VALUE)


def _plain(value: str) -> Iterable[str]:
    """Yield the parts of a value that may occur alone: the full value, and the lines of a key of several lines."""
    stripped = value.strip()
    if len(stripped) >= MIN_VALUE and stripped.strip("*"):
        yield stripped
        for line in stripped.splitlines()[:200]:
            if len(line) >= _MIN_LINE and " " not in line and line != stripped:
                yield line


def _quoted(plain: str) -> tuple[str, ...]:
    content = plain.encode(errors="surrogateescape")
    once = quote(content, safe=""), quote(content), quote_plus(content)
    return *once, *(quote(form, safe="") for form in once)


def _base64(content: bytes) -> Iterable[str]:
    """Yield the encodings of `content` for every offset in the encoded text, as in `user:password`."""
    for encode in (b64encode, urlsafe_b64encode):
        for before in range(3):
            last = (before + len(content)) * 8 // 6
            yield encode(bytes(before) + content).decode()[(before * 8 + 5) // 6 : last]
