"""Estimates, and marks on tokens, of a rank that has all samples."""

from typing import Any

from megarl.batch import Experience, Rewarded
from megarl.config.policy import ActorSection
from megarl.training.estimate import estimate
from megarl.training.interfaces import Metrics
from megarl.training.marks import mark
from tests.support.records import alone


def estimate_alone(scored: Rewarded, *given: Any, **settings: Any) -> tuple[Experience, Metrics]:
    """Return what `estimate` makes of the samples of a record."""
    experience, metrics = estimate(alone(scored), *given, **settings)
    return experience.share, metrics


def mark_alone(minibatch: Experience, section: ActorSection) -> Experience:
    """Return what `mark` makes of a mini-batch."""
    return mark(alone(minibatch), section.policy_loss).share
