"""The next steps at the end of a run: the files that it leaves, and the commands that use them."""

import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from megarl.checkpoint.directory import HUGGINGFACE, STEP_PREFIX, saved_steps
from megarl.checkpoint.state import best_checkpoint
from megarl.config.root import Config, RewardTrainConfig, SupervisedConfig
from megarl.platform.errors import UserError
from megarl.report.tracker import REPORT_FILE
from megarl.tracking.jsonl import METRICS_FILE, table_file
from megarl.tracking.mlflow_place import how_to_open, tracking_uri
from megarl.tracking.names import Ending
from megarl.tracking.run_id import RUN_ID_FILE, known_run_id
from megarl.tracking.samples import GENERATIONS


def next_steps(config: Config | SupervisedConfig, ending: Ending) -> Iterator[tuple[str, str]]:
    """Yield what a run has left, with its place, and what can be done next, with the command."""
    trainer = config.trainer
    run_dir = Path(trainer.default_local_dir)
    steps = saved_steps(run_dir)
    if steps:
        yield "checkpoint", str(run_dir / f"{STEP_PREFIX}{max(steps)}")
        with suppress(UserError):  # of a run that does not validate
            yield "best", str(best_checkpoint(run_dir))
    elif ending == "finished" and isinstance(config, Config):
        yield "checkpoint", "none: trainer.save_freq and save_last save no step"
    yield "report", str(run_dir / REPORT_FILE)
    yield "curves", str(run_dir / METRICS_FILE)
    samples = run_dir / table_file(GENERATIONS)
    if samples.exists():
        yield "samples", str(samples)
    if trainer.rollout_data_dir:
        yield "all samples", trainer.rollout_data_dir
        yield "browse them", shlex.join(["megarl", "report", str(run_dir), "--samples"])
    if "mlflow" in trainer.logger:
        uri = tracking_uri(trainer.mlflow_tracking_uri, run_dir)
        yield "MLflow", how_to_open(uri, known_run_id(run_dir / RUN_ID_FILE))
    if ending == "failed" and steps:
        yield "resume", "the same command resumes from the checkpoint"
    yield from _commands(config, run_dir, ending, has_checkpoint=bool(steps))


def _commands(
    config: Config | SupervisedConfig, run_dir: Path, ending: Ending, *, has_checkpoint: bool
) -> Iterator[tuple[str, str]]:
    model = run_dir / HUGGINGFACE
    if isinstance(config, Config):
        if has_checkpoint:
            yield "evaluate", shlex.join(["megarl", "evaluate", str(run_dir)])
            yield "export", shlex.join(["megarl", "export", str(run_dir), f"{run_dir}-model"])
            yield "chat", shlex.join(["megarl", "chat", str(run_dir)])
    elif ending == "finished":  # the model is exported next
        yield "model", str(model)
        if isinstance(config, RewardTrainConfig):
            yield "reward", f"reward_model.enable=true reward_model.model.path={model}"
        else:
            yield "chat", shlex.join(["megarl", "chat", str(run_dir)])
