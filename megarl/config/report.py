"""The report before training: how a batch is divided, and choices that work but are rarely intended."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from megarl.config.checks import world_size
from megarl.config.custom_functions import ESTIMATOR, LOSS
from megarl.config.foreign import Remark, defaults_beside, remarks_in_words
from megarl.config.links import shown
from megarl.config.load import foreign_keys, written_keys
from megarl.config.mesh_checks import data_parallel_size
from megarl.config.policy import ActorSection, CriticSection
from megarl.config.root import Config, RunConfig, SupervisedConfig
from megarl.config.unread import reasons, unread_keys
from megarl.platform.screen import Screen, labelled
from megarl.platform.secrets import redacted
from megarl.rewards.custom import provenance
from megarl.section import flatten

TOKENIZERS = {
    "actor_rollout_ref.model": "data.tokenizer",
    "model": "data.tokenizer",
    "critic.model": "critic.model.tokenizer_path",
    "reward_model.model": "reward_model.model.input_tokenizer",
}
"""Section of a model -> the key of a tokenizer that may be elsewhere and is trusted as the model is."""
REFERENCE = "actor_rollout_ref.ref.model"
TEACHERS = "actor_rollout_ref.ref.teachers."
"""The section whose keys are also those of the teachers, and the prefix of their keys."""
OWN_FILES = ("custom_reward_function.path", "environment.path", f"{ESTIMATOR}.path", f"{LOSS}.path")
"""The keys of files of the user; `name` in the same section is the function or the class."""

BY_SEQUENCE = ("gspo", "geo_mean", "sapo")
"""The policy losses whose papers weigh all sequences the same."""


class BatchRow(NamedTuple):
    """One line of the table."""

    stage: str
    size: str
    meaning: str


def batch_table(config: Config) -> list[BatchRow]:
    """Return how the prompts of a step become samples, mini-batches, micro-batches and shares of ranks."""
    policy = config.actor_rollout_ref
    prompts = config.data.train_batch_size
    megatron = policy.actor.megatron
    rollout = policy.rollout
    world = world_size(config.trainer)
    tp = megatron.tensor_model_parallel_size
    pp = megatron.pipeline_model_parallel_size
    cp = megatron.context_parallel_size
    context = f" x context {cp}" if cp > 1 else ""
    ranks = data_parallel_size(megatron, world)
    engines = world // rollout.tensor_model_parallel_size
    rows = [
        BatchRow("ranks", f"{world}", f"trainer: tensor {tp} x pipeline {pp}{context} x data {ranks}"),
        BatchRow(
            "engine replicas",
            f"{engines}",
            f"tensor {rollout.tensor_model_parallel_size}; at most {ceil(prompts / engines)} prompts each",
        ),
        BatchRow("prompts", f"{prompts}", "per step"),
        BatchRow("samples", f"{prompts * rollout.n}", f"{prompts} prompts x n {rollout.n}"),
        *_further_samples(config),
        *_update_rows(config, "actor", policy.actor),
    ]
    if config.num_supervised:
        rows.append(
            BatchRow("supervised pairs", f"{config.num_supervised}", "with each mini-batch of the actor (ptx_files)")
        )
    if config.has_critic:
        rows += _update_rows(config, "critic", config.critic)
    if config.reward_model.enable:
        share = ceil(prompts * rollout.n / ranks)
        rows.append(_micro_batch_row(config, "reward model", share, config.reward_model.micro_batch_size))
    return rows


def _further_samples(config: Config) -> Iterator[BatchRow]:
    """Yield the samples besides one batch of prompts."""
    prompts = config.data.train_batch_size
    section = config.algorithm.filter_groups
    if section.enable:
        yield BatchRow(
            "generation batches",
            f"<= {section.max_num_gen_batches}" if section.max_num_gen_batches else "1 or more",
            f"of these samples, until those of {prompts} prompts differ in {section.metric}",
        )
    partial = config.actor_rollout_ref.rollout.partial
    if partial.enable:
        left = "those that are not complete" if partial.num_engine_steps else f"{config.num_in_flight} of them"
        yield BatchRow("prompts drawn at once", f"{config.num_drawn}", f"{left} continue in the next step")
    if config.algorithm.estimator.greedy:
        yield BatchRow("greedy responses", f"{prompts}", "one to each prompt, the baseline of its samples")


def custom_code(config: Config | SupervisedConfig) -> dict[str, str]:
    """Return the code to run that is not part of megarl or its packages, by the keys that name it; without secrets."""
    leaves = dict(flatten(asdict(config)))
    policy = leaves.get("actor_rollout_ref.model.path")
    found = {}
    for key, value in leaves.items():
        section, _, name = key.rpartition(".")
        models = _models(leaves, section)
        if name == "external_lib" and value and models:
            found[key] = _modules(value)
        elif name == "trust_remote_code" and value and models:
            tokenizer = leaves.get(TOKENIZERS.get(section, ""))
            others = [tokenizer] if tokenizer and tokenizer not in (*models, policy) else []
            found[key] = f"what comes with {' and '.join([*models, *others])}"
        elif key in OWN_FILES and value:
            found[key] = provenance(Path(value), leaves[f"{section}.name"])
    return redacted(found)


def _models(leaves: Mapping[str, Any], section: str) -> list[str]:
    """Return the checkpoints that a section of a model names; that of the reference also has the teachers."""
    paths = [leaves.get(f"{section}.path")]
    if section == REFERENCE:
        paths += [path for key, path in leaves.items() if key.startswith(TEACHERS)]
    return list(dict.fromkeys(path for path in paths if path))


def _modules(value: object) -> str:
    return f"modules {', '.join(map(str, value))}" if isinstance(value, list | tuple) else f"module {value}"


def notes(config: Config) -> Iterator[str]:
    """Yield a sentence for each choice that works but is rarely intended."""
    actor = config.actor_rollout_ref.actor
    rollout = config.actor_rollout_ref.rollout
    if actor.megatron.dtype != rollout.dtype:
        yield (
            f"rollout.dtype={rollout.dtype} differs from actor.megatron.dtype={actor.megatron.dtype}: "
            "the engine samples from slightly other probabilities than the trainer computes"
        )
    if rollout.top_p < 1.0 or rollout.top_k != -1:
        yield (
            "rollout.top_p and rollout.top_k cut the distribution that training samples from, while the "
            "trainer's log-probabilities are of all tokens"
        )
    if not rollout.compares:
        why = (
            "rollout.calculate_log_probs is false"
            if not rollout.calculate_log_probs
            else "vLLM has no log-probabilities of all tokens at another temperature than 1 once top_p, top_k or "
            "do_sample=false leave some out"
        )
        yield (f"{why}: no step compares the engine with the trainer, only the checks of rollout.sync.check_every do")
    if actor.use_kl_loss and config.algorithm.use_kl_in_reward:
        yield "both actor.use_kl_loss and algorithm.use_kl_in_reward are on: the divergence is penalised twice"
    if actor.use_kl_loss and actor.kl_loss_type in ("kl", "k1"):
        yield (
            f"actor.kl_loss_type={actor.kl_loss_type} has no gradient in the mean, as a loss it only adds noise: "
            "mse and low_var_kl keep the policy near the reference"
        )
    if actor.policy_loss.loss_mode in BY_SEQUENCE and actor.loss_agg_mode != "seq-mean-token-mean":
        yield (
            f"{actor.policy_loss.loss_mode} weighs all sequences the same, as actor.loss_agg_mode=seq-mean-token-mean "
            f"does and {actor.loss_agg_mode} does not"
        )
    leaves = dict(flatten(asdict(config)))
    hidden = [key for key, shown in redacted(leaves).items() if shown != leaves[key]]
    if hidden:
        yield (
            f"there is a secret in {', '.join(hidden)}: it is neither shown nor kept, so RUN_DIR/config.yaml cannot "
            "start this run again; the environment is a better place for it"
        )
    ranks = data_parallel_size(actor.megatron, world_size(config.trainer))
    if actor.ppo_mini_batch_size < ranks:
        yield (
            f"ppo_mini_batch_size={actor.ppo_mini_batch_size} prompts, kept whole, leave some of the {ranks} "
            "data-parallel ranks without work"
        )


def unsaved(config: RunConfig) -> Iterator[str]:
    """Yield a sentence for each way in which a run can lose what it has learnt."""
    trainer = config.trainer
    learns_from_rewards = isinstance(config, Config)
    if trainer.val_only:
        return
    names_best = isinstance(config, Config) and config.validates_after_steps
    saved = ["the last step"] * trainer.save_last
    saved += ["each step whose validation is the best so far"] * (names_best and trainer.save_best)
    if trainer.save_freq <= 0 and saved:
        yield (
            f"trainer.save_freq={trainer.save_freq}: only {' and '.join(saved)} is saved, so a job that is killed "
            "repeats all steps since then"
        )
    elif trainer.save_freq <= 0:
        yield (
            f"trainer.save_freq={trainer.save_freq}: no step is saved, so a job that is killed starts again with its "
            "first step"
        )
    if learns_from_rewards and not trainer.save_last:
        yield (
            "trainer.save_last=false: the model of the last step is lost when the run ends, unless save_freq or "
            "save_best saves that step"
        )


def start_notes(config: RunConfig, argv: Sequence[str]) -> Iterator[str]:
    """Yield what every kind of run says about its configuration, read from `argv`, when it starts."""
    yield from remarks_in_words(foreign_keys(type(config), argv))
    yield from unread_keys(config, argv)
    yield from unsaved(config)
    yield from unwritten_keys(config, argv)


def other_defaults(
    config: RunConfig, written: Collection[str], remarks: Sequence[Remark]
) -> dict[str, tuple[object, object]]:
    """Return the keys whose default trains otherwise in verl, with both values, if they are read and not `written`.

    Args:
        config: the configuration.
        written: the keys that the user wrote, in the names of megarl.
        remarks: what became of those that have other names.
    """
    values = dict(flatten(asdict(config)))
    defaults = {key: theirs for key, theirs in defaults_beside(remarks).items() if key in values.keys() - set(written)}
    idle = reasons(config, defaults)
    return {key: (values[key], theirs) for key, theirs in defaults.items() if key not in idle and values[key] != theirs}


def unwritten_keys(config: RunConfig, argv: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each key that `argv` leaves out and whose default differs from that of other trainers."""
    written = written_keys(type(config), argv)
    remarks = foreign_keys(type(config), argv)
    others = other_defaults(config, written, remarks) if remarks else {}
    if others:
        listed = ", ".join(f"{key}={shown(ours)} (verl: {shown(theirs)})" for key, (ours, theirs) in others.items())
        yield f"some keys have verl's names; these are not written, and verl's defaults differ: {listed}"
    if isinstance(config, Config) and config.kl_of_reward and "algorithm.use_kl_in_reward" not in written:
        yield (
            "algorithm.use_kl_in_reward is not written and actor.use_kl_loss is off: the reward is reduced by "
            f"algorithm.kl_ctrl.kl_coef={config.algorithm.kl_ctrl.kl_coef:g} times the divergence from a reference; "
            "write algorithm.use_kl_in_reward=false to train without a reference"
        )


def _update_rows(config: Config, model: str, section: ActorSection | CriticSection) -> list[BatchRow]:
    mini_batch = section.ppo_mini_batch_size
    epochs = section.ppo_epochs
    actor = config.actor_rollout_ref.actor
    n = config.actor_rollout_ref.rollout.n
    count = config.data.train_batch_size // mini_batch
    ranks = data_parallel_size(actor.megatron, world_size(config.trainer))
    share = ceil(mini_batch * n / ranks)
    return [
        BatchRow(
            f"{model} mini-batches",
            f"{count}",
            f"{mini_batch} prompts = {mini_batch * n} samples; x {epochs} epochs = {count * epochs} optimizer steps",
        ),
        BatchRow(f"{model} share of a rank", f"{share}", f"samples of a mini-batch, over {ranks} data-parallel ranks"),
        _micro_batch_row(config, model, share, section.ppo_micro_batch_size),
    ]


def _micro_batch_row(config: Config, model: str, share: int, micro_batch: int | None) -> BatchRow:
    actor = config.actor_rollout_ref.actor
    longest = config.data.max_prompt_length + config.data.max_response_length
    tokens = actor.ppo_max_token_len_per_gpu * actor.megatron.context_parallel_size
    has_budget = actor.use_dynamic_bsz or micro_batch is None
    fit = max(1, tokens // longest) if has_budget else share  # a reward model takes a longer text alone
    sequences = min(fit, micro_batch or fit, share)
    # The schedule of a virtual pipeline goes by whole rounds of one micro-batch for each stage.
    virtual = actor.megatron.virtual_pipeline_model_parallel_size
    round_size = actor.megatron.pipeline_model_parallel_size if virtual else 1
    bounds = [f"{tokens} tokens"] if has_budget else []
    bounds += [f"{micro_batch} sequences"] if micro_batch else []
    return BatchRow(
        f"{model} micro-batches",
        f"<= {ceil(share / sequences / round_size) * round_size}",
        f"at most {' and '.join(bounds)} each; {sequences} samples if all reach {longest} tokens",
    )


def show_plan(config: Config) -> None:
    """Print how the prompts of a step are divided, and the remarks on the configuration."""
    table = Table(title="one step")
    for column in ("stage", "size", "meaning"):
        table.add_column(column)
    for row in batch_table(config):
        table.add_row(*row)
    console = Screen()
    console.print(table)
    for remark in notes(config):
        console.print(labelled("note:", remark, "yellow"))
