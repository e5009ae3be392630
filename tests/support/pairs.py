"""A learner and an engine on the same ranks, and the sampler that syncs them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from megarl.reshard.layout import Layout


@dataclass(frozen=True)
class Pair:
    """A learner over both ranks, and an engine on each rank or over both."""

    learner: Any
    engine: Any

    def sampler(self, new_name: Callable[[str], str] = lambda name: name) -> Any:
        """Return a sampler that syncs each parameter of the learner under the name that `new_name` returns for it."""
        from megarl.distributed.exchange import together
        from megarl.learner.batching import Budget
        from megarl.reshard.executor import Reshard
        from megarl.reshard.planner import plan_between
        from megarl.rollout.config import RolloutSection, SyncSection
        from megarl.rollout.limits import Limits
        from megarl.sync.selfcheck import SelfCheck
        from megarl.training.roles import EngineSampler

        held: Layout = [replace(piece, name=new_name(piece.name)) for piece in self.learner.layout()]
        plan = plan_between(
            together(lambda: held),
            together(self.engine.weights.layout),
            rank=dist.get_rank(),
            ranks_per_node=2,
            bucket_bytes=64 << 10,
        )
        return EngineSampler(
            engine=self.engine,
            actor=self.learner,
            reshard=Reshard(plan, device=self.learner.device),
            section=RolloutSection(),
            check=SelfCheck(
                Limits.of(SyncSection(), "float32"),
                self.engine,
                self.learner,
                Budget(max_tokens=800, max_sequences=None),
                check_every=1,
            ),
            finished=lambda prompt, token_ids: None,
        )

    def change(self, amount: float) -> None:
        """Change all matrices by a function of their values, so that copies stay equal."""
        with torch.no_grad(), self.learner.weights() as tensors:
            for tensor in tensors.values():
                if tensor.dim() > 1:
                    tensor.add_(amount * torch.cos(50.0 * tensor))


def swap(one: str, other: str) -> Callable[[str], str]:
    """Return a renaming that exchanges two parts of names."""
    return lambda name: name.replace(one, "*").replace(other, one).replace("*", other)
