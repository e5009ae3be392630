"""What must hold between the sections of a PPO or GRPO run, with the remedy where it does not."""

from collections.abc import Iterator

from megarl.config.checks import (
    cut_faults,
    data_faults,
    data_parallel_size,
    launch_faults,
    length_faults,
    mesh_faults,
    partition_faults,
    path_faults,
    resume_faults,
    schedule_faults,
    world_size,
)
from megarl.config.faults import Fault
from megarl.config.model_files import model_faults, read_sizes
from megarl.config.root import Config
from megarl.config.rule import Facts, Rule, rule

POLICY = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
WORLD = ("trainer.nnodes", "trainer.n_gpus_per_node")
MESH = (f"{ACTOR}.megatron.tensor_model_parallel_size", f"{ACTOR}.megatron.pipeline_model_parallel_size")
FOLLOWING_MESHES = tuple(key.replace(ACTOR, follower) for key in MESH for follower in (REF, "critic"))


@rule("data.train_files", "data.val_files", "data.tokenizer", "custom_reward_function.path")
def _files(config: Config, facts: Facts) -> Iterator[Fault]:
    if facts.check_paths:
        yield from data_faults(config.data)
        yield from path_faults(
            config.custom_reward_function.path, "custom_reward_function.path", "give a Python file that exists"
        )


@rule(POLICY, "critic.model", "algorithm.adv_estimator", "data.tokenizer")
def _models(config: Config, facts: Facts) -> Iterator[Fault]:
    policy, critic, needs_critic = config.actor_rollout_ref.model, config.critic.model, _has_critic(config)
    if needs_critic and not critic.path:
        yield Fault(
            path="critic.model.path",
            message=f"algorithm.adv_estimator=gae trains a critic: name the checkpoint it starts from "
            f"(for example {policy.path}), or choose adv_estimator=grpo, which needs none",
        )
    if needs_critic and critic.tokenizer_path not in (None, config.data.tokenizer, policy.path):
        yield Fault(
            path="critic.model.tokenizer_path",
            message=f"the critic reads the actor's tokens, so {critic.tokenizer_path} cannot differ from "
            f"{config.data.tokenizer or policy.path}: choose a critic of the same tokenizer and leave the key out",
        )
    if facts.check_paths:
        yield from model_faults(policy, f"{POLICY}.path")
        if needs_critic:
            yield from model_faults(critic, "critic.model.path")


@rule(*WORLD)
def _launch(config: Config, facts: Facts) -> Iterator[Fault]:
    yield from launch_faults(config.trainer, facts.world_size)


@rule(*WORLD, *MESH, f"{ROLLOUT}.tensor_model_parallel_size")
def _mesh(config: Config, facts: Facts) -> Iterator[Fault]:
    yield from mesh_faults(config.actor_rollout_ref.actor.megatron, config.trainer, f"{ACTOR}.megatron")
    tp, world = config.actor_rollout_ref.rollout.tensor_model_parallel_size, world_size(config.trainer)
    if world % tp:
        yield Fault(
            path=f"{ROLLOUT}.tensor_model_parallel_size",
            message=f"{tp} does not divide the world of {world} ranks (trainer.nnodes x trainer.n_gpus_per_node): "
            "choose a divisor",
        )


@rule(*MESH, *FOLLOWING_MESHES, "algorithm.adv_estimator")
def _one_mesh(config: Config, facts: Facts) -> Iterator[Fault]:
    actor = config.actor_rollout_ref.actor.megatron
    followers = {f"{REF}.megatron": config.actor_rollout_ref.ref.megatron}
    if _has_critic(config):
        followers["critic.megatron"] = config.critic.megatron
    for where, megatron in followers.items():
        for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
            size, wanted = getattr(megatron, key), getattr(actor, key)
            if size != wanted:
                yield Fault(
                    path=f"{where}.{key}",
                    message=f"{size} differs from {ACTOR}.megatron.{key}={wanted}, and one mesh serves all models: "
                    "leave it out, and it follows the actor's",
                )


@rule(POLICY, *MESH, f"{ROLLOUT}.tensor_model_parallel_size")
def _policy_cut(config: Config, facts: Facts) -> Iterator[Fault]:
    yield from partition_faults(
        config.actor_rollout_ref.model, POLICY, config.actor_rollout_ref.actor.megatron, f"{ACTOR}.megatron"
    )
    if sizes := read_sizes(config.actor_rollout_ref.model):
        engine = config.actor_rollout_ref.rollout.tensor_model_parallel_size
        yield from cut_faults(sizes, f"{POLICY}.path", f"{ROLLOUT}.tensor_model_parallel_size", engine)


@rule(POLICY, "critic.model", *MESH, "algorithm.adv_estimator")
def _critic_cut(config: Config, facts: Facts) -> Iterator[Fault]:
    policy = config.actor_rollout_ref
    if _has_critic(config) and read_sizes(config.critic.model) != read_sizes(policy.model):
        # The mesh is the actor's (`_one_mesh`), so that is the place to correct.
        yield from partition_faults(config.critic.model, "critic.model", policy.actor.megatron, f"{ACTOR}.megatron")


@rule("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size", "critic.ppo_mini_batch_size", "algorithm.adv_estimator")
def _mini_batches(config: Config, facts: Facts) -> Iterator[Fault]:
    prompts = config.data.train_batch_size
    sizes = {f"{ACTOR}.ppo_mini_batch_size": config.actor_rollout_ref.actor.ppo_mini_batch_size}
    # The default of the critic's is the actor's: one fault is enough.
    if _has_critic(config) and config.critic.ppo_mini_batch_size not in sizes.values():
        sizes["critic.ppo_mini_batch_size"] = config.critic.ppo_mini_batch_size
    for key, size in sizes.items():
        if size > prompts:
            yield Fault(
                path=key,
                message=f"a mini-batch of {size} prompts is more than data.train_batch_size={prompts}: "
                f"write {prompts} or a divisor of it",
            )
        elif prompts % size:
            below = prompts - prompts % size
            yield Fault(
                path=key,
                message=f"{size} does not divide data.train_batch_size={prompts}, so the last mini-batch would be "
                f"short: write a divisor, or train_batch_size={below} or {below + size}",
            )


@rule(
    f"{ACTOR}.ppo_mini_batch_size",
    f"{ROLLOUT}.n",
    *MESH,
    *WORLD,
)
def _work_for_all(config: Config, facts: Facts) -> Iterator[Fault]:
    actor, n = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    ranks = data_parallel_size(actor.megatron, world_size(config.trainer))
    if actor.ppo_mini_batch_size * n < ranks:
        yield Fault(
            path=f"{ACTOR}.ppo_mini_batch_size",
            message=f"{actor.ppo_mini_batch_size} prompts x {ROLLOUT}.n={n} are fewer sequences than the {ranks} "
            "data-parallel ranks: raise it, or raise the tensor or pipeline parallel size",
        )


@rule(
    f"{ACTOR}.use_dynamic_bsz",
    f"{ACTOR}.ppo_micro_batch_size",
    "critic.ppo_micro_batch_size",
    "algorithm.adv_estimator",
)
def _micro_batches(config: Config, facts: Facts) -> Iterator[Fault]:
    if config.actor_rollout_ref.actor.use_dynamic_bsz:
        return
    sizes = {f"{ACTOR}.ppo_micro_batch_size": config.actor_rollout_ref.actor.ppo_micro_batch_size}
    if _has_critic(config):
        sizes["critic.ppo_micro_batch_size"] = config.critic.ppo_micro_batch_size
    for key, size in sizes.items():
        if size is None:
            yield Fault(
                path=key,
                message=f"{ACTOR}.use_dynamic_bsz=false needs the number of sequences per forward pass: "
                "set it, or leave use_dynamic_bsz true",
            )


@rule("data.max_prompt_length", "data.max_response_length", f"{ACTOR}.ppo_max_token_len_per_gpu", f"{REF}", POLICY)
def _lengths(config: Config, facts: Facts) -> Iterator[Fault]:
    policy, longest = config.actor_rollout_ref, config.data.max_prompt_length + config.data.max_response_length
    budgets = {f"{ACTOR}.ppo_max_token_len_per_gpu": policy.actor.ppo_max_token_len_per_gpu}
    if policy.ref.log_prob_max_token_len_per_gpu is not None:
        budgets[f"{REF}.log_prob_max_token_len_per_gpu"] = policy.ref.log_prob_max_token_len_per_gpu
    for key, budget in budgets.items():
        if longest > budget and policy.actor.use_dynamic_bsz:
            yield Fault(
                path=key,
                message=f"{budget} tokens cannot hold one sequence of data.max_prompt_length + "
                f"data.max_response_length = {longest}: write at least {longest}",
            )
    yield from length_faults(read_sizes(policy.model), f"{POLICY}.path", "data.max_response_length", longest)


@rule("data.max_prompt_length", "data.max_response_length", ROLLOUT)
def _engine(config: Config, facts: Facts) -> Iterator[Fault]:
    data, rollout = config.data, config.actor_rollout_ref.rollout
    if rollout.prompt_length < data.max_prompt_length:
        yield Fault(
            path=f"{ROLLOUT}.prompt_length",
            message=f"{rollout.prompt_length} is less than data.max_prompt_length={data.max_prompt_length}: "
            "leave it out, and it follows",
        )
    if rollout.response_length > data.max_response_length:
        yield Fault(
            path=f"{ROLLOUT}.response_length",
            message=f"{rollout.response_length} is more than data.max_response_length={data.max_response_length}: "
            "leave it out, and it follows",
        )
    if rollout.max_num_batched_tokens < rollout.max_num_seqs:
        yield Fault(
            path=f"{ROLLOUT}.max_num_batched_tokens",
            message=f"{rollout.max_num_batched_tokens} tokens per engine step cannot serve {ROLLOUT}.max_num_seqs="
            f"{rollout.max_num_seqs} sequences: raise the one or lower the other",
        )


@rule("algorithm.adv_estimator", f"{ROLLOUT}.n", f"{ROLLOUT}.do_sample", "trainer.critic_warmup")
def _group_advantages(config: Config, facts: Facts) -> Iterator[Fault]:
    rollout = config.actor_rollout_ref.rollout
    if config.algorithm.adv_estimator != "grpo":
        return
    if rollout.n == 1:
        yield Fault(
            path=f"{ROLLOUT}.n",
            message="algorithm.adv_estimator=grpo compares the responses to one prompt: write n=2 or more (5 is usual)",
        )
    if not rollout.do_sample:
        yield Fault(
            path=f"{ROLLOUT}.do_sample",
            message="greedy responses to one prompt are all the same, and algorithm.adv_estimator=grpo compares them: "
            "write true",
        )
    if config.trainer.critic_warmup:
        yield Fault(
            path="trainer.critic_warmup",
            message="algorithm.adv_estimator=grpo has no critic to warm up: write 0",
        )


@rule("data.val_files", "trainer.test_freq", "trainer.val_only")
def _validation(config: Config, facts: Facts) -> Iterator[Fault]:
    if not config.data.val_files and (config.trainer.val_only or config.trainer.test_freq > 0):
        asked = "val_only=true" if config.trainer.val_only else f"test_freq={config.trainer.test_freq}"
        yield Fault(path="data.val_files", message=f"trainer.{asked} needs validation prompts: name parquet files")


@rule("trainer.resume_mode", "trainer.resume_from_path")
def _resume(config: Config, facts: Facts) -> Iterator[Fault]:
    yield from resume_faults(config.trainer, check_paths=facts.check_paths)


@rule(f"{ACTOR}.optim", "critic.optim")
def _schedules(config: Config, facts: Facts) -> Iterator[Fault]:
    yield from schedule_faults(config.actor_rollout_ref.actor.optim, f"{ACTOR}.optim")
    yield from schedule_faults(config.critic.optim, "critic.optim")


def _has_critic(config: Config) -> bool:
    return config.algorithm.adv_estimator == "gae"


PPO_RULES: tuple[Rule[Config], ...] = (
    _files,
    _models,
    _launch,
    _mesh,
    _one_mesh,
    _policy_cut,
    _critic_cut,
    _mini_batches,
    _work_for_all,
    _micro_batches,
    _lengths,
    _engine,
    _group_advantages,
    _validation,
    _resume,
    _schedules,
)
