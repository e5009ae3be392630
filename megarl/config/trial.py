"""Trials before anything starts: models on the hub, data sources, the environment, all rows, the reward for a few.

The reward runs in processes as a run has them. The ground truth of each row is its response. Any finite score passes.
Rewards that fail are judged as those of a step.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice, pairwise, zip_longest

from megarl.config.faults import ConfigError, Fault, fault_of
from megarl.config.root import AnyConfig, Config, RunConfig, VerifyConfig
from megarl.config.rows_trial import check_responses, check_rows, stops
from megarl.data.columns import SHOWN_SOURCES, Needs, PromptColumns
from megarl.data.remote_tokenizer import find_tokenizer
from megarl.data.rows import Rows
from megarl.environments.host import Host
from megarl.models.config import ModelSection
from megarl.models.hub import config_place, read_model
from megarl.platform.errors import UserError, placed
from megarl.platform.log import show_printed
from megarl.platform.secrets import beginning
from megarl.platform.slow_loads import reported
from megarl.rewards.config import RulesSection
from megarl.rewards.configured import make_pool
from megarl.rewards.signature import IDS
from megarl.sandbox.pool import Pool, ScoringResult
from megarl.sandbox.wire import pack

logger = logging.getLogger(__name__)

ROUND_S = 0.5
REPORT_S = 5.0
NOT_AWAITED = "the trial ended before, because the reward fails on so many other rows"
SHOWN_CHARACTERS = 60
NUM_SHOWN = 3


@dataclass(frozen=True)
class _Row:
    place: str  # file and number, for messages
    response: str
    arguments: object  # packed


@dataclass(frozen=True)
class Trial:
    """A row, a response, and what the reward gave it."""

    place: str  # file and number of the row
    response: str
    result: ScoringResult | None  # None: nobody waited for it, because enough others had failed

    @property
    def score(self) -> float | None:
        """The score; None without one."""
        return self.result.numbers.get("score") if self.result else None

    @property
    def fault(self) -> str | None:
        """Why there is no score; None if there is one."""
        if self.result is None:
            return NOT_AWAITED
        return self.result.detail if self.result.fault else None


def try_out(config: AnyConfig) -> Iterator[str]:
    """Try what a configuration names, as its command does before it starts; yield remarks.

    Raises:
        ConfigError: a model, a tokenizer, a data source or the environment is missing, the rows of training are fewer
            than a batch, or so many rows or rewards fail that they would stop the run.
    """
    find_models(config)
    if isinstance(config, VerifyConfig):
        return
    if not config.trainer.val_only:
        require_a_batch(config)
    if isinstance(config, Config):
        find_sources(config)
        load_environment(config)
        yield from check_rows(config)
        yield from try_reward(config)
    else:
        yield from check_responses(config)


def find_architectures(config: AnyConfig) -> None:
    """Ask the hub for the `config.json` of each model that is a Hugging Face id, and find the targets of adapters.

    Raises:
        ConfigError: the hub does not have it, or does not answer, or a target selects nothing of the model.
    """
    for key, checkpoint in config.checkpoints:
        with fault_of(key):
            place = config_place(checkpoint.path)
            if isinstance(checkpoint, ModelSection) and checkpoint.has_adapters:
                from megarl.models.peft import lora_of  # imports torch

                lora_of(checkpoint, read_model(place, checkpoint.override_config)[1])


def find_models(config: AnyConfig) -> None:
    """Ask the hub for the `config.json` of each model, and for each tokenizer, that is a Hugging Face id.

    Raises:
        ConfigError: the hub lacks a file, or does not answer.
    """
    tokenizers = {} if isinstance(config, VerifyConfig) else {"data.tokenizer": config.data.tokenizer}
    if isinstance(config, Config):
        if config.has_critic:
            tokenizers["critic.model.tokenizer_path"] = config.tokenizer_of_critic
        if config.reward_model.enable:
            tokenizers["reward_model.model.input_tokenizer"] = config.reward_model.model.input_tokenizer
    find_architectures(config)
    for key, tokenizer in tokenizers.items():
        with fault_of(key):
            if tokenizer is not None:
                find_tokenizer(tokenizer, with_code=False)


def require_a_batch(config: RunConfig) -> None:
    """Count the rows of training, and the supervised pairs.

    Raises:
        ConfigError: they are fewer than those of a step, or cannot be counted.
    """
    wanted = config.num_drawn if isinstance(config, Config) else config.data.train_batch_size
    _require("rows a step", wanted, "data.train_batch_size", "data.train_files", config.data.train_files)
    if isinstance(config, Config) and config.num_supervised:
        actor = "actor_rollout_ref.actor"
        pairs = config.actor_rollout_ref.actor.ptx_files or ()
        wanted = config.num_supervised
        _require("pairs an optimizer step", wanted, f"{actor}.ptx_batch_size", f"{actor}.ptx_files", pairs)


def _require(what: str, wanted: int, size: str, key: str, files: str | Sequence[str]) -> None:
    """Raise ConfigError for the key `size` if the files of `key` have fewer rows than are `wanted`."""
    with fault_of(key):
        num_rows = len(Rows(files, columns=[]))
    if wanted > num_rows:
        message = f"{wanted:,} {what}, but {key} has {num_rows:,}: lower it or give more data"
        raise ConfigError([Fault(size, message)])


def find_sources(config: Config) -> None:
    """Look in the training files for a row of each data source that has a teacher.

    Raises:
        ConfigError: a data source has a teacher but no row, or the rows cannot be read.
    """
    wanted = {source for source in config.teachers if source is not None}
    if not wanted:
        return
    found = set[str]()
    columns = PromptColumns(section=config.data, needs=Needs(source=False, ground_truth=False))
    with fault_of("data.train_files"):
        for row in Rows(config.data.train_files, columns=[], optional=[config.data.reward_fn_key]):
            found.add(columns.source(row))
            if wanted <= found:
                return
    known = ", ".join(sorted(found)[:SHOWN_SOURCES])
    raise ConfigError(
        [
            Fault(
                "actor_rollout_ref.ref.teachers",
                f"no row of data.train_files has the data source {source!r}; the files have {known}",
            )
            for source in sorted(wanted - found)
        ]
    )


def load_environment(config: Config) -> None:
    """Load the environment that a run has, and make none.

    Raises:
        ConfigError: there is no such environment, or its methods or arguments do not fit.
    """
    section = config.environment
    if section.name:
        with fault_of("environment"), reported("environment.path", section.path):
            Host(name=section.name, path=section.path, kwargs=section.kwargs).load()


def try_reward(config: Config) -> Iterator[str]:
    """Call the reward for a few rows; yield a remark for each failure, if the run could bear the failures.

    Raises:
        ConfigError: a step with such rewards would stop the run, or the rows cannot be read.
    """
    section = config.rules
    if section is None or not section.trial_rows:
        return
    trials = call_reward(config)
    failed = [trial.result for trial in trials if trial.result and trial.result.fault]
    messages = list(_messages([trial for trial in trials if trial.result and trial.result.fault]))
    if _stops(section, failed, len(trials)):
        remedy = "mend the reward or the row (reward_model.trial_rows=0 starts without this trial)"
        raise ConfigError([Fault(_reward_key(config), f"{message}: {remedy}") for message in messages[:NUM_SHOWN]])
    yield from messages[:NUM_SHOWN]


def _messages(failed: Sequence[Trial]) -> Iterator[str]:
    """Yield a message for each different fault, with the first of its rows and the number of the others."""
    of_cause: dict[str | None, list[Trial]] = {}
    for trial in failed:
        of_cause.setdefault((trial.result and trial.result.cause) or trial.fault, []).append(trial)
    for first, *others in of_cause.values():
        more = f" and {len(others)} more" if others else ""
        yield f"{first.place}{more}: the reward fails if the response is {_shown(first.response)}: {first.fault}"


def call_reward(config: Config) -> list[Trial]:
    """Call the reward for a few rows, and show what it prints; no rows if it is a model alone.

    Raises:
        ConfigError: the reward cannot be loaded, or the rows cannot be read.
    """
    section = config.rules
    custom = config.custom_reward_function
    if section is None:
        return []
    with fault_of(_reward_key(config)):
        pool = make_pool(section, custom)
    show_printed(on_console=True)
    try:
        with fault_of("data.train_files"):
            rows = list(_rows(config, section, takes_ids=pool.takes_ids))
        results = _results(pool, section, rows)
    finally:
        pool.close()
        show_printed(on_console=False)
    return [Trial(row.place, row.response, result) for row, result in zip(rows, results, strict=True)]


def _reward_key(config: Config) -> str:
    return "custom_reward_function" if config.custom_reward_function.path else "reward_model"


def _rows(config: Config, section: RulesSection, *, takes_ids: bool) -> Iterator[_Row]:
    """Yield equally many rows of each file, with the arguments of a reward, whose response has no tokens."""
    data = config.data
    columns = PromptColumns(section=data, needs=Needs.of(section, config.custom_reward_function))
    rows = columns.open(data.train_files)
    for index in _spread(section.trial_rows, [*rows.file_starts, len(rows)]):
        row = rows[index]
        with placed(f"{rows.place(index)}, "):
            truth = columns.ground_truth(row)
            info = columns.extra_info(row)
        response = "" if truth is None else str(truth)
        arguments = {
            "prompt": str(row[data.prompt_key]),
            "data_source": columns.source(row),
            "solution_str": response,
            "ground_truth": truth,
            "extra_info": info,
            **({IDS: []} if takes_ids else {}),
        }
        try:
            yield _Row(rows.place(index), response, pack(arguments))
        except TypeError as error:
            raise UserError(f"{rows.place(index)}: {error}") from error


def _spread(number: int, starts: Sequence[int]) -> list[int]:
    """Return the numbers of `number` rows, or of all: of each file the first ones. `starts` has the end of the last."""
    rounds = zip_longest(*(range(first, end) for first, end in pairwise(starts)))
    in_turn = (index for rows in rounds for index in rows if index is not None)
    return sorted(islice(in_turn, number))


def _results(pool: Pool, section: RulesSection, rows: Sequence[_Row]) -> list[ScoringResult | None]:
    """Return the result of each row; None for rows that were not waited for, because enough have failed."""
    futures: list[Future[ScoringResult]] = [pool.submit(row.arguments) for row in rows]
    next_report = time.monotonic() + REPORT_S
    while pool.count_pending(futures, within_s=ROUND_S):
        done = [future.result() for future in futures if future.done()]
        if time.monotonic() > next_report:
            logger.info("the reward is tried before the run: it has answered for %d of %d rows", len(done), len(rows))
            next_report += REPORT_S
        if _stops(section, [result for result in done if result.fault], len(rows)):
            break
    return [future.result() if future.done() else None for future in futures]


def _stops(section: RulesSection, failed: Sequence[ScoringResult], num_rows: int) -> bool:
    """Return whether these failures among the responses of a step would stop a run."""
    return stops(section, len(failed), num_rows, only_errors=all(result.fault == "error" for result in failed))


def _shown(text: str) -> str:
    shown = beginning(text, SHOWN_CHARACTERS)
    return repr(shown + ("..." if len(text) > len(shown) else ""))
