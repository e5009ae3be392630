"""A rule: a check between sections, and the keys that the check reads.

A rule names its keys so that it is skipped if a key has a fault: a misspelt batch size should not also be reported as a
batch size that does not divide.
"""

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import Generic, TypeVar

from megarl.config.faults import Fault

C = TypeVar("C", contravariant=True)  # a rule of what two roots share is a rule of each


@dataclass(frozen=True, kw_only=True)
class CheckContext:
    """Facts that rules may know besides the configuration."""

    world_size: int | None  # ranks the launcher started; None before a launch
    check_paths: bool
    writes: bool = True  # whether the command writes the directories of the run


Check = Callable[[C, CheckContext], Iterator[Fault]]


@dataclass(frozen=True, kw_only=True)
class Rule(Generic[C]):
    """A check and the keys (or sections) that it reads."""

    reads: tuple[str, ...]
    check: Check[C]

    def reads_any(self, paths: Set[str]) -> bool:
        """Tell whether one of `paths` is, contains or lies within a key that the rule reads."""
        pairs = ((path + ".", key + ".") for path in paths for key in self.reads)
        return any(path.startswith(key) or key.startswith(path) for path, key in pairs)


def rule(rules: list[Rule[C]], *reads: str) -> Callable[[Callable[[C], Iterator[Fault]]], None]:
    """Return a decorator that adds to `rules` a check that reads the keys `reads`, and nothing else."""
    return lambda check: rules.append(Rule(reads=reads, check=lambda config, context: check(config)))


def rule_in_context(rules: list[Rule[C]], *reads: str) -> Callable[[Check[C]], None]:
    """Return a decorator that adds to `rules` a check that reads the keys `reads`, and the context."""
    return lambda check: rules.append(Rule(reads=reads, check=check))
