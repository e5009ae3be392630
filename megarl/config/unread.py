"""The keys that nothing reads, depending on other keys. A run remarks on such a key at its start if the user wrote it.

A key is read unless a row that names it denies that.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from functools import reduce
from typing import Any

from megarl.algorithms.config import ESTIMATORS, EXACT, K3, LOSSES
from megarl.config.root import Config, RewardTrainConfig, SFTConfig
from megarl.environments.config import EnvironmentSection
from megarl.learner.config import OptimSection
from megarl.platform.secrets import redact
from megarl.rewards.config import JudgeSection
from megarl.section import flatten

OF_RULES = tuple(
    f"reward_model.{name}"
    for name in (
        *("num_workers", "timeout_s", "max_memory_gb", "on_failure", "default_score"),
        *("concurrency", "trial_rows", "isolation", "canary_every", "skip_special_tokens"),
    )
)
"""The keys of rewards that are rules."""
ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
LOSS, ESTIMATOR, CORRECTION = (
    f"{ACTOR}.policy_loss.loss_mode",
    "algorithm.adv_estimator",
    "algorithm.rollout_correction",
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Keys, and when they are read."""

    keys: tuple[str, ...]  # patterns
    read: Callable[[Any], bool]  # of the root
    because: tuple[str, ...] = ()  # the keys that decide
    values: tuple[object, ...] = ()  # of the one key that decides, if the keys are read with these values of it alone
    only: str = ""  # else in words: if what
    why: str = ""  # a reason in words, if no key decides

    @property
    def condition(self) -> str:
        """Say with what other keys the keys are read; empty if nothing ever reads them."""
        if not self.values:
            return self.only
        *most, last = (f"`{shown(value)}`" for value in self.values)
        return f"`{self.because[0]}` is {', '.join(most)}{' or ' if most else ''}{last}"


def _with(keys: str | tuple[str, ...], leader: str, *values: object) -> Row:
    """Return the row of keys that are read if the key `leader` has one of `values`."""
    return Row(
        keys=(keys,) if isinstance(keys, str) else keys,
        read=lambda config: reduce(getattr, leader.split("."), config) in values,
        because=(leader,),
        values=values,
    )


def _arm_rows(section: str, leader: str, reads: Mapping[Any, tuple[str, ...]]) -> Iterator[Row]:
    """Yield the rows of the keys of `section` that some values of `leader` read; `reads` has the keys by value."""
    keys: dict[tuple[object, ...], list[str]] = {}
    for name in dict.fromkeys(name for read in reads.values() for name in read):
        values = tuple(value for value, read in reads.items() if name in read)
        keys.setdefault(values, []).append(f"{section}.{name}")
    for values, found in keys.items():
        yield _with(tuple(found), leader, *values)


def _clips_alike(config: Config) -> bool:
    actor = config.actor_rollout_ref.actor
    return actor.clip_ratio_low is None or actor.clip_ratio_high is None


def _scores_by_rules(config: Config) -> bool:
    return config.reward_model.rules is not None


def _validates(config: Config) -> bool:
    trainer = config.trainer
    return bool(config.data.val_files) and (trainer.val_only or trainer.val_before_train or trainer.test_freq > 0)


def _penalises_reward(config: Config) -> bool:
    asked = config.algorithm.use_kl_in_reward
    return not config.actor_rollout_ref.actor.use_kl_loss if asked is None else asked


def _reference_computes(config: Config) -> bool:
    """Tell whether the reference has forward passes of its own; an exact one runs it together with the actor."""
    return bool(config.divergence_kinds - {*EXACT})


def _warms_by_ratio(optim: OptimSection) -> bool:
    return optim.lr_warmup_steps is None and optim.lr_warmup_steps_ratio > 0.0


def _optim_rows(where: str, optim: Callable[[Any], OptimSection]) -> tuple[Row, ...]:
    return (
        Row(
            keys=(f"{where}.min_lr_ratio",),
            read=lambda config: optim(config).decays,
            only="`warmup_style` is not `constant`",
            because=(f"{where}.warmup_style",),
        ),
        _with(f"{where}.lr_warmup_steps_ratio", f"{where}.lr_warmup_steps", None),
        Row(
            keys=(f"{where}.total_training_steps",),
            read=lambda config: optim(config).decays or _warms_by_ratio(optim(config)),
            only="the learning rate decays, or warms up by `lr_warmup_steps_ratio`",
            because=(f"{where}.warmup_style", f"{where}.lr_warmup_steps_ratio"),
        ),
    )


def _shared_rows(megatron: tuple[str, ...]) -> tuple[Row, ...]:
    """Return the rows of every run that trains; `megatron` are its sections of that name."""
    return (
        Row(
            keys=("trainer.mlflow_tracking_uri",),
            read=lambda config: "mlflow" in config.trainer.logger,
            only="`trainer.logger` names mlflow",
            because=("trainer.logger",),
        ),
        _with("trainer.total_epochs", "trainer.total_training_steps", None),
        Row(
            keys=tuple(f"{where}.*_offload" for where in megatron),
            read=lambda config: config.trainer.device != "cpu",
            only="`trainer.device` is not `cpu`",
            because=("trainer.device",),
        ),
    )


KL_PENALTY = ("algorithm.kl_penalty_k3_bound", "algorithm.kl_penalty_js_beta")
UNTRAINED = ("use_distributed_optimizer", "grad_offload", "optimizer_offload")

PPO_ROWS: tuple[Row, ...] = (
    Row(
        keys=("critic.*",),
        read=lambda config: config.has_critic,
        only=f"`{ESTIMATOR}` is `gae`, or is `custom` and `custom_estimator.needs` has `values`",
        because=(ESTIMATOR,),
    ),
    *_arm_rows("algorithm", ESTIMATOR, {name: estimator.reads for name, estimator in ESTIMATORS.items()}),
    Row(
        keys=("algorithm.kl_ctrl.*", "algorithm.kl_penalty", *KL_PENALTY),
        read=_penalises_reward,
        only="the divergence is part of the reward",
        because=("algorithm.use_kl_in_reward", f"{ACTOR}.use_kl_loss"),
    ),
    Row(
        keys=("algorithm.kl_penalty", *KL_PENALTY),
        read=lambda config: config.algorithm.kl_ctrl.kl_coef > 0.0,
        only="`algorithm.kl_ctrl.kl_coef` is more than 0",
        because=("algorithm.kl_ctrl.kl_coef",),
    ),
    _with("algorithm.kl_penalty_k3_bound", "algorithm.kl_penalty", *K3),
    _with("algorithm.kl_penalty_js_beta", "algorithm.kl_penalty", "full_js"),
    _with(("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"), "algorithm.kl_ctrl.type", "adaptive"),
    _with(
        ("algorithm.filter_groups.metric", "algorithm.filter_groups.max_num_gen_batches"),
        "algorithm.filter_groups.enable",
        True,
    ),
    _with(
        tuple(f"{ROLLOUT}.partial.{name}" for name in ("max_staleness", "stop_when")), f"{ROLLOUT}.partial.enable", True
    ),
    _with(
        tuple(f"algorithm.overlong_buffer.{name}" for name in ("len", "penalty_factor", "max_resp_len")),
        "algorithm.overlong_buffer.enable",
        True,
    ),
    Row(
        keys=(f"{CORRECTION}.rollout_rs_*",),
        read=lambda config: config.algorithm.rollout_correction.rollout_rs is not None,
        only="`algorithm.rollout_correction.rollout_rs` is set",
        because=(f"{CORRECTION}.rollout_rs",),
    ),
    Row(
        keys=(f"{CORRECTION}.rollout_is_threshold",),
        read=lambda config: bool(
            config.algorithm.rollout_correction.rollout_is
            or (
                config.algorithm.rollout_correction.rollout_rs
                and config.algorithm.rollout_correction.rollout_rs_threshold is None
            )
        ),
        only="`rollout_is` is set, or `rollout_rs` is set and `rollout_rs_threshold` is null",
        because=(f"{CORRECTION}.rollout_is",),
    ),
    _with(f"{ACTOR}.kl_loss_*", f"{ACTOR}.use_kl_loss", True),
    _with(f"{ACTOR}.kl_loss_k3_bound", f"{ACTOR}.kl_loss_type", *K3),
    _with(f"{ACTOR}.kl_loss_js_beta", f"{ACTOR}.kl_loss_type", "full_js"),
    *_arm_rows(ACTOR, LOSS, {name: loss.reads for name, loss in LOSSES.items()}),
    Row(
        keys=(f"{ACTOR}.clip_ratio",),
        read=_clips_alike,
        only="`clip_ratio_low` or `clip_ratio_high` is null",
        because=(f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"),
    ),
    Row(
        keys=(f"{ACTOR}.ppo_max_token_len_per_gpu", f"{REF}.log_prob_max_token_len_per_gpu"),
        read=lambda config: (
            config.actor_rollout_ref.actor.use_dynamic_bsz
            or (config.reward_model.enable and config.reward_model.micro_batch_size is None)
        ),
        only=f"`{ACTOR}.use_dynamic_bsz` is true, or a reward model has no `micro_batch_size`",
        because=(f"{ACTOR}.use_dynamic_bsz",),
    ),
    Row(
        keys=(f"{REF}.*",),
        read=lambda config: config.has_reference,
        only="the reward or the loss has a divergence from the reference",
        why="as nothing asks for a reference",
    ),
    Row(
        keys=(f"{REF}.model.*",),
        read=lambda config: not config.has_reference or bool(config.teachers),
        only=f"`{REF}.model.path` or `{REF}.teachers` names a teacher",
        because=(f"{REF}.model.path", f"{REF}.teachers"),
    ),
    Row(
        keys=(f"{REF}.log_prob_*",),
        read=lambda config: not config.has_reference or _reference_computes(config),
        only="such a divergence is estimated",
        because=("algorithm.kl_penalty", f"{ACTOR}.kl_loss_type"),
    ),
    Row(
        keys=(f"{REF}.megatron.seed", "critic.megatron.seed", "reward_model.megatron.seed"),
        read=lambda config: False,
        why=f"as {ACTOR}.megatron.seed serves all models",
    ),
    Row(
        keys=tuple(f"{where}.megatron.{name}" for where in (REF, "reward_model") for name in UNTRAINED),
        read=lambda config: False,
        why="as this model does not learn",
    ),
    _with(
        tuple(f"reward_model.{name}" for name in ("model.*", "megatron.*", "micro_batch_size", "max_length")),
        "reward_model.enable",
        True,
    ),
    Row(
        keys=(*OF_RULES, "data.return_raw_chat", "data.return_raw_input_ids"),
        read=_scores_by_rules,
        only="rules score the responses",
        why="as the reward model scores alone",
    ),
    _with("reward_model.default_score", "reward_model.on_failure", "score"),
    _with("reward_model.canary_every", "reward_model.isolation", "process"),
    Row(
        keys=OF_RULES,
        read=lambda config: config.environment.name is None,
        only="`environment.name` is null",
        why="as the environment gives the rewards",
    ),
    Row(
        keys=tuple(f"environment.{key.name}" for key in fields(EnvironmentSection) if key.name != "name"),
        read=lambda config: config.environment.name is not None,
        only="`environment.name` is set",
        because=("environment.name",),
    ),
    Row(
        keys=(
            *("custom_reward_function.name", "custom_reward_function.reward_kwargs"),
            *("reward_model.isolation", "reward_model.canary_every"),
        ),
        read=lambda config: config.custom_reward_function.path is not None,
        only="`custom_reward_function.path` is set",
        because=("custom_reward_function.path",),
    ),
    Row(
        keys=tuple(f"reward_model.judge.{key.name}" for key in fields(JudgeSection) if key.name != "url"),
        read=lambda config: config.reward_model.judge.url is not None,
        only="`reward_model.judge.url` is set",
        because=("reward_model.judge.url",),
    ),
    _with("data.truncation", "data.filter_overlong_prompts", False),
    Row(
        keys=("data.seed",),
        read=lambda config: bool(
            config.data.shuffle or config.actor_rollout_ref.actor.shuffle or config.actor_rollout_ref.actor.ptx_files
        ),
        only="`data.shuffle` or `actor_rollout_ref.actor.shuffle` is true, or `ptx_files` is set",
        because=("data.shuffle", f"{ACTOR}.shuffle"),
    ),
    Row(
        keys=("data.val_batch_size", f"{ROLLOUT}.val_kwargs.*", "trainer.log_val_generations"),
        read=_validates,
        only="the run validates",
        because=("data.val_files", "trainer.val_before_train", "trainer.test_freq"),
    ),
    Row(
        keys=("trainer.save_best",),
        read=lambda config: bool(config.data.val_files) and config.trainer.test_freq > 0,
        only="the run validates after steps",
        because=("data.val_files", "trainer.test_freq"),
    ),
    Row(
        keys=("trainer.val_before_train",),
        read=lambda config: bool(config.data.val_files),
        only="`data.val_files` is set",
        because=("data.val_files",),
    ),
    _with(
        tuple(f"{ROLLOUT}.val_kwargs.{name}" for name in ("temperature", "top_p", "top_k")),
        f"{ROLLOUT}.val_kwargs.do_sample",
        True,
    ),
    _with((f"{ROLLOUT}.top_p", f"{ROLLOUT}.top_k"), f"{ROLLOUT}.do_sample", True),
    _with(f"{ROLLOUT}.sync.mismatch_*", f"{ROLLOUT}.calculate_log_probs", True),
    Row(
        keys=(f"{ROLLOUT}.free_cache_engine",),
        read=lambda config: config.trainer.device != "cpu",
        only="`trainer.device` is not `cpu`",
        because=("trainer.device",),
    ),
    *_optim_rows(f"{ACTOR}.optim", lambda config: config.actor_rollout_ref.actor.optim),
    *_optim_rows("critic.optim", lambda config: config.critic.optim),
    *_shared_rows(tuple(f"{where}.megatron" for where in (ACTOR, REF, "critic", "reward_model"))),
)

FILE_ROWS: tuple[Row, ...] = (
    Row(
        keys=tuple(
            f"trainer.{name}"
            for name in (
                "critic_warmup",
                "log_val_generations",
                "rollout_data_dir",
                "save_best",
                "val_before_train",
                "val_only",
            )
        ),
        read=lambda config: False,
        why="by a run that learns from files",
    ),
    Row(
        keys=("trainer.test_freq",),
        read=lambda config: bool(config.data.val_files),
        only="`data.val_files` is set",
        because=("data.val_files",),
    ),
    _with("data.seed", "data.shuffle", True),
    *_optim_rows("optim", lambda config: config.optim),
    *_shared_rows(("megatron",)),
)

ROWS: dict[type, tuple[Row, ...]] = {Config: PPO_ROWS, SFTConfig: FILE_ROWS, RewardTrainConfig: FILE_ROWS}


def unread(config: Config | SFTConfig | RewardTrainConfig, written: Collection[str]) -> Iterator[str]:
    """Yield a sentence for each reason why nothing reads some keys that the user has `written`."""
    found = reasons(config, written)
    for reason in dict.fromkeys(found.values()):
        keys = [key for key, own in found.items() if own == reason]
        yield f"{', '.join(keys)} {'is' if len(keys) == 1 else 'are'} not read {reason}"


def reasons(config: Config | SFTConfig | RewardTrainConfig, written: Collection[str]) -> dict[str, str]:
    """Return why nothing reads a key, for each of `written` that nothing reads."""
    leaves, found = dict(flatten(asdict(config))), dict[str, str]()
    for key in sorted(written):
        for row in ROWS[type(config)]:
            if any(fnmatchcase(key, pattern) for pattern in row.keys) and not row.read(config):
                found[key] = redact(
                    row.why or "with " + ", ".join(f"{one}={shown(leaves.get(one))}" for one in row.because)
                )
                break
    return found


def shown(value: object) -> str:
    """Return a value as YAML has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple):
        value = list(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
