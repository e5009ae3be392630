"""Start a run from a program: `megarl.train(model=..., data=..., reward=...)`."""

import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from megarl.api.rows import as_json, count_rows, data_files
from megarl.api.run import TrainingRun
from megarl.api.source import Reward, reward_keys
from megarl.checkpoint.directory import job_in, saved_steps
from megarl.config.links import dump
from megarl.config.load import load_config, merged_trees
from megarl.config.schema import nest
from megarl.platform.detached import start_detached
from megarl.platform.errors import UserError
from megarl.platform.files import check_writable, write_whole
from megarl.platform.log import show_on_console
from megarl.platform.small_files import read_json

logger = logging.getLogger(__name__)

INPUTS = "inputs"
"""Directory of a run with what the program gave: config.yaml, the reward and the rows."""
MOST_PROMPTS = 32
"""Prompts of a step, if there are rows enough."""


def train(
    *,
    model: str | Path,
    data: object,
    reward: Reward | None = None,
    prompt: str = "prompt",
    answer: str | None = None,
    keep: Sequence[str] = (),
    data_source: str = "own",
    algorithm: str = "grpo",
    steps: int = 100,
    out: str | Path | None = None,
    set: Mapping[str, object] | None = None,  # noqa: A002 - the keys that are set
) -> TrainingRun:
    """Start a run in a process of its own, which outlives this program; return it.

    Args:
        model: a Hugging Face directory or id.
        data: a file (CSV, JSON, parquet, Arrow) or a data set of the Hugging Face hub; or rows: mappings, a
            `datasets.Dataset` or a pandas DataFrame.
        reward: a function f(data_source, solution_str, ground_truth, extra_info) -> float, or the Python file of
            `compute_score`; None = the built-in reward of `data_source`.
        prompt: the column of the prompts.
        answer: the column of the ground truths, which the reward receives.
        keep: the columns that the reward receives in `extra_info`.
        data_source: chooses a built-in reward, such as `gsm8k`, and names the score of the validation.
        algorithm: `algorithm.adv_estimator`; `gae` (PPO) also trains a critic, from the same model.
        steps: to train.
        out: directory of the run; a run that is there is resumed. None = `runs/MODEL-ALGORITHM`.
        set: further keys, such as `{"actor_rollout_ref.actor.optim.lr": 1e-6}`, which override all others.

    Raises:
        ConfigError: lists every fault of the configuration.
        UserError: the rows or the reward cannot be used, or a run is at work in `out`.
    """
    model = Path(model).expanduser() if isinstance(model, Path) or model.startswith("~") else model
    directory = Path(out or f"runs/{Path(model).name}-{algorithm}").expanduser().absolute()
    _require_free(directory)
    inputs = directory / INPUTS
    check_writable(directory, "out")
    inputs.mkdir(parents=True, exist_ok=True)
    with _restoring(inputs):
        plain = _is_plain(Path(model))
        files = data_files(data, inputs, prompt=prompt, answer=answer, plain=plain, keep=keep, data_source=data_source)
        num_prompts = _batch_size(count_rows(files["train"]))
        keys: dict[str, object] = {
            "data.train_files": files["train"],
            "data.train_batch_size": num_prompts,
            "data.max_prompt_length": 512,
            "data.max_response_length": 512,
            "actor_rollout_ref.model.path": _place(model),
            "actor_rollout_ref.actor.ppo_mini_batch_size": max(1, num_prompts // 2),
            "actor_rollout_ref.rollout.n": 1 if algorithm == "gae" else 8,
            "algorithm.adv_estimator": algorithm,
            "trainer.experiment_name": directory.name,
            "trainer.default_local_dir": str(directory),
            "trainer.n_gpus_per_node": 1,
            "trainer.total_training_steps": steps,
            "trainer.save_freq": 20,
            "trainer.test_freq": 10 if "val" in files else -1,
        }
        if "val" in files:
            keys["data.val_files"] = files["val"]
        if algorithm == "gae":
            keys["critic.model.path"] = _place(model)
        else:
            keys["algorithm.use_kl_in_reward"] = False
        keys |= reward_keys(reward, inputs)
        config = inputs / "config.yaml"
        given = json.loads(json.dumps(dict(set or {}), default=as_json))
        tree = nest(keys)
        for key, value in given.items():
            tree = merged_trees(tree, nest({key: value}))
        write_whole(config, dump(tree).encode())
        if load_config([str(config)], world_size=None).trainer.default_local_dir != str(directory):
            raise UserError("trainer.default_local_dir is set: name the directory of the run by `out`")
    _report_resumption(directory, steps)
    process = start_detached([sys.executable, "-m", "megarl", "train", str(config)], directory)
    return TrainingRun(directory=directory, process=process)


@contextmanager
def _restoring(directory: Path) -> Iterator[None]:
    """Give the files of a directory their content back if the block fails. It replaces files, and changes none."""
    with TemporaryDirectory(prefix=".kept-", dir=directory.parent) as kept:
        for path in filter(Path.is_file, directory.iterdir()):
            try:
                os.link(path, Path(kept) / path.name)
            except OSError:  # a file system without links
                shutil.copy2(path, kept)
        try:
            yield
        except BaseException:
            for path in Path(kept).iterdir():
                path.replace(directory / path.name)
            raise


def _require_free(directory: Path) -> None:
    """Raise UserError if a job has the directory: what it would resume from must not change."""
    job = job_in(directory)
    if job:
        raise UserError(
            f"out={directory}: {job} trains there: stop it (`megarl.load_run(out)` shows it), or name another"
        )


def _report_resumption(directory: Path, steps: int) -> None:
    """Report that a run is resumed: after a change of its reward or data a person may want another."""
    step = max(saved_steps(directory), default=0)
    if step:
        left = (
            f"continues after step {step}" if step < steps else f"is at step {step} of {steps}: nothing is left to do"
        )
        show_on_console(rank=0)
        logger.info("note: the run of %s %s; name another `out` to start anew with what has changed", directory, left)


def _batch_size(num_rows: int) -> int:
    """Return the greatest power of two that is at most `num_rows` and MOST_PROMPTS."""
    return int(1 << min(num_rows, MOST_PROMPTS).bit_length() - 1)


def _place(model: str | Path) -> str:
    """Return the absolute path of a directory, or the id of the hub."""
    return str(Path(model).absolute()) if Path(model).is_dir() else str(model)


def _is_plain(model: Path) -> bool:
    """Return whether a model is a local directory without a chat template."""
    if not model.is_dir() or (model / "chat_template.jinja").is_file():
        return False
    settings = model / "tokenizer_config.json"
    return not (settings.is_file() and "chat_template" in read_json(settings, dict))
