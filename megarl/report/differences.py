"""The keys in which a run's configuration differs from the defaults, or from those of other runs."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from megarl.checkpoint.differences import value_at
from megarl.config.links import shown
from megarl.config.reference import REQUIRED
from megarl.config.root import LINKS, root_of
from megarl.config.schema import MANDATORY, Schema
from megarl.section import flatten

OWN_KEYS = ("trainer.default_local_dir", "trainer.experiment_name")
"""Keys that name a run, and differ anyway."""
LINK = re.compile(r"\$\{([\w.]+)\}")


class Difference(NamedTuple):
    """A key with its value and its default."""

    key: str
    value: str
    default: str


def from_default(config: Mapping[str, object]) -> Iterator[Difference]:
    """Yield the keys of a resolved configuration that have another value than their default.

    A key whose default follows another key differs only if it does not follow it.
    """
    root = root_of(config)
    for key, default in {**Schema.of(root).leaves, **LINKS[root]}.items():
        try:
            value = value_at(config, key)
            usual = _follow(config, default)
        except KeyError:  # a file of another version
            continue
        if value != usual:
            yield Difference(key, shown(value), REQUIRED if usual == MANDATORY else shown(usual))


def between(configs: Sequence[Mapping[str, object]]) -> dict[str, list[object]]:
    """Return the values of each key that differs between resolved configurations, in their order.

    Keys that one configuration lacks, because they belong to another command or version, are left out. So are the keys
    that name a run.
    """
    flat = [_values(config) for config in configs]
    shared = set(flat[0]).intersection(*flat)
    common = [key for key in flat[0] if key in shared and key not in OWN_KEYS]
    values = {key: [config[key] for config in flat] for key in common}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def _values(config: Mapping[str, object]) -> dict[str, object]:
    """Return the values of a resolved configuration. A mapping that a user fills (`reward_kwargs`) is one value."""
    leaves = Schema.of(root_of(config)).leaves
    found = dict[str, object]()
    for key, value in flatten(config):
        above = accumulate(key.split("."), "{}.{}".format)
        leaf = next((path for path in above if path in leaves), None)
        found[leaf or key] = value_at(config, leaf) if leaf else value
    return found


def _follow(config: Mapping[str, object], default: object) -> object:
    """Return a default as a file has it, with the values of the keys that it names."""
    if isinstance(default, tuple):
        return list(default)
    if not isinstance(default, str):
        return default
    link = LINK.fullmatch(default)
    if link:
        return value_at(config, link[1])
    return LINK.sub(lambda link: str(value_at(config, link[1])), default)
