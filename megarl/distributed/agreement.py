"""Ranks that were started with different configurations or code refuse to go on, and say what differs."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from megarl.distributed.exchange import together
from megarl.platform.secrets import redacted

NUM_SHOWN = 10


def agree(facts: Mapping[str, Any]) -> None:
    """Compare what every rank believes. Collective.

    Args:
        facts: names, as a user knows them, and values whose `repr` tells them apart.

    Raises:
        ValueError: on all ranks alike, with the names whose values differ and the ranks that hold each value; a secret
            is named and not shown.
    """
    beliefs = together(lambda: {name: repr(value) for name, value in facts.items()})
    names = {name for belief in beliefs for name in belief}
    differences = []
    for name in sorted(names):
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank, belief in enumerate(beliefs):
            ranks[belief.get(name, "nothing")].append(rank)
        if len(ranks) > 1:
            plain = {value: redacted({name: value})[name] for value in ranks}
            said = ", ".join(f"{plain[value]} on {_short(holders)}" for value, holders in ranks.items())
            differences.append(f"{name}: {said}")
    if differences:
        more = len(differences) - NUM_SHOWN
        shown = differences[:NUM_SHOWN] + ([f"and {more} more"] if more > 0 else [])
        raise ValueError(
            "the ranks of this job were not started alike; give all the same files and arguments:\n  "
            + "\n  ".join(shown)
        )


def _short(ranks: list[int]) -> str:
    """Rank numbers for people: the first few, and how many."""
    shown = ", ".join(map(str, ranks[:4]))
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}" + (f" ... ({len(ranks)})" if len(ranks) > 4 else "")
