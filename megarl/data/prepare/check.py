"""Checks a data file of prompts, of supervised pairs or of preference pairs, row by row, as the run that reads it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from megarl.data.columns import BY_SOURCE, REWARD_MODEL, Needs, PromptColumns
from megarl.data.config import DataSection
from megarl.data.messages import margin_faults, prompt_faults, text_faults
from megarl.data.rows import Rows
from megarl.data.table import DataRow
from megarl.data.truths import KINDS, TruthFindings, inspect_rows
from megarl.data.truths import Kind as TruthKind
from megarl.platform.errors import UserError

Kind = Literal["rl", "sft", "preference"]
READERS: dict[Kind, str] = {
    "rl": "prompts of megarl train",
    "sft": "pairs of megarl sft",
    "preference": "preference pairs of megarl train-reward",
}
PAIR = ("chosen", "rejected")
RESPONSE = "response"
CONVERSATIONS = ("messages", "conversations")
UNREAD = ("images", "videos", "agent_name", "tools")

COLUMNS = PromptColumns(section=DataSection(train_files=""), needs=BY_SOURCE)
"""Prompts as a run reads them by default."""
ANY_REWARD = PromptColumns(section=DataSection(train_files=""), needs=Needs(source=False, ground_truth=False))
"""Prompts as a run with a reward of its own reads them."""


@dataclass
class CheckReport:
    """The findings of a check: lines that begin with the file and, if rows have a fault, the first row and a number."""

    kind: Kind
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def examine(file: str, columns: PromptColumns = COLUMNS, kind: Kind | None = None) -> CheckReport:
    """Check a file as one of a kind; None: its columns tell the kind. `columns` reads prompts."""
    try:
        found = _columns_of(file, columns)
    except UserError as error:
        return CheckReport(kind or "rl", [str(error)])
    report = CheckReport(kind or _kind_of(found, columns))
    report.notes += [
        f"{file}: the column {name} is not read: megarl trains on texts" for name in UNREAD if name in found
    ]
    conversations = next((name for name in CONVERSATIONS if name in found), None)
    if conversations and columns.section.prompt_key not in found:
        report.faults.append(
            f"{file}: the column {conversations} holds conversations, and a run reads a column of prompts: write the "
            f"last message of the assistant into a column {RESPONSE!r} and the messages before it into 'prompt'"
        )
        return report
    match report.kind:
        case "rl":
            _examine_prompts(file, columns, report)
        case "sft" | "preference":
            _note_faults(_faults_of_pairs(file, report.kind), report)
    return report


def remarks(files: Sequence[str]) -> Iterator[str]:
    """Yield a line for each kind of row that cannot teach; the prompts of the first file are training prompts."""
    training_prompts = None
    for file in files:
        findings, prompts = inspect_rows(ANY_REWARD, file, training_prompts=training_prompts)
        training_prompts = training_prompts or prompts
        for kind, number in findings.counts.items():
            place = findings.shown[kind][0].place
            yield f"{number:,} of {findings.num_rows:,} rows: {KINDS[kind]}; the first is {place}"


def faults(file: str, columns: PromptColumns = COLUMNS, kind: Kind | None = None) -> list[str]:
    """Return one line for each fault of a file."""
    return examine(file, columns, kind).faults


def _columns_of(file: str, columns: PromptColumns) -> set[str]:
    """Return the names of the first row, among those that tell what a file is for."""
    section = columns.section
    names = (section.prompt_key, section.reward_fn_key, REWARD_MODEL, *PAIR, RESPONSE, *CONVERSATIONS, *UNREAD)
    return {name for name, value in Rows(file, columns=(), optional=names)[0].items() if value is not None}


def _kind_of(found: set[str], columns: PromptColumns) -> Kind:
    """Return what a file is for: prompts have a data source or a ground truth, or something else scores them."""
    if found & {columns.section.reward_fn_key, REWARD_MODEL} or not columns.needs.source:
        return "rl"
    if found.intersection(PAIR):
        return "preference"
    return "sft" if found.intersection((RESPONSE, *CONVERSATIONS)) else "rl"


def _examine_prompts(file: str, columns: PromptColumns, report: CheckReport) -> None:
    _note_faults(_faults_of_prompts(file, columns), report)
    try:
        found, _ = inspect_rows(columns, file)
    except UserError as error:
        report.faults += [line for line in (str(error),) if line not in report.faults]
        return
    for kind in [kind for kind in KINDS if kind != "column"]:  # which is reported already
        lines = report.notes if kind in ("text", "again") else report.faults
        lines.extend(_lines(found, kind))


def _lines(found: TruthFindings, kind: TruthKind) -> Iterator[str]:
    shown = found.shown.get(kind, [])
    for finding in shown:
        yield f"{finding.place}{_others(finding.num_rows)}, {finding.message}"
    left = found.counts.get(kind, 0) - sum(finding.num_rows for finding in shown)
    if left:
        yield f"... and {left:,} more rows: {KINDS[kind]}"


def _faults_of_prompts(file: str, columns: PromptColumns) -> Iterator[tuple[str, str]]:
    """Yield the place and the fault of rows."""
    rows = columns.open(file)
    for index, row in enumerate(rows):
        yield from ((rows.place(index), fault) for fault in columns.faults(row))


def _faults_of_pairs(file: str, kind: Kind) -> Iterator[tuple[str, str]]:
    """Yield the place and the fault of rows."""
    responses, optional = ((RESPONSE,), ()) if kind == "sft" else (PAIR, ("margin",))
    rows = Rows(file, columns=("prompt", *responses), optional=optional)
    for index, row in enumerate(rows):
        faults = [f"prompt: {fault}" for fault in prompt_faults(row["prompt"])]
        for column in responses:
            faults += [f"{column}: {fault}" for fault in text_faults(row[column], may_be_empty=False)]
        if kind == "preference":
            faults += _faults_of_preference(row)
        yield from ((rows.place(index), fault) for fault in faults)


def _note_faults(found: Iterator[tuple[str, str]], report: CheckReport) -> None:
    """Note the faults of all rows, each once, with the first of its rows."""
    first = dict[str, str]()
    counts = Counter[str]()
    unreadable = ""
    try:
        for place, fault in found:
            first.setdefault(fault, place)
            counts[fault] += 1
    except UserError as error:
        unreadable = str(error)
    report.faults += [f"{place}{_others(counts[fault])}, {fault}" for fault, place in first.items()]
    if unreadable:
        report.faults.append(unreadable)


def _others(num_rows: int) -> str:
    return f" and {num_rows - 1:,} more" if num_rows > 1 else ""


def _faults_of_preference(row: DataRow) -> Iterator[str]:
    if row["chosen"] == row["rejected"]:
        yield "chosen, rejected: both are the same text, so neither is preferred"
    yield from (f"margin: {fault}" for fault in margin_faults(row.get("margin", 0.0)))
