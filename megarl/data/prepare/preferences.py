"""Preference pairs for a reward model, from files in the usual layouts of such data sets, or from the hub."""

import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import TypeGuard

from megarl.data.messages import margin_faults
from megarl.data.prepare.files import rows_of, source_options
from megarl.data.prepare.options import option
from megarl.data.table import DataRow
from megarl.platform.errors import UserError

Messages = list[dict[str, str]]
Pair = tuple[str | Messages, str, str]

PROMPTS = ("prompt", "question", "instruction", "input", "query")
NAMED = (("chosen", "rejected"), ("chosen_response", "rejected_response"), ("response_j", "response_k"))
NUMBERED = (("response_0", "response_1"), ("response_a", "response_b"), ("response1", "response2"))
WINNERS = ("better_response_id", "preference", "preferred", "winner", "label")
TURN = "\n\nAssistant:"


OPTIONS = (
    *source_options("Anthropic/hh-rlhf"),
    option(
        "--held-out",
        "pairs for validation, taken from a source without a test split; no prompt is in both splits",
        default=0,
    ),
    option("--seed", "seed for the choice of held-out pairs", default=1),
    option("--chat", "make a text prompt a user message; else the responses continue the text", is_flag=True),
)


def build(arguments: SimpleNamespace) -> dict[str, list[DataRow]]:
    """Return the rows of `train` and `val`. Raises UserError if the files are missing or have something else."""
    splits = rows_of(arguments, partial(_row, arguments.chat))
    kinds = {type(row["prompt"]) for rows in splits.values() for row in rows}
    if len(kinds) > 1:
        raise UserError(f"{arguments.source}: some prompts are texts and some are messages: add --chat")
    if not arguments.held_out:
        return splits
    if "val" in splits:
        raise UserError(f"--held-out {arguments.held_out}: {arguments.source} has a test split; leave it out")
    names = [repr(row["prompt"]) for row in splits["train"]]
    return hold_out(splits["train"], arguments.held_out, arguments.seed, names)


def hold_out(rows: list[DataRow], number: int, seed: int, names: Sequence[str]) -> dict[str, list[DataRow]]:
    """Divide `rows` into `train` and `val`: at least `number` rows for validation, rows of equal `names` in one split.

    Raises UserError if no rows are left for training.
    """
    order = sorted({*names})
    random.Random(seed).shuffle(order)
    counts = Counter(names)
    held = set[str]()
    num_held = 0
    for name in order:
        if num_held >= number:
            break
        held.add(name)
        num_held += counts[name]
    splits: dict[str, list[DataRow]] = {"train": [], "val": []}
    for row, name in zip(rows, names, strict=True):
        splits["val" if name in held else "train"].append(row)
    if not splits["train"]:
        raise UserError(
            f"{number} of {len(rows)} pairs are to be held out, so none is left for training: ask for fewer"
        )
    return splits


def _row(as_chat: bool, problem: DataRow, place: str, split: str, index: int) -> DataRow:
    for read in (_named, _numbered, _transcripts):
        pair = read(problem)
        if pair is not None:
            prompt, chosen, rejected = pair
            if as_chat and isinstance(prompt, str):
                prompt = [{"role": "user", "content": prompt}]
            return {"prompt": prompt, "chosen": chosen, "rejected": rejected} | _margin(problem, place)
    raise UserError(
        f"{place}: no preference is recognised in {', '.join(problem)}; name the prompt 'prompt' and the responses "
        "'chosen' and 'rejected'"
    )


def _named(problem: DataRow) -> Pair | None:
    """Read responses by name; in a list of messages, the last message is the response, the others are the prompt."""
    for better, worse in NAMED:
        chosen = problem.get(better)
        rejected = problem.get(worse)
        if isinstance(chosen, str) and isinstance(rejected, str):
            prompt = _prompt(problem)
            return None if prompt is None else (prompt, chosen, rejected)
        if _are_messages(chosen) and _are_messages(rejected):
            prompt = chosen[:-1] or _prompt(problem)
            same = len(chosen) == 1 or chosen[:-1] == rejected[:-1]
            return (prompt, chosen[-1]["content"], rejected[-1]["content"]) if prompt and same else None
    return None


def _numbered(problem: DataRow) -> Pair | None:
    """Read two responses, and the number, letter or name of the better response."""
    prompt = _prompt(problem)
    winner = next((problem[key] for key in WINNERS if problem.get(key) is not None), None)
    if prompt is None or winner is None:
        return None
    for names in NUMBERED:
        if not all(isinstance(problem.get(name), str) for name in names):
            continue
        marks = [name.removeprefix("response").removeprefix("_") for name in names]
        for number in (0, 1):
            if str(winner).lower() in (names[number], marks[number]):
                return prompt, problem[names[number]], problem[names[1 - number]]
    return None


def _transcripts(problem: DataRow) -> Pair | None:
    """Read two dialogues of `Human:` and `Assistant:` that differ in their last response."""
    chosen = problem.get("chosen")
    rejected = problem.get("rejected")
    if not isinstance(chosen, str) or not isinstance(rejected, str) or TURN not in chosen or TURN not in rejected:
        return None
    prompt, _, better = chosen.rpartition(TURN)
    other, _, worse = rejected.rpartition(TURN)
    return (prompt + TURN, better, worse) if prompt == other else None


def _prompt(problem: DataRow) -> str | Messages | None:
    system = problem.get("system")
    for key in PROMPTS:
        value = problem.get(key)
        if _are_messages(value):
            return value
        if isinstance(value, str) and value:
            messages = [{"role": "system", "content": system}] if isinstance(system, str) and system else []
            return [*messages, {"role": "user", "content": value}] if messages else value
    return None


def _are_messages(value: object) -> TypeGuard[Messages]:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(message, dict) and "content" in message for message in value)


def _margin(problem: DataRow, place: str) -> dict[str, float]:
    """Return the margin of the chosen response, if the data has one. UserError if it is no number."""
    margin, high, low = (problem.get(key) for key in ("margin", "score_chosen", "score_rejected"))
    if margin is None and isinstance(high, (int, float)) and isinstance(low, (int, float)):
        margin = high - low
    if margin is None:
        return {}
    for fault in margin_faults(margin):
        raise UserError(f"{place}, column margin: {fault}")
    return {"margin": float(margin)}
