"""A terminal that shows what models, data and users wrote as it is: neither read as markup nor obeyed.

Rich reads `[bold]` and `:warning:` as markup, so a formula such as `\\[x = 5\\]` would vanish.
"""

from typing import Any

from rich.console import Console
from rich.text import Text

from megarl.platform.terminal import visible


class Screen(Console):
    """A console of rich that shows every string as it is written, in tables and titles, too."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **how: Any) -> Text:
        """Return a string as the text that is shown."""
        return super().render_str(visible(text), **how)


def plain(text: str, style: str = "") -> Text:
    """Return a text of rich that shows `text` as it is written."""
    return Text(visible(text), style)


def labelled(label: str, text: str, style: str) -> Text:
    """Return a `text` after a `label` in a style."""
    return Text.assemble((visible(label), style), " ", visible(text))
