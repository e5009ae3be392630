"""Supervised pairs as an extra loss term of the actor against forgetting, chosen by step and mini-batch alone.

PPO-ptx (Ouyang et al. 2022, "Training language models to follow instructions with human feedback", eq. 2), with the
mean over the tokens in place of the sum over a sequence.

A run that resumes therefore takes the next pairs without any state in its checkpoint.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Self

from megarl.config.root import Config
from megarl.data.config import SFTDataSection
from megarl.data.pairs import PairStream
from megarl.data.tokenizer import Tokenizer
from megarl.learner.learner import Learner
from megarl.learner.terms import LossTerm, Objective
from megarl.platform.errors import UserError
from megarl.training.objectives import SFTObjective


@dataclass(frozen=True, kw_only=True)
class Supervision:
    """The pairs of the actor's updates."""

    pairs: PairStream  # a batch for each mini-batch
    objective: Objective
    num_minibatches: int  # of one step

    @classmethod
    def of(cls, config: Config, tokenizer: Tokenizer) -> Self | None:
        """Read the configured pairs. Return None if there are no files. Collective, as reading pairs is.

        Raises:
            UserError: a row is no pair, a pair is too long, or the pairs are too few for one optimizer step.
        """
        data = config.data
        actor = config.actor_rollout_ref.actor
        if not actor.ptx_files:
            return None
        section = SFTDataSection(
            train_files=actor.ptx_files,
            prompt_key=data.prompt_key,
            max_length=data.max_prompt_length + data.max_response_length,
            train_batch_size=config.num_supervised,
            shuffle=data.shuffle,
            seed=data.seed,
        )
        longest = "data.max_prompt_length + data.max_response_length"
        pairs = PairStream(section, actor.ptx_files, tokenizer, longest=longest)
        if len(pairs) < config.num_supervised:
            raise UserError(
                f"actor_rollout_ref.actor.ptx_files hold {len(pairs)} pairs, but an optimizer step takes "
                f"{config.num_supervised}: lower actor_rollout_ref.actor.ptx_batch_size or add pairs"
            )
        num_minibatches = data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs
        objective = SFTObjective("actor/ptx_loss", actor.ptx_coef)
        return cls(pairs=pairs, objective=objective, num_minibatches=num_minibatches)

    def terms(self, learner: Learner, step: int) -> Iterator[LossTerm]:
        """Yield the extra loss term of each mini-batch of a step of the learner, without end.

        The temperature is 1: the term uses the language model's own probabilities, not the sampler's.
        """
        for number in count(step * self.num_minibatches):
            pairs = learner.spread(self.pairs.take(number))
            yield LossTerm(batch=pairs, objective=self.objective, temperature=1.0)
