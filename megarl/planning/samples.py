"""The host memory of the samples of a step on a rank, in each phase of the step.

Counted with the longest prompts and responses, and with samples that divide evenly over engine replicas and learners.
Not counted: validation, samples that dynamic sampling draws and leaves out, the prompts that a step reads after a kill
if it finds kept responses, and what the allocator keeps for itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from types import MappingProxyType

from megarl.algorithms.config import EXACT
from megarl.columns import BLOCK
from megarl.config.root import Config
from megarl.planning.states import FLOAT32

TEXT_BYTES = 5
"""About the letters of a token."""
PROMPT_TOKEN_BYTES = 4 + 2 * TEXT_BYTES
"""Bytes of a token of a prompt: the token, and the text, as it was given and as a model reads it."""
INT_BYTES, ENTRY_BYTES = 32, 8.5
"""Bytes of a Python integer, and of its place in a list, which has room for a sixteenth more on average."""
HASH_BYTES = 4
"""Bytes of a token for the name of its block of cached keys."""
REQUEST_BYTES = 10_000
"""Bytes of a request of vLLM, without its tokens."""
REQUEST_TOKEN_BYTES = round(INT_BYTES + 4 * ENTRY_BYTES + HASH_BYTES)
"""Bytes of a response token in vLLM while it draws the sample: two lists of the request, one of the model runner, and
one of the output."""
LOG_PROB_TOKEN_BYTES = 4 + 4
"""Bytes that its log-probability adds: the token again and the number, in two arrays."""
REQUEST_PROMPT_TOKEN_BYTES = round(INT_BYTES + 2 * ENTRY_BYTES + HASH_BYTES)
"""Bytes of a token of the prompt of each request."""
TABLE_BYTES = 4
"""Bytes of a place in vLLM's table of the tokens of running requests, in pinned memory."""
DRAWN_TOKEN_BYTES = 4 + 4 + 4
"""Bytes of a token that is drawn, or continues in the next step: the token, its log-probability and its version."""
SCORING_TOKEN_BYTES = 4 + TEXT_BYTES
"""Bytes of a token of a response that a reward scores: its key and its text, on one rank of the replica."""
INDEX_SAMPLE_BYTES = 9 * 4 + 3 * 8 * 8 + 9 * 8
"""Bytes of a sample on every rank, of whichever replica: its row of the table, and its numbers in the window that ends
the drawing, as they arrive, end to end, without other numbers, and as rows. Its numbers in an index are fewer."""
INDEX_PROMPT_BYTES = 6 * 8
"""Bytes of a prompt on every rank: its length, and the numbers of its run of samples."""
BLOCK_BYTES = 8 * 8 * BLOCK
"""Bytes of the float64 numbers of a block of tokens while sums over its samples are computed."""
RECORD_FIELDS: Mapping[str, int] = MappingProxyType(
    {"responses": 4, "mask": 1, "rollout_log_probs": 4, "weight_versions": 4, "turn_rewards": 4}
)
"""Bytes of one response token in each column of `megarl.batch.Rollouts`."""
LEARNT_FIELDS: Mapping[str, int] = MappingProxyType(
    dict.fromkeys(("old_log_probs", "ref_log_probs", "values", "advantages", "returns", "weights"), FLOAT32)
)
"""The same for the columns that `megarl.batch.Experience` adds."""


@dataclass(frozen=True, kw_only=True)
class SampleMemory:
    """The host memory of samples on a rank while a phase of a step is at its fullest."""

    phase: str  # generate, record, exchange or update
    parts: Mapping[str, int]  # bytes by name

    @property
    def total(self) -> int:
        """Return all bytes."""
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class _Tokens:
    """The response tokens of a rank."""

    running: int  # of samples that its replica draws at once
    waiting: int  # of the other samples of its replica
    drawn: int  # of its replica, in a step
    learnt: int
    in_flight: int  # of samples that continue in the next step


def sample_memory(config: Config, *, num_shares: int) -> list[SampleMemory]:
    """Return what a rank holds of the samples of a step, phase by phase.

    The engine replicas share the samples that are drawn, and those that continue in the next step. `num_shares`
    data-parallel ranks share the samples that models learn from.
    """
    tokens = _tokens(config, num_shares)
    rollout = config.actor_rollout_ref.rollout
    always = {
        "prompts": _prompt_bytes(config, num_shares),
        "index of samples": config.num_drawn * (rollout.n * INDEX_SAMPLE_BYTES + INDEX_PROMPT_BYTES),
        "token table of the engine": rollout.max_num_seqs
        * (rollout.prompt_length + rollout.response_length)
        * TABLE_BYTES,
        "responses that continue": tokens.in_flight * DRAWN_TOKEN_BYTES,
    }
    phases = {
        "generate": _generating(config, tokens),
        "record": {
            "drawn responses": tokens.drawn * DRAWN_TOKEN_BYTES,
            "records": tokens.drawn * sum(recorded(config).values()),
        },
        "exchange": _exchanging(config, tokens),
        "update": _updating(config, tokens),
    }
    return [
        SampleMemory(phase=phase, parts={name: size for name, size in (always | parts).items() if size})
        for phase, parts in phases.items()
    ]


def recorded(config: Config) -> dict[str, int]:
    """Return the bytes of a response token in each column of a record, on the ranks of the replica that drew it."""
    left_out = set()
    if not config.actor_rollout_ref.rollout.compares:
        left_out.add("rollout_log_probs")
    if not config.environment.name:
        left_out.add("turn_rewards")
    return {name: num_bytes for name, num_bytes in RECORD_FIELDS.items() if name not in left_out}


def exchanged(config: Config) -> dict[str, int]:
    """Return the same of the columns that travel. In a synchronous step all tokens have the same version."""
    columns = recorded(config)
    return columns if config.max_staleness else {name: columns[name] for name in columns if name != "weight_versions"}


def learnt(config: Config) -> dict[str, int]:
    """Return the same of the columns that models learn from. A column of one number takes no memory."""
    algorithm = config.algorithm
    correction = algorithm.rollout_correction
    present = {
        "old_log_probs": not correction.bypass_mode and not config.fused_old_log_probs,
        "ref_log_probs": config.estimates_divergence,
        "values": config.has_critic,
        "advantages": True,
        "returns": config.has_critic,
        "weights": bool(correction.rollout_is or correction.rollout_rs or config.environment.name),
    }
    return exchanged(config) | {name: LEARNT_FIELDS[name] for name, is_present in present.items() if is_present}


def _tokens(config: Config, num_shares: int) -> _Tokens:
    rollout = config.actor_rollout_ref.rollout
    num_replicas = config.trainer.nnodes * config.trainer.n_gpus_per_node // rollout.tensor_model_parallel_size
    of_prompt = rollout.n * rollout.response_length
    greedy = rollout.response_length * config.algorithm.estimator.greedy
    drawn = config.data.train_batch_size * (of_prompt + greedy) // num_replicas
    opened = max(drawn, config.num_drawn * of_prompt // num_replicas)
    running = min(opened, rollout.max_num_seqs * rollout.response_length)
    return _Tokens(
        running=running,
        waiting=opened - running,
        drawn=drawn,
        learnt=config.data.train_batch_size * of_prompt // num_shares,
        in_flight=config.num_in_flight * of_prompt // num_replicas,
    )


def _generating(config: Config, tokens: _Tokens) -> dict[str, int]:
    """Return the bytes while the engine draws the longest responses: most of its tokens are Python numbers in lists.

    The fullest moment is before the end of the first samples. A request that vLLM interrupts keeps its tokens, so the
    KV cache bounds nothing here. All requests of a replica have their prompts at once.
    """
    rollout = config.actor_rollout_ref.rollout
    of_token = REQUEST_TOKEN_BYTES + LOG_PROB_TOKEN_BYTES * rollout.compares
    of_finished = DRAWN_TOKEN_BYTES + ceil(SCORING_TOKEN_BYTES / rollout.tensor_model_parallel_size)
    num_requests = (tokens.running + tokens.waiting) // rollout.response_length
    of_request = REQUEST_BYTES + rollout.prompt_length * REQUEST_PROMPT_TOKEN_BYTES
    return {
        "requests of the engine": tokens.running * of_token + num_requests * of_request,
        "drawn responses": tokens.waiting * of_finished,
    }


def _exchanging(config: Config, tokens: _Tokens) -> dict[str, int]:
    """Return the bytes while samples travel: a message stays until it is sent, and until what came is a record."""
    travelling = sum(exchanged(config).values())
    return {
        "records": _scored(config, tokens),
        "messages": (tokens.drawn + tokens.learnt) * travelling,
        "learnt tokens": tokens.learnt * travelling,
    }


def _updating(config: Config, tokens: _Tokens) -> dict[str, int]:
    """Return the bytes while models learn: of several mini-batches, one is copied while the one before is there.

    The log-probabilities and entropies of the actor stay until the end of the step, an exact divergence too. In
    a copy, columns of one number and columns that two fields share are complete.
    """
    columns = learnt(config)
    outputs = FLOAT32 * (1 + (config.kl_of_reward in EXACT) + ("old_log_probs" not in columns))
    found = {
        "records": _scored(config, tokens),
        "learnt tokens": tokens.learnt * (sum(columns.values()) + outputs),
        "block of tokens": BLOCK_BYTES,
    }
    num_prompts, smallest = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    if smallest < num_prompts:
        completed = {"old_log_probs", "values", "returns", "weights"} - columns.keys()
        of_copy = sum(columns.values()) + FLOAT32 * len(completed)
        found["mini-batches"] = 2 * tokens.learnt * smallest // num_prompts * of_copy
    if config.algorithm.adv_estimator == "custom":
        of_all = _complete_batch(config)  # freed before the first mini-batch is made
        found["tokens of all ranks"] = max(0, of_all - found.get("mini-batches", 0))
    return found


def _scored(config: Config, tokens: _Tokens) -> int:
    """Return the bytes of the records of drawn tokens with their texts, which stay until the end of the step."""
    return tokens.drawn * (sum(recorded(config).values()) + TEXT_BYTES)


def _complete_batch(config: Config) -> int:
    """Return the bytes around a custom estimator: rows of rewards, a mask and values; its results, twice; a mask.

    What the estimator itself makes on the way is not counted.
    """
    rollout = config.actor_rollout_ref.rollout
    total = config.data.train_batch_size * rollout.n * rollout.response_length
    num_columns = 1 + config.has_critic  # a critic has values, and its target is another result
    return total * (3 * FLOAT32 * num_columns + 2)


def _prompt_bytes(config: Config, num_shares: int) -> int:
    """Return the bytes of the prompts of a rank.

    They are those of its samples, or all of them if samples are groups that wait or are chosen, or episodes. Of a
    digest of all prompts, each rank reads a share.
    """
    rollout = config.actor_rollout_ref.rollout
    num_prompts = config.data.train_batch_size
    num_ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    num_replicas = num_ranks // rollout.tensor_model_parallel_size
    prompts = num_prompts + config.num_in_flight
    needs_all = config.num_in_flight or config.algorithm.filter_groups.enable or config.environment.name
    if not needs_all:
        num_digested = ceil(num_prompts / num_ranks) if rollout.keep_complete else 0
        prompts = min(prompts, ceil(num_prompts / num_replicas) + ceil(num_prompts / num_shares) + num_digested)
    return prompts * PROMPT_TOKEN_BYTES * rollout.prompt_length
