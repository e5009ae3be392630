"""The frame of any run: its directory, its schedule, its checkpoints and its trackers."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megarl.assembly.inputs import inputs_of
from megarl.assembly.next_steps import next_steps
from megarl.assembly.resume import ResumePoint, checkpoint_texts, mirror_of
from megarl.checkpoint.directory import CONFIG_FILE
from megarl.checkpoint.failures import warn_of_space
from megarl.checkpoint.huggingface import SavedModel
from megarl.checkpoint.store import CheckpointStore
from megarl.config.faults import ConfigError
from megarl.config.learning_checks import learning_faults
from megarl.config.load import to_dict, to_yaml
from megarl.config.report import custom_code
from megarl.config.root import Config, SupervisedConfig
from megarl.distributed.agreement import agree
from megarl.distributed.exchange import on_first_rank, together
from megarl.distributed.launch import Launch
from megarl.learner.learner import Learner
from megarl.platform.files import check_writable, write_whole
from megarl.report.tracker import REPORT_FILE, ReportTracker
from megarl.tracking.config import TrainerSection
from megarl.tracking.console import Console
from megarl.tracking.history import HISTORY_FILE, History
from megarl.tracking.profile import make_traces
from megarl.tracking.protocol import NullTracker, Tracker
from megarl.tracking.run import TrackedRun
from megarl.tracking.status import STATUS_FILE, Status
from megarl.tracking.tracker import Trackers, make_tracker
from megarl.training.steps import Schedule

logger = logging.getLogger(__name__)


def name_custom_code(config: Config | SupervisedConfig) -> None:
    """Report which of the user's own code runs: rewards, and code that comes with models. Collective.

    Raises:
        UserError: the code differs between ranks.
    """
    code = custom_code(config)
    agree(code)
    if dist.get_rank() == 0:
        for key, what in code.items():
            logger.info("code of your own: %s: %s", key, what)


def check_directories(trainer: TrainerSection) -> None:
    """Check that every rank can write to the run's directories, before anything is built. Collective.

    Raises:
        UserError: a rank cannot write. The message names the key and the remedy on every rank.
    """
    directories = {
        "trainer.default_local_dir": trainer.default_local_dir,
        "trainer.rollout_data_dir": trainer.rollout_data_dir,
    }

    def check() -> None:
        for key, name in directories.items():
            if name:
                check_writable(Path(name), key)

    together(check)


def last_step_of(config: Config | SupervisedConfig, steps_per_epoch: int) -> int:
    """Return the last step of a run. Raises ConfigError if a model would not learn until then."""
    trainer = config.trainer
    last_step = trainer.total_training_steps or trainer.total_epochs * steps_per_epoch
    faults = [*learning_faults(config, last_step)]
    if faults:
        raise ConfigError(faults)
    return last_step


def make_schedule(
    trainer: TrainerSection, launch: Launch, *, first_step: int, last_step: int, resumed: bool
) -> Schedule:
    """Make the schedule of a run that starts at `first_step`."""
    return Schedule(
        first_step=first_step,
        last_step=last_step,
        test_freq=trainer.test_freq,
        save_freq=trainer.save_freq,
        save_last=trainer.save_last,
        save_best=trainer.save_best,
        validate_first=trainer.val_before_train and not resumed,
        traces=make_traces(trainer, launch),
    )


def make_checkpoints(
    config: Config | SupervisedConfig,
    learners: Mapping[str, Learner],
    models: Sequence[SavedModel],
    *,
    mirrored: bool = True,
) -> CheckpointStore:
    """Make the store of a run's checkpoints as `trainer` configures it. Warn if the disk has no room for a checkpoint.

    Args:
        config: of the run.
        learners: the models to save, by name.
        models: these models in Hugging Face's format.
        mirrored: whether to use the mirror that `trainer` may name.
    """
    trainer = config.trainer
    code = custom_code(config)
    inputs = on_first_rank(lambda: inputs_of(config))
    checkpoints = CheckpointStore(
        directory=Path(trainer.default_local_dir),
        learners=learners,
        keep=trainer.max_ckpt_to_keep,
        models=models,
        with_weights=trainer.save_huggingface,
        texts=checkpoint_texts(config, learners, code, inputs),
        is_async=trainer.async_save,
        mirror=mirror_of(trainer) if mirrored else None,
    )
    if trainer.save_freq > 0 or trainer.save_last:
        warn_of_space(checkpoints.directory, checkpoints.num_bytes)
    return checkpoints


def run_tracker(
    config: Config | SupervisedConfig, launch: Launch, resume_point: ResumePoint, *, last_step: int
) -> Tracker:
    """Write the run's configuration. Open the trackers that `trainer.logger` names, and the files of a report.

    Collective; the first rank tracks.
    """
    trainer = config.trainer
    run_dir = Path(trainer.default_local_dir)
    on_first_rank(lambda: write_whole(run_dir / CONFIG_FILE, to_yaml(config).encode()))
    params = to_dict(config)
    code = custom_code(config)
    if code:
        params["code"] = code
    run = TrackedRun(
        run_dir=run_dir,
        project=trainer.project_name,
        experiment=trainer.experiment_name,
        params=params,
        resume_step=resume_point.state.step if resume_point.is_resumed else None,
        resume_metrics=resume_point.state.metrics,
        same_curve=resume_point.same_curve,
        mlflow_tracking_uri=trainer.mlflow_tracking_uri,
    )
    return make_tracker(
        trainer.logger,
        run,
        total_steps=last_step,
        is_main=launch.rank == 0,
        also=_reports(run, last_step) if launch.rank == 0 else {},
        next_steps=partial(next_steps, config),
    )


def _reports(run: TrackedRun, last_step: int) -> dict[str, Tracker]:
    """Open the trackers that keep what a report and `megarl watch` show, and the report itself."""
    return {
        STATUS_FILE: Status(run.run_dir, total_steps=last_step, step=run.resume_step or 0),
        HISTORY_FILE: History(run.run_dir, resume_step=run.resume_step),
        REPORT_FILE: ReportTracker(run.run_dir),
    }


def console_tracker(launch: Launch, *, total_steps: int) -> Tracker:
    """Open a tracker that only prints."""
    return Trackers({"console": Console(total_steps=total_steps)}) if launch.rank == 0 else NullTracker()


def finish_records(
    config: Config | SupervisedConfig, launch: Launch, resume_point: ResumePoint, *, last_step: int
) -> None:
    """Report that no steps are left. Record the last step and complete the mirror if the run died before that."""
    if launch.rank == 0:
        logger.info(
            "nothing left to do: %s is at step %d of %d. To continue this run, raise trainer.total_training_steps or "
            "trainer.total_epochs. To start anew, with what has changed since, name another trainer.experiment_name or "
            "trainer.default_local_dir",
            Path(config.trainer.default_local_dir),
            resume_point.state.step,
            last_step,
        )
    run_tracker(config, launch, resume_point, last_step=last_step).close()
    mirror = mirror_of(config.trainer)
    if resume_point.checkpoint and mirror:
        mirror.remember(resume_point.checkpoint, best=resume_point.state.best_step)
        mirror.close()
