"""Removal of secrets from every text that leaves the process.

Redaction hides too much rather than too little, but leaves ordinary paths, keys and messages unchanged, and so a text
that was redacted before. It cannot find a secret that no name, format or variable reveals.
"""

import os
import sys
import traceback
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megarl.platform.secret_names import Secrecy, is_secret, secrecy_of_path
from megarl.platform.secret_texts import REDACTED, redact_assigned, redact_shapes, redact_users
from megarl.platform.secret_values import values as secret_values
from megarl.platform.terminal import print_message

if TYPE_CHECKING:
    from logging import LogRecord
    from threading import ExceptHookArgs

__all__ = [
    "REDACTED",
    "READ_CHARACTERS",
    "beginning",
    "format_error",
    "guard_output",
    "is_secret",
    "redact",
    "redacted",
]

READ_CHARACTERS = 1 << 16
"""Characters that `beginning` reads of a text."""


def redact(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return `text` without passwords, tokens, keys and signatures, in time that is linear in its length.

    Secrets are values of the secret variables of `environ` (unchanged, escaped, percent-encoded or in base64),
    `user:password@` of URIs, tokens of known formats, and values of secret names in `NAME=VALUE`.
    """
    for value in secret_values(environ):
        text = text.replace(value, REDACTED)
    return redact_assigned(redact_users(redact_shapes(text)))


def beginning(text: str, length: int) -> str:
    """Return the first `length` characters of the redacted text; redact more, because half a secret is not found."""
    return redact(text[:READ_CHARACTERS])[:length]


def redacted(values: Mapping[str, object], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return nested plain values redacted; below a key with a secret name only None, booleans and '' remain."""

    def clean(value: object, *, hidden: bool) -> object:
        if isinstance(value, Mapping):
            return {key: clean(inner, hidden=hidden or _hides(str(key))) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(clean(item, hidden=hidden) for item in value)
        if value is None or isinstance(value, bool) or value == "":
            return value
        if hidden:
            return REDACTED
        return redact(value, environ) if isinstance(value, str) else value

    return {key: clean(value, hidden=_hides(str(key))) for key, value in values.items()}


def guard_output() -> None:
    """Redact, from now on, all log records, warnings and uncaught errors of this process."""
    import logging  # here, because both do work in every fork, and reward processes fork for each response
    import threading

    make = logging.getLogRecordFactory()
    warn = warnings.formatwarning

    def make_redacted(*args: object, **kwargs: object) -> "LogRecord":
        record = make(*args, **kwargs)
        try:
            text = record.getMessage()
        except Exception as error:  # the arguments do not fit, or cannot be formatted; logging would print all of them
            template = record.msg if isinstance(record.msg, str) else type(record.msg).__name__
            text = f"{template} (its arguments cannot be formatted: {type(error).__name__})"
        record.msg = redact(text)
        record.args = None
        if record.exc_info and record.exc_info[1]:
            record.exc_text = format_error(record.exc_info[1])
        return record

    logging.setLogRecordFactory(make_redacted)
    warnings.formatwarning = lambda *args, **kwargs: redact(warn(*args, **kwargs))
    sys.excepthook = lambda kind, error, trace: print_message(format_error(error))
    threading.excepthook = _report_thread
    sys.unraisablehook = _report_unraisable


def _report_thread(args: "ExceptHookArgs") -> None:
    if args.exc_value and not isinstance(args.exc_value, SystemExit):
        name = args.thread.name if args.thread else "?"
        print_message(f"Exception in thread {name}:\n{format_error(args.exc_value)}")


def _report_unraisable(args: Any) -> None:  # its type in typeshed does not exist at run time
    what = getattr(args.object, "__qualname__", type(args.object).__name__)
    trace = format_error(args.exc_value) if args.exc_value else args.exc_type.__name__
    print_message(f"{args.err_msg or 'Exception ignored in'}: {what}\n{trace}")


def format_error(error: BaseException) -> str:
    """Return the traceback of an error, redacted, as Python prints it."""
    return redact("".join(traceback.format_exception(error)).rstrip("\n"))


def _hides(key: str) -> bool:
    return secrecy_of_path(key) is not Secrecy.NO
