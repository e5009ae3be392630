"""The columns of a row of prompts: which of them a run needs, their faults, and their values.

This module needs no tokenizer, so a file can be checked before anything starts.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megarl.data.config import DataSection
from megarl.data.messages import prompt_faults, shown, text_faults, texts_in
from megarl.data.rows import Rows
from megarl.data.table import DataRow
from megarl.platform.errors import UserError
from megarl.rewards.built_in import extracts_answers, known_data_source
from megarl.rewards.config import CustomRewardSection, RulesSection
from megarl.rewards.configured import make_rules
from megarl.sandbox.wire import pack

REWARD_MODEL = "reward_model"
EXTRA_INFO = "extra_info"
NO_SOURCE = "default"
"""The data source of a row without one."""
SHOWN_SOURCES = 5
_NO_RULE_NEEDED = "not needed with custom_reward_function.path or a reward model"


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The columns of a row that scoring reads."""

    source: bool = True  # the data source of the row picks a built-in rule
    ground_truth: bool = True
    rules: tuple[str, ...] = ()  # built-in rules that score every row

    @classmethod
    def of(cls, section: RulesSection | None, custom: CustomRewardSection) -> "Needs":
        """Return the columns that the given rules read; None: a reward model scores alone."""
        if section is None:
            return cls(source=False, ground_truth=False)
        by_source = make_rules(section, custom).reads_data_source()
        rules = tuple(name for name in section.weights or () if extracts_answers(name))
        return cls(source=by_source, ground_truth=by_source or bool(rules), rules=rules)


BY_SOURCE = Needs()
"""The columns that scoring reads if only built-in rules score."""


@dataclass(frozen=True, kw_only=True)
class PromptColumns:
    """Reads a row of prompts as a run does."""

    section: DataSection
    needs: Needs

    def open(self, files: str | Sequence[str]) -> Rows:
        """Open data files. Raises UserError as `Rows` does."""
        data = self.section
        of_scoring = {data.reward_fn_key: self.needs.source, REWARD_MODEL: self.needs.ground_truth}
        needed = [name for name, is_needed in of_scoring.items() if is_needed]
        optional = [name for name, is_needed in of_scoring.items() if not is_needed]
        named = [data.prompt_id_key] if data.prompt_id_key else []
        remedies = {
            data.prompt_key: "data.prompt_key names another",
            data.reward_fn_key: f"data.reward_fn_key names another; {_NO_RULE_NEEDED}",
            REWARD_MODEL: _NO_RULE_NEEDED,
        }
        return Rows(
            files,
            columns=[data.prompt_key, *needed, *named],
            optional=[*optional, EXTRA_INFO],
            remedies=remedies | dict.fromkeys(named, "data.prompt_id_key names another"),
        )

    def faults(self, row: DataRow) -> Iterator[str]:
        """Yield the faults of a row, each after the name of its column."""
        data = self.section
        yield from (f"{data.prompt_key}: {fault}" for fault in prompt_faults(row[data.prompt_key]))
        sources = list(self.source_faults(row))
        yield from (f"{data.reward_fn_key}: {fault}" for fault in sources)
        for name, read in ((REWARD_MODEL, self.ground_truth), (EXTRA_INFO, self.extra_info)):
            try:
                value = read(row)
                pack(value)
                texts = list(texts_in(value))
            except (ValueError, TypeError, RecursionError) as error:
                yield f"{name}: {error}"
                continue
            yield from (f"{name}: {fault}" for text in texts for fault in text_faults(text))
            if name == REWARD_MODEL and value is None and not sources and self._reads_ground_truth(row):
                yield f"{name}: {shown(row[name])} has no ground_truth, which the built-in reward needs"
        yield from self._id_faults(row)

    def source(self, row: DataRow) -> str:
        """Return the data source of a row without faults."""
        source = row.get(self.section.reward_fn_key)
        return NO_SOURCE if source is None else str(source)

    def ground_truth(self, row: DataRow) -> object:
        """Return the ground truth; None if the row has none. Raises UserError as `as_mapping` does."""
        return as_mapping(row.get(REWARD_MODEL)).get("ground_truth")

    def extra_info(self, row: DataRow) -> dict[str, object]:
        """Return the further values that rewards receive. Raises UserError as `as_mapping` does."""
        return as_mapping(row.get(EXTRA_INFO))

    def rules_of(self, row: DataRow) -> list[str]:
        """Return the names of the built-in rules that compare a response to a row without faults with its truth."""
        by_source = [self.source(row)] if self.needs.source else []
        return [name for name in (*by_source, *self.needs.rules) if extracts_answers(name)]

    def prompt_id(self, row: DataRow) -> str | None:
        """Return the id of a prompt; None if it has none."""
        value = row[self.section.prompt_id_key] if self.section.prompt_id_key else None
        return None if value is None else str(value)

    def source_faults(self, row: DataRow) -> Iterator[str]:
        """Yield the faults of a row's data source."""
        source = row.get(self.section.reward_fn_key)
        if source is None:
            if self.needs.source:
                yield "is null, but picks the built-in reward: give a data source, or set custom_reward_function.path"
        elif not isinstance(source, str) or not source:
            yield f"{shown(source)} is not a text"
        elif faults := list(text_faults(source)):
            yield from faults
        elif self.needs.source:
            try:
                known_data_source(source)
            except UserError as error:
                yield str(error)

    def _reads_ground_truth(self, row: DataRow) -> bool:
        if not self.needs.source:
            return self.needs.ground_truth
        return extracts_answers(self.source(row))

    def _id_faults(self, row: DataRow) -> Iterator[str]:
        name = self.prompt_id(row)
        yield from (f"{self.section.prompt_id_key}: {fault}" for fault in text_faults(name or ""))
        limit = self.section.max_prompt_id_length
        if name is not None and limit and len(name) > limit:
            yield (
                f"{self.section.prompt_id_key}: {name!r} has {len(name)} characters, data.max_prompt_id_length is "
                f"{limit}: raise it"
            )


def as_mapping(value: object) -> dict[str, object]:
    """Return the named values of a struct, a map, the text of a JSON object, or null for none.

    Raises:
        UserError: the value is something else.
    """
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise UserError(f"the text {shown(value)} is not JSON: {error}") from error
        if isinstance(parsed, dict):
            return parsed
    elif isinstance(value, Mapping):
        return dict(value)
    elif value is None:
        return {}
    elif isinstance(value, list) and all(isinstance(pair, tuple) for pair in value):  # a map of Arrow
        return dict(value)
    raise UserError(f"{shown(value)} has no named values: give a struct, a map or the text of a JSON object")


def first_faults(columns: PromptColumns, files: str | Sequence[str]) -> Iterator[str]:
    """Yield missing files, missing columns, and data sources without a built-in reward.

    Only the column of the data sources is read, and only if the data source picks the reward.
    """
    try:
        columns.open(files)
        if not columns.needs.source:
            return
        rows = Rows(files, columns=[columns.section.reward_fn_key])
        unknown = dict[object, tuple[int, str]]()
        for index, row in enumerate(rows):
            source = repr(row[columns.section.reward_fn_key])
            if source not in unknown:
                fault = next(columns.source_faults(row), "")
                unknown[source] = (index, fault)
    except UserError as error:
        yield str(error)
        return
    faulty = [(index, fault) for index, fault in unknown.values() if fault]
    for index, fault in faulty[:SHOWN_SOURCES]:
        yield f"{rows.place(index)}, column {columns.section.reward_fn_key}: {fault}"
    if len(faulty) > SHOWN_SOURCES:
        yield f"and {len(faulty) - SHOWN_SOURCES} more data sources have no built-in reward"
