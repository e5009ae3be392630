"""A converted configuration as YAML: a comment for each key that has another name, was dropped, or is to be decided."""

from collections.abc import Iterator

import yaml

from megarl.commands.convert.converted import Converted
from megarl.config.links import Dumper
from megarl.config.root import Config
from megarl.config.schema import Schema
from megarl.platform.secrets import redact
from megarl.platform.terminal import visible

_MOST_COLUMNS = 10_000  # a value stays in its line


def to_text(found: Converted, heading: str) -> str:
    """Return the YAML file."""
    lines = [_comment(heading), ""]
    for title, rows in (("To be decided, as it is not in this file", found.decisions), ("Dropped", found.dropped)):
        if rows:
            lines += [_comment(f"{title}:"), *(_comment(f"  {key}: {why}") for key, why in rows.items()), ""]
    order = {key: number for number, key in enumerate(Schema.of(Config).leaves)}
    keys = sorted(found.leaves, key=lambda key: order.get(key, len(order)))
    return "\n".join([*lines, *_nested(keys, found)]) + "\n"


def _nested(keys: list[str], found: Converted) -> Iterator[str]:
    open_sections: list[str] = []
    for key in keys:
        *sections, name = key.split(".")
        shared = 0
        while shared < min(len(sections), len(open_sections)) and sections[shared] == open_sections[shared]:
            shared += 1
        for depth in range(shared, len(sections)):
            yield f"{'  ' * depth}{sections[depth]}:"
        open_sections = sections
        indent = "  " * len(sections)
        if found.comments.get(key):
            yield indent + _comment(found.comments[key])
        yield f"{indent}{_plain(name)}: {_plain(found.leaves[key])}"


def _plain(value: object) -> str:
    """Return a value in one line of YAML."""
    text = yaml.dump(value, Dumper=Dumper, default_flow_style=True, width=_MOST_COLUMNS, allow_unicode=False)
    return text.removesuffix("...\n").strip()


def _comment(text: str) -> str:
    indent = "  " if text.startswith("  ") else ""
    return f"# {indent}{visible(redact(' '.join(text.split())))}"
