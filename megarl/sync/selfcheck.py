"""Looks, while a run goes on, whether the engine samples from the very weights that the trainer has.

Right after a sync every engine replica continues a few fixed prompts greedily; the trainer then says how likely it
finds those tokens. Greedily, because what a model prefers it finds likely: of an arbitrary token both sides would say
nearly zero, whatever their weights. Both speak of the distribution at temperature 1, which is the engine's for greedy
tokens. The prompts fill a block of the prefix cache, so keys that outlived a sync are met.
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
from megarl.reshard.checksums import checksum
from megarl.rollout.engine import RolloutEngine
from megarl.rollout.limits import Limits
from megarl.rollout.responses import as_rollouts
from megarl.rollout.sampling import GREEDY

logger = logging.getLogger(__name__)

KEY = "actor_rollout_ref.rollout.sync"
NUM_WEIGHTS = 2  # different weights of the trainer, whose syncs are checked in any case
NUM_PROMPTS = 4
PROMPT_TOKENS = 136  # more than a block of the prefix cache: 128 tokens on CPU, 16 on CUDA
RESPONSE_TOKENS = 16

Fingerprint = list[list[int]]  # by rank and parameter
Answer = tuple[list[int], list[float]]  # tokens of one sample and their log-probabilities


def fixed_prompts(vocab_size: int, *, max_model_len: int) -> tuple[list[Prompt], int]:
    """Prompts of arbitrary tokens, the same for every run of a model, and how many tokens may answer each."""
    num_tokens = min(RESPONSE_TOKENS, max_model_len // 2)
    length = min(PROMPT_TOKENS, max_model_len - num_tokens)
    draws = [random.Random(number) for number in range(NUM_PROMPTS)]
    token_ids = [[draw.randrange(vocab_size) for _ in range(length)] for draw in draws]
    return [
        Prompt(index=number, token_ids=tokens, text="", data_source="", ground_truth=None, extra_info={})
        for number, tokens in enumerate(token_ids)
    ], num_tokens


def ask(engine: RolloutEngine, prompts: Sequence[Prompt], *, max_tokens: int) -> Rollouts:
    """What every engine replica says to the prompts; sample `p * num_replicas + r` is the answer of replica `r`.

    Must be the first that the engine generates after a sync.

    Raises:
        RuntimeError: on all ranks, where the engine still had keys of a prompt, which older weights must have made.
    """

    replicas = engine.on_all_ranks(
        lambda: engine.generate(prompts, GREEDY, max_tokens=max_tokens, step=0, log_probs=True)
    )
    for replica, generations in enumerate(replicas):
        if num_cached := max(generation.num_cached for generation in generations):
            raise RuntimeError(
                f"right after a sync {engine.name(replica)} still has the keys of {num_cached} prompt tokens, made by "
                "older weights: its prefix cache was not dropped (RolloutEngine.awake)"
            )
    answers = [generations[number] for number in range(len(prompts)) for generations in replicas]
    groups = [answer.prompt for answer in answers]
    return as_rollouts(Prompts(prompts=prompts), groups, answers, n=engine.num_replicas)


@dataclass(frozen=True)
class Seen:
    """What one check saw, sample by sample."""

    engine: list[Answer]
    trainer: list[Answer]


class SelfCheck:
    """The checks of one job; each remembers the one before."""

    def __init__(
        self, limits: Limits, engine: RolloutEngine, actor: Learner, budget: Budget, *, check_every: int
    ) -> None:
        self._limits, self._engine, self._budget, self._check_every = limits, engine, budget, check_every
        self._actor = actor
        self._prompts, self._num_tokens = fixed_prompts(
            actor.architecture.vocab_size, max_model_len=engine.max_model_len
        )
        self._last_step: int | None = None
        self._before: Seen | None = None
        self._checked: list[Fingerprint] = []  # of different weights, up to `NUM_WEIGHTS`

    def is_due(self, step: int) -> bool:
        """Whether the sync after `step` finished steps is to be checked. Collective.

        It is due as often as configured, and for the first weights of the job and the first that differ from them:
        some faults show only when weights change, which they do not while a critic warms up or a learning rate is 0.
        """
        if step == self._last_step:
            return False
        if self._check_every > 0 and step % self._check_every == 0:
            return True
        return len(self._checked) < NUM_WEIGHTS and self._fingerprint() not in self._checked

    def ask(self, *, step: int) -> Rollouts:
        """The engine's part, right after a sync; what it says is for `compare`."""
        self._last_step = step
        if len(self._checked) < NUM_WEIGHTS and (weights := self._fingerprint()) not in self._checked:
            self._checked.append(weights)
        return ask(self._engine, self._prompts, max_tokens=self._num_tokens)

    def compare(self, answers: Rollouts) -> dict[str, float]:
        """The trainer's part, with the weights of the sync: no update may come in between.

        Returns:
            The mean and the largest difference between the probabilities that the engine and the trainer give to the
            tokens, each of the replica where it is largest.

        Raises:
            ValueError: on all ranks alike, if the mean is above `logprob_stop`, or if the trainer has moved since
                the check before and a replica of the engine has not.
        """
        says = self._actor.infer(answers, self._budget, temperature=1.0).log_probs
        assert answers.rollout_log_probs is not None, "`ask` asks for them"
        seen = Seen(_by_sample(answers, answers.rollout_log_probs), _by_sample(answers, says))
        means, largest = probability_differences(answers, says, num_replicas=self._engine.num_replicas)
        mean = float(means.max())
        if not mean <= self._limits.probs_warn:  # NaN counts as too much
            message = self._disagreement(mean, int(means.argmax()))
            if not mean <= self._limits.probs_stop:
                raise ValueError(f"{message} (more than {KEY}.logprob_stop={self._limits.probs_stop:.3g})")
            if dist.get_rank() == 0:
                logger.warning("%s (more than %s.logprob_warn=%.3g)", message, KEY, self._limits.probs_warn)
        if self._before and (stale := stale_replicas(self._before, seen, num_replicas=self._engine.num_replicas)):
            named = ", ".join(map(self._engine.name, stale))
            raise ValueError(
                f"the trainer's weights changed, and those that {named} computes with did not: a sync no longer "
                "reaches what the kernels read. Look at packed weights (megarl/rollout/reload.py), CUDA graphs "
                "(rollout.enforce_eager=true turns them off) and the prefix cache (rollout.enable_prefix_caching=false)"
            )
        self._before = seen
        return {"sync/check_probs_diff_mean": mean, "sync/check_probs_diff_max": float(largest.max())}

    def _fingerprint(self) -> Fingerprint:
        """What tells the trainer's weights from others: the checksums of all parameters of all ranks. Collective."""
        with self._actor.weights() as tensors:
            return together(lambda: [int(checksum(tensor, tensor.dtype)) for tensor in tensors.values()])

    def _disagreement(self, mean: float, replica: int) -> str:
        name = self._engine.name(replica)
        return (
            f"{name} and the trainer give the same tokens probabilities that differ by {mean:.4f} "
            "on average. Look at what makes them compute differently: rollout.dtype and actor.megatron.dtype, "
            "rollout.engine_kwargs (quantization, attention backend), actor.megatron.override_transformer_config, "
            "model.override_config; `python -m megarl.verify MODEL_DIR` with the same keys compares both with "
            "transformers, and says whether the weights arrive"
        )


def probability_differences(
    answers: Rollouts, says: torch.Tensor, *, num_replicas: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[R], [R]: mean and largest |p_engine - p_trainer| over the tokens of each replica, as `ask` orders them."""
    assert answers.rollout_log_probs is not None, "`ask` asks for them"
    shape = (-1, num_replicas, answers.mask.shape[1])
    differences = (answers.rollout_log_probs.exp() - says.exp()).abs().where(answers.mask, 0.0).view(shape)
    return differences.sum((0, 2)) / answers.mask.view(shape).sum((0, 2)), differences.amax((0, 2))


def stale_replicas(before: Seen, now: Seen, *, num_replicas: int) -> list[int]:
    """The replicas that say bit for bit what they said before although the trainer no longer does.

    That the trainer has moved is judged by more than half of its numbers: a step may be so small that it rounds away in
    some of them, and in all of the engine's only where it does in most of the trainer's.
    """
    stale = []
    for replica in range(num_replicas):
        mine = slice(replica, None, num_replicas)
        if before.engine[mine] == now.engine[mine]:
            pairs = [
                was == is_
                for (_, old), (_, new) in zip(before.trainer[mine], now.trainer[mine], strict=True)
                for was, is_ in zip(old, new, strict=True)
            ]
            if sum(pairs) < len(pairs) / 2:
                stale.append(replica)
    return stale


def _by_sample(answers: Rollouts, log_probs: torch.Tensor) -> list[Answer]:
    return [
        (answers.response_ids(sample), log_probs[sample][answers.mask[sample]].tolist())
        for sample in range(len(answers))
    ]
