"""The time that chat templates see (`strftime_now`): when the run began, on every rank and after every resume."""

from datetime import datetime
from os import environ
from pathlib import Path

from megarl.assembly.resume import resumed_checkpoint
from megarl.checkpoint.template_time import recorded_time
from megarl.distributed.exchange import on_first_rank, together
from megarl.distributed.place import restarted
from megarl.tracking.config import TrainerSection


def template_time(trainer: TrainerSection) -> datetime:
    """Return the local time of the first start, in full seconds; the present for a new run. Collective.

    Raises:
        UserError: the checkpoint that the run resumes from is missing or damaged.
    """
    run_dir = Path(trainer.default_local_dir)
    known: datetime | None = None
    if trainer.resume_mode == "auto" or any(together(lambda: restarted(environ))):
        known = on_first_rank(lambda: recorded_time(run_dir))
    if known is None and (checkpoint := resumed_checkpoint(trainer)):
        known = on_first_rank(lambda: recorded_time(checkpoint))
    return known or on_first_rank(lambda: datetime.now().replace(microsecond=0))
