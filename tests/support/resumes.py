"""Runs without models that save, and resume from what they saved."""

from pathlib import Path

import pytest

from megarl.assembly.inputs import inputs_of
from megarl.assembly.resume import checkpoint_texts
from megarl.checkpoint.state import Best, State
from megarl.checkpoint.store import CheckpointStore
from megarl.config.load import load_config, load_sft_config
from megarl.config.report import custom_code
from megarl.config.root import Config, SFTConfig

RESUME = "megarl.assembly.resume"
"""The name of the logger of resumes."""


def configured(run_dir: Path, *arguments: str) -> Config:
    model = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model", "critic.model.path=model"]
    arguments = (*model, f"trainer.default_local_dir={run_dir}", *arguments)
    return load_config(arguments, world_size=None, check_paths=False)


def configured_sft(run_dir: Path) -> SFTConfig:
    arguments = ["data.train_files=pairs.parquet", "model.path=model", f"trainer.default_local_dir={run_dir}"]
    return load_sft_config(arguments, world_size=None, check_paths=False)


def save(config: Config | SFTConfig, *, step: int, best: Best | None = None) -> Path:
    run_dir, code, inputs = Path(config.trainer.default_local_dir), custom_code(config), inputs_of(config)
    run = CheckpointStore(
        directory=run_dir,
        learners={},
        keep=None,
        texts=checkpoint_texts(config, {}, code, inputs),
    )
    run.save(State(step=step, best=best))
    return run_dir / f"global_step_{step}"


def told(caplog: pytest.LogCaptureFixture) -> str:
    """Return the lines that were logged since the last call."""
    lines = [f"{record.getMessage()}\n" for record in caplog.records if record.name == RESUME]
    caplog.clear()
    return "".join(lines)
