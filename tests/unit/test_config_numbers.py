"""Numbers: every number of every root has bounds, and a number outside them is a fault that names its key."""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from annotated_types import Ge, Gt, Le, Lt
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from megarl.config.faults import ConfigError
from megarl.config.load import load_config, load_reward_train_config, load_sft_config
from megarl.config.report import batch_table, notes
from megarl.config.root import Config, RewardTrainConfig, SFTConfig, VerifyConfig

ROOTS = (Config, SFTConfig, RewardTrainConfig, VerifyConfig)
MINIMAL = {
    load_config: ["actor_rollout_ref.model.path=org/policy", "critic.model.path=org/critic"],
    load_sft_config: ["model.path=org/policy"],
    load_reward_train_config: ["model.path=org/policy"],
}
ABSURD = ("inf", "-inf", "nan", "-1", "0", "1e308", "1e400", "1" + 30 * "0", "-1" + 30 * "0", "1e12", "1e-400")


def numbers(root: type, prefix: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield each number's dotted key with what its annotation says of it."""
    hints = get_type_hints(root, include_extras=True)
    for key in fields(root):
        if is_dataclass(kind := hints[key.name]):
            yield from numbers(kind, f"{prefix}{key.name}.")  # type: ignore[arg-type]
        else:
            said = list(_said(kind))
            if int in said or float in said:
                yield prefix + key.name, said


def _said(kind: Any) -> Iterator[Any]:
    """Yield the types and constraints in an annotation, at any depth."""
    if isinstance(kind, FieldInfo):
        yield from kind.metadata
    else:
        yield kind
        for part in get_args(kind):
            yield from _said(part)


NUMBERS = dict(numbers(Config))


def load(*arguments: str, loader: Any = load_config) -> Any:
    argv = ["data.train_files=train.parquet", *MINIMAL[loader], *arguments]
    return loader(argv, world_size=None, check_paths=False)


@pytest.mark.parametrize("root", ROOTS)
def test_every_number_has_lower_and_upper_bound(root: type) -> None:
    unbounded = [
        key
        for key, said in numbers(root)
        if not (any(isinstance(one, Ge | Gt) for one in said) and any(isinstance(one, Le | Lt) for one in said))
    ]
    assert not unbounded, "take a number of megarl/section.py, or give it bounds and say them in its docstring"


def is_allowed(written: str, said: list[Any]) -> bool:
    """Return whether the annotations of a number allow what was written."""
    value: Any = float(written)
    is_kind = float in said or (math.isfinite(value) and value.is_integer())
    lower = all(value >= one.ge if isinstance(one, Ge) else value > one.gt for one in said if isinstance(one, Ge | Gt))
    upper = all(value <= one.le if isinstance(one, Le) else value < one.lt for one in said if isinstance(one, Le | Lt))
    return is_kind and math.isfinite(value) and lower and upper and not any(get_origin(one) is dict for one in said)


@settings(max_examples=12)
@given(st.dictionaries(st.sampled_from(sorted(NUMBERS)), st.sampled_from(ABSURD) | st.floats().map(str), min_size=15))
def test_number_outside_bounds_is_fault_of_its_key(written: dict[str, str]) -> None:
    outside = {key for key, number in written.items() if not is_allowed(number, NUMBERS[key])}
    outside -= {key for key in outside if key.endswith("lr_warmup_steps") and float(written[key]) == -1}  # null
    try:
        config = load(*(f"{key}={number}" for key, number in written.items()))
    except ConfigError as error:
        assert outside <= {fault.path for fault in error.faults}
    else:
        assert not outside
        assert batch_table(config) and all(notes(config))


@pytest.mark.parametrize(
    ("key", "written", "message"),
    [
        ("trainer.phase_timeout_s", "inf", "should be a finite number"),
        ("trainer.phase_timeout_s", "-5", "should be greater than 0"),
        ("trainer.phase_timeout_s", "1e12", "should be less than or equal to 100000000"),
        ("actor_rollout_ref.actor.optim.lr", "inf", "should be a finite number"),
        ("actor_rollout_ref.actor.optim.lr", "1e308", "should be less than or equal to 10"),
        ("actor_rollout_ref.actor.optim.betas", "[0.9,1.0]", "1.0 should be less than 1"),
        ("actor_rollout_ref.actor.entropy_coeff", "1e400", "should be a finite number"),
        ("actor_rollout_ref.rollout.n", "1e12", "should be less than or equal to 1000000"),
        ("actor_rollout_ref.rollout.temperature", "nan", "should be a finite number"),
        ("actor_rollout_ref.rollout.temperature", "0.001", "should be greater than or equal to 0.01"),
        ("data.train_batch_size", "1" + 18 * "0", "should be less than or equal to 1000000"),
        ("data.seed", "-1", "should be greater than or equal to 0"),
        ("algorithm.gamma", "1.01", "should be less than or equal to 1"),
        ("reward_model.weights", "{math: nan}", "should be a finite number"),
        ("trainer.total_epochs", "1" + 5000 * "0", "4300 digits"),
    ],
)
def test_number_fault_states_its_cause(key: str, written: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(f"{key}={written}")
    (fault,) = [fault for fault in caught.value.faults if fault.path == key]
    assert message in fault.message


@pytest.mark.parametrize("loader", [load_sft_config, load_reward_train_config])
@pytest.mark.parametrize("argument", ["optim.lr=inf", "grad_clip=nan", "data.train_batch_size=1e18"])
def test_runs_that_learn_from_files_refuse_them_too(loader: Any, argument: str) -> None:
    with pytest.raises(ConfigError, match=argument.partition("=")[0]):
        load(argument, loader=loader)
