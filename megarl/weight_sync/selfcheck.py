"""Checks during a run that the engine samples from the weights that the trainer has.

Right after a sync every engine replica continues a few fixed prompts greedily, and the trainer computes the probability
of the same tokens. Decoding is greedy because only likely tokens discriminate: for a random token both sides would
report a probability near zero, whatever their weights. Both sides use temperature 1, as the engine does for greedy
tokens. The prompts fill a block of the prefix cache, so the check meets keys that outlived a sync.
"""

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarl.batch import Prompt, Prompts, Rollouts
from megarl.distributed.exchange import together
from megarl.learner.batching import Budget
from megarl.learner.learner import Learner
from megarl.platform.errors import UserError
from megarl.reshard.checksums import checksum
from megarl.rollout.engine import RolloutEngine
from megarl.rollout.limits import Limits
from megarl.rollout.responses import as_rollouts
from megarl.rollout.sampling import GREEDY

logger = logging.getLogger(__name__)

KEY = "actor_rollout_ref.rollout.sync"
NUM_WEIGHTS = 2  # the first different weights of a job, whose syncs are always checked
NUM_PROMPTS = 4
PROMPT_TOKENS = 136  # more than a block of the prefix cache: 128 tokens on CPU, 16 on CUDA
RESPONSE_TOKENS = 16

Fingerprint = list[list[int]]  # by rank and parameter
Response = tuple[list[int], list[float]]  # the tokens of a sample and their log-probabilities


def fixed_prompts(vocab_size: int, *, max_model_len: int) -> tuple[list[Prompt], int]:
    """Return prompts of random tokens, the same for every run of a model, and the length of the responses."""
    num_tokens = min(RESPONSE_TOKENS, max_model_len // 2)
    length = min(PROMPT_TOKENS, max_model_len - num_tokens)
    draws = [random.Random(number) for number in range(NUM_PROMPTS)]
    token_ids = [[draw.randrange(vocab_size) for _ in range(length)] for draw in draws]
    prompts = [
        Prompt(index=number, token_ids=tokens, text="", data_source="", ground_truth=None, extra_info={})
        for number, tokens in enumerate(token_ids)
    ]
    return prompts, num_tokens


def generate_on_replicas(engine: RolloutEngine, prompts: Sequence[Prompt], *, max_tokens: int) -> Rollouts:
    """Generate responses of every replica. Sample `p * num_replicas + r` is the response of replica `r` to prompt `p`.

    The engine must not have generated anything since the sync.

    Raises:
        RuntimeError: on all ranks, if an engine still had keys of a prompt: older weights must have computed them.
    """
    replicas = engine.on_all_ranks(
        lambda: engine.generate(prompts, GREEDY, max_tokens=max_tokens, step=0, log_probs=True)
    )
    for replica, generations in enumerate(replicas):
        num_cached = max(generation.num_cached for generation in generations)
        if num_cached:
            raise RuntimeError(
                f"right after a sync {engine.name(replica)} still has the keys of {num_cached} prompt tokens, made by "
                "older weights: its prefix cache was not dropped (RolloutEngine.generating)"
            )
    responses = [generations[number] for number in range(len(prompts)) for generations in replicas]
    groups = [response.prompt for response in responses]
    return as_rollouts(Prompts(prompts=prompts), groups, responses, n=engine.num_replicas)


@dataclass(frozen=True)
class CheckResult:
    """The log-probabilities of one check, sample by sample."""

    engine: list[Response]
    trainer: list[Response]


@dataclass(eq=False)
class SelfCheck:
    """The checks of one job. Each check compares its results with those of the check before."""

    limits: Limits
    engine: RolloutEngine
    actor: Learner
    budget: Budget
    check_every: int

    def __post_init__(self) -> None:
        self._prompts, self._num_tokens = fixed_prompts(
            self.actor.architecture.vocab_size, max_model_len=self.engine.max_model_len
        )
        self._last_step: int | None = None
        self._before: CheckResult | None = None
        self._checked: list[Fingerprint] = []  # of different weights, up to `NUM_WEIGHTS`

    def is_due(self, step: int) -> bool:
        """Return whether the sync after `step` finished steps must be checked. Collective.

        A check is due as often as configured, and for the first `NUM_WEIGHTS` different weights of the job: some faults
        show only when weights change, and weights stay equal while a critic warms up or a learning rate is 0.
        """
        if step == self._last_step:
            return False
        if self.check_every > 0 and step % self.check_every == 0:
            return True
        return self._unchecked() is not None

    def generate(self, *, step: int) -> Rollouts:
        """Generate the engine's responses right after a sync. `compare` takes them."""
        self._last_step = step
        weights = self._unchecked()
        if weights is not None:
            self._checked.append(weights)
        return generate_on_replicas(self.engine, self._prompts, max_tokens=self._num_tokens)

    def compare(self, responses: Rollouts) -> dict[str, float]:
        """Compare the responses with the trainer's probabilities. The trainer must still have the weights of the sync.

        Returns:
            The mean and the largest difference between the probabilities that engine and trainer give the tokens, each
            for the replica with the largest value.

        Raises:
            UserError: on all ranks alike, if the mean is above `logprob_stop`, or if the trainer has changed since
                the check before and a replica has not.
        """
        log_probs = log_probs_of_all(self.actor, responses, self.budget, temperature=1.0)
        assert responses.rollout_log_probs is not None, "`generate_on_replicas` requests them"
        seen = CheckResult(_by_sample(responses, responses.rollout_log_probs), _by_sample(responses, log_probs))
        means, largest = probability_differences(responses, log_probs, num_replicas=self.engine.num_replicas)
        mean = float(means.max())
        if not mean <= self.limits.probs_warn:  # NaN counts as too much
            message = self._disagreement(mean, int(means.argmax()))
            if not mean <= self.limits.probs_stop:
                raise UserError(f"{message} (more than {KEY}.logprob_stop={self.limits.probs_stop:.3g})")
            if dist.get_rank() == 0:
                logger.warning("%s (more than %s.logprob_warn=%.3g)", message, KEY, self.limits.probs_warn)
        stale = []
        if self._before:
            stale = stale_replicas(self._before, seen, num_replicas=self.engine.num_replicas)
        if stale:
            named = ", ".join(map(self.engine.name, stale))
            raise UserError(
                f"the trainer's weights changed, but the weights that {named} computes with did not: a sync no longer "
                "reaches what the kernels read. Look at packed weights (megarl/rollout/reload.py), CUDA graphs "
                "(rollout.enforce_eager=true turns them off) and the prefix cache (rollout.enable_prefix_caching=false)"
            )
        self._before = seen
        return {"sync/check_probs_diff_mean": mean, "sync/check_probs_diff_max": float(largest.max())}

    def _unchecked(self) -> Fingerprint | None:
        """Return the checksums of all parameters of all ranks if they are of weights that are still to be checked.

        Collective.
        """
        if len(self._checked) >= NUM_WEIGHTS:
            return None
        with self.actor.weights() as tensors:
            weights = together(lambda: [int(checksum(tensor, tensor.dtype)) for tensor in tensors.values()])
        return None if weights in self._checked else weights

    def _disagreement(self, mean: float, replica: int) -> str:
        name = self.engine.name(replica)
        return (
            f"{name} and the trainer give the same tokens probabilities that differ by {mean:.2g} "
            "on average. Look for settings that make them compute differently: rollout.dtype and actor.megatron.dtype, "
            "rollout.engine_kwargs (quantization, attention backend), actor.megatron.override_transformer_config, "
            "model.override_config; `megarl verify MODEL_DIR` with the same keys compares both with "
            "transformers, and reports whether the weights arrive"
        )


def log_probs_of_all(
    actor: Learner, responses: Rollouts, budget: Budget, *, temperature: float | None = None
) -> torch.Tensor:
    """Return the actor's log-probabilities of all tokens of a small record on every rank, `[N]`. Collective.

    The engine may take longer prompts than the data have, so the budget grows to hold the longest response.
    """
    budget = budget.holding(int(responses.lengths().max()), actor.mesh)
    batch = actor.spread(responses)
    found = actor.infer(batch, budget, temperature=temperature).log_probs
    return batch.gather_tokens(found).to(torch.float32)


def probability_differences(
    responses: Rollouts, log_probs: torch.Tensor, *, num_replicas: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and largest |p_engine - p_trainer| over the tokens of each replica.

    Each is `[R]`, in the order of `generate_on_replicas`.
    """
    assert responses.rollout_log_probs is not None, "`generate_on_replicas` requests them"
    differences = responses.rows((responses.rollout_log_probs.exp() - log_probs.exp()).abs())
    of_replicas = differences.view(len(responses) // num_replicas, num_replicas, -1)
    num_tokens = responses.num_tokens.view(-1, num_replicas).sum(0)
    return of_replicas.sum((0, 2)) / num_tokens, of_replicas.amax((0, 2))


def stale_replicas(before: CheckResult, now: CheckResult, *, num_replicas: int) -> list[int]:
    """Return the replicas whose results are bit for bit the same as before although the trainer's changed.

    The trainer has changed if more than half of its numbers differ. A step may be so small that it rounds away in some
    numbers; it rounds away in all of the engine's only if it does in most of the trainer's.
    """
    stale = []
    for replica in range(num_replicas):
        mine = slice(replica, None, num_replicas)
        if before.engine[mine] == now.engine[mine]:
            old = [number for _, log_probs in before.trainer[mine] for number in log_probs]
            new = [number for _, log_probs in now.trainer[mine] for number in log_probs]
            num_equal = sum(was == is_now for was, is_now in zip(old, new, strict=True))
            if num_equal < len(old) / 2:
                stale.append(replica)
    return stale


def _by_sample(responses: Rollouts, log_probs: torch.Tensor) -> list[Response]:
    lengths = responses.num_tokens.tolist()
    parts = zip(responses.responses.split(lengths), log_probs.split(lengths), strict=True)
    return [(tokens.tolist(), numbers.tolist()) for tokens, numbers in parts]
