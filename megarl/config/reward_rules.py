"""Rules of rewards: by functions, a judge, a neural model or an environment. Each fault names its remedy."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from string import Formatter
from urllib.parse import urlsplit

from megarl.config.checks import length_faults, path_faults, reward_faults
from megarl.config.faults import Fault
from megarl.config.keys import LAYERS, MESH, POLICY, REWARD, ROLLOUT
from megarl.config.model_files import model_faults, read_sizes, tokenizer_faults
from megarl.config.ppo_rules import follower_faults
from megarl.config.root import MODEL_SCORE, Config, RewardModelSection
from megarl.config.rule import CheckContext, Rule, rule, rule_in_context
from megarl.environments.host import BUILT_IN
from megarl.platform.secrets import is_secret
from megarl.rewards.config import JudgeSection
from megarl.rewards.rules import CUSTOM, JUDGE
from megarl.rewards.signature import ARGUMENTS, PROMPT, fault_in_file

SECTION = "environment"
NAME = f"{SECTION}.name"
PLACES = (PROMPT, *ARGUMENTS)
"""The names in braces that the template of a judge may have."""

RULES: list[Rule[Config]] = []


@rule(RULES, f"{REWARD}.weights", f"{REWARD}.enable", "custom_reward_function.path")
def _weights(config: Config) -> Iterator[Fault]:
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


@rule_in_context(RULES, "custom_reward_function")
def _custom_function(config: Config, context: CheckContext) -> Iterator[Fault]:
    custom = config.custom_reward_function
    path = Path(custom.path or "")
    if context.check_paths and path.is_file():
        fault = fault_in_file(path, custom.name, custom.reward_kwargs)
        if fault:
            yield Fault("custom_reward_function.name", fault)


@rule_in_context(RULES, f"{REWARD}.judge", f"{REWARD}.timeout_s")
def _judge(config: Config, context: CheckContext) -> Iterator[Fault]:
    section = config.reward_model
    if section.judge.url:
        yield from _judge_faults(section.judge, f"{REWARD}.judge", environ=os.environ if context.check_paths else None)
    if section.judge.url and section.timeout_s < section.judge.attempt_s:
        yield Fault(
            f"{REWARD}.timeout_s",
            f"{section.timeout_s:g} s for one response are less than {REWARD}.judge.attempt_s="
            f"{section.judge.attempt_s:g} for one request: raise the former to the time of several requests",
        )


@rule(RULES, f"{REWARD}.timeout_s", NAME, f"{SECTION}.timeout_s", "trainer.phase_timeout_s")
def _time(config: Config) -> Iterator[Fault]:
    phase = config.trainer.phase_timeout_s
    times = {f"{REWARD}.timeout_s": (config.reward_model.timeout_s, "response")}
    if config.environment.name:
        times[f"{SECTION}.timeout_s"] = (config.environment.timeout_s, "turn")
    for key, (seconds, work) in times.items():
        if seconds >= phase:
            yield Fault(
                key,
                f"{seconds:g} s for one {work} reach trainer.phase_timeout_s={phase:g}, after which a run without "
                "progress ends: raise the latter",
            )


@rule_in_context(RULES, REWARD, "data.max_prompt_length", "data.max_response_length")
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
def _reward_model_cut(config: Config) -> Iterator[Fault]:
    if config.reward_model.enable:
        yield from follower_faults(config, config.reward_model.model, config.reward_model.megatron, REWARD)


@rule_in_context(RULES, SECTION)
def _environment(config: Config, context: CheckContext) -> Iterator[Fault]:
    section = config.environment
    if section.name is None and section.path is not None:
        yield Fault(NAME, f"{SECTION}.path={section.path} defines a class: write its name")
    if section.name is not None and section.path is None and section.name not in BUILT_IN:
        yield Fault(
            NAME,
            f"{section.name!r} is not built in ({', '.join(BUILT_IN)}): set {SECTION}.path to the file that defines it",
        )
    if section.name == "python" and section.path is None and not section.run_code:
        yield Fault(
            f"{SECTION}.run_code",
            f"{NAME}=python runs programs that the policy writes, and no sandbox holds them: they may read, "
            "write and send what the user of this run may. Start the run in a container without network and secrets, "
            "and write true",
        )
    if context.check_paths:
        yield from path_faults(section.path, f"{SECTION}.path", "give a Python file that exists")


@rule(
    RULES,
    NAME,
    f"{REWARD}.enable",
    f"{REWARD}.weights",
    f"{REWARD}.judge.url",
    "custom_reward_function.path",
    "algorithm.overlong_buffer.enable",
)
def _rewards_of_environment(config: Config) -> Iterator[Fault]:
    others = {
        f"{REWARD}.enable": config.reward_model.enable,
        f"{REWARD}.weights": config.reward_model.weights,
        f"{REWARD}.judge.url": config.reward_model.judge.url,
        "custom_reward_function.path": config.custom_reward_function.path,
        "algorithm.overlong_buffer.enable": config.algorithm.overlong_buffer.enable,
    }
    for key, value in others.items():
        if config.environment.name and value:
            yield Fault(key, f"{NAME}={config.environment.name} gives the rewards, turn by turn: leave this out")


@rule(RULES, NAME, f"{ROLLOUT}.ignore_eos", "algorithm.adv_estimator", "critic.model", "data.tokenizer")
def _sampling_of_environment(config: Config) -> Iterator[Fault]:
    rollout = config.actor_rollout_ref.rollout
    algorithm = config.algorithm
    refused = {
        f"{ROLLOUT}.ignore_eos": (rollout.ignore_eos, "a turn ends at the end-of-sequence token"),
        "algorithm.adv_estimator": (
            algorithm.estimator.greedy,
            f"{algorithm.adv_estimator} compares with one greedy response, which is no episode: choose grpo or another",
        ),
        "critic.model.tokenizer_path": (
            config.has_critic and config.tokenizer_of_critic,
            "a critic reads the tokens of episodes as the policy does: name a critic with the policy's tokenizer",
        ),
    }
    for key, (is_set, reason) in refused.items():
        if config.environment.name and is_set:
            yield Fault(key, f"with {NAME}={config.environment.name}, {reason}")


def _judge_faults(judge: JudgeSection, where: str, *, environ: Mapping[str, str] | None) -> Iterator[Fault]:
    """Check address, template, pattern, range and key of a judge; None as `environ`: without the key's value."""
    if not _is_address(judge.url or ""):
        yield Fault(f"{where}.url", f"{judge.url} is no address: give one such as http://host:8000/v1")
    if not judge.model:
        yield Fault(f"{where}.model", "is empty: name the model that the server offers")
    yield from _template_faults(judge.template, f"{where}.template")
    yield from _pattern_faults(judge.pattern, f"{where}.pattern")
    if judge.lowest >= judge.highest:
        yield Fault(f"{where}.lowest", f"{judge.lowest:g} is not below {where}.highest={judge.highest:g}: lower it")
    name = judge.api_key_variable
    if name:
        yield from _key_faults(name, f"{where}.api_key_variable", environ)


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # half a bracket, or no port
        return False
    return (
        parts.scheme in ("http", "https")
        and bool(parts.hostname)
        and port != 0
        and len(url.split()) == 1
        and url.isprintable()
    )


def _template_faults(template: str, key: str) -> Iterator[Fault]:
    try:
        named = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        yield Fault(key, f"{error}: write braces that stand for themselves twice, {{{{ and }}}}")
        return
    places = {re.split(r"[.\[]", name)[0] for name in named}
    unknown = sorted(places - {*PLACES})
    if unknown:
        known = ", ".join(f"{{{place}}}" for place in PLACES)
        yield Fault(key, f"there is no {{{unknown[0]}}}: choose from {known}, or write {{extra_info[KEY]}}")
    if "solution_str" not in places:
        yield Fault(key, "does not show the response: write {solution_str} into the template")


def _pattern_faults(pattern: str, key: str) -> Iterator[Fault]:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        yield Fault(key, f"is no regular expression: {error}")
        return
    if groups != 1:
        yield Fault(key, f"has {groups} groups: write one, (...), around the number; others as (?:...)")


def _key_faults(name: str, key: str, environ: Mapping[str, str] | None) -> Iterator[Fault]:
    if not is_secret(name):
        yield Fault(
            key,
            f"{name} is no name of a secret, so that its value would not be hidden in messages: "
            "choose one such as JUDGE_API_KEY",
        )
    elif environ is not None and not environ.get(name):
        yield Fault(key, f"the environment variable {name} is not set: export it, or write null")
    elif environ is not None and not re.fullmatch("[!-~]+", environ[name]):
        yield Fault(
            key, f"{name} has a space, a line break or a letter that no HTTP header may have: export the key alone"
        )
