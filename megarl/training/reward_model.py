"""The neural reward model of a run: it reads a prompt with its answer and says one number.

The policy's tokens become the model's own: the answer is decoded, put behind the prompt as the model's chat template
wants it, and encoded again. Where both models share vocabulary and template, tokens pass as they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from megarl.batch import Prompt, Rollouts, Scored
from megarl.config.root import RewardModelSection
from megarl.data.conversations import Conversations, scoring_batch
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.distributed.exchange import in_shares
from megarl.learner.batching import Budget
from megarl.learner.factory import make_learner
from megarl.learner.learner import Learner
from megarl.learner.parallel import Mesh
from megarl.models.source import Source
from megarl.rewards.config import CustomRewardSection
from megarl.rewards.scoring import RuleScorer

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RewardModel:
    """A frozen sequence classifier, sharded as the critic is."""

    learner: Learner
    budget: Budget
    reader: Conversations
    decoder: Tokenizer | None  # of the policy's tokens; None: the model reads them as they are

    def score(self, rollouts: Rollouts) -> Tensor:
        """[B] float32: what the model gives each sample; the same on every rank.

        Raises:
            ValueError: the chat template refuses a prompt, whose data row is named.
            FloatingPointError: the model gave no finite number.
        """
        sequences = _of_each(len(rollouts), lambda sample: self._read(rollouts, sample))
        longest = max(map(len, sequences)) + 1  # scoring_batch adds a token
        # A sequence may be longer in this vocabulary than in the policy's, for which the budget was checked.
        max_tokens = max(self.budget.max_tokens, -(-longest // self.learner.mesh.cp_size))
        values: Tensor = self.learner.infer(scoring_batch(sequences), replace(self.budget, max_tokens=max_tokens))
        scores = values[:, 0]
        if not scores.isfinite().all():
            sample = scores.isfinite().tolist().index(False)
            raise FloatingPointError(f"the reward model gives sample {sample} the score {float(scores[sample])}")
        return scores

    def _read(self, rollouts: Rollouts, sample: int) -> list[int]:
        """The sample in the model's own tokens."""
        prompt, response = rollouts.prompt_of(sample), rollouts.response_ids(sample)
        if self.decoder is None:
            return self.reader.fit([*prompt.token_ids, *response])
        behind = [] if self.reader.tokenizer.templates(prompt.raw_prompt) else prompt.token_ids
        answer = self.decoder.decode_after(behind, response)
        try:
            return self.reader.encode(prompt.raw_prompt, answer)
        except ValueError as error:
            raise ValueError(f"the reward model cannot read data row {prompt.index}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class ModelScorer:
    """The reward where a model has a say in it: alone, or beside rules."""

    model: RewardModel
    weight: float
    rules: RuleScorer | None  # None: the model alone
    tokenizer: Tokenizer  # the policy's

    def begin(self, prompt: Prompt, token_ids: Sequence[int]) -> None:
        """Let the rules start on a response; the model waits for all of them."""
        if self.rules:
            self.rules.begin(prompt, token_ids)

    def score(self, rollouts: Rollouts) -> tuple[Scored, dict[str, float]]:
        """Score every sample; with metrics of the model's scores and of the rules. Raises what both raise."""
        given = self.model.score(rollouts)
        metrics = {
            "reward/model/mean": float(given.mean()),
            "reward/model/min": float(given.min()),
            "reward/model/max": float(given.max()),
        }
        given = self.weight * given
        if self.rules is None:
            texts = _of_each(len(rollouts), lambda sample: self.tokenizer.decode(rollouts.response_ids(sample)))
            return _finite(rollouts.extend(Scored, texts=texts, scores=given, accuracies=given)), metrics
        scored, others = self.rules.score(rollouts)
        return _finite(replace(scored, scores=scored.scores + given)), metrics | others


def _finite(scored: Scored) -> Scored:
    """The record itself. FloatingPointError if weights make a score too large for float32."""
    odd = (scored.judged() & ~scored.scores.isfinite()).nonzero()[:, 0].tolist()
    if odd:
        raise FloatingPointError(
            f"reward_model.weights: the weighted scores of sample {odd[0]} come to {float(scored.scores[odd[0]])} in "
            "float32: choose smaller weights"
        )
    return scored


Reward = RuleScorer | ModelScorer


def make_rules(section: RewardModelSection, custom: CustomRewardSection, policy: Tokenizer) -> RuleScorer | None:
    """The rules that have a say; None: a model scores alone. ValueError for what is wrong with the custom function."""
    rules = section.rules
    return RuleScorer.make(rules, custom, policy.decode) if rules else None


def make_reward(
    rules: RuleScorer | None,
    section: RewardModelSection,
    policy: Tokenizer,
    mesh: Mesh,
    *,
    policy_path: str,
    device: torch.device,
    budget: Budget,
    balance: bool,
) -> Reward:
    """The rules, with the model that `section` names where one is enabled; of it each rank loads its own part.

    Args:
        rules: as `make_rules` gives them.
        section: what the user says of the model.
        policy: the tokenizer of the tokens that arrive.
        mesh: this rank's place.
        policy_path: the checkpoint of the policy, for which `input_tokenizer` stands by default.
        device: where the model computes.
        budget: of a forward pass.
        balance: spread samples by length over data-parallel ranks.

    Raises:
        ValueError: it is no sequence classifier, or does not know the policy's tokens that are to pass.
    """
    if section.model_weight is None:
        assert rules is not None, "nothing scores"
        return rules
    source, given = Source.read(section.model), section.model.input_tokenizer
    if not source.architecture.scalar_head:
        raise ValueError(f"reward_model.model.path: {source.directory} is no sequence classifier")
    if given is None and policy.vocab_size > source.architecture.vocab_size:
        raise ValueError(
            f"reward_model.model.input_tokenizer=null passes the policy's {policy.vocab_size} tokens to a model of "
            f"{source.architecture.vocab_size}: leave it out, so that answers are encoded again"
        )
    trusted = section.model.trust_remote_code
    reader = Conversations(
        tokenizer=policy if given is None else source.tokenizer(trust_remote_code=trusted),
        pad_token_id=source.hf_config.get("pad_token_id"),
        max_length=section.max_length or source.architecture.max_position_embeddings,
    )
    decoder = policy if given == policy_path else given and load_tokenizer(given, trust_remote_code=trusted)
    learner = make_learner(
        source.directory,
        source.architecture,
        section.megatron,
        mesh,
        role="value",
        device=device,
        balance=balance,
    )
    model = RewardModel(learner=learner, budget=budget, reader=reader, decoder=decoder or None)
    return ModelScorer(model=model, weight=section.model_weight, rules=rules, tokenizer=policy)


def _of_each(num: int, compute: Callable[[int], T]) -> list[T]:
    """`compute` of 0 to `num` - 1, each on one rank, all on every rank; an error of one rank is raised on all."""
    return [*chain.from_iterable(in_shares(num, lambda share: [compute(place) for place in share]))]
