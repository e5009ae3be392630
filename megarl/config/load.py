"""From the command line to a checked configuration: a function of files and arguments.

It starts no process, imports no torch, leaves no file, and reports all faults in one error.
"""

import math
import re
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megarl.config import algorithm_rules, ppo_rules, reward_rules, sft_rules
from megarl.config.faults import ConfigError, Fault
from megarl.config.foreign import Remark
from megarl.config.layers import COMMAND_LINE, Layer, read_layers, recognise
from megarl.config.links import LINK, dump, escaped, follow
from megarl.config.root import (
    COMMANDS,
    CONFIG_NAME,
    LINKS,
    Config,
    RewardTrainConfig,
    SFTConfig,
    SupervisedConfig,
    VerifyConfig,
)
from megarl.config.rule import CheckContext, Rule
from megarl.config.schema import MANDATORY, Schema, nest
from megarl.config.shared_rules import LAUNCH_RULES, POLICY_RULES, RUN_RULES, VERIFY_RULES
from megarl.platform.errors import UserError
from megarl.platform.secrets import REDACTED, redacted
from megarl.platform.small_files import adapter

SECRETS_NOTE = f"""\
# {REDACTED} replaces a secret. To start from this file, put the secret into the environment or write it here again.
"""

C = TypeVar("C")
S = TypeVar("S", SFTConfig, RewardTrainConfig)
RL_RULES: Sequence[Rule[Config]] = [
    *LAUNCH_RULES,
    *RUN_RULES,
    *POLICY_RULES,
    *ppo_rules.RULES,
    *algorithm_rules.RULES,
    *reward_rules.RULES,
]
FILE_RULES: Sequence[Rule[SFTConfig | RewardTrainConfig]] = [*LAUNCH_RULES, *RUN_RULES, *sft_rules.RULES]
RULES_OF_VERIFY: Sequence[Rule[VerifyConfig]] = [*LAUNCH_RULES, *POLICY_RULES, *VERIFY_RULES]


def load_config(
    argv: Sequence[str], *, world_size: int | None, check_paths: bool = True, writes: bool = True
) -> Config:
    """Read the configuration of a PPO or GRPO run.

    Args:
        argv: YAML files, merged left to right, and `a.b.c=value` arguments, which override the files.
        world_size: number of ranks that the launcher started; None before a launch.
        check_paths: whether data and models must exist, and the directories of the run take files.
        writes: whether the command writes the directories of the run.

    Raises:
        ConfigError: names every fault by its dotted key, with the remedy.
    """
    context = CheckContext(world_size=world_size, check_paths=check_paths, writes=writes)
    config = _load(Config, argv, rules=RL_RULES, context=context)
    if config.algorithm.use_kl_in_reward is None:
        penalise = not config.actor_rollout_ref.actor.use_kl_loss
        config = replace(config, algorithm=replace(config.algorithm, use_kl_in_reward=penalise))
    return config


def load_supervised(root: type[S], argv: Sequence[str], *, world_size: int | None, check_paths: bool = True) -> S:
    """Read the configuration of a run that learns from files, as `load_config` does."""
    context = CheckContext(world_size=world_size, check_paths=check_paths)
    return _load(root, argv, rules=FILE_RULES, context=context)


load_sft_config = partial(load_supervised, SFTConfig)
load_reward_train_config = partial(load_supervised, RewardTrainConfig)


def load_verify_config(argv: Sequence[str], *, world_size: int | None) -> VerifyConfig:
    """Read the configuration of `megarl verify`, as `load_config` does.

    Without a trainer.n_gpus_per_node, the launcher decides about it. Without a launcher it is the smallest number of
    ranks that the sizes fit.
    """
    context = CheckContext(world_size=world_size, check_paths=True)
    if "trainer.n_gpus_per_node" not in written_keys(VerifyConfig, argv):
        config, _, _ = read(VerifyConfig, argv)  # the second reading reports the faults
        megatron = config.actor_rollout_ref.actor.megatron
        tp = megatron.tensor_model_parallel_size
        pp = megatron.pipeline_model_parallel_size
        dense_ranks = tp * megatron.context_parallel_size * pp
        expert_ranks = megatron.expert_model_parallel_size * (megatron.expert_tensor_parallel_size or tp) * pp
        engine_ranks = config.actor_rollout_ref.rollout.tensor_model_parallel_size
        num_ranks = world_size or math.lcm(dense_ranks, expert_ranks, engine_ranks)
        argv = [f"trainer.n_gpus_per_node={max(1, num_ranks // config.trainer.nnodes)}", *argv]
    return _load(VerifyConfig, argv, rules=RULES_OF_VERIFY, context=context)


def written_keys(root: type, argv: Sequence[str]) -> dict[str, str]:
    """Return the keys of `root` that the files and arguments in `argv` set, each with its last origin."""
    schema = Schema.of(root)
    layers, _ = read_layers(argv)
    origins: dict[str, str] = {}
    for layer in layers:
        origins |= {key: layer.origin for key in recognise(layer, schema).leaves if key in schema.leaves}
    return origins


def foreign_keys(root: type, argv: Sequence[str]) -> list[Remark]:
    """Return what became of the keys of other trainers in `argv` that are accepted."""
    return [remark for layer in read_layers(argv)[0] for remark in recognise(layer, Schema.of(root)).remarks]


def to_dict(config: Config | SupervisedConfig) -> dict[str, Any]:
    """Return every key with its resolved value, nested, in plain types, to be kept and shown; secrets are redacted."""
    return redacted(_plain(config))


def to_yaml(config: Config | SupervisedConfig) -> str:
    """Return a YAML file that loads as this configuration, except for its secrets, which a comment mentions."""
    shown = to_dict(config)
    note = "" if shown == _plain(config) else SECRETS_NOTE
    return note + dump(escaped(shown))


def _plain(config: Config | SupervisedConfig) -> dict[str, object]:
    tree: dict[str, Any] = adapter(type(config)).dump_python(config, mode="json")
    return tree


def _load(root: type[C], argv: Sequence[str], *, rules: Sequence[Rule[C]], context: CheckContext) -> C:
    config, faults, origins = read(root, argv)
    wrong_files = [*_files_of_other_commands(root, argv)] if faults else []
    if wrong_files:
        raise ConfigError(wrong_files)
    if any(fault.path in argv for fault in faults):
        raise ConfigError(faults)
    faults.extend(_broken(config, faults, rules=rules, context=context))
    if faults:
        raise ConfigError([replace(fault, origin=fault.origin or origins.get(fault.path)) for fault in faults])
    return config


def _files_of_other_commands(root: type, argv: Sequence[str]) -> Iterator[Fault]:
    """Yield a fault for each file with sections that another command has and this one lacks."""
    for layer in read_layers(argv)[0]:
        if layer.origin == COMMAND_LINE:
            continue
        num_faults = {other: len(recognise(layer, Schema.of(other)).faults) for other in COMMANDS}
        best = min(COMMANDS, key=num_faults.__getitem__)
        sections = [name for name in layer.tree if name in Schema.of(best) and name not in Schema.of(root)]
        if sections and num_faults[best] < num_faults[root]:
            yield Fault(
                layer.origin,
                f"is a file for megarl {COMMANDS[best]}, as it has `{sections[0]}`; here it has to be one for megarl "
                f"{COMMANDS[root]}",
            )


def _broken(config: C, faults: Sequence[Fault], *, rules: Sequence[Rule[C]], context: CheckContext) -> Iterator[Fault]:
    """Yield the faults that rules between keys find, except rules about keys that have `faults` already."""
    faulty_keys = {path for fault in faults for path in (fault.path, fault.about) if path}
    for rule in rules:
        if not rule.reads_any(faulty_keys):
            yield from rule.check(config, context)


def read(root: type[C], argv: Sequence[str]) -> tuple[C, list[Fault], dict[str, str]]:
    """Return the configuration with substitutes for faulty values, the faults, and the origin of each written key.

    The faults are those of files, names and types. Rules between keys are not checked.
    """
    layers, faults = read_layers(argv)
    config, found, origins = _read_layers(root, layers)
    if any(fault.path in argv for fault in faults):  # a file is not read: what it may hold is not missing
        found = [fault for fault in found if fault.origin]
    return config, [*faults, *found], origins


def try_layer(layer: Layer) -> tuple[Config, list[Fault], list[Fault]]:
    """Return the configuration of a run that a layer describes, the faults of its types, and those between keys.

    Nothing is looked up: neither files, nor models, nor ranks.
    """
    config, faults, _ = _read_layers(Config, [layer])
    context = CheckContext(world_size=None, check_paths=False, writes=False)
    return config, faults, list(_broken(config, faults, rules=RL_RULES, context=context))


def _read_layers(root: type[C], layers: Sequence[Layer]) -> tuple[C, list[Fault], dict[str, str]]:
    """Return what `read` does; faults of single layers have an origin."""
    schema = Schema.of(root)
    faults: list[Fault] = []
    remarks: list[Remark] = []
    written: dict[str, object] = {**schema.leaves, **LINKS[root], CONFIG_NAME: _name_of(layers, schema)}
    origins: dict[str, str] = {}
    for layer in layers:
        recognised = recognise(layer, schema)
        faults += recognised.faults
        remarks += recognised.remarks
        origins |= dict.fromkeys(recognised.leaves, layer.origin)
        written |= {key: merged(written[key], value) for key, value in _spread(recognised.leaves, schema)}
    values, unresolved = _resolve(written, schema)
    config, mistyped = _validate(root, values, schema)
    written_names = {}
    for remark in remarks:
        answer = remark.answer(values)
        if answer:
            faults.append(Fault(remark.written, answer))
        if remark.written != remark.key:
            written_names[remark.key] = f" (written {remark.written})"
    followers = LINKS[root].keys() - origins.keys()  # a key that merely follows another shares its fault
    for fault in (*unresolved, *mistyped):
        if fault.path not in followers:
            faults.append(replace(fault, message=fault.message + written_names.get(fault.path, "")))
    return config, faults, origins


def _name_of(layers: Sequence[Layer], schema: Schema) -> str:
    """Return the names of the files, without their suffix; without a file the default name of a run."""
    names = [Path(layer.origin).stem for layer in layers if layer.origin != COMMAND_LINE]
    return "-".join(names) or str(schema.leaves["trainer.experiment_name"])


def merged(old: object, new: object) -> object:
    """Return `new`, which overrides `old`; of two dictionaries the union."""
    return merged_trees(old, new) if isinstance(old, dict) and isinstance(new, dict) else new


def merged_trees(old: dict[str, object], new: dict[str, object]) -> dict[str, object]:
    """Return the union of two dictionaries, in which `new` overrides `old`."""
    return old | {key: merged(old.get(key), value) for key, value in new.items()}


def _spread(values: Mapping[str, object], schema: Schema) -> Iterator[tuple[str, object]]:
    """Yield the values; a section that follows a section becomes keys that follow the keys of the same names."""
    for path, value in values.items():
        if path in schema.leaves:
            yield path, value
            continue
        link = LINK.fullmatch(str(value))
        assert link, "a section takes no other value"
        for key in schema.leaves:
            followed = link["key"] + key.removeprefix(path)
            if key.startswith(f"{path}.") and followed in schema.leaves:
                yield key, f"${{{followed}}}"


def _resolve(written: Mapping[str, object], schema: Schema) -> tuple[dict[str, object], list[Fault]]:
    """Return plain values by dotted key; for a key without a value, a substitute of its type and a fault."""
    values: dict[str, object] = {}
    faults: list[Fault] = []
    for path, default in schema.leaves.items():
        if not isinstance(written[path], str | list | dict):  # most keys: nothing to follow
            values[path] = written[path]
            continue
        try:
            values[path] = _expand_home(follow(path, written))
        except UserError as error:
            is_missing = written[path] == MANDATORY
            message = f"has no value: add {path}=..." if is_missing else f"cannot be resolved: {error}"
            faults.append(Fault(path, message))
            values[path] = _stand_in(default)
    return values, faults


def _validate(root: type[C], values: Mapping[str, object], schema: Schema) -> tuple[C, list[Fault]]:
    """Return the checked configuration; for a value of the wrong type, the default and a fault."""
    validator = adapter(root)
    messages: dict[str, list[str]] = defaultdict(list)
    try:
        config = validator.validate_python(nest(values))
    except ValidationError as error:
        for details in error.errors():
            path = schema.leaf(".".join(map(str, details["loc"])))
            messages[path].append(_message_of(details))
        config = validator.validate_python(nest(_without_faults(values, messages, schema)))
    for path, value in values.items():
        may_count = isinstance(value, bool | list | dict) and path not in messages
        if may_count and _is_boolean_for_number(value, attrgetter(path)(config)):
            messages[path] = ["should be a number"]
    faults = [Fault(path, f"{', or '.join(found)}, not {values[path]!r}") for path, found in messages.items()]
    if faults:
        config = validator.validate_python(nest(_without_faults(values, messages, schema)))
    return config, faults


def _without_faults(values: Mapping[str, object], faulty: Container[str], schema: Schema) -> dict[str, object]:
    """Return the values, with the default of each key that is faulty."""
    return {path: _stand_in(schema.leaves[path]) if path in faulty else value for path, value in values.items()}


def _is_boolean_for_number(written: object, found: object) -> bool:
    """Return whether pydantic has read a written true or false as the number 1 or 0."""
    if isinstance(written, list) and isinstance(found, list | tuple):
        return any(map(_is_boolean_for_number, written, found))
    if isinstance(written, dict):
        kept = found if isinstance(found, Mapping) else vars(found) if is_dataclass(found) else {}
        return any(_is_boolean_for_number(value, kept.get(key)) for key, value in written.items())
    return isinstance(written, bool) and isinstance(found, int | float) and not isinstance(found, bool)


def _expand_home(value: object) -> object:
    """Expand `~`, which no shell sees in a file or after `key=`."""
    if isinstance(value, list):
        return [_expand_home(item) for item in value]
    return str(Path(value).expanduser()) if isinstance(value, str) and value.startswith("~/") else value


def _stand_in(default: object) -> object:
    return "" if default == MANDATORY else default


def _message_of(details: ErrorDetails) -> str:
    place = details["loc"][-1]
    if details["type"] == "missing":
        return f"item {place + 1} is missing" if isinstance(place, int) else "is missing"
    item = f"{details['input']!r} " if isinstance(place, int) else ""
    message = details["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return item + re.sub(", (got|unable) .*", "", message)
