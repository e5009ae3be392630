"""The plan of what a rank holds of samples agrees with what the code of a step allocates, on one rank of eight."""

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import pytest
import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from benchmarks.samples_simulated import simulated
from benchmarks.samples_step import PER_PROMPT, PROMPT, STEP, Actor, Case, drawn_groups, first_step, job_of
from megarl.algorithms.config import AlgorithmSection
from megarl.algorithms.invariance import estimates_of
from megarl.batch import PER_TOKEN, Experience, Generation, Prompt, int32
from megarl.config.load import load_config
from megarl.config.root import Config
from megarl.data.columns import Needs
from megarl.data.config import DataSection
from megarl.data.order import Position
from megarl.data.prompts import PromptDataset
from megarl.data.tokenizer import Tokenizer
from megarl.distributed.sharded import Shares
from megarl.planning.samples import (
    DRAWN_TOKEN_BYTES,
    INDEX_PROMPT_BYTES,
    INDEX_SAMPLE_BYTES,
    LEARNT_FIELDS,
    PROMPT_TOKEN_BYTES,
    RECORD_FIELDS,
    TEXT_BYTES,
    SampleMemory,
    sample_memory,
)
from megarl.rollout.responses import of_groups
from megarl.rollout.table import GroupRows
from megarl.rollout.window import Window, exchange
from megarl.tracking.timers import Timers
from megarl.training.gate import require_version
from megarl.training.loop import take_step
from megarl.training.minibatches import MiniBatches
from tests.support.allocations import allocations

RANKS, NUM_TOKENS = 8, 1 << 15
SAMPLES = 64 * RANKS
NUM_DRAWN = SAMPLES // RANKS * NUM_TOKENS
HERE = 1
CASES = {estimator: Case(RANKS, SAMPLES, NUM_TOKENS, estimator) for estimator in ("grpo", "gae")}
SMALL = ("data.train_files=train.parquet", "actor_rollout_ref.model.path=model", "algorithm.adv_estimator=grpo")


def config(*overrides: str, estimator: str = "grpo") -> Config:
    """Return a run with the samples of `CASES`."""
    values = (
        *(f"data.train_batch_size={SAMPLES // PER_PROMPT}", f"actor_rollout_ref.rollout.n={PER_PROMPT}"),
        *(f"data.max_prompt_length={len(PROMPT)}", f"data.max_response_length={NUM_TOKENS}"),
        *(f"trainer.n_gpus_per_node={RANKS}", "actor_rollout_ref.rollout.tensor_model_parallel_size=1"),
        *("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1000000", f"algorithm.adv_estimator={estimator}"),
        *("critic.model.path=model", "algorithm.kl_ctrl.kl_coef=0"),
        f"actor_rollout_ref.actor.ppo_mini_batch_size={SAMPLES // PER_PROMPT}",
    )
    return load_config([*SMALL, *values, *overrides], world_size=None, check_paths=False)


def planned(*overrides: str, estimator: str = "grpo") -> dict[str, SampleMemory]:
    """Return the plan by phase."""
    found = sample_memory(config(*overrides, estimator=estimator), num_shares=RANKS)
    return {memory.phase: memory for memory in found}


@pytest.fixture
def shares() -> Iterator[Shares]:
    with simulated(HERE, RANKS):
        yield Shares.blocks(1)


def test_every_column_of_tokens_is_in_the_plan() -> None:
    columns = {field.name for field in fields(Experience) if PER_TOKEN in field.metadata}
    with_another_tokenizer = {"places"}
    assert columns - with_another_tokenizer == {*RECORD_FIELDS, *LEARNT_FIELDS}


def test_arrays_of_drawn_samples_take_planned_bytes(shares: Shares) -> None:
    own = drawn_groups(CASES["grpo"], shares).table.own.values()
    arrays = [column for each in own for column in (each.token_ids, each.log_probs, each.weight_versions) if column]
    num_bytes = sum(len(column) * column.itemsize for column in arrays)
    assert num_bytes == planned()["record"].parts["drawn responses"] == NUM_DRAWN * DRAWN_TOKEN_BYTES


def test_record_takes_planned_bytes(shares: Shares) -> None:
    groups = drawn_groups(CASES["grpo"], shares)
    with allocations() as found:
        of_groups(groups, shares)
    assert found.peak == pytest.approx(planned()["record"].parts["records"], rel=0.02)


def test_exchange_takes_planned_bytes(shares: Shares) -> None:
    """Pieces of several messages are copied into a record, unless they arrive in its order."""
    case = Case(RANKS, SAMPLES, NUM_TOKENS // 2, "grpo", ragged=True)
    job = job_of(case, shares)
    first_step(job)
    samples = require_version(job.samples.collect(Position(), Timers(), step=STEP).scored, step=STEP)
    with allocations() as found:
        learnt_samples = job.actor.take(samples, step=STEP)
    num_drawn, num_learnt = (int(each.share.num_tokens.sum()) for each in (samples, learnt_samples))
    parts = planned()["exchange"].parts
    of_messages, of_learnt = parts["messages"] / (2 * NUM_DRAWN), parts["learnt tokens"] / NUM_DRAWN
    expected = (num_drawn + num_learnt) * of_messages + num_learnt * of_learnt
    assert found.peak == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("num_prompts", [SAMPLES // PER_PROMPT, SAMPLES // PER_PROMPT // 4])
@pytest.mark.parametrize("estimator", CASES)
def test_step_takes_planned_bytes(shares: Shares, estimator: str, num_prompts: int) -> None:
    """The texts of this test are empty."""
    actor = Actor(shares)
    actor._minibatches = MiniBatches(num_prompts=num_prompts, num_epochs=1, shuffle=True, seed=1)
    job = replace(job_of(CASES[estimator], shares), actor=actor)
    progress = first_step(job)
    with allocations() as found:
        take_step(job, progress, Timers(), step=STEP)
    phases = planned(f"actor_rollout_ref.actor.ppo_mini_batch_size={num_prompts}", estimator=estimator)
    names = ("records", "messages", "learnt tokens", "mini-batches", "block of tokens")
    expected = max(sum(phases[phase].parts.get(name, 0) for name in names) for phase in ("exchange", "update"))
    assert found.peak == pytest.approx(expected - NUM_DRAWN * TEXT_BYTES, rel=0.06)


@pytest.mark.parametrize("needs", ["groups", "values"])
def test_custom_estimator_takes_planned_bytes(shares: Shares, needs: str) -> None:
    """An eighth of the samples is on this rank. An estimator of values returns advantages and returns."""

    def of_groups(token_rewards: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
        return token_rewards.clone()

    def of_values(token_rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return token_rewards - values, token_rewards.clone()

    job = job_of(CASES["gae" if needs == "values" else "grpo"], shares)
    function = of_values if needs == "values" else of_groups
    custom = replace(
        job,
        algorithm=AlgorithmSection(adv_estimator="custom"),
        custom_estimator=partial(estimates_of, function, kwargs={}),
    )
    progress = first_step(job)
    with allocations() as found:
        take_step(custom, progress, Timers(), step=STEP)
    update = planned(f"algorithm.custom_estimator={{path: own.py, needs: [{needs}]}}", estimator="custom")["update"]
    names = ("records", "learnt tokens", "tokens of all ranks", "block of tokens")
    expected = sum(update.parts[name] for name in names) - NUM_DRAWN * TEXT_BYTES
    assert found.peak == pytest.approx(expected, rel=0.1)


def test_prompts_take_planned_bytes(tmp_path: Path) -> None:
    """A prompt of the data has its tokens, and its text twice: as the data have it, and as a model reads it."""
    num_prompts, num_tokens = 64, 1024
    words = [f"{number:0{TEXT_BYTES - 1}}" for number in range(num_prompts)]
    rows = [{"prompt": " ".join([word] * num_tokens), "data_source": "own"} for word in words]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    vocabulary = {word: number for number, word in enumerate(["</s>", *words])}
    model = tokenizers.Tokenizer(WordLevel(vocabulary, unk_token="</s>"))
    model.pre_tokenizer = Whitespace()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>"), source="words")
    section = DataSection(train_files=str(tmp_path / "rows.jsonl"), max_prompt_length=num_tokens)
    dataset = PromptDataset(section, section.train_files, tokenizer, Needs(source=False, ground_truth=False))
    with allocations() as found:
        prompts = [*dataset.read(range(num_prompts))]
    assert sum(len(prompt.token_ids) for prompt in prompts) == num_prompts * num_tokens
    assert found.present == pytest.approx(num_prompts * num_tokens * PROMPT_TOKEN_BYTES, rel=0.2)


def test_numbers_of_all_samples_take_planned_bytes(shares: Shares) -> None:
    num_groups = 512
    prompt = Prompt(index=0, token_ids=PROMPT, text="", data_source="", ground_truth=None, extra_info={})
    table = GroupRows.new([prompt] * num_groups, range(PER_PROMPT), started=0).table
    finished = [Generation(0, int32([1]), None, False) for _ in range(len(table) // RANKS)]
    with allocations() as found:
        windows = exchange(lambda: Window(finished), range(RANKS))
        assert windows.finished.shape[1] == len(table)
    expected = len(table) * INDEX_SAMPLE_BYTES + num_groups * INDEX_PROMPT_BYTES
    assert found.peak + table.numbers.nbytes == pytest.approx(expected, rel=0.1)
