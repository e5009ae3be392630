"""Rules of environments, and of what a run with one cannot do; each fault names its remedy."""

from collections.abc import Iterator

from megarl.config.checks import path_faults
from megarl.config.faults import Fault
from megarl.config.keys import REWARD, ROLLOUT
from megarl.config.root import Config
from megarl.config.rule import CheckContext, Rule, rule
from megarl.environments.host import BUILT_IN

SECTION = "environment"
NAME = f"{SECTION}.name"

RULES: list[Rule[Config]] = []


@rule(RULES, SECTION)
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


@rule(RULES, NAME, f"{SECTION}.timeout_s", "trainer.phase_timeout_s")
def _time(config: Config, context: CheckContext) -> Iterator[Fault]:
    seconds = config.environment.timeout_s
    phase = config.trainer.phase_timeout_s
    if config.environment.name and seconds >= phase:
        yield Fault(
            f"{SECTION}.timeout_s",
            f"{seconds:g} s for one turn reach trainer.phase_timeout_s={phase:g}, after which a run without "
            "progress ends: raise the latter",
        )


@rule(
    RULES,
    NAME,
    f"{REWARD}.enable",
    f"{REWARD}.weights",
    f"{REWARD}.judge.url",
    "custom_reward_function.path",
    "algorithm.overlong_buffer.enable",
)
def _rewards(config: Config, context: CheckContext) -> Iterator[Fault]:
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
def _sampling(config: Config, context: CheckContext) -> Iterator[Fault]:
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
