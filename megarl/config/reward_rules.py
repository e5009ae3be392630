"""Rules of rewards and of the neural reward model; each fault names its remedy."""

import os
from collections.abc import Iterator
from pathlib import Path

from megarl.config.checks import length_faults, reward_faults
from megarl.config.faults import Fault
from megarl.config.judge_checks import judge_faults
from megarl.config.keys import LAYERS, MESH, POLICY, REWARD
from megarl.config.model_files import model_faults, read_sizes, tokenizer_faults
from megarl.config.ppo_rules import follower_cut
from megarl.config.root import MODEL_SCORE, Config, RewardModelSection
from megarl.config.rule import CheckContext, Rule, rule
from megarl.rewards.rules import CUSTOM, JUDGE
from megarl.rewards.signature import fault_in_file

RULES: list[Rule[Config]] = []


@rule(RULES, f"{REWARD}.weights", f"{REWARD}.enable", "custom_reward_function.path")
def _weights(config: Config, context: CheckContext) -> Iterator[Fault]:
    section = config.reward_model
    custom = config.custom_reward_function
    key = f"{REWARD}.weights"
    weighted = section.weights is not None and MODEL_SCORE in section.weights
    if weighted and not section.enable:
        yield Fault(
            key,
            f"weighs the score of a reward model ({MODEL_SCORE}), and there is none: set {REWARD}.enable=true "
            f"and {REWARD}.model.path, or leave it out",
        )
    elif section.enable and section.weights is not None and not weighted:
        yield Fault(key, f"gives the reward model no weight: add {MODEL_SCORE}: 1.0, or set {REWARD}.enable=false")
    elif section.enable and not section.rules and (custom.path or section.judge.url):
        other = custom.path
        name = CUSTOM
        place = "custom_reward_function.path"
        if not other:
            other = section.judge.url
            name = JUDGE
            place = f"{REWARD}.judge.url"
        yield Fault(
            key,
            f"lets the reward model score alone, so that {other} is never called: weigh both, as in "
            f"{{{MODEL_SCORE}: 1.0, {name}: 0.5}}, or remove {place}",
        )
    elif section.rules:
        yield from reward_faults(section.rules, custom)


@rule(RULES, "custom_reward_function")
def _custom_function(config: Config, context: CheckContext) -> Iterator[Fault]:
    custom = config.custom_reward_function
    path = Path(custom.path or "")
    if context.check_paths and path.is_file() and (fault := fault_in_file(path, custom.name, custom.reward_kwargs)):
        yield Fault("custom_reward_function.name", fault)


@rule(RULES, f"{REWARD}.judge", f"{REWARD}.timeout_s")
def _judge(config: Config, context: CheckContext) -> Iterator[Fault]:
    section = config.reward_model
    if section.judge.url:
        yield from judge_faults(section.judge, f"{REWARD}.judge", environ=os.environ if context.check_paths else None)
    if section.judge.url and section.timeout_s < section.judge.attempt_s:
        yield Fault(
            f"{REWARD}.timeout_s",
            f"{section.timeout_s:g} s for one response are less than {REWARD}.judge.attempt_s="
            f"{section.judge.attempt_s:g} for one request: raise the former to the time of several requests",
        )


@rule(RULES, f"{REWARD}.timeout_s", "trainer.phase_timeout_s")
def _reward_time(config: Config, context: CheckContext) -> Iterator[Fault]:
    seconds = config.reward_model.timeout_s
    phase = config.trainer.phase_timeout_s
    if seconds >= phase:
        yield Fault(
            f"{REWARD}.timeout_s",
            f"{seconds:g} s for one response reach trainer.phase_timeout_s={phase:g}, after which a run "
            "without progress ends: raise the latter",
        )


@rule(RULES, REWARD, "data.max_prompt_length", "data.max_response_length")
def _reward_model(config: Config, context: CheckContext) -> Iterator[Fault]:
    section = config.reward_model
    if not section.enable:
        return
    yield from _reward_checkpoint_faults(section, config.actor_rollout_ref.model.path, check_paths=context.check_paths)
    sizes = read_sizes(section.model)
    key = f"{REWARD}.model.path"
    if sizes is None:
        return
    if not sizes.scalar_head:
        yield Fault(
            key,
            f"{section.model.path} is a language model and no sequence classifier (config.json: architectures "
            "...ForSequenceClassification): name one that scores, for example a model of megarl.commands.train_reward",
        )
    if section.max_length is not None:
        yield from length_faults(sizes, key, f"{REWARD}.max_length", section.max_length)
    elif section.model.input_tokenizer is None:
        longest = config.data.max_prompt_length + config.data.max_response_length
        yield from length_faults(sizes, key, "data.max_response_length", longest)


def _reward_checkpoint_faults(section: RewardModelSection, policy_path: str, *, check_paths: bool) -> Iterator[Fault]:
    """The checkpoint must be named and there."""
    if not section.model.path:
        yield Fault(f"{REWARD}.model.path", f"{REWARD}.enable=true needs one: name a sequence classifier")
    elif check_paths:
        yield from model_faults(section.model, f"{REWARD}.model.path")
        tokenizer = section.model.input_tokenizer
        if tokenizer != policy_path:  # a link to the policy's tokenizer, checked elsewhere
            place = f"{REWARD}.model.input_tokenizer"
            yield from tokenizer_faults(tokenizer, place, "give a directory, a .model file, a URI, a HF id or null")


@rule(RULES, POLICY, f"{REWARD}.model", *MESH, LAYERS, f"{REWARD}.megatron", f"{REWARD}.enable")
def _reward_model_cut(config: Config, context: CheckContext) -> Iterator[Fault]:
    if config.reward_model.enable:
        yield from follower_cut(config, config.reward_model.model, config.reward_model.megatron, REWARD)
