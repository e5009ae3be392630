"""The FLOPs that the models need in a step, and how much of the devices' peak speed they are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megarl.batch import Rollouts
from megarl.distributed.sharded import Sharded
from megarl.learner.per_data_source import PerDataSource
from megarl.models.architecture import Architecture
from megarl.models.flops import Tokens, forward_flops
from megarl.tracking.names import TIMING
from megarl.training.interfaces import Metrics

TERA = 1e12
PART = 1 << 40
UPDATES = {"perf/mfu/actor": "update_actor", "perf/mfu/critic": "update_critic"}


@dataclass(frozen=True, kw_only=True)
class FlopsCounter:
    """The passes of each phase over the samples of a step. A reward model and ReMax's greedy responses are left out."""

    passes: Mapping[str, Sequence[tuple[PerDataSource[Architecture], int]]] = field(default_factory=dict)
    """By phase of the timers: models, and the forward passes of each over its share of the samples; an update is
    three."""
    peak: float | None = None  # FLOP/s of all devices together; None: unknown

    def metrics(self, samples: Sharded[Rollouts], timing: Metrics) -> Metrics:
        """Return the TFLOP of the phases that `timing` knows, over all ranks, and the utilization by each update.

        Collective.
        """
        lengths = samples.share.lengths()
        outputs = samples.share.num_learnt()

        def forward(models: PerDataSource[Architecture]) -> int:
            num_flops = 0
            for architecture, chosen in models.shares(samples.share):
                tokens = Tokens(lengths=lengths[chosen].numpy(), num_outputs=int(outputs[chosen].sum()))
                num_flops += forward_flops(architecture, tokens)
            return num_flops

        of_share = dict[str, int]()
        for phase, passes in self.passes.items():
            if TIMING + phase in timing:
                of_share[phase] = sum(num_passes * forward(models) for models, num_passes in passes)
        flops = dict(zip(of_share, _sums(samples, [*of_share.values()]), strict=True))
        found = {"perf/tflop": sum(flops.values()) / TERA}
        if self.peak:
            found |= {
                name: flops[phase] / timing[TIMING + phase] / self.peak
                for name, phase in UPDATES.items()
                if phase in flops
            }
        return found

    def utilization(self, tflop: float, seconds: float) -> Metrics:
        """Return the utilization by a step, generation and all waiting included; nothing if the peak is unknown."""
        return {"perf/mfu": tflop * TERA / seconds / self.peak} if self.peak else {}


def _sums(samples: Sharded[Rollouts], counts: Sequence[int]) -> list[int]:
    """Return the sums of counts over the shares of all ranks, exact although a float64 may be too small. Collective."""
    if not counts:
        return []
    parts = torch.tensor([divmod(count, PART) for count in counts], dtype=torch.float64)
    return [int(high) * PART + int(low) for high, low in samples.sum(parts[None]).tolist()]
