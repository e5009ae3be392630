"""Configurations nobody thought of: each key has a random value, and a run that resumes repeats its steps exactly."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest

from megarl.commands import train
from megarl.config.faults import ConfigError
from megarl.config.load import load_config
from megarl.config.reference import walk
from megarl.config.root import Config
from tests.support.forked import run_job
from tests.support.workspace import Workspace, train_arguments, with_many_ends

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1800)]

RUN_S = 300
NUM_KEYS = 8
ESTIMATORS = ("gae", "grpo", "grpo_passk", "remax", "rloo", "opo", "gpg", "reinforce_plus_plus")
CHOSEN = ("actor_rollout_ref.rollout.n", "algorithm.adv_estimator", "trainer.nnodes", "trainer.n_gpus_per_node")
OF_ANOTHER_LENGTH = ("trainer.total_", "trainer.save_freq", "trainer.max_ckpt_to_keep", "trainer.resume")
OF_ANOTHER_PLACE = ("trainer.device", "chat_template", "trainer.watchdog", "reward_model.judge", "timeout")
STOPPING = ("actor_rollout_ref.rollout.sync.", "gpu_memory", "kv_cache", "max_memory", "optim.lr")
"""Keys that stop a run at a bound, or leave no room for it."""
NEVER = (*CHOSEN, *OF_ANOTHER_LENGTH, *OF_ANOTHER_PLACE, *STOPPING)
NUMBERS = {bool: ("true", "false"), int: (1, 2, 3, 8), float: (0, 0.1, 0.5, 1, 2), type(None): ("null",)}
OF_THE_PROCESS = ("timing_s/", "perf/", "time", "reward/slowest_s", "sync/check")
"""Metrics of clocks, of memory, and of the self-check in the first steps of a process."""


def values_of(kind: Any) -> Iterator[object]:
    """Yield values of a key of this type; none if it is a text of any kind."""
    origin = get_origin(kind)
    if origin is Literal:
        yield from get_args(kind)
    elif origin is Annotated:
        yield from values_of(get_args(kind)[0])
    elif origin:
        for each in get_args(kind):
            yield from values_of(each)
    else:
        yield from NUMBERS.get(kind, ())


def keys() -> dict[str, list[object]]:
    """Return the keys of a run that have a choice of values."""
    found = {}
    for path, section in walk(Config):
        kinds = get_type_hints(section, include_extras=True)
        for field in fields(section):
            key = f"{path}.{field.name}".lstrip(".")
            if not is_dataclass(kinds[field.name]) and not any(part in key for part in NEVER):
                found[key] = [*values_of(kinds[field.name])]
    return {key: values for key, values in found.items() if values}


def drawn(seed: int, sound: Sequence[str]) -> list[str]:
    """Return random settings, without those that are faults next to the others."""
    random = Random(seed)
    choices = keys()
    estimator = random.choice(ESTIMATORS)
    settings = {key: random.choice(choices[key]) for key in random.sample(sorted(choices), NUM_KEYS)}
    settings["algorithm.adv_estimator"] = estimator
    while True:
        written = [f"{key}={value}" for key, value in settings.items()]
        try:
            load_config([*sound, *written], world_size=2)
        except ConfigError as error:
            named = {key for key in settings if key in str(error)}
            assert all(fault.path and fault.message for fault in error.faults)
            assert named, f"no key of {written} is named: {error}"
            settings = {key: value for key, value in settings.items() if key not in named}
        else:
            return written


def steps_of(run_dir: Path) -> list[dict[str, float]]:
    """Return the metrics of each step that do not depend on the process."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if not any(part in name for part in OF_THE_PROCESS)}
        for line in lines
    ]


@pytest.mark.parametrize("seed", range(6))
def test_run_of_random_keys_resumes_exactly(workspace: Workspace, tmp_path: Path, seed: int) -> None:
    model = with_many_ends(workspace.model, tmp_path / "model")
    sound = [
        *train_arguments(workspace, tmp_path / "run"),
        f"actor_rollout_ref.model.path={model}",
        f"critic.model.path={model}",
        "actor_rollout_ref.rollout.n=2",
        "trainer.total_training_steps=3",
        "trainer.save_freq=1",
        "trainer.test_freq=1",
    ]
    arguments = [*sound, *drawn(seed, sound)]
    run_job(2, train.main, *arguments, log=tmp_path / "first", timeout_s=RUN_S)
    first = steps_of(tmp_path / "run")
    assert {step["step"] for step in first} >= {1, 2, 3}
    resume = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path / 'run' / 'global_step_1'}")
    run_job(2, train.main, *arguments, *resume, log=tmp_path / "resumed", timeout_s=RUN_S)
    for was, now in zip(first, steps_of(tmp_path / "run"), strict=True):
        changed = {name: (value, now.get(name)) for name, value in was.items() if now.get(name) != value}
        assert changed == {}, f"step {was['step']}"
