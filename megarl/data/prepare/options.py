"""Options of tasks, as click has them."""

from collections.abc import Iterator, Sequence
from typing import Any

import click

COUNT = click.IntRange(min=0)
AT_LEAST_ONE = click.IntRange(min=1)


class Several(click.Option):
    """An option with one value or more, all words up to the next option: `--num-numbers 3 4`."""

    def __init__(self, names: Sequence[str], **keywords: Any) -> None:
        super().__init__(names, multiple=True, **{"metavar": "VALUE ...", **keywords})

    def type_cast_value(self, ctx: click.Context, value: object) -> object:
        """Return the values as a list."""
        return [*super().type_cast_value(ctx, value)]


def option(names: str, help: str | None = None, **keywords: Any) -> click.Option:
    """Return an option of the type of its default; integers are counts, and the help shows a default that informs.

    `names`, divided by spaces, are those of the option, and of its value if that has another.
    """
    if keywords.get("type", type(keywords.get("default"))) is int:
        keywords["type"] = COUNT
    return click.Option(names.split(), help=help, show_default=bool(keywords.get("default")), **keywords)


def single_values(params: Sequence[click.Parameter], words: Sequence[str]) -> Iterator[str]:
    """Yield the words with the name of an option of several values before each value."""
    names = {name for param in params if isinstance(param, Several) for name in param.opts}
    option = ""
    is_first = False
    for word in words:
        if word.startswith("--"):
            option = word if word in names else ""
            is_first = True
        elif option and not is_first:
            yield option
        else:
            is_first = False
        yield word
