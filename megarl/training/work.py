"""The FLOPs that the models need in a step, and how much of the devices' peak speed they are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megarl.distributed.sharded import Index
from megarl.learner.per_data_source import PerDataSource
from megarl.models.architecture import Architecture
from megarl.models.flops import Tokens, forward_flops
from megarl.tracking.names import TIMING
from megarl.training.interfaces import Metrics

TERA = 1e12
UPDATES = {"perf/mfu/actor": "update_actor", "perf/mfu/critic": "update_critic"}


@dataclass(frozen=True, kw_only=True)
class Work:
    """The passes of each phase over the samples of a step. A reward model and ReMax's greedy responses are left out."""

    passes: Mapping[str, Sequence[tuple[PerDataSource[Architecture], int]]] = field(default_factory=dict)
    """By phase of the timers: models, and the forward passes of each over its share of the samples; an update is
    three."""
    peak: float | None = None  # FLOP/s of all devices together; None: unknown

    def metrics(self, index: Index, timing: Metrics) -> Metrics:
        """Return the TFLOP of the phases that `timing` knows, over all ranks, and the utilization by each update."""
        lengths = index.lengths
        outputs = index.num_learnt

        def forward(models: PerDataSource[Architecture]) -> int:
            return sum(
                forward_flops(
                    architecture, Tokens(lengths=lengths[share].numpy(), num_outputs=int(outputs[share].sum()))
                )
                for architecture, share in models.shares(index)
            )

        flops = {
            phase: sum(num_passes * forward(models) for models, num_passes in passes)
            for phase, passes in self.passes.items()
            if TIMING + phase in timing
        }
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
