"""The marks of configuration keys: what another value does to a run that resumes, and when a key is read."""

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Self


class Effect(Enum):
    """A kind of effect.

    None: the results are the same bits. Rounding: the results differ only in the order of sums, as those of another
    split do. Curve: the training curve differs from here on.
    """

    NONE = "nothing"
    ROUNDING = "rounding"
    CURVE = "another curve"


@dataclass(frozen=True)
class Change:
    """The effect of another value of a key on a run that resumes, and the reason."""

    effect: Effect
    reason: str


UNKNOWN = Change(Effect.CURVE, "nobody has analysed this key")


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A condition under which a key is read. A path that begins with a dot belongs to the section that has the mark."""

    fact: str  # a key, or a property of a section; empty: the key is never read
    values: tuple[object, ...] = ()  # of the fact, or an item of its list; none: any value that is true
    words: str = ""  # the condition in words, if fact and values do not say it
    because: tuple[str, ...] = ()  # the keys that decide; none: the fact
    why: str = ""  # the reason in words, if no key decides
    of: tuple[str, ...] = ()  # the names of the keys of a section that the condition is about; none: all

    def at(self, prefix: str, path: str) -> Self:
        """Return the condition of the key or section at `path`, in a section with the prefix, with complete paths."""

        def complete(known: str) -> str:
            return prefix + known[1:] if known.startswith(".") else known

        of = tuple(f"{path}.{name}" for name in self.of)
        return replace(self, fact=complete(self.fact), because=tuple(map(complete, self.because)), of=of)

    def concerns(self, path: str) -> bool:
        """Return whether the condition, of a section around `path`, is one of `path`; no key decides about itself."""
        return path in self.of if self.of else path != self.fact


def when(fact: str, *values: object, **others: Any) -> Condition:
    """Return the condition that a fact has one of `values`."""
    return Condition(fact=fact, values=values, **others)


def never(why: str, *of: str) -> Condition:
    """Return the condition of keys that nothing reads."""
    return Condition(fact="", why=why, of=of)


def key(default: object, change: Change | None = None, *, read_if: Condition | tuple[Condition, ...] = ()) -> Any:
    """Return a field with a mark.

    Args:
        default: the value of a key that nobody sets, or a function or class that makes it.
        change: the effect of another value; None: that of the section.
        read_if: the conditions under which the key, or every key of a section, is read. A message names the first
            that fails.
    """
    value: dict[str, Any] = {"default_factory" if callable(default) else "default": default}
    conditions = read_if if isinstance(read_if, tuple) else (read_if,)
    return field(**value, metadata={"change": change, "read_if": conditions})


# Marks of several sections.
SCORES = Change(
    Effect.NONE, "validation only: its scores cannot be compared with earlier ones, and the best score starts afresh"
)
VALIDATION = Change(Effect.NONE, "when validation runs, and the size of its batches")
SPLIT = Change(Effect.ROUNDING, "another split")
MICRO = Change(Effect.ROUNDING, "other micro-batches")
ENGINE = Change(Effect.ROUNDING, "the engine computes the same in another way")
OPTIMIZER = Change(Effect.CURVE, "the optimizer")
REWARD = Change(Effect.CURVE, "the reward")
VALIDATES = when(
    "validates",
    words="the run validates",
    because=("data.val_files", "trainer.val_before_train", "trainer.test_freq"),
)
RULES = when("reward_model.rules", words="rules score the responses", why="as the reward model scores alone")
OFF_CPU = when("trainer.device", "auto", "cuda")
