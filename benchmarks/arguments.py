"""A parser of command-line options whose help reads like that of `megarl`."""

import argparse
from difflib import get_close_matches
from typing import Any, NoReturn

from megarl.platform.secrets import redact

HEADINGS = {"options": "Options", "positional arguments": "Arguments"}


class _Help(argparse.HelpFormatter):
    """Names defaults that inform, and keeps the lines of the example."""

    def add_usage(self, usage: str | None, actions: Any, groups: Any, prefix: str | None = None) -> None:
        super().add_usage(usage, actions, groups, prefix or "Usage: ")

    def start_section(self, heading: str | None) -> None:
        super().start_section(HEADINGS.get(heading or "", heading))

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        tells = action.option_strings and action.default not in (None, False, "", [], argparse.SUPPRESS)
        return f"{text} [default: %(default)s]".strip() if tells else text


class Arguments(argparse.ArgumentParser):
    """An ArgumentParser that shows examples, and redacts its messages."""

    def __init__(self, *, example: str = "", **keywords: Any) -> None:
        """Declare a command; `example` holds command lines for its help."""
        if example:
            keywords["epilog"] = "\n  ".join(["Example:", *example.splitlines()])
        super().__init__(formatter_class=_Help, allow_abbrev=False, **keywords)

    def error(self, message: str) -> NoReturn:
        """Print the redacted message, and exit with code 2."""
        super().error(redact(message))

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """Raise ArgumentError if `value` is no choice; names the nearest choice if there is one."""
        choices = action.choices or (value,)
        if value not in choices and (close := get_close_matches(str(value), map(str, choices), n=1)):
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}: did you mean {close[0]!r}?")
        super()._check_value(action, value)
