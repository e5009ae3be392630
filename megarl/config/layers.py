"""Files and `a.b.c=value` arguments of the user, each read into a layer of dotted keys that the schema knows.

Later layers override earlier ones. Values are checked elsewhere, except values of other trainers.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from yaml import MarkedYAMLError, YAMLError

from megarl.config.faults import Fault
from megarl.config.foreign import FLAGS, alias, answer_key, answer_values
from megarl.config.links import LINK, parse
from megarl.config.schema import Schema, nest
from megarl.platform.errors import UserError
from megarl.platform.files import similar
from megarl.platform.secrets import REDACTED

COMMAND_LINE = "command line"
YAML = (".yaml", ".yml")
CHECKS = ("--check", "--dry-run")  # what people try in order to check a configuration
UNREADABLE = (YAMLError, ValueError)  # PyYAML raises ValueError for numbers, dates and bytes
_QUOTING = re.compile(r"(tag|alias|anchor|handle) '.*'", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One file, or one argument."""

    origin: str  # the file's name, or COMMAND_LINE
    tree: dict[Any, Any]  # nested, links unresolved


def read_layers(argv: Sequence[str]) -> tuple[list[Layer], list[Fault]]:
    """Read `argv`, YAML files before `a.b.c=value` in any order, into layers in the order in which they apply."""
    layers: list[Layer] = []
    faults: list[Fault] = []
    for argument in sorted(argv, key=lambda argument: "=" in argument):
        try:
            layers.append(_read_override(argument) if "=" in argument else _read_file(argument))
        except UserError as error:
            faults.append(Fault(argument.partition("=")[0], str(error)))
    return layers, faults


def recognise(layer: Layer, schema: Schema) -> tuple[dict[str, Any], list[Fault]]:
    """Return the layer's values by dotted key, and a fault for each key or value that megarl does not have."""
    leaves: dict[str, Any] = {}
    faults: list[Fault] = []
    for written, value in _flatten(layer.tree, schema, ""):
        path = alias(written) if written not in schema and alias(written) in schema else written
        found = list(_key_faults(path, value, schema))
        if path in leaves and leaves[path] != value:
            found.append(Fault(path, f"is given twice, as {leaves[path]!r} and as {value!r}"))
        faults.extend(replace(fault, origin=layer.origin) for fault in found)
        if not found and path in schema and (path in schema.leaves or value):
            leaves[path] = value
    return leaves, faults


def _key_faults(path: str, value: object, schema: Schema) -> Iterator[Fault]:
    if path in schema.leaves:
        for answer in answer_values(path, value):
            yield Fault(path, answer)
    elif path in schema.sections:
        link = LINK.fullmatch(value) if isinstance(value, str) else None
        if not (value is None or value == {} or (link and link["key"] in schema.sections)):
            yield Fault(path, f"is a section with keys of its own, not a value: {value!r}")
    elif (foreign := answer_key(path, value)) is not None:
        if foreign:
            yield Fault(path, foreign)
    else:
        meant = schema.nearest(path)
        hint = f"did you mean {meant}?" if meant else "nothing of this name can be set, remove it"
        yield Fault(path, f"unknown key: {hint}", about=meant)


def _read_file(name: str) -> Layer:
    path = Path(name)
    meant = FLAGS.get(name.lstrip("-").partition(" ")[0])
    if meant:
        raise UserError(f"is a flag of another trainer: write {meant}")
    if name in CHECKS:
        raise UserError("is an option of another command: write megarl config --check CONFIG.yaml")
    if name.startswith("-") or path.suffix not in YAML:
        raise UserError("is neither a YAML file nor a.b.c=value")
    if not path.is_file():
        raise UserError(f"no such file{similar(path)}")
    try:
        tree = parse(path.read_text(encoding="utf-8")) or {}
    except UNREADABLE as error:
        raise UserError(f"is not valid YAML: {_say(error)}") from error
    if not isinstance(tree, dict):
        raise UserError("must hold keys and values at its top level")
    return Layer(origin=name, tree=tree)


@lru_cache(maxsize=256)  # a planner tries many variants of one command line
def _read_override(argument: str) -> Layer:
    if argument.startswith("~"):
        raise UserError("keys cannot be removed: set it to another value")
    key, _, value = argument.lstrip("+").partition("=")
    try:
        return Layer(origin=COMMAND_LINE, tree=nest({key: parse(value)}))
    except UNREADABLE as error:
        raise UserError(f"its value is not valid YAML: {_say(error)}") from error


def _flatten(node: dict[Any, Any], schema: Schema, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value and path not in schema.leaves:
            yield from _flatten(value, schema, path + ".")
        else:
            yield path, value


def _say(error: Exception) -> str:
    """Describe the error in one line without the values that it quotes: only the key may show that one is secret."""
    words = str(error)
    if isinstance(error, MarkedYAMLError):  # its own words may show the line
        words = " ".join(part for part in (error.context, error.problem) if part)
        mark = error.problem_mark
        if mark:
            words += f" (line {mark.line + 1}, column {mark.column + 1})"
    return " ".join(_QUOTING.sub(rf"\1 '{REDACTED}'", words).split())
