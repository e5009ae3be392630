"""Compares the configuration of a run with that of the checkpoint it resumes, and knows the effect of each key.

Each key of a configuration has one of three effects. None: the results are the same bits. Rounding: the results differ
only in the order of sums, as those of another split do. Curve: the training curve differs from here on. The table must
know every key; a new key belongs to `CURVE` until somebody has analysed it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

from megarl.rewards.custom import DIGEST


class Effect(Enum):
    """The effect of changing a value."""

    NONE = "nothing"
    ROUNDING = "rounding"
    CURVE = "another curve"


@dataclass(frozen=True, kw_only=True)
class ConfigDifference:
    """A key whose value has changed."""

    key: str
    was: Any
    now: Any
    effect: Effect
    reason: str

    @property
    def makes_scores_incomparable(self) -> bool:
        """Whether validation scores cannot be compared with earlier ones, so the best score starts afresh."""
        return self.reason in (_SCORES, _REWARD, _CONTENT)


_NAMES = "a name"
_RECORDS = "records and checkpoints, not the training"
_VALIDATION = "when validation runs, and the size of its batches"
_SCORES = "validation only: its scores cannot be compared with earlier ones, and the best score starts afresh"
_REWARD = "the reward"
_CONTENT = "another file content"
_DATA = "the training data: another file content"
_ALGORITHM = "the algorithm: another file content"
_SPLIT = "another split"
_MICRO = "other micro-batches"
_ENGINE = "the engine computes the same in another way"
_LENGTH = "the run's length"

# The first row whose pattern matches a key decides. Only rows of `CURVE` may match keys that nobody has analysed.
EFFECTS: tuple[tuple[str, Effect, str], ...] = (
    *((f"trainer.{name}", Effect.NONE, _NAMES) for name in ("project_name", "experiment_name")),
    *(
        (f"trainer.{name}", Effect.NONE, _RECORDS)
        for name in (
            *("logger", "mlflow_tracking_uri", "save_freq", "save_last", "save_best"),
            *("max_ckpt_to_keep", "async_save", "save_huggingface"),
            *("default_hdfs_dir", "default_local_dir", "resume_mode", "resume_from_path"),
            *("rollout_data_dir", "log_val_generations", "profile_steps", "peak_tflops"),
        )
    ),
    *((f"trainer.{name}", Effect.NONE, _VALIDATION) for name in ("test_freq", "val_before_train", "val_only")),
    ("trainer.device", Effect.ROUNDING, "another device's arithmetic"),
    ("trainer.deterministic", Effect.ROUNDING, "other kernels"),
    ("trainer.phase_timeout_s", Effect.NONE, "how long, not what"),
    ("trainer.max_skipped_updates", Effect.NONE, "when a run gives up"),
    *((f"trainer.{name}", Effect.NONE, _LENGTH) for name in ("total_epochs", "total_training_steps")),
    *((f"trainer.{name}", Effect.ROUNDING, _SPLIT) for name in ("nnodes", "n_gpus_per_node", "balance_batch")),
    ("trainer.critic_warmup", Effect.CURVE, "when the actor starts to learn"),
    ("data.val_files", Effect.NONE, _SCORES),
    ("data.val_batch_size", Effect.NONE, _VALIDATION),
    ("data.prompt_id_key", Effect.NONE, "names of prompts in records"),
    ("data.micro_batch_size", Effect.ROUNDING, _MICRO),
    ("data.*", Effect.CURVE, "the training data and its order"),
    *(
        (f"*megatron.{name}", Effect.ROUNDING, _SPLIT)
        for name in (
            *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
            *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
            *("sequence_parallel", "use_distributed_optimizer"),
        )
    ),
    ("*megatron.*_offload", Effect.NONE, "the place where parts of the trainer are kept"),
    ("*megatron.*", Effect.CURVE, "how the model computes"),
    ("*model.trust_remote_code", Effect.NONE, "which code may be loaded"),
    ("*model.enable_gradient_checkpointing", Effect.ROUNDING, "what is recomputed"),
    *(
        (pattern, Effect.CURVE, "the model: its tokenizer, and the frozen models that it is compared with")
        for pattern in ("model.*", "*.model.*", "actor_rollout_ref.ref.teachers*")
    ),
    *(
        (pattern, Effect.ROUNDING, _MICRO)
        for pattern in ("*micro_batch_size", "*max_token_len_per_gpu", "*.use_dynamic_bsz")
    ),
    ("*optim.*", Effect.CURVE, "the optimizer"),
    ("*grad_clip", Effect.CURVE, "the optimizer"),
    ("actor_rollout_ref.rollout.val_kwargs.*", Effect.NONE, _SCORES),
    ("actor_rollout_ref.rollout.sync.*", Effect.NONE, "how weights are transferred and checked, not their values"),
    *(
        (f"actor_rollout_ref.rollout.{name}", Effect.NONE, "a key without a choice")
        for name in ("load_format", "calculate_log_probs")
    ),
    *(
        (f"actor_rollout_ref.rollout.{name}", Effect.ROUNDING, _ENGINE)
        for name in (
            *("tensor_model_parallel_size", "gpu_memory_utilization", "enforce_eager", "free_cache_engine"),
            *("max_num_batched_tokens", "max_num_seqs", "enable_prefix_caching", "keep_complete"),
        )
    ),
    ("actor_rollout_ref.rollout.*", Effect.CURVE, "what is sampled"),
    ("actor_rollout_ref.actor.*", Effect.CURVE, "the actor's loss"),
    ("critic.*", Effect.CURVE, "the critic's loss"),
    ("algorithm.*", Effect.CURVE, "the algorithm"),
    ("reward_model.num_workers", Effect.NONE, "how many responses are scored at once"),
    ("reward_model.concurrency", Effect.NONE, "how many responses are scored at once"),
    ("reward_model.trial_rows", Effect.NONE, "how many rows the reward is tried on before the run"),
    ("reward_model.canary_every", Effect.NONE, "how often a reward is checked, not its scores"),
    ("reward_model.judge.api_key_variable", Effect.NONE, "the variable that holds the judge's key"),
    ("reward_model.judge.cache", Effect.NONE, "the place of the judge's replies"),
    ("reward_model.*", Effect.CURVE, _REWARD),
    ("custom_reward_function.*", Effect.CURVE, _REWARD),
    ("environment.num_workers", Effect.NONE, "how many episodes are played at once"),
    ("environment.run_code", Effect.NONE, "whether programs of the policy may run"),
    ("environment.overlap", Effect.ROUNDING, _ENGINE),
    ("environment.*", Effect.CURVE, _REWARD),
    ("center_rewards_coefficient", Effect.CURVE, "the loss"),
)
_INPUTS = {
    "data.train_files": (Effect.CURVE, _DATA),
    "actor_rollout_ref.actor.ptx_files": (Effect.CURVE, _DATA),
    "data.val_files": (Effect.NONE, _SCORES),
}
"""The effect of another content of the files that a key names. All others decide how a model reads or scores texts."""
_LEARNING = ("algorithm.", "actor_rollout_ref.actor.")
_LENGTHS = ("trainer.total_epochs", "trainer.total_training_steps")


def config_differences(was: Mapping[str, Any], now: Mapping[str, Any], keys: Iterable[str]) -> list[ConfigDifference]:
    """Return the keys whose values differ, those with the largest effect first.

    Args:
        was: the nested configuration of the run that saved the checkpoint.
        now: the nested configuration of the run that resumes it.
        keys: dotted keys to compare; a key that either lacks, as of another version, is skipped.
    """
    found = []
    for key in keys:
        old, new = _find(was, key), _find(now, key)
        if old != new and _ABSENT not in (old, new):
            effect, reason = effect_of(key)
            if key in _LENGTHS and (_rates_follow_the_length(was) or _rates_follow_the_length(now)):
                effect, reason = Effect.CURVE, "the learning rate follows the run's length"
            found.append(ConfigDifference(key=key, was=old, now=new, effect=effect, reason=reason))
    order = list(Effect)
    return sorted(found, key=lambda difference: -order.index(difference.effect))


def code_differences(
    was: Mapping[str, str], now: Mapping[str, str], found: Iterable[ConfigDifference]
) -> list[ConfigDifference]:
    """Return the differences in the user's own code (see `megarl.config.report.custom_code`), except the keys `found`.

    A file is compared by its digest alone; its path is part of the configuration.
    """
    known = {difference.key for difference in found}
    return [
        ConfigDifference(
            key=key,
            was=was[key],
            now=now[key],
            effect=Effect.CURVE,
            reason=_ALGORITHM if key.startswith(_LEARNING) else _CONTENT,
        )
        for key in sorted((was.keys() & now.keys()) - known)
        if was[key].rpartition(DIGEST)[2] != now[key].rpartition(DIGEST)[2]
    ]


def input_differences(
    was: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]], found: Iterable[ConfigDifference]
) -> list[ConfigDifference]:
    """Return the files with another content under the same name, by key and name, except those of the keys `found`."""
    known = {difference.key for difference in found}
    differences = []
    for key in sorted((was.keys() & now.keys()) - known):
        effect, reason = _INPUTS.get(key, (Effect.CURVE, _CONTENT))
        for name in sorted(was[key].keys() | now[key].keys()):
            old, new = was[key].get(name, "no such file"), now[key].get(name, "no such file")
            if old != new:
                differences.append(
                    ConfigDifference(key=f"{key}: {name}", was=old, now=new, effect=effect, reason=reason)
                )
    return differences


def effect_of(key: str) -> tuple[Effect, str]:
    """Return the effect of changing `key`, and the reason."""
    for pattern, effect, reason in EFFECTS:
        if fnmatchcase(key, pattern):
            return effect, reason
    return Effect.CURVE, "unknown to this table"


def size_differences(
    was: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]
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


class _Absent:
    """A placeholder for a missing value."""


_ABSENT = _Absent()


def _find(tree: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return _ABSENT
        tree = tree[part]
    return tree


def _rates_follow_the_length(tree: Any, name: str = "") -> bool:
    """Return whether a learning rate anywhere in the configuration warms up or decays over a share of the run."""
    if not isinstance(tree, Mapping):
        return False
    if name == "optim":
        warms_up = tree.get("lr_warmup_steps") is None and tree.get("lr_warmup_steps_ratio", 0.0) > 0.0
        decays = tree.get("warmup_style", "constant") != "constant"
        return bool(tree.get("total_training_steps", -1) <= 0 and (warms_up or decays))
    return any(_rates_follow_the_length(value, key) for key, value in tree.items())
