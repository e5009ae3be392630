"""Checks what all rows can teach: ground truths that their rules cannot read, empty truths, blank prompts, equal rows.

The rule of a row scores the response that must be right, in processes that may be killed. Equal ground truths are tried
once.
"""

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Literal

from megarl.data.columns import PromptColumns
from megarl.data.messages import plain_text, shown
from megarl.data.table import DataRow
from megarl.rewards.reasoning_gym import SOURCE_PREFIX
from megarl.rewards.self_test import AS_TEXT, SelfTest
from megarl.sandbox.pool import Pool, ScoringResult, WorkerLimits
from megarl.sandbox.wire import pack

Kind = Literal["column", "truth", "text", "empty", "blank", "seen", "again", "silent", "equal"]
KINDS: dict[Kind, str] = {
    "column": "a column has no value that a run can read",
    "truth": "no response can be right, or none can be scored",
    "text": "the ground truth is plain text to math-verify, so only the same words are right",
    "empty": "the ground truth is empty",
    "blank": "the prompt is blank",
    "seen": "the prompt is a training prompt too",
    "again": "prompt and ground truth are those of an earlier row",
    "silent": "a response is blank",
    "equal": "both responses are the same text",
}
MAX_SHOWN = 20
"""Most different messages of a kind that are kept."""
_WINDOW = 4096
_TOGETHER = 64
_TIMEOUT_S = 60.0
_MAX_MEMORY = 4_000_000_000
_NOTHING = ("", "nan", "none", "null")


@dataclass
class RowsFinding:
    """A message about rows."""

    message: str
    place: str  # of the first of the rows
    num_rows: int = 1


@dataclass
class TruthFindings:
    """The messages about the rows of a set of files, by kind."""

    num_rows: int
    counts: dict[Kind, int] = field(default_factory=dict)  # rows
    shown: dict[Kind, list[RowsFinding]] = field(default_factory=dict)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "TruthFindings":
        """Return the findings that `dataclasses.asdict` made into `fields`."""
        shown = {kind: [RowsFinding(**finding) for finding in found] for kind, found in fields["shown"].items()}
        return cls(fields["num_rows"], fields["counts"], shown)

    def add(self, kind: Kind, message: str, place: str, num_rows: int = 1) -> None:
        """Note a message about rows; the first of them is at `place`."""
        self.counts[kind] = self.counts.get(kind, 0) + num_rows
        kept = self.shown.setdefault(kind, [])
        known = next((finding for finding in kept if finding.message == message), None)
        if known:
            known.num_rows += num_rows
        elif len(kept) < MAX_SHOWN:
            kept.append(RowsFinding(message, place, num_rows))


def inspect_rows(
    columns: PromptColumns, files: str | Sequence[str], *, training_prompts: set[int] | None = None
) -> tuple[TruthFindings, set[int]]:
    """Return what was found in all rows of files, and the digests of their prompts.

    A row with a fault in its columns brings nothing else. `training_prompts` are digests of prompts that no row should
    have. Raises UserError if the files cannot be read.
    """
    rows = columns.open(files)
    findings = TruthFindings(len(rows))
    prompts = set[int]()
    pairs = set[int]()
    num_given = 0
    empty = list[int]()
    limits = WorkerLimits(
        num_workers=len(os.sched_getaffinity(0)),
        timeout_s=_TIMEOUT_S,
        max_memory=_MAX_MEMORY,
        num_together=_TOGETHER,
        isolation="process",
    )
    with closing(Pool(SelfTest(), limits)) as pool:
        trials = _Trials(pool)
        for index, row in enumerate(rows):
            faults = list(columns.faults(row))
            for fault in faults:
                findings.add("column", fault, rows.place(index))
            if faults:
                continue
            prompt = row[columns.section.prompt_key]
            digest = hash(repr(prompt))
            prompts.add(digest)
            if not plain_text(prompt).strip():
                findings.add("blank", KINDS["blank"], rows.place(index))
            if training_prompts is not None and digest in training_prompts:
                findings.add("seen", KINDS["seen"], rows.place(index))
            truth = columns.ground_truth(row)
            pair = hash((digest, repr(truth)))
            if pair in pairs:
                findings.add("again", KINDS["again"], rows.place(index))
            pairs.add(pair)
            rules = columns.rules_of(row)
            if rules:
                trials.add(columns, row, rules, index)
            elif _is_nothing(truth):
                empty.append(index)
                num_given += truth is not None
            else:
                num_given += 1
        for kind, message, index, num_rows in trials.messages():
            findings.add(kind, message, rows.place(index), num_rows)
    if empty and num_given:  # a reward that needs no ground truth has none in any row
        findings.add("empty", KINDS["empty"], rows.place(empty[0]), len(empty))
    return findings, prompts


class _Trials:
    """The trials of ground truths; some are under way."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._rows: dict[int, list[int]] = {}  # digest of rule and truth -> the first row, and the number of rows
        self._pending = deque[tuple[int, str, object, Future[ScoringResult]]]()
        self._messages: dict[int, tuple[Kind, str]] = {}

    def add(self, columns: PromptColumns, row: DataRow, rules: Sequence[str], index: int) -> None:
        truth = columns.ground_truth(row)
        info = columns.extra_info(row)
        for rule in rules:
            inputs = info if rule.startswith(SOURCE_PREFIX) else None  # the other rules read the ground truth alone
            digest = hash((rule, repr(truth), repr(inputs)))
            if digest in self._rows:
                self._rows[digest][1] += 1
                continue
            self._rows[digest] = [index, 1]
            arguments = {"data_source": rule, "solution_str": "", "ground_truth": truth, "extra_info": info}
            self._pending.append((digest, rule, truth, self._pool.submit(pack(arguments))))
        if len(self._pending) >= _WINDOW:
            self._collect(_WINDOW // 2)

    def messages(self) -> Iterator[tuple[Kind, str, int, int]]:
        """Wait for all trials; yield the kind of each message, the message, its first row and the number of rows."""
        self._collect(len(self._pending))
        for digest, (kind, message) in self._messages.items():
            first, number = self._rows[digest]
            yield kind, message, first, number

    def _collect(self, number: int) -> None:
        done = [self._pending.popleft() for _ in range(number)]
        results = self._pool.wait([future for *_, future in done])
        for (digest, rule, truth, _), result in zip(done, results, strict=True):
            message = _message(rule, truth, result)
            if message:
                self._messages[digest] = message


def _message(rule: str, truth: object, result: ScoringResult) -> tuple[Kind, str] | None:
    """Return the kind and the message of a trial that found something."""
    score = result.numbers.get("score", 0.0)
    if result.fault:
        fault = result.detail
    elif score < 1.0:
        fault = f"the response {shown(result.pred)}, which must be right, scores {score:g}"
    elif result.numbers.get(AS_TEXT):
        return "text", f"reward_model.ground_truth: {shown(truth)} is plain text, so only the same words are right"
    else:
        return None
    return "truth", f"reward_model.ground_truth: {shown(truth)} does not fit the reward of {rule!r}: {fault}"


def _is_nothing(truth: object) -> bool:
    return truth is None or (isinstance(truth, str | float) and str(truth).strip().lower() in _NOTHING)
