"""The keys that nothing reads, depending on other keys. A run remarks on such a key at its start if the user wrote it.

The marks of fields say when a key is read (`megarl.mark.Condition`).
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from functools import reduce

from megarl.config.links import shown
from megarl.config.load import written_keys
from megarl.config.root import RunConfig
from megarl.config.schema import Schema
from megarl.mark import Condition
from megarl.platform.secrets import redact
from megarl.section import flatten


def unread_keys(config: RunConfig, argv: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each reason why nothing reads some keys that `argv`, the source of `config`, sets."""
    found = reasons(config, written_keys(type(config), argv))
    for reason in dict.fromkeys(found.values()):
        keys = [key for key, own in found.items() if own == reason]
        yield f"{', '.join(keys)} {'is' if len(keys) == 1 else 'are'} not read {reason}"


def reasons(config: RunConfig, written: Collection[str]) -> dict[str, str]:
    """Return why nothing reads a key, for each of `written` that nothing reads."""
    read_if = Schema.of(type(config)).read_if
    leaves = dict(flatten(asdict(config)))
    found = {}
    for key in sorted(written):
        failed = next((one for one in read_if[key] if not holds(one, config)), None)
        if failed:
            deciding = (f"{one}={shown(leaves.get(one))}" for one in failed.because or (failed.fact,))
            found[key] = redact(failed.why or f"with {', '.join(deciding)}")
    return found


def holds(condition: Condition, config: object) -> bool:
    """Return whether a condition holds in the configuration `config`."""
    if not condition.fact:
        return False
    value = reduce(getattr, condition.fact.split("."), config)
    if not condition.values:
        return bool(value)
    items = value if isinstance(value, list) else [value]
    return any(item in condition.values for item in items)


def in_words(condition: Condition) -> str:
    """Return a condition in words; empty if it never holds."""
    if condition.words or not condition.fact:
        return condition.words
    *most, last = [f"`{shown(value)}`" for value in condition.values] or ["set"]
    return f"`{condition.fact}` is {', '.join(most)}{' or ' if most else ''}{last}"
