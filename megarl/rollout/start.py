"""The start of the engine of a checkpoint."""

from collections.abc import Sequence

from megarl.models.source import Source
from megarl.rollout.config import RolloutSection
from megarl.rollout.engine import RolloutEngine


def start_engine(
    source: Source,
    section: RolloutSection,
    *,
    stop_token_ids: Sequence[int],
    max_model_len: int,
    max_sequences: int,
    trust_remote_code: bool,
) -> RolloutEngine:
    """Start this rank's part of an engine for the model, asleep and without weights; arguments as `RolloutEngine`."""
    return RolloutEngine(
        section,
        model_dir=source.directory,
        overrides=source.overrides,
        architecture=source.architecture,
        stop_token_ids=stop_token_ids,
        max_model_len=max_model_len,
        max_sequences=max_sequences,
        trust_remote_code=trust_remote_code,
    )
