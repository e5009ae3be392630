"""Handles updates that were skipped because the loss or gradient was not finite: keeps a few for inspection.

    RUN_DIR/nonfinite/step_12_actor_0.json      what was not finite in mini-batch 0 of the actor's step 12
                     /step_12_actor_0.parquet   the mini-batch: a row for each sample, every field of the record
                     /step_12_actor_0_1.parquet its extra loss term, if any

Invariant: decisions follow from facts that all ranks share, so either all ranks continue or none does.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from megarl.batch import Rollouts
from megarl.checkpoint.find import last_intact_during_run
from megarl.learner.finite import NotFinite
from megarl.learner.terms import LossTerm
from megarl.platform.errors import UserError
from megarl.platform.files import write_whole
from megarl.samples.store import write_record
from megarl.tracking.config import TrainerSection

logger = logging.getLogger(__name__)

DIRECTORY = "nonfinite"
MOST_KEPT = 16  # mini-batches of all models together; the oldest are removed


class Skips:
    """The skipped updates of one model. Counts how many come in a row, over the steps of a process."""

    def __init__(self, model: str, trainer: TrainerSection) -> None:
        self._model = model
        self._most_in_a_row = trainer.max_skipped_updates
        self._in_a_row = 0
        self._run_dir = Path(trainer.default_local_dir)
        self._directory = self._run_dir / DIRECTORY

    def note(self, why: NotFinite | None, terms: Sequence[LossTerm], *, step: int, minibatch: int) -> None:
        """Record that a mini-batch was skipped, and `why`. None: the model learned from it.

        Args:
            why: what was not finite.
            terms: the terms of the loss of the mini-batch.
            step: the step of the run, counted from 1.
            minibatch: the number of the mini-batch in the step.

        Raises:
            UserError: on all ranks alike, if more mini-batches in a row were skipped than allowed.
        """
        if why is None:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        batches = [term.batch.to_first_rank() for term in terms]
        record = self._directory / f"step_{step}_{self._model}_{minibatch}.json"
        if dist.get_rank() == 0:
            logger.warning(
                "step %d: the %s does not learn from mini-batch %d (%s; number %d in a row of at most "
                "trainer.max_skipped_updates=%d): see %s",
                *(step, self._model, minibatch, why.describe(), self._in_a_row, self._most_in_a_row, record),
            )
            self._keep(record, step, minibatch, [batch for batch in batches if batch is not None], why)
        if self._in_a_row > self._most_in_a_row:
            raise UserError(self._too_many(record, why))

    def _keep(self, record: Path, step: int, minibatch: int, batches: Sequence[Rollouts], why: NotFinite) -> None:
        """Write the records of a mini-batch to files. A disk error only warns."""
        facts = {
            "model": self._model,
            "step": step,
            "minibatch": minibatch,
            "loss": str(why.loss),  # JSON has no NaN
            "grad_norm": str(why.grad_norm),
            "samples_of_micro_batches_whose_loss_is_not_finite": [list(rows) for rows in why.rows],
            "parameters_whose_gradient_is_not_finite": {f"rank {rank}": of for rank, of in why.parameters.items()},
        }
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            for number, batch in enumerate(batches):
                name = record.stem + (f"_{number}" if number else "")
                write_record(record.with_name(f"{name}.parquet"), batch)
            write_whole(record, json.dumps(facts, indent=1).encode())
            self._forget_oldest()
        except OSError as error:
            logger.warning("%s could not be written: %s", record, error)

    def _forget_oldest(self) -> None:
        records = sorted(self._directory.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for record in records[:-MOST_KEPT]:
            for path in self._directory.iterdir():
                if path.stem == record.stem or path.stem.startswith(f"{record.stem}_"):
                    path.unlink()

    def _too_many(self, record: Path, why: NotFinite) -> str:
        found = last_intact_during_run(self._run_dir)
        good = f"the last good checkpoint is {found}" if found else f"{self._run_dir} has no intact checkpoint"
        return (
            f"the {self._model}'s loss or gradient was not finite in {self._in_a_row} updates in a row, more than "
            f"trainer.max_skipped_updates={self._most_in_a_row}; the last time: {why.describe()}. Nothing was learnt "
            f"from them, and {good}. {record} lists the numbers that were not finite, and the parquet file of the same "
            "name has the samples. Look there for an odd reward or log-probability. Otherwise lower the learning rate "
            "(optim.lr) or grad_clip, and start again"
        )
