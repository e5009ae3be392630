"""A learner and an engine on the same ranks, and the sync between them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from megarl.reshard.layout import Layout


@dataclass(frozen=True)
class Pair:
    """A learner over all ranks, and an engine on each rank or over all."""

    learner: Any
    engine: Any

    def sync(self, new_name: Callable[[str], str] = lambda name: name, check: Any = None) -> Any:
        """Return a sync that sends each parameter under the name that `new_name` returns, checked in every step."""
        from megarl.learner.batching import Budget
        from megarl.rollout.config import SyncSection
        from megarl.rollout.limits import Limits
        from megarl.weight_sync.selfcheck import SelfCheck
        from megarl.weight_sync.transfer import Sync

        limits, budget = Limits.of(SyncSection(), "float32"), Budget(max_tokens=800, max_sequences=None)
        return Sync(
            engine=self.engine,
            actor=self.learner,
            reshard=self.reshard(new_name),
            check=check or SelfCheck(limits, self.engine, self.learner, budget, check_every=1),
        )

    def reshard(self, new_name: Callable[[str], str] = lambda name: name) -> Any:
        """Return this rank's part of the transfer between the two."""
        from megarl.distributed.exchange import together
        from megarl.reshard.executor import Reshard
        from megarl.reshard.planner import plan_between

        held: Layout = [replace(piece, name=new_name(piece.name)) for piece in self.learner.layout()]
        plan = plan_between(
            together(lambda: held),
            together(self.engine.weights.layout),
            rank=dist.get_rank(),
            ranks_per_node=2,
            bucket_bytes=64 << 10,
        )
        return Reshard(plan, device=self.learner.device)

    def change(self, amount: float) -> None:
        """Change all matrices by a function of their values, so that copies stay equal."""
        with torch.no_grad(), self.learner.weights() as tensors:
            for tensor in tensors.values():
                if tensor.dim() > 1:
                    tensor.add_(amount * torch.cos(50.0 * tensor))


def swap(one: str, other: str) -> Callable[[str], str]:
    """Return a renaming that exchanges two parts of names."""
    return lambda name: name.replace(one, "*").replace(other, one).replace("*", other)
