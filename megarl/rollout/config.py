"""The configuration of generation by vLLM."""

from dataclasses import field
from math import ceil
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from megarl.mark import ENGINE, MICRO, OFF_CPU, SCORES, VALIDATES, Change, Effect, key, when
from megarl.platform.errors import UserError
from megarl.section import Count, CountFromZero, Fraction, Length, Seed, section

SAMPLES = Change(Effect.CURVE, "what is sampled")
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
    """Draw tokens at random; False = greedy: temperature, top_p and top_k are not read."""
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = key(0.0, read_if=when(".do_sample", True))
    """Divisor of the logits, at most 2, as vLLM wants it; 0 = greedy."""
    top_p: Share = key(1.0, read_if=when(".do_sample", True))
    """Sample from the most likely tokens that together reach this probability."""
    top_k: TopK = key(-1, read_if=when(".do_sample", True))
    """Sample from this many most likely tokens; -1 = all."""


@section(Change(Effect.NONE, "how weights are transferred and checked, not their values"))
class SyncSection:
    """`rollout.sync.*`: the transfer of weights from the trainer to the engine, and its checks."""

    bucket_megabytes: Count = 512
    """Staging memory of a transfer, in MiB per rank."""
    two_level: bool = False
    """Transfer data that several ranks of a node need to the node once, then forward it inside the node."""
    check_every: CountFromZero = 0
    """Steps between self-checks of the sync; 0 = check only the first two syncs of different weights, after a start and
    after a resume."""
    logprob_warn: Fraction | None = None
    """A self-check warns if the mean difference between the token probabilities of engine and trainer exceeds this;
    null = half of logprob_stop."""
    logprob_stop: Fraction | None = None
    """A self-check stops the run if the same difference exceeds this; null = 0.0625 in bfloat16, 0.00024 if both
    compute in float32."""
    mismatch_stop: Annotated[float, Field(ge=0.0, le=0.5)] | None = key(None, read_if=COMPARES)
    """The run stops before it learns from a step whose mismatch exceeds this. The mismatch is the mean of
    min(d^2, 1) / 2 over the step's tokens; d is the difference of the log-probabilities. null = 0.0156 in bfloat16,
    2.4e-07 if both compute in float32; 0.5 = never."""
    mismatch_growth: Annotated[float, Field(ge=1.0, le=1e9)] = key(10.0, read_if=COMPARES)
    """The run also stops if the mismatch exceeds this multiple of the median of the run's first 8 steps."""
    mismatch_share: Fraction = key(0.05, read_if=COMPARES)
    """The largest share of a step's samples that may be left out because of their own mismatch before the run stops."""


@section(SAMPLES)
class PartialSection:
    """`rollout.partial.*`: responses that continue under the weights of the next step."""

    enable: bool = False
    """End a step before its slowest responses end; they continue in the next step."""
    max_staleness: Count = 4
    """Most steps that may finish between the weights that drew a token and the step that learns from it. A step waits
    for responses that would become older."""
    stop_when: Annotated[float, Field(ge=0.5, le=1.0)] | Annotated[int, Field(ge=2, le=1_000_000)] = 0.8
    """When a step ends. 0.5 to 1.0 = as soon as this share of the prompts being drawn have all their responses: a step
    learns from data.train_batch_size prompts, so the engine draws train_batch_size / stop_when prompts at once. 2 or
    more = after so many engine steps: the engine draws train_batch_size prompts at once, and a step learns from those
    that have all their responses."""

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
    """Responses per prompt; more than 1 if the advantages compare them (grpo, rloo, ...)."""
    temperature: Annotated[float, Field(ge=0.01, le=2.0)] = 1.0
    """Divisor of the logits, in sampling and in the trainer's log-probabilities: 0.01 to 2, as vLLM wants it."""
    top_k: TopK = key(-1, read_if=when(".do_sample", True))
    """Sample from this many most likely tokens; -1 = all."""
    top_p: Share = key(1.0, read_if=when(".do_sample", True))
    """Sample from the most likely tokens that together reach this probability."""
    do_sample: bool = True
    """Draw tokens at random; False = greedy."""
    response_length: Length = 512
    """Maximum tokens of a response; follows data.max_response_length unless set."""
    prompt_length: Length = 512
    """Maximum tokens of a prompt; follows data.max_prompt_length unless set."""
    ignore_eos: bool = False
    """Generate to the full length even if the model ends its response; for measurements."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the engine's weights; should equal the actor's type."""
    gpu_memory_utilization: Share = key(0.5, ENGINE)
    """Share of a device's memory that the engine may use for weights and KV cache."""
    enforce_eager: bool | None = key(None, ENGINE)
    """Run without CUDA graphs and compilation; null = false on CUDA, true on CPU."""
    free_cache_engine: bool = key(True, ENGINE, read_if=OFF_CPU)
    """Free the engine's memory between rollouts (CUDA)."""
    load_format: Literal["dummy_megatron", "megatron", "auto"] = key("dummy_megatron", NO_CHOICE)
    """dummy_megatron and megatron start the engine without weights, for the first sync; auto reads the checkpoint."""
    tensor_model_parallel_size: Count = key(1, ENGINE)
    """Ranks per engine replica."""
    max_num_batched_tokens: Length = key(8192, ENGINE)
    """Maximum tokens per engine step."""
    max_num_seqs: Count = key(1024, ENGINE)
    """Maximum sequences per engine step."""
    enable_prefix_caching: bool = key(True, ENGINE)
    """Compute a prompt once for its n responses."""
    log_prob_micro_batch_size: Count | None = key(None, MICRO)
    """Maximum sequences of a forward pass for the actor's old log-probabilities, per rank; null = the token budget."""
    calculate_log_probs: bool = key(True, NO_CHOICE)
    """Return the engine's log-probabilities and compare them with the trainer's in every step."""
    seed: Seed = 1
    """Seed of the engine and of every request."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vllm.LLM."""
    val_kwargs: SamplingSection = key(SamplingSection, read_if=VALIDATES)
    """Sampling in validation."""
    partial: PartialSection = key(PartialSection, read_if=when(".partial.enable", True))
    """Responses that continue under the weights of the next step."""
    keep_complete: bool = key(False, ENGINE)
    """Keep the complete responses of a running step in files: a run that is killed and resumes at this step draws only
    the others."""
    sync: SyncSection = field(default_factory=SyncSection)
    """The transfer of weights to the engine, and its checks."""

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
