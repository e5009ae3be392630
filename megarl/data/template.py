"""The chat template that `data.chat_template` gives: a Jinja file, or the template itself."""

import re
from pathlib import Path

from megarl.platform.errors import UserError

RANDOM = re.compile(r"\|\s*random\b|\blipsum\b")
"""Sources of random numbers in a Jinja template."""


def is_template(given: str) -> bool:
    """Return whether `data.chat_template` is the template itself and no file with it."""
    return "{" in given


def read_template(given: str) -> str:
    """Return the text of the template.

    Raises:
        UserError: there is no such file, or it cannot be read.
    """
    if is_template(given):
        return given
    place = Path(given)
    try:
        if place.is_file():
            return place.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{given!r} cannot be read: {error}; give a Jinja file in UTF-8") from error
    raise UserError(f"{given!r} is neither a Jinja template nor a file: name a file, or write the template")


def check_template(given: str) -> None:
    """Look for faults of a template that need no tokenizer; nothing in it runs.

    Raises:
        UserError: it cannot be read, does not parse, or draws random numbers.
    """
    text = read_template(given)
    where = "the template" if is_template(given) else f"the template in {given}"
    try:
        _parse(text)
    except Exception as error:  # also RecursionError, and errors of the compiler of Python
        place = f" (line {line})" if (line := getattr(error, "lineno", None)) else ""
        raise UserError(f"{where} does not parse as Jinja: {error}{place}; mend it") from error
    found = RANDOM.search(text)
    if found:
        raise UserError(
            f"{where} draws random numbers ({found[0].strip()}), so a row would have other tokens in each run and on "
            "each rank: remove that"
        )


def _parse(text: str) -> None:
    """Compile a template as `transformers` does, without computing its constants. Raises any error."""
    from jinja2 import nodes  # most configurations give no template
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """Parses the blocks that mark the assistant's words."""

        tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[GenerationTag, loopcontrols]
    )
    environment.compile(text)
