"""The machine of a plan: speeds that were published or measured, and the lengths that its samples have."""

from dataclasses import dataclass
from math import ceil, log2

from megarl.planning.traffic import Links
from megarl.platform.peaks import Peaks


@dataclass(frozen=True)
class EngineCost:
    """The seconds that an engine step takes on the host, whatever the size of the model."""

    step: float = 0.0  # to schedule, to prepare inputs, to sample
    layer: float = 0.0  # for each layer: to call its operations
    sample: float = 0.0  # for each sample that is drawn: to record its token

    def seconds(self, num_layers: int, *, num_steps: float, num_tokens: float) -> float:
        """Return the seconds of some steps that draw `num_tokens` tokens together."""
        return num_steps * (self.step + num_layers * self.layer) + num_tokens * self.sample


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The speeds of a rank's device and of its links, in bytes per second and direction."""

    peaks: Peaks
    links: Links
    ranks_per_node: int
    engine: EngineCost = EngineCost()

    @property
    def domain(self) -> int:
        """Return the number of neighbouring ranks that fast links connect."""
        return self.links.domain or self.ranks_per_node

    def link(self, span: int) -> float:
        """Return the bandwidth of ranks that are neighbours within `span` ranks."""
        return self.links.inside if span <= self.domain else self.links.between

    def sum_link(self, span: int, *, stride: int = 1) -> float:
        """Return the bandwidth of a rank in a sum over every `stride`-th of `span` neighbours, or in a gathering.

        Each rank of a domain passes an equal part of the sum on to other domains, over its own link.
        """
        if span <= self.domain:
            return self.links.inside
        ranks_of_domain = max(1, self.domain // stride)  # D432
        return min(self.links.inside, self.links.between * ranks_of_domain)

    def latency(self, span: int) -> float:
        """Return the seconds of a sum of a few numbers over `span` neighbours: up a tree of messages, and down."""
        inside = ceil(log2(min(span, self.domain)))
        between = ceil(log2(-(-span // self.domain)))
        return 2 * (inside * self.links.inside_latency + between * self.links.between_latency)


@dataclass(frozen=True)
class Lengths:
    """The mean tokens of a prompt and of a response."""

    prompt: int
    response: int
    longest: int | None = None  # tokens of the longest response; None: all are as long as the mean

    @property
    def steps(self) -> int:
        """Return the steps that an engine takes for the longest response."""
        return self.longest or self.response
