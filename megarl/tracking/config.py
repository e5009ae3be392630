"""The section of the run itself: its length, ranks, records and checkpoints."""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from megarl.platform.errors import UserError
from megarl.section import Count, CountFromZero, Interval, Length, Seconds, section

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
Logger = Annotated[Literal["console", "jsonl", "mlflow", "tensorboard", "wandb"], BeforeValidator(_mlflow_by_any_name)]


@section
class TrainerSection:
    """`trainer.*`."""

    total_epochs: Count = 30
    """Passes over the training prompts."""
    total_training_steps: Length | None = None
    """Steps after which to stop; null = total_epochs decides."""
    project_name: Name = "megarl_examples"
    """MLflow experiment, and project in Weights & Biases."""
    experiment_name: Name = "gsm8k"
    """Name of the run in MLflow and Weights & Biases."""
    logger: Annotated[list[Logger], BeforeValidator(_as_list)] = field(default_factory=lambda: ["console", "mlflow"])
    """Trackers that record metrics: console, jsonl, mlflow (alias tracking), tensorboard, wandb. jsonl, the files of
    curves in the run's directory, is always on."""
    mlflow_tracking_uri: str | None = None
    """MLflow server; null = MLFLOW_TRACKING_URI, or else mlflow.db next to the run's directory, an SQLite file that all
    runs of a project share."""
    nnodes: Count = 1
    """Machines."""
    n_gpus_per_node: Count = 8
    """Processes per machine, on CPU too."""
    save_freq: Interval = -1
    """Steps between checkpoints; -1 or 0 = none but those of save_last and save_best."""
    save_last: bool = True
    """Save the last step, whatever save_freq is."""
    save_best: bool = True
    """Save each step whose validation is the best so far, and keep it until a better one is saved. false =
    val/best_step may name a step without a checkpoint."""
    test_freq: Interval = -1
    """Steps between validations; -1 or 0 = none."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate, show the scores and stop, without changing the records of the run."""
    critic_warmup: CountFromZero = 0
    """First steps; only the critic learns in them."""
    balance_batch: bool = True
    """Spread the samples over the data-parallel ranks by length."""
    default_hdfs_dir: str | None = None
    """Mirror of the checkpoints, uploaded during training and used to resume on an empty disk: a directory or any URI
    that pyarrow or fsspec opens (s3://, hdfs://, ...). Each run needs its own mirror. null = none."""
    default_local_dir: Annotated[str, AfterValidator(_local)] = "checkpoints"
    """The run's directory; checkpoints/PROJECT/EXPERIMENT unless set."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """auto = resume from the last checkpoint in the run's directory; disable = start anew; resume_path = resume from
    resume_from_path. Later or unrelated checkpoints in the directory are set aside. A job that its launcher restarts
    always resumes from its own last checkpoint."""
    resume_from_path: str | None = None
    """Checkpoint to resume from, with resume_mode=resume_path: a directory, or a URI that ends in global_step_N."""
    max_ckpt_to_keep: Count | None = 3
    """Newest checkpoints kept, besides that of the best validation; null = all."""
    save_huggingface: bool = False
    """Write Hugging Face weights into each checkpoint: huggingface/, and huggingface_critic/ for a critic."""
    async_save: bool = False
    """Write checkpoints during training, from copies in host memory; false = training waits until they are complete."""
    log_val_generations: CountFromZero = 8
    """Validation samples recorded in tables."""
    rollout_data_dir: Annotated[str | None, AfterValidator(_local)] = None
    """Directory for the samples of every step and validation, as parquet; null = samples are not kept."""
    profile_steps: list[Count] = field(default_factory=list)
    """Steps, counted from 1, that torch's profiler traces, into profile/ in the run's directory."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto = cuda if available."""
    deterministic: bool = False
    """Let the trainer take only CUDA kernels that give the same bits every time, which are slower. On CPU they do."""
    peak_tflops: Annotated[float, Field(gt=0.0, le=1e6)] | None = None
    """Peak speed of a device in TFLOP/s, for the perf/mfu metrics; null = the published speed in bfloat16 of H100, H200
    or B200; another device then gets no perf/mfu. `megarl doctor --peaks` measures it."""
    phase_timeout_s: Seconds = 1800.0
    """Seconds that a phase of a step may take without progress; then every rank reports its state, and the job ends."""
    max_skipped_updates: CountFromZero = 3
    """Most updates in a row that are skipped because their loss or gradient is not finite; one more ends the run."""
