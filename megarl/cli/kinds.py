"""The kinds of values that options accept."""

import re
from typing import Any

import click

UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class Amount(click.ParamType):
    """A number of bytes, or of bytes per second."""

    name = "amount"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse `80GB`, `79.6GiB` or `45GB/s`."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(rf"\s*([\d.]+)\s*({'|'.join(UNITS)})(/s)?\s*", value)
        if not match:
            self.fail(
                f"{value!r} is not a number with one of the units {', '.join(UNITS)}: for example 80GB", param, ctx
            )
        return int(float(match[1]) * UNITS[match[2]])
