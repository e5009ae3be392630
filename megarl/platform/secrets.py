"""What must not be shown is blotted out before text leaves the process.

Redacting errs on the side of hiding and changes nothing else: ordinary paths, keys and messages come out as they went
in, and what is redacted once stays as it is. What no name, shape or variable tells is not found.
"""

import argparse
import logging
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

from megarl.platform.secret_names import Telling, is_secret, tells
from megarl.platform.secret_texts import BLOT, blot_named, blot_shapes, blot_users
from megarl.platform.secret_values import values as secret_values

__all__ = ["BLOT", "READ_CHARACTERS", "Parser", "beginning", "guard_output", "is_secret", "redact", "redacted"]

READ_CHARACTERS = 1 << 16
"""Of a text of which the beginning is shown."""


def redact(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return `text` without passwords, tokens, keys and signatures, in time that is linear in its length.

    They are found as `user:password@` of URIs, as what is given to a name that tells (`?token=...`, `'secret': '...'`,
    `password: ...`, `--api-key ...`), by the shape of known tokens, and as values of the variables of `environ` whose
    names tell: as they are, and escaped, in percent form or in base64.
    """
    for value in secret_values(environ):
        text = text.replace(value, BLOT)
    return blot_named(blot_users(blot_shapes(text)))


def beginning(text: str, length: int) -> str:
    """The first `length` characters of what `redact` leaves; it sees more of a giant, as half a secret is not found."""
    return redact(text[:READ_CHARACTERS])[:length]


def redacted(values: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Nested plain values as `redact` leaves them; below a key whose name tells, nothing but None, truth and ''."""

    def clean(value: Any, *, hidden: bool) -> Any:
        if isinstance(value, Mapping):
            return {key: clean(inner, hidden=hidden or _hides(str(key))) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(clean(item, hidden=hidden) for item in value)
        if value is None or isinstance(value, bool) or value == "":
            return value
        if hidden:
            return BLOT
        return redact(value, environ) if isinstance(value, str) else value

    return {key: clean(value, hidden=_hides(str(key))) for key, value in values.items()}


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


def _hides(key: str) -> bool:
    return tells(key) is not Telling.NO
