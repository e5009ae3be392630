"""The configuration of generation by vLLM."""

from dataclasses import field
from math import ceil
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from megarl.mark import ENGINE, MICRO, OFF_CPU, SCORES, VALIDATES, Change, Effect, key, when
from megarl.platform.errors import UserError
from megarl.section import Count, CountFromZero, Fraction, Length, Seed, section

SAMPLES = Change(Effect.CURVE, "what is sampled")
RoutingReplay = Literal["none", "engine", "engine_scores"]
ROUTES = Change(Effect.CURVE, "which experts learn from a token")
NO_CHOICE = Change(Effect.NONE, "a key without a choice")
COMPARES = when("actor_rollout_ref.rollout.calculate_log_probs", True)


def _top_k(value: int) -> int:
    if value == 0:
        raise UserError("must be -1 (all tokens) or at least 1")
    return value


TopK = Annotated[int, Field(ge=-1, le=1_000_000), AfterValidator(_top_k)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]


@section(SCORES)
class SamplingSection:
    """`rollout.val_kwargs.*`: sampling in validation."""

    n: Count = 1
    """Responses per prompt."""
    do_sample: bool = False
    """Draw tokens at random; false = greedy."""
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = key(0.0, read_if=when(".do_sample", True))
    """Divisor of the logits; 0 = greedy."""
    top_p: Share = key(1.0, read_if=when(".do_sample", True))
    """Total probability of the most likely tokens to sample from."""
    top_k: TopK = key(-1, read_if=when(".do_sample", True))
    """Number of most likely tokens to sample from; -1 = all."""


@section(Change(Effect.NONE, "how weights are transferred and checked, not their values"))
class SyncSection:
    """`rollout.sync.*`: the transfer of weights from the trainer to the engine, and its checks."""

    bucket_megabytes: Count = 512
    """Staging memory of a transfer, in MiB per rank."""
    two_level: bool = False
    """Send data that several ranks of a node need once."""
    check_every: CountFromZero = 0
    """Steps between self-checks; 0 = only at a start."""
    logprob_warn: Fraction | None = None
    """Difference above which a self-check warns; null = half of logprob_stop."""
    logprob_stop: Fraction | None = None
    """Mean difference of probabilities above which a self-check stops the run; null = 0.0625 in bfloat16, 0.00024 in
    float32."""
    mismatch_stop: Annotated[float, Field(ge=0.0, le=0.5)] | None = key(None, read_if=COMPARES)
    """Mismatch (docs/verify.md) above which the run stops; null = 0.0156 in bfloat16, 2.4e-07 in float32; 0.5 =
    never."""
    mismatch_growth: Annotated[float, Field(ge=1.0, le=1e9)] = key(10.0, read_if=COMPARES)
    """The same as a multiple of the median of the first 8 steps."""
    mismatch_share: Fraction = key(0.05, read_if=COMPARES)
    """Share of a step's samples that may be left out for their mismatch."""


@section(SAMPLES)
class PartialSection:
    """`rollout.partial.*`: responses that continue under the weights of the next step."""

    enable: bool = False
    """End a step before its slowest responses end."""
    max_staleness: Count = 4
    """Largest age of the weights that drew a token, in steps."""
    stop_when: Annotated[float, Field(ge=0.5, le=1.0)] | Annotated[int, Field(ge=2, le=1_000_000)] = 0.8
    """A step ends when this share of the prompts being drawn is complete (0.5 to 1.0), or after this number of engine
    steps (2 or more)."""

    @property
    def num_engine_steps(self) -> int | None:
        """Return the engine steps of a step; None if a step ends when enough prompts have all their responses."""
        return self.stop_when if isinstance(self.stop_when, int) else None

    def num_drawn(self, num_prompts: int) -> int:
        """Return the number of prompts that the engine draws at once, if a step learns from at most `num_prompts`."""
        return num_prompts if isinstance(self.stop_when, int) else ceil(num_prompts / self.stop_when)


@section(SAMPLES)
class RolloutSection:
    """`actor_rollout_ref.rollout.*`: the engine, and sampling in training."""

    n: Count = 1
    """Responses per prompt; more than 1 for grpo, rloo, ...."""
    temperature: Annotated[float, Field(ge=0.01, le=2.0)] = 1.0
    """Divisor of the logits, in engine and trainer."""
    top_k: TopK = key(-1, read_if=when(".do_sample", True))
    """Number of most likely tokens to sample from; -1 = all."""
    top_p: Share = key(1.0, read_if=when(".do_sample", True))
    """Total probability of the most likely tokens to sample from."""
    do_sample: bool = True
    """Draw tokens at random; false = greedy."""
    response_length: Length = 512
    """Most tokens of a response."""
    prompt_length: Length = 512
    """Most tokens of a prompt."""
    ignore_eos: bool = False
    """Generate to the full length, for measurements."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the engine's weights; should be the actor's."""
    gpu_memory_utilization: Share = key(0.5, ENGINE)
    """Share of a device's memory for the engine."""
    enforce_eager: bool | None = key(None, ENGINE)
    """Run without CUDA graphs and compilation; null = on CPU only."""
    free_cache_engine: bool = key(True, ENGINE, read_if=OFF_CPU)
    """Free the engine's memory between rollouts."""
    load_format: Literal["dummy_megatron", "megatron", "auto"] = key("dummy_megatron", NO_CHOICE)
    """auto reads the checkpoint; the others wait for the first sync."""
    tensor_model_parallel_size: Count = key(1, ENGINE)
    """Ranks per engine replica."""
    max_num_batched_tokens: Length = key(8192, ENGINE)
    """Most tokens per engine step."""
    max_num_seqs: Count = key(1024, ENGINE)
    """Most sequences per engine step."""
    enable_prefix_caching: bool = key(True, ENGINE)
    """Compute a prompt once for its n responses."""
    log_prob_micro_batch_size: Count | None = key(None, MICRO)
    """Most sequences per forward pass for old log-probabilities; null = the token budget alone."""
    calculate_log_probs: bool = key(True, NO_CHOICE)
    """Compare the engine's log-probabilities with the trainer's."""
    seed: Seed = 1
    """Seed of the engine and of every request."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vllm.LLM."""
    val_kwargs: SamplingSection = key(SamplingSection, read_if=VALIDATES)
    """Sampling in validation."""
    routing_replay: RoutingReplay = key("none", ROUTES)
    """engine: the trainer uses the experts that the engine chose (R3); engine_scores: the actor also uses the engine's
    scores of them."""
    partial: PartialSection = key(PartialSection, read_if=when(".partial.enable", True))
    """Responses that continue under the weights of the next step."""
    keep_complete: bool = key(False, ENGINE)
    """Keep complete responses of a running step, so that a killed run draws only the others."""
    sync: SyncSection = field(default_factory=SyncSection)
    """The transfer of weights to the engine, and its checks."""

    @property
    def has_whole_experts(self) -> bool:
        """Tell whether a rank of a replica holds complete experts, instead of a slice of every expert."""
        return bool(self.engine_kwargs.get("enable_expert_parallel"))

    @property
    def draws_from_all(self) -> bool:
        """Whether every token may be drawn, with the probability that the trainer computes for it."""
        return self.do_sample and self.top_p == 1.0 and self.top_k == -1

    @property
    def compares(self) -> bool:
        """Whether training samples come with log-probabilities that are comparable with the trainer's.

        If some tokens cannot be drawn, the engine knows the probabilities of all tokens only at temperature 1.
        """
        return self.calculate_log_probs and (self.draws_from_all or self.temperature == 1.0)
