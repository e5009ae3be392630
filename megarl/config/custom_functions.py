"""The call of a user's estimator or policy loss, and the reasons why a function cannot be called so. No torch here.

A function is called with keywords: those of the arguments below that it takes, and its `kwargs`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from inspect import Signature

from megarl.algorithms.config import NEEDS, CustomEstimatorSection, PolicyLossSection
from megarl.platform.functions import takes, unmet

ESTIMATOR = "algorithm.custom_estimator"
LOSS = "actor_rollout_ref.actor.policy_loss"
SAMPLES = ("token_rewards", "scores", "mask")
"""The arguments of every estimator; the others are `NEEDS`."""
LOSS_ARGUMENTS = ("log_probs", "old_log_probs", "advantages", "mask")
"""The arguments of every policy loss."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """The call of a user's function."""

    key: str  # the section that names the function
    path: str
    name: str
    arguments: tuple[str, ...]  # that the run computes
    kwargs: Mapping[str, object]
    needs: tuple[str, ...] = ()  # the arguments that are computed for this function alone

    @classmethod
    def of_estimator(cls, section: CustomEstimatorSection) -> "Call":
        """Return the call of a user's advantage estimator."""
        return cls(
            key=ESTIMATOR,
            path=section.path or "",
            name=section.name,
            arguments=(*SAMPLES, *section.needs),
            kwargs=section.kwargs,
            needs=tuple(section.needs),
        )

    @classmethod
    def of_loss(cls, section: PolicyLossSection) -> "Call":
        """Return the call of a user's policy loss."""
        return cls(
            key=LOSS, path=section.path or "", name=section.name, arguments=LOSS_ARGUMENTS, kwargs=section.kwargs
        )

    def __str__(self) -> str:
        return f"{self.name} of {self.path}"

    def faults(self, signature: Signature) -> Iterator[tuple[str, str]]:
        """Yield the key and the message of each reason why a function with this signature cannot be called so."""
        for name in self.kwargs:
            if name in self.arguments:
                yield f"{self.key}.kwargs", f"{name} is an argument that the run gives: leave it out"
            elif not takes(signature, name):
                yield f"{self.key}.kwargs", f"{self} does not take {name}: leave it out, or add a parameter {name}"
        for name in self.needs:
            if not takes(signature, name):
                yield f"{self.key}.needs", f"{self} does not take {name}, which is computed for it: leave it out"
        for name in unmet(signature, {*self.arguments, *self.kwargs}):
            if self.key == ESTIMATOR and name in NEEDS:
                yield f"{self.key}.needs", f"{self} takes {name}: add {name} to this list"
            else:
                yield (
                    f"{self.key}.name",
                    f"{self} has a parameter {name} without a value: give {name} a default, or a value in "
                    f"{self.key}.kwargs (the run gives {', '.join(self.arguments)})",
                )
