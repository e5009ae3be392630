"""The neural reward model of a run: it reads a prompt with its response and returns one number.

The policy's tokens are translated: the response is decoded, with all that the policy wrote up to its end, appended to
the prompt in the model's chat template, and encoded again. If both models share vocabulary and template, tokens pass
unchanged.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megarl.batch import Prompt, Rollouts, Scored
from megarl.data.conversations import Conversations, scoring_batch
from megarl.data.tokenizer import Tokenizer
from megarl.distributed.exchange import largest, on_each_rank
from megarl.distributed.redistribution import redistribute
from megarl.distributed.runs import Runs
from megarl.distributed.sharded import Sharded
from megarl.learner.batching import Budget
from megarl.learner.learner import Learner
from megarl.platform.errors import placed
from megarl.rewards.collective import ScoringMetrics
from megarl.rewards.scoring import Decode, RuleScorer


@dataclass(frozen=True, kw_only=True)
class RewardModel:
    """A frozen sequence classifier, sharded as the critic is."""

    learner: Learner
    budget: Budget
    reader: Conversations
    decoder: Tokenizer | None  # of the policy's tokens; None: the model reads them unchanged
    ends: Collection[int]  # tokens at the end of a response that are not decoded

    def score(self, samples: Sharded[Rollouts]) -> Tensor:
        """Return the model's score of each sample, `[B]` float32, the same on every rank. Collective.

        Raises:
            UserError: the chat template refuses a prompt. Names its data row.
            FloatingPointError: the model returned a number that is not finite.
        """
        index = samples.index
        owners = self.learner.batching.owners(index.lengths, torch.arange(len(samples)))
        taken = redistribute(samples, Rollouts, Runs.of(index.groups, owners), self.learner.mesh.shares)
        sequences = on_each_rank(lambda: [self._read(taken.share, place) for place in range(len(taken.share))])
        batch = taken.with_share(scoring_batch(sequences))
        # The budget was checked for the policy's vocabulary. A sequence may be longer in this vocabulary.
        longest = largest(max(batch.share.lengths().tolist(), default=0))
        found = self.learner.infer(batch, self.budget.holding(longest, self.learner.mesh))
        scores = batch.gather(found).to(torch.float32)  # a sequence has one token
        if not scores.isfinite().all():
            sample = scores.isfinite().tolist().index(False)
            raise FloatingPointError(f"the reward model gives sample {sample} the score {float(scores[sample])}")
        return scores

    def _read(self, rollouts: Rollouts, sample: int) -> list[int]:
        """Return the sample in the model's own tokens."""
        prompt = rollouts.prompt_of(sample)
        response = rollouts.response_ids(sample).tolist()
        if self.decoder is None:
            return self.reader.fit([*prompt.token_ids, *response])
        prefix = [] if self.reader.tokenizer.templates(prompt.raw_prompt) else list(prompt.token_ids)
        text = self.decoder.written(response, ends=self.ends, before=prefix)
        with placed(f"the reward model cannot read data row {prompt.index}: "):
            return self.reader.encode(prompt.raw_prompt, text)


@dataclass(frozen=True, kw_only=True)
class ModelScorer:
    """The reward of a model, alone or added to that of rules."""

    model: RewardModel
    weight: float  # of the model's score
    rules: RuleScorer | None
    decode: Decode  # makes the texts to log, if there are no rules

    def begin(self, prompt: Prompt, token_ids: Sequence[int]) -> None:
        """Start to score a response by the rules. The model scores all responses together later."""
        if self.rules:
            self.rules.begin(prompt, token_ids)

    def forget(self) -> None:
        """Forget the responses that the rules have begun to score."""
        if self.rules:
            self.rules.forget()

    def score(self, samples: Sharded[Rollouts]) -> tuple[Sharded[Scored], ScoringMetrics]:
        """Score every sample. Return metrics of the model and the rules too. Raises what both raise. Collective."""
        given = self.model.score(samples)
        metrics = {
            "reward/model/mean": float(given.mean()),
            "reward/model/min": float(given.min()),
            "reward/model/max": float(given.max()),
        }
        share = samples.share
        mine = self.weight * given[samples.mine]
        if self.rules is None:
            texts = [self.decode(share.response_ids(sample).tolist()) for sample in range(len(share))]
            scored = share.extend(Scored, texts=texts, scores=mine, accuracies=mine)
            return _finite(samples.with_share(scored)), metrics
        by_rules, others = self.rules.score(samples)
        scored = replace(by_rules.share, scores=by_rules.share.scores + mine)
        return _finite(samples.with_share(scored)), {**metrics, **others}


def _finite(samples: Sharded[Scored]) -> Sharded[Scored]:
    """Return the samples. FloatingPointError if weights make a score too large for float32. Collective."""
    share = samples.share
    odd = (share.has_score() & ~share.scores.isfinite()).nonzero()[:, 0].tolist()
    for sample, score in samples.first(1, {place: float(share.scores[place]) for place in odd}).items():
        raise FloatingPointError(
            f"reward_model.weights: the weighted scores of sample {sample} come to {score} in float32: choose smaller "
            "weights"
        )
    return samples
