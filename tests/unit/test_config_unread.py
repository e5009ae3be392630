"""Keys that nothing reads: what the marks of keys say is true of what is computed from the keys."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algorithms.config import ESTIMATORS, LOSSES
from megarl.algorithms.losses import PolicyOutputs, Totals
from megarl.assembly.models import make_budget
from megarl.assembly.run import make_kl_controller
from megarl.batch import Experience, Prompt, Rewarded
from megarl.checkpoint.state import State
from megarl.config.load import load_config, load_reward_train_config, load_sft_config, written_keys
from megarl.config.reference import keys_of
from megarl.config.report import unwritten_keys
from megarl.config.root import Config, RewardTrainConfig, SFTConfig
from megarl.config.schema import Schema
from megarl.config.unread import holds, in_words, reasons, unread_keys
from megarl.training.objectives import ActorObjective
from tests.support.estimates import estimate_alone, mark_alone

MINIMAL = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=org/policy", "critic.model.path=org/critic"]
POLICY = "actor_rollout_ref.model"
ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
VAL = "data.val_files=val.parquet"
FILES = ["data.train_files=a", "model.path=org/m"]
GROUPS = [f"{ROLLOUT}.n=2"]


def grpo(*more: str) -> list[str]:
    return ["algorithm.adv_estimator=grpo", *GROUPS, *more]


def mode(name: str) -> str:
    return f"{ACTOR}.policy_loss.loss_mode={name}"


EXAMPLES: dict[str, tuple[str, list[str], list[str]]] = {
    "critic.cliprange_value": ("0.3", [], grpo()),
    "algorithm.gamma": ("0.5", [], grpo()),
    "algorithm.lam": ("0.5", [], ["algorithm.adv_estimator=reinforce_plus_plus"]),
    "algorithm.norm_adv_by_std_in_grpo": ("false", grpo(), ["algorithm.adv_estimator=rloo", *GROUPS]),
    "algorithm.kl_ctrl.kl_coef": ("0.5", [], [f"{ACTOR}.use_kl_loss=true"]),
    "algorithm.kl_penalty": ("abs", [], ["algorithm.kl_ctrl.kl_coef=0"]),
    "algorithm.kl_penalty_k3_bound": ("0.01", ["algorithm.kl_penalty=k3"], ["algorithm.kl_penalty=mse"]),
    "algorithm.kl_ctrl.horizon": ("50", ["algorithm.kl_ctrl.type=adaptive"], []),
    "algorithm.kl_ctrl.target_kl": ("7", ["algorithm.kl_ctrl.type=adaptive"], []),
    "algorithm.overlong_buffer.len": ("3", ["algorithm.overlong_buffer={enable: true, len: 2}"], []),
    "algorithm.overlong_buffer.penalty_factor": ("3", ["algorithm.overlong_buffer={enable: true, len: 2}"], []),
    "algorithm.rollout_correction.rollout_is_threshold": (
        "1.01",
        ["algorithm.rollout_correction.rollout_is=token"],
        ["algorithm.rollout_correction={rollout_rs: token, rollout_rs_threshold: 2}"],
    ),
    "algorithm.rollout_correction.rollout_is_threshold_lower": (
        "0.5",
        ["algorithm.rollout_correction.rollout_is=token"],
        ["algorithm.rollout_correction.rollout_rs=token"],
    ),
    "algorithm.rollout_correction.rollout_is_batch_normalize": (
        "true",
        ["algorithm.rollout_correction.rollout_is=token"],
        ["algorithm.rollout_correction.rollout_rs=token"],
    ),
    "algorithm.rollout_correction.rollout_rs_threshold": (
        "1.2",
        ["algorithm.rollout_correction.rollout_rs=token"],
        ["algorithm.rollout_correction.rollout_is=token"],
    ),
    "algorithm.rollout_correction.rollout_rs_threshold_lower": (
        "0.9",
        ["algorithm.rollout_correction.rollout_rs=token"],
        [],
    ),
    f"{ACTOR}.kl_loss_coef": ("0.5", [f"{ACTOR}.use_kl_loss=true"], []),
    f"{ACTOR}.kl_loss_type": ("abs", [f"{ACTOR}.use_kl_loss=true"], []),
    f"{ACTOR}.kl_loss_k3_bound": (
        "0.01",
        [f"{ACTOR}.use_kl_loss=true"],
        [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=abs"],
    ),
    f"{ACTOR}.policy_loss.clip_cov_ratio": ("0.5", [mode("clip_cov"), f"{ACTOR}.policy_loss.clip_cov_lb=-9"], []),
    f"{ACTOR}.policy_loss.kl_cov_ratio": ("0.5", [mode("kl_cov")], [mode("clip_cov")]),
    f"{ACTOR}.policy_loss.ppo_kl_coef": ("0.5", [mode("kl_cov"), f"{ACTOR}.policy_loss.kl_cov_ratio=0.5"], []),
    f"{ACTOR}.policy_loss.tau_pos": ("0.5", [mode("sapo")], [mode("cispo")]),
    f"{ACTOR}.policy_loss.tau_neg": ("0.5", [mode("sapo")], [mode("cispo")]),
    f"{ACTOR}.clip_ratio": ("0.0001", [], [f"{ACTOR}.clip_ratio_low=0.1", f"{ACTOR}.clip_ratio_high=0.3"]),
    f"{ACTOR}.clip_ratio_low": ("0.0001", [], [mode("gpg")]),
    f"{ACTOR}.clip_ratio_high": ("0.0001", [mode("cispo")], [mode("kl_cov")]),
    f"{ACTOR}.clip_ratio_c": ("1.1", [], [mode("gspo"), f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"]),
    f"{ACTOR}.ppo_max_token_len_per_gpu": (
        "9999",
        [],
        [f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size=4", "critic.ppo_micro_batch_size=4"],
    ),
}
"""By key: another value of it, arguments under which it is read, and arguments under which it is not."""

SAID: dict[str, tuple[list[str], list[str]]] = {
    **{
        f"{model}.{value}": ([f"{model}.lora_rank=8"], [])
        for model in ("actor_rollout_ref.model", "critic.model")
        for value in ("lora_alpha=32.0", "lora_dropout=0.1")
    },
    **{
        f"{model}.freeze_moe_router=true": ([], [f"{model}.lora_rank=8"])
        for model in ("actor_rollout_ref.model", "critic.model")
    },
    f"{POLICY}.lora_dropout=0.2": ([f"{POLICY}.lora_adapter_path=adapters"], []),
    **{
        f"{POLICY}.{value}": (
            [f"{POLICY}.lora_rank=8"],
            [f"{POLICY}.lora_rank=8", f"{POLICY}.lora_adapter_path=adapters"],
        )
        for value in ("lora_alpha=8", "target_modules=[q_proj]", "exclude_modules=[q_proj]")
    },
    "algorithm.filter_groups.metric=score": (grpo("algorithm.filter_groups.enable=true"), []),
    f"{REF}.megatron.dtype=float32": ([], ["algorithm.kl_ctrl.kl_coef=0"]),
    f"{REF}.log_prob_micro_batch_size=4": ([], ["algorithm.kl_penalty=full"]),
    f"{REF}.model.trust_remote_code=true": ([f"{REF}.model.path=org/teacher"], []),
    f"{REF}.teachers={{math: org/teacher}}": ([], ["algorithm.kl_ctrl.kl_coef=0"]),
    "algorithm.kl_penalty_js_beta=0.3": (["algorithm.kl_penalty=full_js"], ["algorithm.kl_penalty=full"]),
    f"{ACTOR}.kl_loss_js_beta=0.3": (
        [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=full_js"],
        [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=full"],
    ),
    f"{REF}.megatron.param_offload=true": ([], ["trainer.device=cpu"]),
    "reward_model.model.path=org/rm": (["reward_model.enable=true"], []),
    "reward_model.micro_batch_size=9": (["reward_model.enable=true", "reward_model.model.path=org/rm"], []),
    "reward_model.max_length=9": (["reward_model.enable=true", "reward_model.model.path=org/rm"], []),
    "reward_model.timeout_s=9": ([], ["reward_model.enable=true", "reward_model.model.path=org/rm"]),
    "reward_model.default_score=1": (["reward_model.on_failure=score"], []),
    "reward_model.num_workers=9": ([], ["environment.name=openenv"]),
    "reward_model.isolation=process": (["custom_reward_function.path=mine.py"], []),
    "reward_model.canary_every=9": (["reward_model.isolation=process", "custom_reward_function.path=mine.py"], []),
    "environment.max_turns=9": (["environment.name=openenv"], []),
    "custom_reward_function.name=judge": (["custom_reward_function.path=mine.py"], []),
    "algorithm.custom_estimator.name=mine": (
        ["algorithm.adv_estimator=custom", "algorithm.custom_estimator.path=mine.py"],
        [],
    ),
    f"{ACTOR}.policy_loss.name=mine": ([mode("custom"), f"{ACTOR}.policy_loss.path=mine.py"], []),
    "critic.cliprange_value=0.3": (
        ["algorithm.adv_estimator=custom", "algorithm.custom_estimator={path: mine.py, needs: [values]}"],
        ["algorithm.adv_estimator=custom", "algorithm.custom_estimator.path=mine.py"],
    ),
    "custom_reward_function.reward_kwargs={a: 1}": (["custom_reward_function.path=mine.py"], []),
    "reward_model.concurrency=9": ([], ["reward_model.enable=true", "reward_model.model.path=org/rm"]),
    "reward_model.judge.model=other": (
        ["reward_model.judge.url=http://h/v1", "reward_model.judge.model=m", "reward_model.timeout_s=100"],
        [],
    ),
    "trainer.save_best=false": (["data.val_files=a", "trainer.test_freq=2"], ["data.val_files=a"]),
    "data.truncation=left": ([], ["data.filter_overlong_prompts=true"]),
    "data.seed=2": ([], ["data.shuffle=false", f"{ACTOR}.shuffle=false"]),
    "data.val_batch_size=2": ([VAL], []),
    "trainer.log_val_generations=2": ([VAL], [VAL, "trainer.val_before_train=false"]),
    "trainer.val_before_train=true": ([VAL], []),
    f"{ROLLOUT}.val_kwargs.top_p=0.5": ([VAL, f"{ROLLOUT}.val_kwargs.do_sample=true"], [VAL]),
    f"{ROLLOUT}.partial.max_staleness=2": (
        [f"{ROLLOUT}.partial.enable=true", "algorithm.rollout_correction.rollout_is=token"],
        [],
    ),
    f"{ROLLOUT}.partial.stop_when=64": (
        [f"{ROLLOUT}.partial.enable=true", "algorithm.rollout_correction.rollout_is=token"],
        [],
    ),
    f"{ROLLOUT}.top_k=5": ([], [f"{ROLLOUT}.do_sample=false"]),
    f"{ROLLOUT}.sync.mismatch_growth=5": ([], [f"{ROLLOUT}.calculate_log_probs=false"]),
    f"{ROLLOUT}.free_cache_engine=false": ([], ["trainer.device=cpu"]),
    f"{ACTOR}.optim.min_lr_ratio=0.1": ([f"{ACTOR}.optim.warmup_style=cosine"], []),
    f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1": ([], [f"{ACTOR}.optim.lr_warmup_steps=3"]),
    f"{ACTOR}.optim.total_training_steps=9": ([f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1"], []),
    "trainer.mlflow_tracking_uri=http://h": ([], ["trainer.logger=wandb"]),
    "trainer.total_epochs=3": ([], ["trainer.total_training_steps=5"]),
}
"""By argument: others under which its key is read, and others under which it is not."""


def load(*arguments: str) -> Config:
    return load_config([*MINIMAL, *arguments], world_size=None, check_paths=False)


def unread_of(*arguments: str) -> dict[str, str]:
    return reasons(load(*arguments), written_keys(Config, [*MINIMAL, *arguments]))


def said(*arguments: str) -> list[str]:
    return list(unread_keys(load(*arguments), [*MINIMAL, *arguments]))


@pytest.mark.parametrize(
    ("arguments", "is_said"),
    [
        ([], True),
        (grpo(), True),
        (["algorithm.use_kl_in_reward=null"], False),  # whoever writes null has read what it means
        (["algorithm.use_kl_in_reward=true"], False),
        (["algorithm.use_kl_in_reward=false"], False),
        (["algorithm.kl_ctrl.kl_coef=0"], False),
        (grpo(f"{ACTOR}.use_kl_loss=true"), False),
    ],
)
def test_default_kl_in_reward_is_reported(arguments: list[str], is_said: bool) -> None:
    found = list(unwritten_keys(load(*arguments), [*MINIMAL, *arguments]))
    assert len(found) == is_said
    assert all("algorithm.kl_ctrl.kl_coef=0.005" in sentence for sentence in found)


@pytest.mark.parametrize(
    ("root", "loader", "argv"),
    [
        (Config, load_config, MINIMAL),
        (SFTConfig, load_sft_config, FILES),
        (RewardTrainConfig, load_reward_train_config, FILES),
    ],
)
def test_conditions_name_keys_and_values_that_exist(root: type, loader: Callable, argv: list[str]) -> None:
    schema, keys = Schema.of(root), keys_of(root)
    reasons(loader(argv, world_size=None, check_paths=False), schema.leaves)  # every fact is there
    for condition in {one for conditions in schema.read_if.values() for one in conditions}:
        deciding = condition.because or (condition.fact,)
        assert condition.why or schema.leaves.keys() >= set(deciding)
        assert in_words(condition) or condition.why
        assert schema.leaves.keys() >= set(condition.of)
        for value in condition.values:
            assert (
                not isinstance(value, str)
                or f"`{value}`" in keys[condition.fact].kind
                or "list" in keys[condition.fact].kind
            )


def test_every_condition_is_covered_by_example() -> None:
    cases = [(key, off) for key, (_, _, off) in EXAMPLES.items()]
    cases += [(argument.partition("=")[0], off) for argument, (_, off) in SAID.items()]
    cases += [(f"{model}.megatron.seed", []) for model in (REF, "critic", "reward_model")]
    cases += [(f"{model}.megatron.grad_offload", []) for model in (REF, "reward_model")]
    read_if = Schema.of(Config).read_if
    silent = {one for conditions in read_if.values() for one in conditions}
    for key, off in cases:
        config = load(*off)
        silent -= {condition for condition in read_if[key] if not holds(condition, config)}
    assert not [one for one in silent if not one.fact.startswith("critic.optim")]


@pytest.mark.parametrize(
    ("argument", "on", "off"),
    [*((f"{key}={value}", on, off) for key, (value, on, off) in EXAMPLES.items()), *((k, *v) for k, v in SAID.items())],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unread_key_is_remarked(argument: str, on: list[str], off: list[str]) -> None:
    key = argument.partition("=")[0]
    assert key not in unread_of(*on, argument)
    assert unread_of(*off, argument)[key]


def test_a_remark_names_the_keys_that_decide(tmp_path: Path) -> None:
    assert said("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=5", "algorithm.gamma=0.9") == [
        "algorithm.gamma, critic.model.path are not read with algorithm.adv_estimator=grpo"
    ]
    both = [f"{ACTOR}.clip_ratio=0.1", f"{ACTOR}.clip_ratio_low=0.2", f"{ACTOR}.clip_ratio_high=0.3"]
    assert said(*both) == [
        f"{ACTOR}.clip_ratio is not read with {ACTOR}.clip_ratio_low=0.2, {ACTOR}.clip_ratio_high=0.3"
    ]
    file = tmp_path / "a.yaml"
    file.write_text("critic: {megatron: {seed: 3}}\n")
    assert said(str(file)) == [f"critic.megatron.seed is not read as {ACTOR}.megatron.seed serves all models"]


def test_supervised_runs_have_their_own_remarks() -> None:
    argv = [*FILES, "trainer.critic_warmup=2", "optim.min_lr_ratio=0.1"]
    for loader in (load_sft_config, load_reward_train_config):
        assert list(unread_keys(loader(argv, world_size=None, check_paths=False), argv)) == [
            "optim.min_lr_ratio is not read with optim.warmup_style=constant",
            "trainer.critic_warmup is not read by a run that learns from files",
        ]


def numbers(config: Config) -> Iterator[Any]:
    """Yield what estimator, losses, controller and budgets make of a fixed batch."""
    torch.manual_seed(0)
    size, length = 8, 6
    num_tokens = torch.tensor([6, 5, 6, 3, 6, 4, 2, 6])
    total = int(num_tokens.sum())
    old, ref, engine = -2.0 * torch.rand(3, total)
    prompt = Prompt(index=0, token_ids=[1, 2], text="", data_source="", ground_truth=None, extra_info={})
    scored = Rewarded(
        prompts=[prompt] * 4,
        groups=torch.arange(size) // 2,
        num_tokens=num_tokens,
        responses=torch.zeros(total, dtype=torch.int32),
        mask=torch.ones(total, dtype=torch.bool),
        rollout_log_probs=engine,
        truncated=torch.zeros(size, dtype=torch.bool),
        scores=torch.tensor([1.0, 0.0, 0.5, -0.5, 1.0, 1.0, 0.0, 0.25]),
    )
    algorithm = replace(config.algorithm, overlong_buffer=replace(config.algorithm.overlong_buffer, max_resp_len=6))
    penalised = config.kl_of_reward is not None
    experience, metrics = estimate_alone(
        scored,
        old,
        ref,
        torch.rand(total) if config.has_critic else None,
        torch.full((size,), 0.25) if config.algorithm.estimator.greedy else None,
        algorithm=algorithm,
        kl_coef=config.algorithm.kl_ctrl.kl_coef if penalised else None,
    )
    yield metrics, experience.advantages.tolist(), experience.returns.tolist()
    actor = config.actor_rollout_ref.actor
    outputs = PolicyOutputs(log_probs=old + torch.randn(total), entropy=torch.rand(total))
    marked: Experience = mark_alone(experience, actor)
    totals = Totals(num_tokens=total, num_sequences=size)
    loss, parts = ActorObjective(actor, horizon=length)(outputs, marked, totals)
    yield loss.item(), {name: value.item() for name, value in parts.items()}
    controller = make_kl_controller(config.algorithm.kl_ctrl, State(step=0))
    if penalised:
        yield [controller.update(current, num_steps=64).coef for current in (0.01, 0.11, 5.0)]
    yield make_budget(config, actor.ppo_micro_batch_size)
    yield config.critic if config.has_critic else None


@pytest.mark.parametrize("key", EXAMPLES)
def test_read_conditions_match_actual_computation(key: str) -> None:
    value, on, off = EXAMPLES[key]
    for arguments, is_read in ((on, True), (off, False)):
        before, after = (repr(list(numbers(load(*arguments, *more)))) for more in ([], [f"{key}={value}"]))
        assert (before != after) is is_read


CHOICES = {"algorithm.adv_estimator": ESTIMATORS, f"{ACTOR}.policy_loss.loss_mode": LOSSES}


@pytest.mark.parametrize(
    ("key", "fact"),
    [(key, one.fact) for key in EXAMPLES for one in Schema.of(Config).read_if[key] if one.fact in CHOICES],
)
def test_marks_match_keys_read_by_estimators_and_losses(key: str, fact: str) -> None:
    value, on, _ = EXAMPLES[key]
    for choice in CHOICES[fact].keys() - {"custom", "none"}:
        arguments = [*on, *GROUPS, f"{fact}={choice}"]
        before, after = (repr(list(numbers(load(*arguments, *more)))) for more in ([], [f"{key}={value}"]))
        assert (before != after) is (key not in unread_of(*arguments, f"{key}={value}")), choice
