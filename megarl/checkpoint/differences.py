"""Compares the configuration of a run with that of the checkpoint it resumes; the marks of keys name the effects."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megarl.mark import REWARD, SCORES, Change, Effect
from megarl.rewards.custom import DIGEST

_CONTENT = Change(Effect.CURVE, "another file content")
_ALGORITHM = Change(Effect.CURVE, "the algorithm: another file content")
_DATA = Change(Effect.CURVE, "the training data: another file content")
_FOLLOWS = Change(Effect.CURVE, "the learning rate follows the run's length")
_INPUTS = {"data.train_files": _DATA, "actor_rollout_ref.actor.ptx_files": _DATA, "data.val_files": SCORES}
"""The effect of another content of the files that a key names. All others decide how a model reads or scores texts."""
_LEARNING = ("algorithm.", "actor_rollout_ref.actor.")
_LENGTHS = ("trainer.total_epochs", "trainer.total_training_steps")


@dataclass(frozen=True)
class ConfigDifference:
    """A key whose value has changed."""

    key: str
    was: object
    now: object
    change: Change

    @property
    def makes_scores_incomparable(self) -> bool:
        """Whether validation scores cannot be compared with earlier ones, so the best score starts afresh."""
        return self.change in (SCORES, REWARD, _CONTENT)


def config_differences(
    was: Mapping[str, object], now: Mapping[str, object], changes: Mapping[str, Change]
) -> list[ConfigDifference]:
    """Return the keys whose values differ, those with the largest effect first.

    Args:
        was: the nested configuration of the run that saved the checkpoint.
        now: the nested configuration of the run that resumes it.
        changes: what another value does, by dotted key; a key that either lacks, as of another version, is skipped.
    """
    found = []
    for key, change in changes.items():
        try:
            old = value_at(was, key)
            new = value_at(now, key)
        except KeyError:
            continue
        if old != new:
            follows = key in _LENGTHS and (_rates_follow_the_length(was) or _rates_follow_the_length(now))
            found.append(ConfigDifference(key, old, new, _FOLLOWS if follows else change))
    order = list(Effect)
    return sorted(found, key=lambda difference: -order.index(difference.change.effect))


def code_differences(
    was: Mapping[str, str], now: Mapping[str, str], found: Iterable[ConfigDifference]
) -> list[ConfigDifference]:
    """Return the differences in the user's own code (see `megarl.config.report.custom_code`), except the keys `found`.

    A file is compared by its digest alone; its path is part of the configuration.
    """
    known = {difference.key for difference in found}
    differences = []
    for key in sorted((was.keys() & now.keys()) - known):
        if was[key].rpartition(DIGEST)[2] != now[key].rpartition(DIGEST)[2]:
            change = _ALGORITHM if key.startswith(_LEARNING) else _CONTENT
            differences.append(ConfigDifference(key, was[key], now[key], change))
    return differences


def input_differences(
    was: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]], found: Iterable[ConfigDifference]
) -> list[ConfigDifference]:
    """Return the files with another content under the same name, by key and name, except those of the keys `found`."""
    known = {difference.key for difference in found}
    differences = []
    for key in sorted((was.keys() & now.keys()) - known):
        change = _INPUTS.get(key, _CONTENT)
        for name in sorted(was[key].keys() | now[key].keys()):
            old = was[key].get(name, "no such file")
            new = now[key].get(name, "no such file")
            if old != new:
                differences.append(ConfigDifference(f"{key}: {name}", old, new, change))
    return differences


def size_differences(
    was: Mapping[str, Mapping[str, object]], now: Mapping[str, Mapping[str, object]]
) -> dict[str, list[str]]:
    """Describe by model the sizes that differ between a checkpoint (`was`) and a run (`now`), and missing models.

    A model that only the checkpoint has is no fault: the run does not need it.
    """
    faults: dict[str, list[str]] = {}
    for model, sizes in now.items():
        if model not in was:
            faults[model] = ["the checkpoint has no such model"]
            continue
        differing = [
            f"{name} is {was[model].get(name)} in the checkpoint and {value} here"
            for name, value in sizes.items()
            if was[model].get(name) != value
        ]
        if differing:
            faults[model] = differing
    return faults


def value_at(config: Mapping[str, object], key: str) -> object:
    """Return the value of a dotted key in a nested configuration. Raises KeyError."""
    node: object = config
    for part in key.split("."):
        if not isinstance(node, Mapping):
            raise KeyError(key)
        node = node[part]
    return node


def _rates_follow_the_length(tree: object) -> bool:
    """Return whether a learning rate anywhere in the configuration warms up or decays over a share of the run."""
    if not isinstance(tree, Mapping):
        return False
    if "warmup_style" in tree:
        warms_up = tree.get("lr_warmup_steps") is None and _positive(tree.get("lr_warmup_steps_ratio"))
        return not _positive(tree.get("total_training_steps")) and (warms_up or tree["warmup_style"] != "constant")
    return any(map(_rates_follow_the_length, tree.values()))


def _positive(value: object) -> bool:
    """Return whether a value of a file, which may be of another version, is a number above 0."""
    return isinstance(value, int | float) and value > 0
