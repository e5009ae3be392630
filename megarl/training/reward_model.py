"""The neural reward model of a run: it reads a prompt with its response and returns one number.

The policy's tokens are translated: the response is decoded, with all that the policy wrote up to its end, appended to
the prompt in the model's chat template, and encoded again. If both models share vocabulary and template, tokens pass
unchanged.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from megarl.batch import Prompt, Rollouts, Scored
from megarl.data.conversations import Conversations, scoring_batch
from megarl.data.tokenizer import Tokenizer
from megarl.distributed.exchange import in_shares
from megarl.learner.batching import Budget
from megarl.learner.learner import Learner
from megarl.platform.errors import UserError
from megarl.rewards.scoring import RuleScorer

T = TypeVar("T")


class RewardModel:
    """A frozen sequence classifier, sharded as the critic is."""

    def __init__(
        self,
        *,
        learner: Learner,
        budget: Budget,
        reader: Conversations,
        decoder: Tokenizer | None,
        ends: Collection[int],
    ) -> None:
        """Take the model and its `reader`.

        `decoder` decodes the policy's tokens, without those of `ends` at the end of a response; None passes all tokens
        unchanged.
        """
        self._learner = learner
        self._budget = budget
        self._reader = reader
        self._decoder = decoder
        self._ends = ends

    def score(self, rollouts: Rollouts) -> Tensor:
        """Return the model's score of each sample, `[B]` float32, the same on every rank.

        Raises:
            UserError: the chat template refuses a prompt. Names its data row.
            FloatingPointError: the model returned a number that is not finite.
        """
        sequences = _of_each(len(rollouts), lambda sample: self._read(rollouts, sample))
        longest = max(map(len, sequences)) + 1  # scoring_batch adds a token
        # The budget was checked for the policy's vocabulary. A sequence may be longer in this vocabulary.
        max_tokens = max(self._budget.max_tokens, -(-longest // self._learner.mesh.cp_size))
        batch = self._learner.spread(scoring_batch(sequences))
        found = self._learner.infer(batch, replace(self._budget, max_tokens=max_tokens))
        scores = batch.gather(found).to(torch.float32)  # a sequence has one token
        if not scores.isfinite().all():
            sample = scores.isfinite().tolist().index(False)
            raise FloatingPointError(f"the reward model gives sample {sample} the score {float(scores[sample])}")
        return scores

    def _read(self, rollouts: Rollouts, sample: int) -> list[int]:
        """Return the sample in the model's own tokens."""
        prompt = rollouts.prompt_of(sample)
        response = rollouts.response_ids(sample).tolist()
        if self._decoder is None:
            return self._reader.fit([*prompt.token_ids, *response])
        prefix = [] if self._reader.tokenizer.templates(prompt.raw_prompt) else prompt.token_ids
        text = self._decoder.written(response, ends=self._ends, before=prefix)
        try:
            return self._reader.encode(prompt.raw_prompt, text)
        except UserError as error:
            raise UserError(f"the reward model cannot read data row {prompt.index}: {error}") from error


class ModelScorer:
    """The reward of a model, alone or added to that of rules."""

    def __init__(
        self, *, model: RewardModel, weight: float, rules: RuleScorer | None, decode: Callable[[Sequence[int]], str]
    ) -> None:
        """Weigh the model's score by `weight`. `rules` None: the model alone, and `decode` makes the texts to log."""
        self._model = model
        self._weight = weight
        self._rules = rules
        self._decode = decode

    def begin(self, prompt: Prompt, token_ids: Sequence[int]) -> None:
        """Start to score a response by the rules. The model scores all responses together later."""
        if self._rules:
            self._rules.begin(prompt, token_ids)

    def forget(self) -> None:
        """Forget the responses that the rules have begun to score."""
        if self._rules:
            self._rules.forget()

    def score(self, rollouts: Rollouts) -> tuple[Scored, dict[str, float]]:
        """Score every sample. Return metrics of the model and the rules too. Raises what both raise."""
        given = self._model.score(rollouts)
        metrics = {
            "reward/model/mean": float(given.mean()),
            "reward/model/min": float(given.min()),
            "reward/model/max": float(given.max()),
        }
        given = self._weight * given
        if self._rules is None:
            texts = _of_each(len(rollouts), lambda sample: self._decode(rollouts.response_ids(sample).tolist()))
            return _finite(rollouts.extend(Scored, texts=texts, scores=given, accuracies=given)), metrics
        scored, others = self._rules.score(rollouts)
        return _finite(replace(scored, scores=scored.scores + given)), metrics | others


def _finite(scored: Scored) -> Scored:
    """Return the record itself. FloatingPointError if weights make a score too large for float32."""
    odd = (scored.has_score() & ~scored.scores.isfinite()).nonzero()[:, 0].tolist()
    if odd:
        raise FloatingPointError(
            f"reward_model.weights: the weighted scores of sample {odd[0]} come to {float(scored.scores[odd[0]])} in "
            "float32: choose smaller weights"
        )
    return scored


def _of_each(num: int, compute: Callable[[int], T]) -> list[T]:
    """Compute the items 0 to `num - 1`, each on one rank. Return all on every rank; an error is raised on all."""
    return [*chain.from_iterable(in_shares(num, lambda share: [compute(place) for place in share]))]
