"""How far engine and trainer may be apart before something other than rounding is at work.

Each side rounds the states of every layer and so the logits. A logit of size z is off by about z r on either side,
where r is the relative error of one number: 2^-8 in bfloat16, whose results are rounded once, and 2^-16 in float32,
where a sum of n products is off by about sqrt(n) 2^-24 and n goes up to 2^16. With logits up to 32:

- the log-probabilities of two sides differ by d with a mean square of up to 2 (32 r)^2, of which the mismatch
  (`megarl.training.gate`) is half: (32 r)^2;
- a probability differs by up to p (1 - p) times the error of a difference of two logits, 64 r / 4 = 16 r.
"""

from dataclasses import dataclass

from megarl.rollout.config import SyncSection

ROUNDING = {"bfloat16": 2.0**-8, "float32": 2.0**-16}
LOGIT = 32.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """`rollout.sync.*` with a number for each null."""

    probs_warn: float  # mean difference of probabilities in a self-check
    probs_stop: float
    mismatch_stop: float
    mismatch_growth: float
    mismatch_share: float

    @classmethod
    def of(cls, section: SyncSection, *dtypes: str) -> "Limits":
        """The limits of a run whose trainer and engine compute in `dtypes`: the coarsest counts."""
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
