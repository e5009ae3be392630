"""Checks that the engine which drew a step's samples computes as the trainer does, before anything learns from them.

With d = log p_trainer - log p_engine, the mismatch of a sampled token is min(d^2, 1) / 2, and that of several tokens is
their mean without the largest: one in a hundred, at least `FREE_TOKENS`. While d is small it estimates
KL(engine || trainer), as `exp(d) - d - 1` does (http://joschu.net/blog/kl-approx.html). It is bounded, and free of its
extremes, because rounding may let a router choose another expert, in float32 too, and that token then differs entirely.

A sample is far out if its mismatch is above `FAR_OUT` times the limit of the step: nothing learns from it. A step fails
if too many samples are far out, or if the mismatch of the others is above the limit. The limit is `mismatch_growth`
times the median of the run's first `WINDOW` steps that passed, but not below `LEAST` times `mismatch_stop`, and not
above `mismatch_stop`.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megarl.algorithms.correction import token_mismatch
from megarl.batch import Rollouts
from megarl.columns import in_rows, sample_sums
from megarl.distributed.exchange import together
from megarl.distributed.selection import kth_largest
from megarl.distributed.sharded import Index, Sharded
from megarl.platform.errors import UserError
from megarl.rollout.limits import Limits

logger = logging.getLogger(__name__)
R = TypeVar("R", bound=Rollouts)

KEY = "actor_rollout_ref.rollout.sync"
WINDOW = 8  # healthy steps that the limit follows
FAR_OUT = 4.0
FREE_TOKENS = 2
LEAST = 0.1  # of `mismatch_stop`: a policy that was sure of every token may become less sure, and then rounding shows
MOST_NAMED = 8  # rows of the data set


class MismatchError(UserError):
    """The samples of a step do not come from the trainer's probabilities."""


@dataclass(frozen=True, kw_only=True)
class GateResult:
    """The result of a step that passes the gate."""

    rows: Tensor | None  # [K] int64: the samples to learn from; None: all
    healthy: tuple[float, ...]  # mismatches of the run's first steps, for the next step's limit
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Gate:
    """The check of the samples of each step."""

    limits: Limits

    def __str__(self) -> str:
        limits = self.limits
        return (
            f"the samples of each step must agree with the trainer: mismatch at most {limits.mismatch_stop:.3g} "
            f"and {limits.mismatch_growth:g} times that of the first steps; at most {limits.mismatch_share:.0%} "
            f"of them are left out for a mismatch of their own ({KEY}.mismatch_*)"
        )

    def limit(self, healthy: Sequence[float]) -> float:
        """Return the highest allowed mismatch of a step, given the mismatches in `healthy`."""
        stop = self.limits.mismatch_stop
        if not healthy:
            return stop
        usual = self.limits.mismatch_growth * median(healthy)
        return min(stop, max(usual, LEAST * stop))

    def check(
        self, samples: Sharded[Rollouts], log_probs: Tensor, healthy: Sequence[float], *, step: int
    ) -> GateResult:
        """Check the samples that were drawn after `step` finished steps. Collective.

        Args:
            samples: `B` samples, with the engine's log-probabilities. Tokens of older weights are not compared.
            log_probs: `[n]` float32 of the trainer; numbers that are not finite are not compared.
            healthy: mismatches of the run's first steps.
            step: names the step in messages.

        Raises:
            MismatchError: on all ranks alike. Nothing may learn from the samples. It is raised too if the current
                weights drew tokens and none of them can be compared.
        """
        share = samples.share
        assert share.rollout_log_probs is not None, "samples without the engine's log-probabilities"
        limit = self.limit(healthy)
        sampled = _drawn_after(share, step)
        mismatch, of_share = _mismatches(share, log_probs, sampled)
        means, num_comparable, totals = of_share.unbind(-1)
        mine = means <= FAR_OUT * limit
        counts = samples.sum(torch.stack([mine.double(), num_comparable, num_comparable * mine], dim=-1))
        num_kept, num_tokens, num_tokens_kept = map(int, counts.tolist())
        if not num_tokens:
            _report_blindness(samples, log_probs, sampled, step=step)
        left_out = 1.0 - num_kept / len(samples)
        level = _mean(samples, mismatch, totals, mine, count=num_tokens_kept)
        kept = samples.marked(mine)
        if left_out > self.limits.mismatch_share or level > limit or not num_kept:
            level = _mean(samples, mismatch, totals, torch.ones_like(mine), count=num_tokens)
            raise MismatchError(_failure(samples.index, level, kept, limit, step=step))
        if left_out and dist.get_rank() == 0:
            logger.warning(
                "nothing learns from %d samples of step %d: engine and trainer disagree about their probabilities: %s",
                int((~kept).sum()),
                step + 1,
                _rows(samples.index, ~kept),
            )
        return GateResult(
            rows=kept.nonzero()[:, 0] if left_out else None,
            healthy=(*healthy, level)[:WINDOW] if num_tokens_kept else tuple(healthy),
            metrics={
                "training/rollout_mismatch": level,
                "training/rollout_mismatch_limit": limit,
                "training/rollout_mismatch_left_out": left_out,
            },
        )


def require_version(samples: Sharded[R], *, step: int, max_staleness: int = 0) -> Sharded[R]:
    """Refuse samples with a token that was not drawn with the weights after `step` finished steps. Collective.

    `max_staleness` more steps may have finished since the weights that drew a token. If none may, every token of the
    policy has the same version, and the samples are returned without their versions.

    Raises:
        MismatchError: names the rows and the versions, on all ranks alike.
    """
    share = samples.share
    versions = share.weight_versions
    if versions is None:
        return samples
    oldest = step - max_staleness
    wrong = torch.zeros_like(share.mask)
    if len(versions) and (versions.max() > step or versions.min() < oldest):
        wrong = share.mask & ((versions > step) | (versions < oldest))
    has_wrong = share.sums(wrong) > 0
    if int(samples.sum(has_wrong)):
        wrong_samples = samples.marked(has_wrong)
        found = together(lambda: versions[wrong].unique().tolist())
        raise MismatchError(
            f"the trainer has the weights after {step} finished steps, but the engine drew "
            f"{_rows(samples.index, wrong_samples)} with those after "
            f"{', '.join(map(str, sorted({*chain.from_iterable(found)})))}: the sync before them did not take place. "
            "Nothing has learnt from them"
        )
    return samples if max_staleness else samples.with_share(replace(share, weight_versions=None))


def _drawn_after(rollouts: Rollouts, step: int) -> Tensor:
    """Return `[N]` bool: the tokens that the weights after `step` finished steps drew."""
    versions = rollouts.weight_versions
    if versions is None or not len(versions) or versions.min() == versions.max() == step:
        return rollouts.mask
    return rollouts.mask & (versions == step)


def _report_blindness(samples: Sharded[Rollouts], log_probs: Tensor, sampled: Tensor, *, step: int) -> None:
    """Raise MismatchError if none of the `sampled` tokens is finite on both sides; warn if there are no such tokens."""
    share = samples.share
    assert share.rollout_log_probs is not None
    of_engine = sampled & ~share.rollout_log_probs.isfinite()
    of_trainer = sampled & ~log_probs.isfinite()
    counts = samples.sum(torch.stack([share.sums(column) for column in (sampled, of_engine, of_trainer)], dim=-1))
    num_tokens, num_engine, num_trainer = map(int, counts)
    if num_tokens:
        raise MismatchError(
            f"no token of step {step + 1} can be compared between engine and trainer: of {num_tokens} tokens "
            f"{num_engine} have no finite log-probability of the engine and {num_trainer} none of the trainer. Nothing "
            "has learnt from them. Look for weights of the last checkpoint that are not finite, and for a type that "
            "overflows (actor_rollout_ref.rollout.dtype)"
        )
    if dist.get_rank() == 0:
        logger.warning(
            "no token of step %d is compared between engine and trainer: %s",
            step + 1,
            "older weights drew all of them" if samples.index.num_learnt.any() else "no response has a token",
        )


def _mismatches(share: Rollouts, log_probs: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mismatch of each token, `[n]`, zero if it has none; and of each sample, `[b, 3]` float64.

    The numbers of a sample are those of `_means`, how many of its tokens have a mismatch, and the sum of these.
    """
    assert share.rollout_log_probs is not None
    of_tokens = []
    of_samples = []
    for samples, columns in share.blocks(log_probs, share.rollout_log_probs, sampled):
        num_tokens = share.num_tokens[samples]
        mismatch, comparable = token_mismatch(*columns)
        counts = sample_sums(comparable, num_tokens)
        totals = sample_sums(mismatch, num_tokens)
        of_tokens.append(mismatch)
        of_samples.append(torch.stack([_means(mismatch, counts, totals, num_tokens), counts, totals], dim=-1))
    return torch.cat(of_tokens), torch.cat(of_samples)


def _means(mismatch: Tensor, counts: Tensor, totals: Tensor, num_tokens: Tensor) -> Tensor:
    """Return the `[b]` means over the comparable tokens without the largest; 0 for samples without others.

    `mismatch` is `[n]`. The other arguments are numbers of each sample, `[b]`: its comparable tokens, the sum of their
    mismatches, and all its tokens.
    """
    free = (counts // 100).clamp(min=FREE_TOKENS)
    most = int(free.max()) if len(free) else 0
    rows = in_rows(mismatch, num_tokens)
    rows.numpy().sort()  # a partition is slower if many numbers are equal
    largest = rows[:, max(rows.shape[1] - most, 0) :].double()
    is_free = torch.arange(largest.shape[1], 0, -1) <= free[:, None]
    largest = pad(largest.where(is_free, 0.0), (1, 0)).cumsum(-1)[:, -1]  # zeros before them change no bit
    return (totals - largest).clamp(min=0.0) / (counts - free).clamp(min=1)


def _mean(samples: Sharded[Rollouts], mismatch: Tensor, totals: Tensor, kept: Tensor, *, count: int) -> float:
    """Return the same mean over all `count` comparable tokens of the kept samples together. Collective.

    `mismatch` is `[n]`. Each of this rank's samples has the sum of its mismatches in `totals` `[b]`, and is kept or
    not: bool `[b]`.
    """
    share = samples.share
    free = min(max(count // 100, FREE_TOKENS), count)
    if free == count:
        return 0.0
    numbers = mismatch if kept.all() else mismatch * share.on_tokens(kept)
    border = kth_largest(numbers, free, counts=samples.shares.reports)  # a mismatch of 0 changes it only to 0
    places = (numbers > border).numpy().nonzero()[0]
    owners = share.num_tokens.numpy().cumsum().searchsorted(places, side="right")
    above = torch.from_numpy(np.bincount(owners, numbers.numpy()[places], minlength=len(share)))
    num_above = torch.from_numpy(np.bincount(owners, minlength=len(share))).double()
    below, num_free = samples.sum(torch.stack([(totals - above).where(kept, 0.0), num_above], dim=-1)).tolist()
    return max(below - border * (free - int(num_free)), 0.0) / (count - free)


def _failure(index: Index, level: float, kept: Tensor, limit: float, *, step: int) -> str:
    far_out = f"{int((~kept).sum())} of {len(kept)} samples are far out"
    named = "" if kept.all() else f" ({_rows(index, ~kept)})"
    return (
        f"the engine did not draw the samples of step {step + 1} from the trainer's probabilities: their mismatch "
        f"is {level:.3g}, the limit {limit:.3g}, and {far_out}{named}. Nothing has learnt from them. Look at what may "
        f"have changed: the weights in the engine ({KEY}.check_every=1 compares every byte of every sync), the "
        "temperature, cached keys of older weights (rollout.enable_prefix_caching=false caches none). "
        "`megarl verify MODEL_DIR` tests the sync alone. If engine and trainer are sound, raise "
        f"{KEY}.mismatch_stop, mismatch_growth or mismatch_share"
    )


def _rows(index: Index, samples: Tensor) -> str:
    """Name the rows of the data of the given samples, bool `[B]`."""
    asked = index.groups[samples.nonzero()[:, 0]].tolist()
    rows = list(dict.fromkeys(index.prompts[place].index for place in asked))
    others = " ..." if len(rows) > MOST_NAMED else ""
    return f"rows {', '.join(map(str, rows[:MOST_NAMED]))}{others} of the data"
