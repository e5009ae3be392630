"""What a run that goes on does otherwise than the one that saved the checkpoint, and what comes of it.

Each key of a configuration has one of three effects. None: the results are the same bits. Rounding: they are those of
another split, equal but for the order of sums. Curve: the run is another one from here on. The table must know every
key; one that is new belongs to `CURVE` until somebody has looked.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

from megarl.rewards.rules import DIGEST


class Effect(Enum):
    """What comes of another value."""

    NONE = "nothing"
    ROUNDING = "rounding"
    CURVE = "another curve"


@dataclass(frozen=True, kw_only=True)
class ConfigDifference:
    """A key that has another value now."""

    key: str
    was: Any
    now: Any
    effect: Effect
    reason: str

    @property
    def makes_scores_incomparable(self) -> bool:
        """Whether validation scores do not compare with earlier ones, so that the best begins anew."""
        return self.reason in (_SCORES, _REWARD, _CONTENT)


_NAMES = "a name"
_RECORDS = "records and checkpoints, not the training"
_VALIDATION = "when and in which portions is validated"
_SCORES = "validation only: its scores do not compare with earlier ones, and the best begins anew"
_REWARD = "the reward"
_CONTENT = "another file content"
_SPLIT = "another split"
_MICRO = "other micro-batches"
_ENGINE = "the engine computes the same by other means"
_LENGTH = "the run's length"

# The first row whose pattern fits a key. Only rows of `CURVE` may speak for keys that nobody has looked at.
EFFECTS: tuple[tuple[str, Effect, str], ...] = (
    *((f"trainer.{name}", Effect.NONE, _NAMES) for name in ("project_name", "experiment_name")),
    *(
        (f"trainer.{name}", Effect.NONE, _RECORDS)
        for name in (
            *("logger", "mlflow_tracking_uri", "save_freq", "max_ckpt_to_keep", "async_save", "save_huggingface"),
            *("default_hdfs_dir", "default_local_dir", "resume_mode", "resume_from_path"),
            *("rollout_data_dir", "log_val_generations"),
        )
    ),
    *((f"trainer.{name}", Effect.NONE, _VALIDATION) for name in ("test_freq", "val_before_train", "val_only")),
    ("trainer.device", Effect.ROUNDING, "another device's arithmetic"),
    ("trainer.phase_timeout_s", Effect.NONE, "how long, not what"),
    ("trainer.max_skipped_updates", Effect.NONE, "when a run gives up"),
    *((f"trainer.{name}", Effect.NONE, _LENGTH) for name in ("total_epochs", "total_training_steps")),
    *((f"trainer.{name}", Effect.ROUNDING, _SPLIT) for name in ("nnodes", "n_gpus_per_node", "balance_batch")),
    ("trainer.critic_warmup", Effect.CURVE, "when the actor begins to learn"),
    ("data.val_files", Effect.NONE, _SCORES),
    ("data.val_batch_size", Effect.NONE, _VALIDATION),
    ("data.prompt_id_key", Effect.NONE, "names of prompts in records"),
    ("data.micro_batch_size", Effect.ROUNDING, _MICRO),
    ("data.*", Effect.CURVE, "what is learnt from, in which order"),
    *(
        (f"*megatron.{name}", Effect.ROUNDING, _SPLIT)
        for name in (
            *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
            *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
            *("sequence_parallel", "use_distributed_optimizer"),
        )
    ),
    ("*megatron.*_offload", Effect.NONE, "where parts of the trainer wait"),
    ("*megatron.*", Effect.CURVE, "how the model computes"),
    ("*model.trust_remote_code", Effect.NONE, "which code may be loaded"),
    ("*model.enable_gradient_checkpointing", Effect.ROUNDING, "what is computed twice"),
    *(
        (pattern, Effect.CURVE, "the model: its tokenizer, and the frozen one that it is compared with")
        for pattern in ("model.*", "*.model.*")
    ),
    *(
        (pattern, Effect.ROUNDING, _MICRO)
        for pattern in ("*micro_batch_size", "*max_token_len_per_gpu", "*.use_dynamic_bsz")
    ),
    ("*optim.*", Effect.CURVE, "the optimizer"),
    ("*grad_clip", Effect.CURVE, "the optimizer"),
    ("actor_rollout_ref.rollout.val_kwargs.*", Effect.NONE, _SCORES),
    ("actor_rollout_ref.rollout.sync.*", Effect.NONE, "how weights travel and are checked, not which"),
    *(
        (f"actor_rollout_ref.rollout.{name}", Effect.NONE, "a key without a choice")
        for name in ("load_format", "calculate_log_probs")
    ),
    *(
        (f"actor_rollout_ref.rollout.{name}", Effect.ROUNDING, _ENGINE)
        for name in (
            *("tensor_model_parallel_size", "gpu_memory_utilization", "enforce_eager", "free_cache_engine"),
            *("max_num_batched_tokens", "max_num_seqs", "enable_prefix_caching"),
        )
    ),
    ("actor_rollout_ref.rollout.*", Effect.CURVE, "what is sampled"),
    ("actor_rollout_ref.actor.*", Effect.CURVE, "the actor's loss"),
    ("critic.*", Effect.CURVE, "the critic's loss"),
    ("algorithm.*", Effect.CURVE, "the algorithm"),
    ("reward_model.num_workers", Effect.NONE, "how many responses are scored at once"),
    ("reward_model.*", Effect.CURVE, _REWARD),
    ("custom_reward_function.*", Effect.CURVE, _REWARD),
    ("center_rewards_coefficient", Effect.CURVE, "the loss"),
)
_LENGTHS = ("trainer.total_epochs", "trainer.total_training_steps")


def config_differences(was: Mapping[str, Any], now: Mapping[str, Any], keys: Iterable[str]) -> list[ConfigDifference]:
    """The keys whose values differ, those that matter most first.

    Args:
        was: the nested configuration that a checkpoint was saved under.
        now: that of the run that goes on from it.
        keys: dotted keys to compare; one that either does not have was made by another version, and is passed over.
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
    """What differs in the user's own code, as `megarl.config.report.own_code` says it, beside the keys `found`.

    A file is known by its digest alone: where it lies is the configuration's.
    """
    known = {difference.key for difference in found}
    return [
        ConfigDifference(key=key, was=was[key], now=now[key], effect=Effect.CURVE, reason=_CONTENT)
        for key in sorted((was.keys() & now.keys()) - known)
        if was[key].rpartition(DIGEST)[2] != now[key].rpartition(DIGEST)[2]
    ]


def effect_of(key: str) -> tuple[Effect, str]:
    """What comes of another value of `key`, and why."""
    for pattern, effect, reason in EFFECTS:
        if fnmatchcase(key, pattern):
            return effect, reason
    return Effect.CURVE, "unknown to this table"


def size_differences(
    was: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[str]]:
    """By model the sizes in which those of a checkpoint and those of a run differ, in words; a model may be lacking.

    A model that only the checkpoint has is no fault: it is not needed any more.
    """
    faults: dict[str, list[str]] = {}
    for model, sizes in now.items():
        if model not in was:
            faults[model] = ["the checkpoint has no such model"]
            continue
        said = [
            f"{name} is {was[model].get(name)} in the checkpoint and {value} here"
            for name, value in sizes.items()
            if was[model].get(name) != value
        ]
        if said:
            faults[model] = said
    return faults


class _Absent:
    """In place of a value."""


_ABSENT = _Absent()


def _find(tree: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return _ABSENT
        tree = tree[part]
    return tree


def _rates_follow_the_length(tree: Any, name: str = "") -> bool:
    """Whether a learning rate anywhere in the configuration warms up or decays over a share of the run."""
    if not isinstance(tree, Mapping):
        return False
    if name == "optim":
        warms_up = tree.get("lr_warmup_steps") is None and tree.get("lr_warmup_steps_ratio", 0.0) > 0.0
        decays = tree.get("warmup_style", "constant") != "constant"
        return bool(tree.get("total_training_steps", -1) <= 0 and (warms_up or decays))
    return any(_rates_follow_the_length(value, key) for key, value in tree.items())
