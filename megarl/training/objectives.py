"""The objectives that the learner minimises: pure losses, combined as configured.

Invariant: the loss and every metric are a micro-batch's *contribution* to those of the global mini-batch, already
divided by its `Totals`. The learner only adds contributions up, over micro-batches and ranks.

An objective takes the model's outputs on a micro-batch, the micro-batch (its columns on the outputs' device) and the
totals of the mini-batch. Outputs and columns are `[n]`, or rows `[b, T]` as the learner gives them. The loss carries
the gradient, the metrics do not.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from megarl.algorithms import losses
from megarl.algorithms.calls import arguments_of
from megarl.algorithms.config import LOSSES, LossAggregation
from megarl.algorithms.kl import token_divergence
from megarl.algorithms.losses import (
    PolicyLoss,
    PolicyOutputs,
    Totals,
    aggregate,
    bradley_terry,
    entropy,
    lm_cross_entropy,
    reward_centering,
    value_clip,
)
from megarl.algorithms.masked import masked
from megarl.batch import Experience, Marked, Preferences, Rollouts
from megarl.config.custom_functions import LOSS_ARGUMENTS
from megarl.config.policy import ActorSection, CriticSection
from megarl.training.custom import CustomLoss

Contribution = tuple[Tensor, dict[str, Tensor]]


@dataclass(frozen=True)
class ActorObjective:
    """The policy loss, less the entropy bonus, plus the KL loss if it is enabled."""

    section: ActorSection
    horizon: int  # the most tokens a response may have: the constant of `seq-mean-token-sum-norm`
    custom: CustomLoss | None = None  # the user's policy loss; `loss_mode=custom` needs it

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss has an entropy bonus."""
        return self.section.entropy_coeff != 0

    def __call__(self, outputs: PolicyOutputs, micro: Experience, totals: Totals) -> Contribution:
        """Return loss and metrics of the policy on `micro`."""
        section = self.section
        mean = partial(_mean, micro=micro, totals=totals, mode=section.loss_agg_mode, horizon=self.horizon)
        pg = policy_loss(outputs, micro, section, self.custom)
        loss = mean(pg.sums)
        metrics = {
            "actor/pg_loss": loss,
            "actor/pg_clipfrac": pg.clip_frac / totals.num_tokens,
            "actor/pg_clipfrac_lower": pg.clip_frac_lower / totals.num_tokens,
            "actor/ppo_kl": pg.ppo_kl / totals.num_tokens,
        }
        if self.needs_entropy:
            assert outputs.entropy is not None, "outputs without entropies"
            entropy_mean = mean(entropy(micro.rows(outputs.entropy), micro.rows(micro.mask)))
            metrics["actor/entropy_loss"] = entropy_mean
            loss = loss - section.entropy_coeff * entropy_mean
        if section.use_kl_loss:
            divergence = token_divergence(
                section.kl_loss_type,
                outputs.kl,
                outputs.log_probs,
                micro.ref_log_probs,
                micro.mask,
                k3_bound=section.kl_loss_k3_bound,
            )
            kl_loss = mean(micro.rows(divergence).sum(-1))
            metrics["actor/kl_loss"] = kl_loss
            loss = loss + section.kl_loss_coef * kl_loss
        return loss, {name: value.detach() for name, value in metrics.items()}


def policy_loss(
    outputs: PolicyOutputs, micro: Experience, section: ActorSection, custom: CustomLoss | None = None
) -> PolicyLoss:
    """Return the loss of type `policy_loss.loss_mode` for a mini-batch that `marks.mark` has prepared."""
    old_log_probs = outputs.log_probs.detach() if micro.old_log_probs is None else micro.old_log_probs
    tensors = (outputs.log_probs, old_log_probs, micro.advantages * micro.weights, micro.mask)
    given = dict(zip(LOSS_ARGUMENTS, map(micro.rows, tensors), strict=True))
    if custom:
        return custom(given)
    low = section.clip_ratio if section.clip_ratio_low is None else section.clip_ratio_low
    high = section.clip_ratio if section.clip_ratio_high is None else section.clip_ratio_high
    settings: dict[str, Any] = {"clip_low": low, "clip_high": high, "clip_c": section.clip_ratio_c}
    loss = section.policy_loss
    settings |= {"kl_coef": loss.ppo_kl_coef, "tau_pos": loss.tau_pos, "tau_neg": loss.tau_neg}
    function = getattr(losses, LOSSES[loss.loss_mode].function)
    chosen = {"chosen": micro.rows(micro.marked)} if isinstance(micro, Marked) else {}
    result: PolicyLoss = function(**arguments_of(function, given | chosen | settings))
    return result


@dataclass(frozen=True)
class CriticObjective:
    """The clipped value loss."""

    section: CriticSection
    horizon: int  # as in `ActorObjective`

    def __call__(self, values: Tensor, micro: Experience, totals: Totals) -> Contribution:
        """Return loss and metrics of the critic's `values` on `micro`."""
        tensors = map(micro.rows, (values, micro.values, micro.returns, micro.mask))
        vf = value_clip(*tensors, clip_range=self.section.cliprange_value)
        vf_loss = _mean(vf.sums, micro, totals, mode=self.section.loss_agg_mode, horizon=self.horizon)
        metrics = {
            "critic/vf_loss": vf_loss,
            "critic/vf_clipfrac": vf.clip_frac / totals.num_tokens,
            "critic/vpred_mean": masked(values, micro.mask).sum() / totals.num_tokens,
        }
        return vf_loss, {name: value.detach() for name, value in metrics.items()}


@dataclass(frozen=True)
class SFTObjective:
    """`coef` times the cross-entropy of the response tokens, every token with the same weight."""

    metric: str = "sft/loss"
    coef: float = 1.0

    def __call__(self, outputs: PolicyOutputs, micro: Rollouts, totals: Totals) -> Contribution:
        """Return loss and metrics of the model on `micro`, whose responses are the targets."""
        loss = lm_cross_entropy(outputs.log_probs, micro.mask).sum() / totals.num_tokens
        return self.coef * loss, {self.metric: loss.detach()}


@dataclass(frozen=True)
class PreferenceObjective:
    """The Bradley-Terry loss of a reward model, plus `centering` times the squared sum of a pair's rewards."""

    centering: float

    def __call__(self, values: Tensor, micro: Preferences, totals: Totals) -> Contribution:
        """Return loss and metrics of the scores `values` of the pairs in `micro`; a sequence has one token."""
        chosen, rejected = values.view(-1, 2).unbind(-1)
        num_pairs = totals.num_sequences / 2
        loss = bradley_terry(chosen, rejected, micro.margins.flatten()[::2]).sum() / num_pairs
        margins = (chosen - rejected).detach()
        metrics = {
            "reward_model/loss": loss,
            "reward_model/accuracy": ((margins > 0) + 0.5 * (margins == 0)).sum() / num_pairs,  # a tie is half right
            "reward_model/margin/mean": margins.sum() / num_pairs,
            "reward_model/score/mean": values.sum() / totals.num_sequences,
        }
        if self.centering:
            loss = loss + self.centering * reward_centering(chosen, rejected).sum() / num_pairs
        return loss, {name: value.detach() for name, value in metrics.items()}


def _mean(sums: Tensor, micro: Rollouts, totals: Totals, *, mode: LossAggregation, horizon: int) -> Tensor:
    return aggregate(
        sums,
        micro.rows(micro.mask).sum(-1),
        mode=mode,
        num_tokens=totals.num_tokens,
        num_sequences=totals.num_sequences,
        horizon=horizon,
    )
