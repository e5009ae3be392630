"""A check that all ranks were started with the same configuration and code."""

from collections import defaultdict
from collections.abc import Mapping

from megarl.distributed.exchange import together
from megarl.platform.errors import UserError
from megarl.platform.secrets import redacted

NUM_SHOWN = 10


def agree(facts: Mapping[str, object]) -> None:
    """Compare the facts of all ranks. Collective.

    Args:
        facts: values by the names that a user knows; values are equal if their `repr` is equal.

    Raises:
        UserError: on all ranks, if values differ. The message has their names and the ranks that hold each value; of a
            secret only the name.
    """
    by_rank = together(lambda: {name: repr(value) for name, value in facts.items()})
    names = {name for facts_of_rank in by_rank for name in facts_of_rank}
    differences = []
    for name in sorted(names):
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank, facts_of_rank in enumerate(by_rank):
            ranks[facts_of_rank.get(name, "nothing")].append(rank)
        if len(ranks) > 1:
            plain = {value: redacted({name: value})[name] for value in ranks}
            shown_values = ", ".join(f"{plain[value]} on {_short(holders)}" for value, holders in ranks.items())
            differences.append(f"{name}: {shown_values}")
    if differences:
        more = len(differences) - NUM_SHOWN
        shown = differences[:NUM_SHOWN] + ([f"and {more} more"] if more > 0 else [])
        raise UserError(
            "the ranks of this job were started differently; give all of them the same files and arguments:\n  "
            + "\n  ".join(shown)
        )


def _short(ranks: list[int]) -> str:
    """Return the first few rank numbers and their count, for people."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    count = f" ... ({len(ranks)})" if len(ranks) > 4 else ""
    return f"ranks {', '.join(map(str, ranks[:4]))}{count}"
