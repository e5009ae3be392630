"""Look before a run: the faults of a configuration, its plan, and the scores of a reward."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from megarl.api.command import run_command
from megarl.api.rows import as_json, data_files
from megarl.api.source import Reward, reward_keys
from megarl.config.faults import Fault
from megarl.config.load import load_config
from megarl.config.trial import Trial, call_reward
from megarl.platform.log import show_on_console


def check(*files: str | Path, set: Mapping[str, object] | None = None) -> tuple[Fault, ...]:  # noqa: A002 - as of `train`
    """Return the faults that `megarl config --check` finds, a process of its own; nothing is started.

    Args:
        files: YAML files, merged left to right.
        set: keys that override the files.
    """
    found = json.loads(run_command("config", "--of=train", "--json", *_words(files, set), fine=(0, 2)))
    return tuple(Fault(**fault) for fault in found["faults"])


def plan(*files: str | Path, set: Mapping[str, object] | None = None) -> dict[str, object]:  # noqa: A002 - as of `train`
    """Return batches, memory, seconds and traffic that `megarl plan --json` predicts.

    Raises:
        UserError: the configuration is faulty, or a model cannot be planned.
    """
    found: dict[str, object] = json.loads(run_command("plan", *_words(files, set), "--json", fine=(0, 1)))
    return found


def score(
    reward: Reward | None,
    data: object,
    *,
    prompt: str = "prompt",
    answer: str | None = None,
    keep: Sequence[str] = (),
    data_source: str = "own",
    n: int = 10,
) -> list[Trial]:
    """Call a reward for the first `n` rows as a run does, in processes of its own, with the truth as the response.

    Text that the reward prints is shown. Arguments are those of `megarl.train`.

    Raises:
        UserError: the rows or the reward cannot be used.
    """
    with tempfile.TemporaryDirectory(prefix="megarl-score-") as place:
        files = data_files(
            data, Path(place), prompt=prompt, answer=answer, plain=False, keep=keep, data_source=data_source
        )
        keys: dict[str, object] = {
            "data.train_files": files["train"],
            "actor_rollout_ref.model.path": "none",
            "algorithm.adv_estimator": "grpo",
            "actor_rollout_ref.rollout.n": 2,
            "reward_model.trial_rows": n,
        }
        keys |= reward_keys(reward, Path(place))
        show_on_console(rank=0)
        return call_reward(load_config(_words((), keys), world_size=None, check_paths=False))


def _words(files: tuple[str | Path, ...], keys: Mapping[str, object] | None) -> list[str]:
    """Return files and keys as the words of a command."""
    written = {key: json.dumps(value, ensure_ascii=False, default=as_json) for key, value in (keys or {}).items()}
    return [*map(str, files), *(f"{key}={value}" for key, value in written.items())]
