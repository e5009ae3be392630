"""What must not be shown is blotted out before text leaves the process.

Redacting errs on the side of hiding and changes nothing else: ordinary paths, keys and messages come out as they went
in, and what is redacted once stays as it is. What no name, shape or variable tells is not found.
"""

import argparse
import logging
import os
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn
from urllib.parse import quote

BLOT = "***"
MIN_VALUE = 8
"""Characters of a variable's value from which on it is looked for in texts; a shorter one may be a common word."""

READ_CHARACTERS = 1 << 16
"""Of a text of which the beginning is shown."""

_NAME = re.compile(
    r"(?:password|passwd|passphrase|secret|authorization"
    r"|(?:^|[^a-z])(?:credential|signature|sig|token"
    r"|(?:api|access|secret|private|account|storage|shared|signing|encryption)[_-]?key(?:[_-]?id)?))$"
)
_OF_TEXT = re.compile(  # tokens that are words of a text, and counts of them
    r"(?:^|[^a-z])(?:added|bos|cls|decoder[_-]start|end|eos|first|image|last|mask|max|min|next|num|pad|per|sep|special"
    r"|start|stop|unk)[_-]?token$"
)
_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_USER = re.compile(r"(?<=:/)(/?)[^\s/?#'\"]*:[^\s/?#'\"]*@")
_USER_WITH_SLASH = re.compile(r"(?<=:/)(/?)[^\s/:@?#'\"]+:(?!\d*(?:[/?#\s'\"]|$))[^\s@'\"]*@")
_SHAPES = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{20,}|(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])|gh[oprsu]_[A-Za-z0-9]{20,}"
    r"|github_pat_\w{20,}|glpat-[\w-]{20,}|xox[abprs]-[\w-]{10,}|AIza[\w-]{35}"
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*)",
    re.DOTALL,
)
_BEARER = re.compile(r"(?i)\b((?:bearer|authorization: *(?:basic|token|api-?key)) +)[\w.~+/-]{8,}=*")
_IN_QUERY = re.compile(r"(?i)(?<=[?&])(key|code|pwd)=[^\s&#;,'\"]+")
_QUOTED = r"b?'[^']*'|b?\"[^\"]*\""
_ASSIGNED = re.compile(
    r"(?P<name>\w[\w.-]{0,80})(?P<between>=|['\"]\s*:\s*)"
    rf"(?P<value>{_QUOTED}|\[[^\]]*\]|\([^)]*\)|\{{[^}}]*\}}|['\"]?[^\s&#;,'\"]+)"
)
_PAIRED = re.compile(  # as headers of HTTP are kept
    r"(?:(?<=[(\[]['\"])|(?<=[(\[]b['\"]))(?P<name>\w[\w.-]{0,80})(?P<between>['\"],\s*)"
    rf"(?P<value>{_QUOTED})(?=[)\]])"
)


def is_secret(name: str) -> bool:
    """Whether what bears this name (a key, a variable, a parameter of a query) is not for everybody's eyes."""
    plain = _WORDS.sub("_", name).lower()
    return bool(_NAME.search(plain)) and not _OF_TEXT.search(plain)


def redact(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """`text` without passwords, tokens, keys and signatures.

    They are found as `user:password@` of URIs, as what is given to a name that tells (`?token=...`, `'secret': '...'`),
    by the shape of known tokens, and as values of the variables of `environ` whose names tell.
    """
    for value in _values(environ):
        text = text.replace(value, BLOT)
    text = _SHAPES.sub(BLOT, text)
    text = _USER_WITH_SLASH.sub(rf"\1{BLOT}@", _USER.sub(rf"\1{BLOT}@", text))
    text = _IN_QUERY.sub(rf"\1={BLOT}", _BEARER.sub(rf"\1{BLOT}", text))
    return _PAIRED.sub(_blot, _ASSIGNED.sub(_blot, text))


def beginning(text: str, length: int) -> str:
    """The first `length` characters of what `redact` leaves; it sees more of a giant, as half a secret is not found."""
    return redact(text[:READ_CHARACTERS])[:length]


def redacted(values: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Nested plain values as `redact` leaves them; below a key whose name tells, nothing but None, truth and ''."""

    def clean(value: Any, *, hidden: bool) -> Any:
        if isinstance(value, Mapping):
            return {key: clean(inner, hidden=hidden or _tells(str(key))) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(clean(item, hidden=hidden) for item in value)
        if value is None or isinstance(value, bool) or value == "":
            return value
        if hidden:
            return BLOT
        return redact(value, environ) if isinstance(value, str) else value

    return {key: clean(value, hidden=_tells(str(key))) for key, value in values.items()}


class Parser(argparse.ArgumentParser):
    """Arguments as argparse reads them; what is wrong with them is said without the secrets in them."""

    def error(self, message: str) -> NoReturn:
        """Say it, and exit with 2."""
        super().error(redact(message))


def guard_output() -> None:
    """Have every logger, and what Python itself says of warnings and uncaught errors, redact from now on."""
    make, warn = logging.getLogRecordFactory(), warnings.formatwarning

    def make_redacted(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        try:
            text = record.getMessage()
        except Exception as error:  # the arguments do not fit, or cannot say what they are; logging would show them all
            told = record.msg if isinstance(record.msg, str) else type(record.msg).__name__
            text = f"{told} (its arguments cannot be told: {type(error).__name__})"
        record.msg, record.args = redact(text), None
        if record.exc_info and record.exc_info[1]:
            record.exc_text = _trace(record.exc_info[1])
        return record

    logging.setLogRecordFactory(make_redacted)
    warnings.formatwarning = lambda *args, **kwargs: redact(warn(*args, **kwargs))
    sys.excepthook = lambda kind, error, trace: print(_trace(error), file=sys.stderr)
    threading.excepthook, sys.unraisablehook = _say_thread, _say_unraisable


def _say_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value and not isinstance(args.exc_value, SystemExit):
        name = args.thread.name if args.thread else "?"
        print(f"Exception in thread {name}:\n{_trace(args.exc_value)}", file=sys.stderr)


def _say_unraisable(args: Any) -> None:  # typeshed's own type for it is not there at run time
    what = getattr(args.object, "__qualname__", type(args.object).__name__)
    trace = _trace(args.exc_value) if args.exc_value else args.exc_type.__name__
    print(f"{args.err_msg or 'Exception ignored in'}: {what}\n{trace}", file=sys.stderr)


def _trace(error: BaseException) -> str:
    return redact("".join(traceback.format_exception(error)).rstrip("\n"))


def _values(environ: Mapping[str, str]) -> Iterable[str]:
    """What to look for, longest first, as one may be a part of another; as it is and as it stands in a URI."""
    found = {value for name, value in environ.items() if len(value) >= MIN_VALUE and is_secret(name)}
    return sorted(found | {quote(value, safe="") for value in found}, key=len, reverse=True)


def _tells(name: str) -> bool:
    """Whether a part of a dotted name says that what is below is secret."""
    return any(map(is_secret, name.split(".")))


def _blot(match: re.Match[str]) -> str:
    if not _tells(match["name"]):
        return match[0]
    opening = re.match(r"b?['\"]|", match["value"])
    mark = opening[0] if opening else ""
    return f"{match['name']}{match['between']}{mark}{BLOT}{mark[-1:]}"
