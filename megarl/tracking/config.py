"""The section of the run itself: its length, ranks, records and checkpoints."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from megarl.mark import SPLIT, VALIDATES, VALIDATION, Change, Effect, key, when
from megarl.platform.errors import UserError
from megarl.section import Count, CountFromZero, Interval, Length, Seconds, section

NAME = Change(Effect.NONE, "a name")
RECORDS = Change(Effect.NONE, "records and checkpoints, not the training")
LENGTH = Change(Effect.NONE, "the run's length")
AFTER_STEPS = when(
    "validates_after_steps", words="the run validates after steps", because=("data.val_files", ".test_freq")
)

REPLAY = "replay"
"""The directory of the records of a replay, in the directory of the run."""


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _mlflow_by_any_name(value: object) -> object:
    return "mlflow" if value == "tracking" else value


def _local(value: str | None) -> str | None:
    if value and "://" in value:
        raise UserError("must be a directory, which may be on a shared disk")
    return value


# A name like 2024 is a number to YAML.
Name = Annotated[str, Field(min_length=1, coerce_numbers_to_str=True)]
Logger = Annotated[str, BeforeValidator(_mlflow_by_any_name)]


@section()
class TrainerSection:
    """`trainer.*`: length, records, checkpoints and devices of a run."""

    total_epochs: Count = key(30, LENGTH, read_if=when(".total_training_steps", None))
    """Passes over the training prompts."""
    total_training_steps: Length | None = key(None, LENGTH)
    """Steps after which to stop; null = total_epochs decides."""
    project_name: Name = key("megarl_examples", NAME)
    """MLflow experiment, and project in Weights & Biases."""
    experiment_name: Name = key("run", NAME)
    """Name of the run in MLflow and Weights & Biases; `${config_name}` is the name of the YAML file, or `run`."""
    logger: Annotated[list[Logger], BeforeValidator(_as_list)] = key(lambda: ["console", "mlflow"], RECORDS)
    """Trackers: console, jsonl (always on), mlflow (alias tracking), tensorboard, wandb, and those of installed
    packages."""
    mlflow_tracking_uri: str | None = key(
        None, RECORDS, read_if=when(".logger", "mlflow", words="`trainer.logger` names mlflow")
    )
    """MLflow server; null = MLFLOW_TRACKING_URI, else mlflow.db next to the run's directory."""
    nnodes: Count = key(1, SPLIT)
    """Machines."""
    n_gpus_per_node: Count = key(8, SPLIT)
    """Ranks per machine, on CPU too."""
    save_freq: Interval = key(-1, RECORDS)
    """Steps between checkpoints; -1 or 0 = none but those of save_last and save_best."""
    save_last: bool = key(True, RECORDS)
    """Save the last step, whatever save_freq is."""
    save_best: bool = key(True, RECORDS, read_if=AFTER_STEPS)
    """Save the step with the best validation so far."""
    test_freq: Interval = key(-1, VALIDATION)
    """Steps between validations; -1 or 0 = none."""
    val_before_train: bool = key(True, VALIDATION, read_if=when("data.val_files"))
    """Validate before the first step."""
    val_only: bool = key(False, VALIDATION)
    """Validate, show the scores and stop."""
    critic_warmup: CountFromZero = key(0, Change(Effect.CURVE, "when the actor starts to learn"))
    """First steps; only the critic learns in them."""
    balance_batch: bool = key(True, SPLIT)
    """Spread samples over ranks by length."""
    default_hdfs_dir: str | None = key(None, RECORDS)
    """Mirror of the checkpoints of this run, a directory or URI."""
    default_local_dir: Annotated[str, AfterValidator(_local)] = key("checkpoints", RECORDS)
    """The run's directory."""
    resume_mode: Literal["auto", "disable", "resume_path"] = key("auto", RECORDS)
    """auto = from the last checkpoint in the run's directory; disable = start anew; resume_path = from
    resume_from_path."""
    resume_from_path: str | None = key(None, RECORDS)
    """Checkpoint to resume from: a directory or URI that ends in global_step_N."""
    max_ckpt_to_keep: Count | None = key(3, RECORDS)
    """Newest checkpoints kept, besides the best; null = all."""
    save_huggingface: bool = key(False, RECORDS)
    """Write Hugging Face weights into each checkpoint."""
    async_save: bool = key(False, RECORDS)
    """Write checkpoints during training."""
    log_val_generations: CountFromZero = key(8, RECORDS, read_if=VALIDATES)
    """Validation samples recorded in tables."""
    rollout_data_dir: Annotated[str | None, AfterValidator(_local)] = key(None, RECORDS)
    """Directory for all samples, as parquet; null = none."""
    profile_steps: list[Count] = key(list, RECORDS)
    """Steps, counted from 1, that torch's profiler traces into RUN_DIR/profile."""
    device: Literal["auto", "cuda", "cpu"] = key("auto", Change(Effect.ROUNDING, "another device's arithmetic"))
    """auto = cuda if available."""
    deterministic: bool = key(False, Change(Effect.ROUNDING, "other kernels"))
    """Take only CUDA kernels that give the same bits every time, which are slower."""
    peak_tflops: Annotated[float, Field(gt=0.0, le=1e6)] | None = key(None, RECORDS)
    """Peak TFLOP/s of a device for perf/mfu; null = the published bfloat16 speed of H100, H200 or B200."""
    on_end: str | None = key(None, RECORDS)
    """Shell command to run when the run ends; it reads MEGARL_RUN_DIR, and in MEGARL_ENDING finished, stopped, failed
    or killed."""
    phase_timeout_s: Seconds = key(1800.0, Change(Effect.NONE, "how long, not what"))
    """Seconds without progress after which the job ends with a report."""
    max_skipped_updates: CountFromZero = key(3, Change(Effect.NONE, "when a run gives up"))
    """Most updates in a row skipped because loss or gradient is not finite."""
