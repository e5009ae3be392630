"""The transfer of the actor's weights to the engines, with the self-check when it is due."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megarl.learner.learner import Learner
from megarl.reshard.executor import Destination, Reshard, SyncReport
from megarl.rollout.engine import RolloutEngine
from megarl.tracking.timers import Timers
from megarl.weight_sync.selfcheck import SelfCheck


def send_weights(actor: Learner, destination: Destination, reshard: Reshard, *, check: bool = False) -> SyncReport:
    """Write the actor's weights to `destination` as planned. Collective. `check` compares the bytes on both ends."""
    with actor.weights() as tensors:
        return reshard.run(tensors, destination, check=check)


@dataclass(frozen=True, kw_only=True)
class Sync:
    """This rank's part of the transfer from the actor to its engine."""

    engine: RolloutEngine
    actor: Learner
    reshard: Reshard
    check: SelfCheck

    @contextmanager
    def awake(self, timers: Timers, *, step: int) -> Iterator[dict[str, float]]:
        """Wake the engine with the actor's weights of `step` finished steps, and put it to sleep after the block.

        A sync that is due for a check is made twice: the trainer computes its side of the check while the engine
        sleeps, so a check that fails stops the run before any sample is drawn. Yields the metrics of the check.

        Raises:
            UserError: on all ranks alike, if other weights arrived or the engine computes with other weights.
            RuntimeError: on all ranks alike, if the engine kept keys of older weights.
        """
        is_due = self.check.is_due(step)
        metrics = dict[str, float]()
        if is_due:
            with timers("sync_check"):
                self._send(timers, step=step, check=True)
                with self.engine.generating():
                    responses = self.check.generate(step=step)
                metrics = self.check.compare(responses)
        self._send(timers, step=step, check=is_due)
        with self.engine.generating():
            yield metrics

    def _send(self, timers: Timers, *, step: int, check: bool) -> None:
        with self.engine.receive_weights(version=step) as destination, timers("sync"):
            send_weights(self.actor, destination, self.reshard, check=check)
