"""The one way to replace code of another library, and the table of all such replacements.

A `Patch` names what is replaced, with the reason, the versions it was tested with and the condition for its removal.
`declare` enters it in the table, which `megarl doctor --patches` prints, and imports nothing. `replace` applies it for
the life of the process, `replaced` for a block. Neither stacks: a second replacement takes the place of the first.
"""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from types import MappingProxyType
from typing import Any

from megarl.platform.versions import ENGINES, found_among

DISTRIBUTIONS = MappingProxyType({"vllm": ENGINES})
"""Library -> the distributions that contain it, if it has several."""
ABSENT = object()

_table: "list[Patch]" = []
_originals: dict[tuple[str, str], object] = {}


@dataclass(frozen=True, kw_only=True)
class Patch:
    """Names of one module or class that megarl replaces, for one reason."""

    owner: str
    """`module` or `module:Class`."""
    names: tuple[str, ...]
    library: str
    """The library that makes the replacement necessary, which is not always the owner of the code."""
    versions: str
    """The versions of `library` that the replacement was tested with, e.g. `>=0.16.1,<=0.19.2`."""
    reason: str
    upstream: str
    """An issue or pull request, or the file and function that would have to change."""
    until: str
    """The condition for removal."""

    def __str__(self) -> str:
        return f"{self.owner}.{', '.join(self.names)}"

    @property
    def installed_version(self) -> str | None:
        """The installed version of the library, or None."""
        found = found_among(DISTRIBUTIONS.get(self.library, (self.library,)))
        return next(iter(found.values()), None)

    @property
    def is_tested(self) -> bool:
        """Whether the replacement was tested with the installed version."""
        from packaging.specifiers import SpecifierSet

        found = self.installed_version
        return found is not None and SpecifierSet(self.versions).contains(found, prereleases=True)

    @property
    def is_present(self) -> bool:
        """Whether the installed version has the names at all. Imports the owner."""
        try:
            owner = self.find_owner()
        except (ModuleNotFoundError, AttributeError):
            return False
        return all(hasattr(owner, name) for name in self.names)

    def find_owner(self) -> Any:
        """Import and return the module or class that has the names."""
        module, _, path = self.owner.partition(":")
        return reduce(getattr, path.split(".") if path else [], importlib.import_module(module))

    def original(self, name: str) -> Any:
        """Return the library's own object, also after `replace`."""
        assert name in self.names
        key = (self.owner, name)
        return _originals[key] if key in _originals else getattr(self.find_owner(), name)


def declare(owner: str, *names: str, library: str, versions: str, reason: str, upstream: str, until: str) -> Patch:
    """Enter a replacement in the table and return it. The arguments are the fields of `Patch`."""
    patch = Patch(
        owner=owner, names=names, library=library, versions=versions, reason=reason, upstream=upstream, until=until
    )
    _table.append(patch)
    return patch


def declared() -> Sequence[Patch]:
    """Return the replacements declared by the modules imported so far."""
    return tuple(_table)


def replace(patch: Patch, /, **new: object) -> None:
    """Set each of the patch's names to its new object. A repeated call replaces only the replacement."""
    assert new.keys() == set(patch.names)
    owner = patch.find_owner()
    for name, value in new.items():
        if hasattr(owner, name):
            _originals.setdefault((patch.owner, name), getattr(owner, name))
        setattr(owner, name, value)


@contextmanager
def replaced(patch: Patch, /, *, on: object = None, **new: object) -> Iterator[None]:
    """Set the patch's names to new objects within the block; blocks may nest.

    `on` is the one instance of the owner to change, instead of the owner itself.
    """
    assert new.keys() == set(patch.names)
    owner = patch.find_owner() if on is None else on
    before = {name: vars(owner).get(name, ABSENT) for name in new}
    try:
        for name, value in new.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is not ABSENT:
                setattr(owner, name, value)
            elif name in vars(owner):
                delattr(owner, name)
