"""Rules between the sections of a run that learns from rewards; each fault names its remedy."""

from collections.abc import Iterator
from pathlib import Path

from megarl.algorithms.config import EXACT
from megarl.config.checks import (
    data_faults,
    length_faults,
    offload_faults,
    partition_faults,
    path_faults,
    replay_faults,
    variables_faults,
    world_size,
)
from megarl.config.faults import Fault
from megarl.config.keys import ACTOR, LAYERS, MESH, POLICY, REF, REWARD, ROLLOUT, WORLD
from megarl.config.mesh_checks import SIZES, data_parallel_size, override_faults
from megarl.config.model_files import model_faults, read_sizes, tokenizer_faults
from megarl.config.root import Config
from megarl.config.rule import CheckContext, Rule, rule, rule_in_context
from megarl.data.columns import Needs, PromptColumns, first_faults
from megarl.data.template import VARIABLES
from megarl.learner.config import MegatronSection
from megarl.models.config import CheckpointSection
from megarl.platform.uri import why_unopened
from megarl.section import listed

TEACHER = f"{REF}.model"
TEACHERS = f"{REF}.teachers"
KL_KEYS = ("algorithm.use_kl_in_reward", "algorithm.kl_penalty", f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_type")
FOLLOWING_MESHES = tuple(
    key.replace(ACTOR, follower) for key in (*MESH, LAYERS) for follower in (REF, "critic", REWARD)
)

RULES: list[Rule[Config]] = []


def needs_of(config: Config) -> Needs:
    """Return the columns of the data that the run's rewards read; an environment takes what it finds."""
    return Needs.of(config.rules, config.custom_reward_function)


@rule_in_context(
    RULES,
    "data.train_files",
    "data.val_files",
    "data.tokenizer",
    "data.chat_template",
    "custom_reward_function.path",
)
def _files(config: Config, context: CheckContext) -> Iterator[Fault]:
    if context.check_paths:
        yield from data_faults(config.data, config.actor_rollout_ref.model)
        yield from path_faults(
            config.custom_reward_function.path, "custom_reward_function.path", "give a Python file that exists"
        )


@rule_in_context(
    RULES, "data", f"{REWARD}.weights", f"{REWARD}.enable", "custom_reward_function.path", "environment.name"
)
def _rows(config: Config, context: CheckContext) -> Iterator[Fault]:
    """Columns and data sources are looked at before ranks start; each rank looks at whole rows later."""
    if not context.check_paths or context.world_size is not None:
        return
    needs = needs_of(config)
    columns = PromptColumns(section=config.data, needs=needs)
    for key, value in (("train_files", config.data.train_files), ("val_files", config.data.val_files)):
        there = [file for file in listed(value) if _may_be_opened(file)]  # other rules report the others
        if there:
            yield from (Fault(f"data.{key}", fault) for fault in first_faults(columns, there))


def _may_be_opened(file: str) -> bool:
    if "://" in file and not why_unopened(file):
        return True
    return Path(file).is_file()


@rule(RULES, "data.apply_chat_template", VARIABLES)
def _template_variables(config: Config) -> Iterator[Fault]:
    yield from variables_faults(config.data)


@rule(RULES, "data.prompt_id_key", "data.max_prompt_id_length")
def _prompt_ids(config: Config) -> Iterator[Fault]:
    if config.data.max_prompt_id_length and not config.data.prompt_id_key:
        yield Fault(
            "data.max_prompt_id_length",
            "bounds the values of a column that is not read: set data.prompt_id_key, or leave this key out",
        )


@rule_in_context(RULES, POLICY, "critic.model", "algorithm.adv_estimator", "data.tokenizer")
def _models(config: Config, context: CheckContext) -> Iterator[Fault]:
    policy = config.actor_rollout_ref.model
    critic = config.critic.model
    needs_critic = config.has_critic
    if needs_critic and not critic.path:
        yield Fault(
            "critic.model.path",
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} trains a critic: name the checkpoint it "
            f"starts from (for example {policy.path}), or choose adv_estimator=grpo or another that needs none",
        )
    if context.check_paths:
        yield from model_faults(policy, f"{POLICY}.path")
        if needs_critic:
            yield from model_faults(critic, "critic.model.path", needs_head=False)
            own = config.tokenizer_of_critic
            place = "critic.model.tokenizer_path"
            yield from tokenizer_faults(own, place, "give a directory, a .model file, a URI, a HF id or null")
    sizes = read_sizes(policy)
    if sizes and sizes.scalar_head:
        yield Fault(f"{POLICY}.path", f"{policy.path} scores sequences and predicts no tokens: name a language model")


@rule_in_context(RULES, POLICY, TEACHER, TEACHERS, *KL_KEYS)
def _teachers(config: Config, context: CheckContext) -> Iterator[Fault]:
    for source, teacher in config.teachers.items():
        yield from _teacher(config, teacher, f"{TEACHER}.path" if source is None else TEACHERS, context)


def _teacher(config: Config, teacher: CheckpointSection, key: str, context: CheckContext) -> Iterator[Fault]:
    policy = config.actor_rollout_ref.model
    if context.check_paths:
        yield from model_faults(teacher, key)
    sizes = read_sizes(teacher)
    known = read_sizes(policy)
    if sizes and sizes.scalar_head:
        yield Fault(key, f"{teacher.path} scores sequences and predicts no tokens: name a language model")
    elif sizes and known and config.divergence_kinds & {*EXACT} and sizes.vocab_size != known.vocab_size:
        yield Fault(
            key,
            f"{teacher.path} knows {sizes.vocab_size} tokens and {policy.path} {known.vocab_size}: the exact "
            "divergence compares the same tokens. Name a teacher with this vocabulary, or choose kl_loss_type=k2 or "
            "kl_penalty=k1, which compare only the tokens of the responses",
        )


@rule(RULES, *MESH, *FOLLOWING_MESHES, "algorithm.adv_estimator", f"{REWARD}.enable")
def _one_mesh(config: Config) -> Iterator[Fault]:
    actor = config.actor_rollout_ref.actor.megatron
    followers = {f"{REF}.megatron": config.actor_rollout_ref.ref.megatron}
    if config.has_critic:
        followers["critic.megatron"] = config.critic.megatron
    if config.reward_model.enable:
        followers[f"{REWARD}.megatron"] = config.reward_model.megatron
    for where, megatron in followers.items():
        for key in SIZES:
            size = getattr(megatron, key)
            wanted = getattr(actor, key)
            if size != wanted:
                yield Fault(
                    f"{where}.{key}",
                    f"{size} differs from {ACTOR}.megatron.{key}={wanted}, and one mesh serves all models: "
                    "leave it out, and it follows the actor's",
                )
        if megatron.override_transformer_config != actor.override_transformer_config:
            yield from override_faults(megatron, where)


@rule(RULES, POLICY, "critic.model", *MESH, LAYERS, "critic.megatron", "algorithm.adv_estimator")
def _critic_stages(config: Config) -> Iterator[Fault]:
    if config.has_critic:
        yield from follower_faults(config, config.critic.model, config.critic.megatron, "critic")


@rule(RULES, POLICY, TEACHER, TEACHERS, *MESH, LAYERS, f"{REF}.megatron", *KL_KEYS)
def _teacher_stages(config: Config) -> Iterator[Fault]:
    for teacher in config.teachers.values():
        yield from follower_faults(config, teacher, config.actor_rollout_ref.ref.megatron, REF)


def follower_faults(config: Config, model: CheckpointSection, megatron: MegatronSection, where: str) -> Iterator[Fault]:
    """Yield the `partition_faults` of a model that is sharded as the actor is, except those of the actor itself."""
    policy = config.actor_rollout_ref
    sizes = read_sizes(model)
    known = read_sizes(policy.model)
    is_alike = sizes and known and sizes.with_scalar_head() == known.with_scalar_head()
    if megatron.override_transformer_config != policy.actor.megatron.override_transformer_config:
        yield from partition_faults(model, f"{where}.model", megatron, f"{where}.megatron")
    elif sizes and not is_alike:
        # The mesh is the actor's (`_one_mesh`), so that is the place to correct.
        yield from partition_faults(model, f"{where}.model", policy.actor.megatron, f"{ACTOR}.megatron")


@rule(RULES, f"{ACTOR}.megatron", "critic.megatron", "algorithm.adv_estimator")
def _offload(config: Config) -> Iterator[Fault]:
    actor = config.actor_rollout_ref.actor.megatron
    critic = config.critic.megatron
    yield from offload_faults(actor, f"{ACTOR}.megatron")
    # The default of the critic's is the actor's: one fault is enough.
    if config.has_critic and not any(offload_faults(actor, "")):
        yield from offload_faults(critic, "critic.megatron")


@rule(
    RULES,
    "data.train_batch_size",
    f"{ACTOR}.ppo_mini_batch_size",
    "critic.ppo_mini_batch_size",
    "algorithm.adv_estimator",
)
def _mini_batches(config: Config) -> Iterator[Fault]:
    prompts = config.data.train_batch_size
    sizes = {f"{ACTOR}.ppo_mini_batch_size": config.actor_rollout_ref.actor.ppo_mini_batch_size}
    # The default of the critic's is the actor's: one fault is enough.
    if config.has_critic and config.critic.ppo_mini_batch_size not in sizes.values():
        sizes["critic.ppo_mini_batch_size"] = config.critic.ppo_mini_batch_size
    for key, size in sizes.items():
        if size > prompts:
            yield Fault(
                key,
                f"a mini-batch of {size} prompts is more than data.train_batch_size={prompts}: "
                f"write {prompts} or a divisor of it",
            )
        elif prompts % size:
            below = prompts - prompts % size
            yield Fault(
                key,
                f"{size} does not divide data.train_batch_size={prompts}, so the last mini-batch would be "
                f"short: write a divisor, or train_batch_size={below} or {below + size}",
            )


@rule(RULES, f"{ACTOR}.ppo_mini_batch_size", f"{ROLLOUT}.n", *MESH, *WORLD)
def _work_for_all(config: Config) -> Iterator[Fault]:
    actor = config.actor_rollout_ref.actor
    n = config.actor_rollout_ref.rollout.n
    ranks = data_parallel_size(actor.megatron, world_size(config.trainer))
    if actor.ppo_mini_batch_size * n < ranks:
        yield Fault(
            f"{ACTOR}.ppo_mini_batch_size",
            f"{actor.ppo_mini_batch_size} prompts x {ROLLOUT}.n={n} are fewer sequences than the {ranks} "
            "data-parallel ranks: raise it, or raise the tensor, pipeline or context parallel size",
        )


@rule(
    RULES,
    f"{ACTOR}.use_dynamic_bsz",
    f"{ACTOR}.ppo_micro_batch_size",
    "critic.ppo_micro_batch_size",
    "algorithm.adv_estimator",
)
def _micro_batches(config: Config) -> Iterator[Fault]:
    if config.actor_rollout_ref.actor.use_dynamic_bsz:
        return
    sizes = {f"{ACTOR}.ppo_micro_batch_size": config.actor_rollout_ref.actor.ppo_micro_batch_size}
    if config.has_critic:
        sizes["critic.ppo_micro_batch_size"] = config.critic.ppo_micro_batch_size
    for key, size in sizes.items():
        if size is None:
            yield Fault(
                key,
                f"{ACTOR}.use_dynamic_bsz=false needs the number of sequences per forward pass: "
                "set it, or leave use_dynamic_bsz true",
            )


@rule(
    RULES,
    "data.max_prompt_length",
    "data.max_response_length",
    f"{ACTOR}.ppo_max_token_len_per_gpu",
    f"{REF}",
    POLICY,
)
def _lengths(config: Config) -> Iterator[Fault]:
    policy = config.actor_rollout_ref
    longest = config.data.max_prompt_length + config.data.max_response_length
    budgets = {f"{ACTOR}.ppo_max_token_len_per_gpu": policy.actor.ppo_max_token_len_per_gpu}
    if policy.ref.log_prob_max_token_len_per_gpu is not None:
        budgets[f"{REF}.log_prob_max_token_len_per_gpu"] = policy.ref.log_prob_max_token_len_per_gpu
    ranks = policy.actor.megatron.context_parallel_size  # share the tokens of a sequence
    for key, budget in budgets.items():
        if longest > budget * ranks and policy.actor.use_dynamic_bsz:
            yield Fault(
                key,
                f"{budget} tokens cannot hold one sequence of data.max_prompt_length + "
                f"data.max_response_length = {longest}: write at least {-(-longest // ranks)}",
            )
    yield from length_faults(read_sizes(policy.model), f"{POLICY}.path", "data.max_response_length", longest)


@rule(RULES, "data.max_prompt_length", "data.max_response_length", ROLLOUT)
def _engine(config: Config) -> Iterator[Fault]:
    data = config.data
    rollout = config.actor_rollout_ref.rollout
    if rollout.prompt_length < data.max_prompt_length:
        yield Fault(
            f"{ROLLOUT}.prompt_length",
            f"{rollout.prompt_length} is less than data.max_prompt_length={data.max_prompt_length}: "
            "leave it out, and it follows",
        )
    if rollout.response_length > data.max_response_length:
        yield Fault(
            f"{ROLLOUT}.response_length",
            f"{rollout.response_length} is more than data.max_response_length={data.max_response_length}: "
            "leave it out, and it follows",
        )
    if rollout.max_num_batched_tokens < rollout.max_num_seqs:
        yield Fault(
            f"{ROLLOUT}.max_num_batched_tokens",
            f"{rollout.max_num_batched_tokens} tokens per engine step cannot serve {ROLLOUT}.max_num_seqs="
            f"{rollout.max_num_seqs} sequences: raise the one or lower the other",
        )


@rule(RULES, "data.val_files", "trainer.test_freq", "trainer.val_only")
def _validation(config: Config) -> Iterator[Fault]:
    if not config.data.val_files and (config.trainer.val_only or config.trainer.test_freq > 0):
        asked = "val_only=true" if config.trainer.val_only else f"test_freq={config.trainer.test_freq}"
        yield Fault("data.val_files", f"trainer.{asked} needs validation prompts: name parquet files")


@rule(RULES, f"{ROLLOUT}.val_kwargs")
def _val_sampling(config: Config) -> Iterator[Fault]:
    sampling = config.actor_rollout_ref.rollout.val_kwargs
    is_random = sampling.do_sample and sampling.temperature
    if sampling.n > 1 and not is_random:
        key, remedy = ("temperature", "1.0") if sampling.do_sample else ("do_sample", "true, and a temperature")
        yield Fault(
            f"{ROLLOUT}.val_kwargs.{key}",
            f"the {sampling.n} greedy responses to a prompt would all be the same: write {remedy}, or n=1",
        )


@rule(RULES, POLICY, f"{ROLLOUT}.routing_replay", f"{ACTOR}.routing_replay")
def _routing_replay(config: Config) -> Iterator[Fault]:
    """Updates replay the actor's choice or that of the engine."""
    policy = config.actor_rollout_ref
    key = f"{ACTOR}.routing_replay"
    yield from replay_faults(policy.model, key, policy.actor.routing_replay)
    if policy.actor.routing_replay != "none" and policy.rollout.routing_replay != "none":
        yield Fault(key, f"updates replay the engine's choice ({ROLLOUT}.routing_replay): leave this key out")
