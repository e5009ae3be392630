"""Knights and knaves: puzzles that have exactly one solution."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from types import SimpleNamespace
from typing import Any, Literal

from megarl.data.prepare.options import Several, option
from megarl.platform.errors import UserError

NAMES = ("Ava", "Ben", "Chloe", "David", "Emma", "Jack", "Lily", "Noah", "Olivia", "Zoe")
MAX_TRIES = 10_000  # after so many draws in a row without a new puzzle, there are no more

Kind = Literal["is", "and", "or", "same"]

_RULES = (
    "A very special island is inhabited only by knights and knaves. Knights always tell the truth, and knaves always "
    "lie. You meet {count} inhabitants: {names}. {statements} So who is a knight and who is a knave? Show your work in "
    "<think> </think> tags. And return the final answer in <answer> </answer> tags, for example "
    "<answer> {example} </answer>."
)


@dataclass(frozen=True)
class Claim:
    """A statement about the role of one person, or the roles of two."""

    kind: Kind
    people: tuple[int, ...]
    knights: tuple[bool, ...]
    """The roles that it gives to the people; empty if it only says that two have the same role."""

    def holds(self, world: Sequence[bool]) -> bool:
        """Return whether the claim is true in a world; `world[i]` says whether person `i` is a knight."""
        if self.kind == "same":
            return world[self.people[0]] == world[self.people[1]]
        parts = [world[person] == knight for person, knight in zip(self.people, self.knights, strict=True)]
        return any(parts) if self.kind == "or" else all(parts)

    def text(self, names: Sequence[str]) -> str:
        """Return the claim in words."""
        if self.kind == "same":
            return f"{names[self.people[0]]} is a knight if and only if {names[self.people[1]]} is a knight"
        parts = [
            f"{names[person]} is a {role(knight)}" for person, knight in zip(self.people, self.knights, strict=True)
        ]
        return f" {self.kind} ".join(parts)


def role(knight: bool) -> str:
    """Return the name of a role."""
    return "knight" if knight else "knave"


OPTIONS = (
    option("--train", "training puzzles", default=2000),
    option("--val", "validation puzzles, distinct from training puzzles", default=256),
    Several(["--num-people"], type=int, default=[3], show_default=True, help="how many people; several = any of them"),
    option("--seed", default=1),
)


def build(arguments: SimpleNamespace) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of `train` and `val`. Raises UserError if there are too few puzzles."""
    if not all(2 <= count <= len(NAMES) for count in arguments.num_people):
        raise UserError(f"--num-people {arguments.num_people}: give 2 to {len(NAMES)}")
    total = arguments.train + arguments.val
    puzzles = list(islice(_distinct(random.Random(arguments.seed), arguments.num_people), total))
    if len(puzzles) < total:
        raise UserError(
            f"only about {len(puzzles)} distinct puzzles exist under these options, {total} were asked for: "
            "raise --num-people, or ask for fewer"
        )
    return {
        split: [_row(names, claims, split, index) for index, (names, claims) in enumerate(part)]
        for split, part in (("train", puzzles[arguments.val :]), ("val", puzzles[: arguments.val]))
    }


def solutions(claims: Sequence[Claim]) -> list[tuple[bool, ...]]:
    """Return all worlds whose knights, and only they, tell the truth; person `i` says `claims[i]`."""
    worlds = product((True, False), repeat=len(claims))
    return [
        world
        for world in worlds
        if all(knight == claim.holds(world) for knight, claim in zip(world, claims, strict=True))
    ]


def _draw(rng: random.Random, speaker: int, count: int) -> Claim:
    kind: Kind = rng.choice(("is", "and", "or", "same"))
    if kind == "is":  # nobody states their own role: everybody would say "a knight"
        people = rng.sample([person for person in range(count) if person != speaker], 1)
    else:
        people = rng.sample(range(count), 2)
    knights = () if kind == "same" else tuple(rng.random() < 0.5 for _ in people)
    return Claim(kind=kind, people=tuple(people), knights=knights)


def _distinct(rng: random.Random, counts: Sequence[int]) -> Iterator[tuple[list[str], list[Claim]]]:
    seen: set[str] = set()
    tries = 0
    while tries < MAX_TRIES:
        tries += 1
        count = rng.choice(counts)
        names = rng.sample(NAMES, count)
        claims = [_draw(rng, speaker, count) for speaker in range(count)]
        text = _statements(names, claims)
        if text not in seen and len(solutions(claims)) == 1:
            seen.add(text)
            tries = 0
            yield names, claims


def _statements(names: Sequence[str], claims: Sequence[Claim]) -> str:
    return " ".join(f'{name} says: "{claim.text(names)}."' for name, claim in zip(names, claims, strict=True))


def _row(names: list[str], claims: list[Claim], split: str, index: int) -> dict[str, Any]:
    task = _RULES.format(
        count=len(names),
        names=", ".join(names[:-1]) + " and " + names[-1],
        statements=_statements(names, claims),
        example=", ".join(f"({i}) {name} is a {role(i % 2 == 1)}" for i, name in enumerate(names, start=1)),
    )
    (world,) = solutions(claims)
    return {
        "data_source": "knights_knaves",
        "prompt": [{"role": "user", "content": task}],
        "ability": "logic",
        "reward_model": {"style": "rule", "ground_truth": {"names": names, "is_knight": list(world)}},
        "extra_info": {"split": split, "index": index},
    }
