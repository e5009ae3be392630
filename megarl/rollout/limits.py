"""The differences between engine and trainer that rounding alone can cause.

Each side rounds the states of every layer, and therefore the logits. A logit of size z has an error of about z r on
either side; r is the relative error of one number. In bfloat16 r = 2^-8, because results are rounded once. In float32
r = 2^-16, because a sum of n products has an error of about sqrt(n) 2^-24, and n is at most 2^16. With logits up to 32:

- the log-probabilities of the two sides differ by d with a mean square of up to 2 (32 r)^2; the mismatch
  (`megarl.training.gate`) is half of it: (32 r)^2;
- a probability differs by up to p (1 - p) times the error of a difference of two logits, 64 r / 4 = 16 r.
"""

from dataclasses import dataclass

from megarl.rollout.config import SyncSection

ROUNDING = {"bfloat16": 2.0**-8, "float32": 2.0**-16}
LOGIT = 32.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The settings of `rollout.sync.*` with a number for each null."""

    probs_warn: float  # mean difference of probabilities in a self-check
    probs_stop: float
    mismatch_stop: float
    mismatch_growth: float
    mismatch_share: float

    @classmethod
    def of(cls, section: SyncSection, *dtypes: str) -> "Limits":
        """Return the limits of a run whose trainer and engine compute in `dtypes`; the coarsest type decides."""
        rounding = max(ROUNDING[dtype] for dtype in dtypes)

        def either(given: float | None, derived: float) -> float:
            return derived if given is None else given

        probs_stop = either(section.logprob_stop, LOGIT * rounding / 2)
        return cls(
            probs_warn=either(section.logprob_warn, probs_stop / 2),
            probs_stop=probs_stop,
            mismatch_stop=either(section.mismatch_stop, (LOGIT * rounding) ** 2),
            mismatch_growth=section.mismatch_growth,
            mismatch_share=section.mismatch_share,
        )
