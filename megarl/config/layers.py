"""Files and `a.b.c=value` arguments of the user, each read into a layer of dotted keys that the schema knows.

Later layers override earlier ones. Values are checked elsewhere, except values of other trainers.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from yaml import MarkedYAMLError

from megarl.config.faults import Fault
from megarl.config.foreign import Remark, answer_flag, read_key
from megarl.config.links import LINK, UNREADABLE, escaped, parse
from megarl.config.schema import Schema, nest
from megarl.platform.errors import UserError
from megarl.platform.files import similar
from megarl.platform.secrets import REDACTED

COMMAND_LINE = "command line"
YAML = (".yaml", ".yml")
CHECKS = ("--check", "--dry-run")  # what people try in order to check a configuration
HYDRA = {"-cn": "--config-name", "-cp": "--config-path", "-cd": "--config-dir"}
_INDICATORS = ("'", '"', "|", ">", "!", "&", "*")
"""Beginnings of texts that YAML reads in another way than one without quotes."""
_READ_OTHERWISE = re.compile(r"\n|(?:^|\s)#")
_QUOTING = re.compile(r"(tag|alias|anchor|handle) '.*'", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One file, or one argument."""

    origin: str  # the file's name, or COMMAND_LINE
    tree: dict[Any, object]  # nested, links unresolved


@dataclass(frozen=True, kw_only=True)
class Recognised:
    """A layer in the names of megarl."""

    leaves: dict[str, object] = field(default_factory=dict)  # by dotted key
    faults: list[Fault] = field(default_factory=list)  # of each key or value that megarl does not have
    remarks: list[Remark] = field(default_factory=list)  # on accepted keys of other trainers


def read_layers(argv: Sequence[str]) -> tuple[list[Layer], list[Fault]]:
    """Read `argv`, YAML files before `a.b.c=value` in any order, into layers in the order in which they apply."""
    layers: list[Layer] = []
    faults: list[Fault] = []
    for argument in sorted(joined(argv), key=is_override):
        is_key = is_override(argument)
        try:
            layers.append(_read_override(argument) if is_key else _read_file(argument))
        except UserError as error:
            faults.append(Fault(argument.partition("=")[0] if is_key else argument, str(error)))
    return layers, faults


def is_override(argument: str) -> bool:
    """Return whether an argument is `a.b.c=value`, and no path such as `lr=1e-6/config.yaml`."""
    key, sign, _ = argument.partition("=")
    return bool(sign) and "/" not in key and not os.path.exists(argument)  # noqa: PTH110 - a Path raises if a value is long


def override(key: str, text: str) -> str:
    """Return the argument that sets a key to a text, in quotes if YAML would read another value."""
    written = escaped(text)
    try:
        is_plain = parse(written) == written
    except UNREADABLE:
        is_plain = False
    return f"{key}={written if is_plain else json.dumps(written, ensure_ascii=False)}"


def recognise(layer: Layer, schema: Schema) -> Recognised:
    """Return the layer in the names of megarl."""
    found = Recognised()
    for written, value in _flatten(layer.tree, schema, ""):
        reading = read_key(written, value, schema)
        faults = [Fault(written, reading.answer, missing=reading.missing)] if reading.answer else []
        if not reading.known:
            faults.append(_unknown(written, schema))
        faults.extend(_no_sections(reading.leaves, schema))
        for path, own in reading.leaves.items():
            if path in found.leaves and found.leaves[path] != own:
                faults.append(Fault(path, f"is given twice, as {found.leaves[path]!r} and as {own!r}"))
            if not faults and (path in schema.leaves or own):
                found.leaves[path] = own
        found.faults.extend(replace(fault, origin=layer.origin) for fault in faults)
        if reading.remark and not faults:
            found.remarks.append(reading.remark)
    return found


def joined(argv: Sequence[str]) -> Iterator[str]:
    """Yield the arguments; an option of Hydra with the next one, which is its value."""
    arguments = iter(argv)
    for argument in arguments:
        option = HYDRA.get(argument, argument)
        yield f"{option}={next(arguments, '')}" if option in HYDRA.values() else argument


def _no_sections(leaves: dict[str, object], schema: Schema) -> Iterator[Fault]:
    """Yield a fault for a section that has a value instead of keys."""
    for path, value in leaves.items():
        link = LINK.fullmatch(value) if isinstance(value, str) else None
        follows = link and link["key"] in schema.sections
        is_left = value is None or value == {} or follows
        if path in schema.sections and not is_left:
            yield Fault(path, f"is a section with keys of its own, not a value: {value!r}")


def _unknown(path: str, schema: Schema) -> Fault:
    meant = schema.nearest(path)
    hint = f"did you mean {meant}?" if meant else "nothing of this name can be set, remove it"
    return Fault(path, f"unknown key: {hint}", about=meant)


def _read_file(name: str) -> Layer:
    path = Path(name)
    meant = answer_flag(name)
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
        raise UserError(f"is not valid YAML: {_one_line(error)}") from error
    if not isinstance(tree, dict):
        raise UserError("must hold keys and values at its top level")
    # A key such as `x-small: &small {...}` only gives values a place, for YAML's anchors.
    return Layer(origin=name, tree={key: value for key, value in tree.items() if not str(key).startswith("x-")})


@lru_cache(maxsize=256)  # a planner tries many variants of one command line
def _read_override(argument: str) -> Layer:
    if argument.startswith("~"):
        raise UserError("keys cannot be removed: set it to another value")
    key, _, value = argument.lstrip("+").partition("=")
    try:
        return Layer(origin=COMMAND_LINE, tree=nest({key: _typed(value)}))
    except UNREADABLE as error:
        raise UserError(f"its value is not valid YAML: {_one_line(error)}") from error


def _typed(text: str) -> object:
    """Return the value of an argument. A text without quotes is taken as typed: with line breaks, and without comments.

    YAML would fold the lines of a script or a template, and end the name of a file at ` #`.
    """
    value = parse(text)  # D419
    bare = text.strip()
    is_text = (isinstance(value, str) or bare.startswith("#")) and not bare.startswith(_INDICATORS)
    return bare if is_text and _READ_OTHERWISE.search(bare) else value


def _flatten(node: dict[object, object], schema: Schema, prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in node.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value and path not in schema.leaves:
            yield from _flatten(value, schema, path + ".")
        else:
            yield path, value


def _one_line(error: Exception) -> str:
    """Describe the error in one line without the values that it quotes: only the key may show that one is secret."""
    words = str(error)
    if isinstance(error, MarkedYAMLError):  # its own words may show the line
        words = " ".join(part for part in (error.context, error.problem) if part)
        mark = error.problem_mark
        if mark:
            words += f" (line {mark.line + 1}, column {mark.column + 1})"
    return " ".join(_QUOTING.sub(rf"\1 '{REDACTED}'", words).split())
