"""The start of the engine of a checkpoint."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from megarl.models.source import Source
from megarl.platform.errors import UserError
from megarl.reshard.headers import CONFIG
from megarl.reshard.wrapped import is_wrapped
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
    """Start this rank's part of an engine for the model, asleep and without weights; arguments as `RolloutEngine`.

    Raises:
        UserError: as `RolloutEngine`, or the engine itself would load the weights of a model of images and text.
    """
    with _described(source, section) as (directory, overrides):
        return RolloutEngine(
            section,
            model_dir=directory,
            overrides=overrides,
            architecture=source.architecture,
            stop_token_ids=stop_token_ids,
            max_model_len=max_model_len,
            max_sequences=max_sequences,
            trust_remote_code=trust_remote_code,
        )


@contextmanager
def _described(source: Source, section: RolloutSection) -> Iterator[tuple[Path, Mapping[str, object]]]:
    """Yield a directory whose `config.json` describes the model to vLLM, and the fields that replace its own."""
    if not is_wrapped(source.directory):
        yield source.directory, source.overrides
        return
    if section.load_format == "auto":
        raise UserError(
            f"actor_rollout_ref.rollout.load_format auto: vLLM would load the model of images and text in "
            f"{source.directory}; leave the key out, and the first sync brings the weights of the text model"
        )
    with TemporaryDirectory() as name:
        (Path(name) / CONFIG).write_text(json.dumps(source.hf_config), encoding="utf-8")
        yield Path(name), {}
