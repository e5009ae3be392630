"""The keys of a launch in the names of megarl, with what became of each of them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megarl.commands.convert.converted import Converted
from megarl.commands.convert.expand import UNKNOWN, links, unset_names
from megarl.commands.convert.flags import Flags, words_of
from megarl.commands.convert.inherit import tree_of
from megarl.commands.convert.launch import Launched
from megarl.config.layers import YAML, Layer, joined, read_layers, recognise
from megarl.config.links import shown
from megarl.config.load import try_layer
from megarl.config.report import other_defaults
from megarl.config.root import Config
from megarl.config.schema import Schema, nest
from megarl.section import flatten

_ENVIRONMENT = "cannot be resolved: there is no variable"
_OPTION = re.compile(r"--config-(name|path|dir)=(.*)", re.DOTALL)


def convert_launch(launched: Launched, *, base: Path) -> Converted:
    """Return the configuration of a launch; the files of Hydra are searched in the directory `base`."""
    flags = Flags.of(launched)
    if flags:
        found = Converted()
        flags.fill(found, flags.read_file(found, launched, base))
    else:
        found = convert_words(launched.words, base=base)
    for word in launched.stray:
        found.decisions[word] = "stands outside of the command: a comment or a blank after a backslash ends it"
    _settle(found, adds_defaults=not flags)
    return found


def convert_file(path: Path) -> Converted:
    """Return the configuration of a YAML file."""
    tree = tree_of(path) or {}  # the reading of layers reports what cannot be read
    flags = Flags.of_file(tree)
    if flags:
        found = Converted()
        flags.fill(found, words_of(tree))
    else:
        found = convert_words([str(path)], base=path.parent)
    _settle(found, adds_defaults=not flags)
    return found


def convert_words(words: Sequence[str], *, base: Path) -> Converted:
    """Return the keys of files and of arguments such as Hydra reads."""
    found = Converted()
    schema = Schema.of(Config)
    readable = []
    for word in joined(words):
        key, _, value = word.partition("=")
        value = found.named(key.lstrip("+"), value)
        if UNKNOWN in key + value:
            found.decisions[word.replace(UNKNOWN, "$(...)")] = "only the script can tell the value: write it"
        elif word.startswith("~"):
            found.decisions[word] = "removes a default of Hydra, and megarl has others"
        elif "=" not in word and not word.endswith(YAML) and not word.startswith("--config-"):
            found.decisions[word] = "is neither a file nor a.b.c=value"
        else:
            readable.append(f"{key}={links(value)}" if "=" in word else word)
            for name in unset_names(value):
                found.comments[key.lstrip("+")] = f"the script takes {name} from the environment"
    environment = dict(found.comments)
    layers, faults = read_layers(list(_with_files(readable, base)))
    for fault in faults:
        found.decisions[fault.path] = fault.message
    for layer in layers:
        recognised = recognise(layer, schema)
        found.keep(recognised.leaves, recognised.remarks)
        for fault in recognised.faults:
            found.decisions[f"{fault.path}={_at(layer.tree, fault.path)}"] = fault.message
    found.comments.update({key: text for key, text in environment.items() if key in found.leaves})
    path = found.leaves.get("trainer.resume_from_path")
    if path and found.leaves.get("trainer.resume_mode") != "resume_path":
        del found.leaves["trainer.resume_from_path"]
        found.dropped[f"trainer.resume_from_path={path}"] = "only trainer.resume_mode=resume_path reads it"
    return found


def _with_files(words: Sequence[str], base: Path) -> Iterator[str]:
    """Yield the words; the file that Hydra's options name comes first, if it is there."""
    options = {match[1]: match[2] for word in words if (match := _OPTION.fullmatch(word))}
    folder = options.get("path") or options.get("dir") or "."
    name = f"{options.get('name', '').removesuffix('.yaml')}.yaml"
    own = next((path for path in (base / folder / name, Path(folder) / name) if path.is_file()), None)
    if own is None:
        yield from words
        return
    yield str(own)
    yield from (word for word in words if not _OPTION.fullmatch(word))


def _settle(found: Converted, *, adds_defaults: bool) -> None:
    """Take out values of wrong types, add the defaults of verl that train differently, and list what does not fit."""
    for _ in range(2):  # a key that was taken out may leave another without a value
        config, faults, broken = try_layer(Layer(origin="", tree=nest(found.leaves)))
        faults = [fault for fault in faults if not fault.message.startswith(_ENVIRONMENT)]
        for fault in faults:
            key = next((key for key in found.leaves if fault.path in (key, *_parents(key))), None)
            value = f"={found.leaves.pop(key)}" if key else ""
            found.decisions[f"{fault.path}{value}"] = fault.message
        if not faults:
            break
    if adds_defaults:
        for key, (ours, theirs) in other_defaults(config, found.leaves, found.remarks).items():
            found.leaves[key] = theirs
            found.comments[key] = f"verl's default; megarl's is {shown(ours)}"
        config, faults, broken = try_layer(Layer(origin="", tree=nest(found.leaves)))
    values = dict(flatten(asdict(config)))
    for remark in found.remarks:
        answer = remark.answer(values)
        if answer:
            written = f"{remark.written}={remark.value}"
            found.dropped.pop(written, None)
            found.decisions[written] = answer
    for fault in broken:
        found.decisions.setdefault(fault.path, fault.message)


def _parents(key: str) -> Iterator[str]:
    parts = key.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts)))


def _at(tree: Mapping[Any, object], path: str) -> object:
    """Return the value at a dotted path of a tree."""
    node: object = tree
    for part in path.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node
