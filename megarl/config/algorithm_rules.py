"""Rules of the advantage estimator and the losses; each fault names its remedy.

The file of an estimator or a loss of the user is read and not run.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from megarl.algorithms.config import RolloutCorrectionSection
from megarl.config.checks import file_faults, path_faults
from megarl.config.custom_functions import ESTIMATOR, LOSS, Call
from megarl.config.faults import Fault
from megarl.config.keys import ACTOR, ROLLOUT
from megarl.config.root import Config
from megarl.config.rule import CheckContext, Rule, rule, rule_in_context
from megarl.platform.errors import UserError
from megarl.platform.functions import signature_in
from megarl.section import listed

ALL_TOKENS = {"do_sample": True, "top_p": 1.0, "top_k": -1}  # of `rollout`: every token may be drawn

ESTIMATOR_KEY = "algorithm.adv_estimator"
LOSS_KEY = f"{LOSS}.loss_mode"

RULES: list[Rule[Config]] = []


@rule(
    RULES,
    "algorithm.adv_estimator",
    "algorithm.filter_groups.enable",
    f"{ROLLOUT}.n",
    f"{ROLLOUT}.do_sample",
    "trainer.critic_warmup",
)
def _estimator(config: Config) -> Iterator[Fault]:
    rollout = config.actor_rollout_ref.rollout
    estimator = config.algorithm.adv_estimator
    comparing = f"algorithm.adv_estimator={estimator}" if config.algorithm.estimator.compares else None
    if config.algorithm.filter_groups.enable and not comparing:
        comparing = "algorithm.filter_groups"
    if comparing and rollout.n == 1:
        yield Fault(
            f"{ROLLOUT}.n",
            f"{comparing} compares the responses to one prompt: write n=2 or more (5 is usual), or for single "
            "responses adv_estimator=reinforce_plus_plus",
        )
    if comparing and not rollout.do_sample:
        yield Fault(
            f"{ROLLOUT}.do_sample",
            f"greedy responses to one prompt are all the same, and {comparing} compares them: write true",
        )
    elif config.algorithm.estimator.greedy and not rollout.do_sample:
        yield Fault(
            f"{ROLLOUT}.do_sample",
            f"algorithm.adv_estimator={estimator} compares responses with the greedy one: write true",
        )
    if not config.has_critic and config.trainer.critic_warmup:
        yield Fault("trainer.critic_warmup", f"algorithm.adv_estimator={estimator} has no critic to warm up: write 0")


@rule(RULES, "algorithm.filter_groups", "algorithm.use_kl_in_reward", "algorithm.kl_ctrl", f"{ACTOR}.use_kl_loss")
def _filter_metric(config: Config) -> Iterator[Fault]:
    algorithm = config.algorithm
    asked = config.algorithm.use_kl_in_reward
    in_reward = not config.actor_rollout_ref.actor.use_kl_loss if asked is None else asked
    wanted = algorithm.filter_groups.enable and algorithm.filter_groups.metric == "seq_final_reward"
    if wanted and in_reward and algorithm.kl_ctrl.kl_coef > 0.0:
        yield Fault(
            "algorithm.filter_groups.metric",
            "the divergence in the reward is not known while prompts are chosen: write seq_reward, or take it "
            f"into the loss with algorithm.use_kl_in_reward=false and {ACTOR}.use_kl_loss=true",
        )


@rule(RULES, "algorithm.overlong_buffer", "data.max_response_length", f"{ROLLOUT}.response_length")
def _overlong(config: Config) -> Iterator[Fault]:
    buffer = config.algorithm.overlong_buffer
    if buffer.enable and not 0 < buffer.len <= buffer.max_resp_len:
        yield Fault(
            "algorithm.overlong_buffer.len",
            f"{buffer.len} is not a part of the {buffer.max_resp_len} tokens of a response, over which the "
            "penalty could grow: write between 1 and that",
        )


@rule(RULES, "algorithm.rollout_correction", *(f"{ROLLOUT}.{key}" for key in ("calculate_log_probs", *ALL_TOKENS)))
def _correction(config: Config) -> Iterator[Fault]:
    correction = config.algorithm.rollout_correction
    rollout = config.actor_rollout_ref.rollout
    asked = correction.rollout_is or correction.rollout_rs or correction.bypass_mode
    if asked and not rollout.calculate_log_probs:
        yield Fault(
            f"{ROLLOUT}.calculate_log_probs",
            "algorithm.rollout_correction compares the engine's log-probabilities with the trainer's: write true",
        )
    for key, wanted in ALL_TOKENS.items():
        if asked and getattr(rollout, key) != wanted:
            yield Fault(
                f"{ROLLOUT}.{key}",
                "the engine then draws from other probabilities than the trainer, which computes those of all "
                "tokens, and algorithm.rollout_correction cannot relate the two: write "
                f"{json.dumps(wanted)}, or leave out rollout_is, rollout_rs and bypass_mode",
            )
    if correction.rollout_is and correction.bypass_mode:
        yield Fault(
            "algorithm.rollout_correction.rollout_is",
            "would correct twice: with bypass_mode the ratios of an update are from the engine's probabilities already",
        )
    if correction.needs_is_threshold and correction.rollout_is_threshold is None:
        yield Fault(
            "algorithm.rollout_correction.rollout_is_threshold",
            "null is no bound: write 2 or another number; verl has no weights then, which is rollout_is=null here",
        )
        return
    if correction.rollout_is or correction.rollout_rs:
        yield from _bounds(correction)


def _bounds(correction: RolloutCorrectionSection) -> Iterator[Fault]:
    """Yield a fault if no weight or no ratio lies between its bounds."""
    smallest = correction.rollout_is_threshold_lower
    if correction.rollout_is and smallest is not None and smallest > correction.largest_weight:
        yield Fault(
            "algorithm.rollout_correction.rollout_is_threshold_lower",
            f"no weight lies between {smallest:g} and {correction.largest_weight:g}: write less than "
            "rollout_is_threshold",
        )
    if not correction.rollout_rs:
        return
    upper = correction.largest_ratio
    lower = correction.rollout_rs_threshold_lower
    lower = 1.0 / upper if lower is None else lower
    if lower >= upper:
        yield Fault(
            "algorithm.rollout_correction.rollout_rs_threshold",
            f"no ratio lies between {lower:g} and {upper:g}: write more than 1, or a smaller "
            "rollout_rs_threshold_lower",
        )


@rule(RULES, f"{ROLLOUT}.partial", "algorithm.rollout_correction", "algorithm.filter_groups.enable")
def _partial(config: Config) -> Iterator[Fault]:
    if not config.actor_rollout_ref.rollout.partial.enable:
        return
    correction = config.algorithm.rollout_correction
    if correction.rollout_is is None and not correction.bypass_mode:
        yield Fault(
            "algorithm.rollout_correction.rollout_is",
            f"{ROLLOUT}.partial learns from tokens of older weights, which only a correction makes up for: write "
            "token, or bypass_mode=true",
        )
    if config.algorithm.filter_groups.enable:
        yield Fault(
            f"{ROLLOUT}.partial.enable",
            "algorithm.filter_groups refills the engine by its own rule: use one of the two",
        )


@rule(
    RULES,
    f"{ROLLOUT}.keep_complete",
    f"{ROLLOUT}.partial.enable",
    "algorithm.filter_groups.enable",
    "environment.name",
)
def _keeping(config: Config) -> Iterator[Fault]:
    others = {
        f"{ROLLOUT}.partial.enable": config.actor_rollout_ref.rollout.partial.enable,
        "algorithm.filter_groups.enable": config.algorithm.filter_groups.enable,
        "environment.name": config.environment.name,
    }
    if config.actor_rollout_ref.rollout.keep_complete:
        for key, is_on in others.items():
            if is_on:
                yield Fault(
                    f"{ROLLOUT}.keep_complete",
                    f"{key} decides by counted engine steps what a step draws, and kept responses take none: write "
                    "false",
                )


@rule(RULES, "algorithm.adv_estimator", f"{ACTOR}.use_kl_loss", f"{ACTOR}.ptx_coef")
def _teaches(config: Config) -> Iterator[Fault]:
    actor = config.actor_rollout_ref.actor
    learns_otherwise = actor.use_kl_loss or actor.ptx_coef
    if config.algorithm.adv_estimator == "none" and not learns_otherwise:
        yield Fault(
            "algorithm.adv_estimator",
            f"without advantages the actor would learn nothing: write {ACTOR}.use_kl_loss=true to learn from a "
            "teacher, or choose another estimator",
        )


@rule(RULES, f"{ACTOR}.policy_loss")
def _policy_loss(config: Config) -> Iterator[Fault]:
    loss = config.actor_rollout_ref.actor.policy_loss
    if loss.loss_mode == "clip_cov" and loss.clip_cov_lb >= loss.clip_cov_ub:
        yield Fault(
            f"{ACTOR}.policy_loss.clip_cov_lb",
            f"no covariance lies between {loss.clip_cov_lb:g} and clip_cov_ub={loss.clip_cov_ub:g}: lower it",
        )


@rule_in_context(RULES, f"{ACTOR}.ptx_coef", f"{ACTOR}.ptx_files", f"{ACTOR}.ptx_batch_size")
def _supervision(config: Config, context: CheckContext) -> Iterator[Fault]:
    actor = config.actor_rollout_ref.actor
    files = listed(actor.ptx_files)
    if not files and (actor.ptx_coef or actor.ptx_batch_size):
        asked = f"ptx_coef={actor.ptx_coef:g}" if actor.ptx_coef else f"ptx_batch_size={actor.ptx_batch_size}"
        yield Fault(
            f"{ACTOR}.ptx_files", f"{ACTOR}.{asked} needs supervised pairs: name their parquet files, or leave it out"
        )
    if files and not actor.ptx_coef:
        yield Fault(
            f"{ACTOR}.ptx_coef",
            f"the pairs of {ACTOR}.ptx_files have no weight: write more than 0, or leave the files out",
        )
    if context.check_paths:
        for file in files:
            yield from file_faults(file, f"{ACTOR}.ptx_files")


@rule_in_context(RULES, ESTIMATOR_KEY, ESTIMATOR)
def _custom_estimator(config: Config, context: CheckContext) -> Iterator[Fault]:
    algorithm = config.algorithm
    is_chosen = algorithm.adv_estimator == "custom"
    yield from _faults_of_call(ESTIMATOR_KEY, is_chosen, Call.of_estimator(algorithm.custom_estimator), context)


@rule_in_context(RULES, LOSS)
def _custom_loss(config: Config, context: CheckContext) -> Iterator[Fault]:
    section = config.actor_rollout_ref.actor.policy_loss
    yield from _faults_of_call(LOSS_KEY, section.loss_mode == "custom", Call.of_loss(section), context)


def _faults_of_call(chooser: str, is_chosen: bool, call: Call, context: CheckContext) -> Iterator[Fault]:
    """Check that a function is both named and chosen, and that it accepts its arguments."""
    key = f"{call.key}.path"
    path = Path(call.path)
    if is_chosen and not call.path:
        yield Fault(key, f"{chooser}=custom is a function of yours: name its Python file")
    if call.path and not is_chosen:
        yield Fault(chooser, f"is not custom, so that {call} is never called: write custom")
    if not is_chosen or not call.path or not context.check_paths:
        return
    missing = list(path_faults(call.path, key, "give a Python file that exists"))
    yield from missing
    if missing:
        return
    try:
        signature = signature_in(path, call.name)
    except UserError as error:
        yield Fault(f"{call.key}.name", str(error))
        return
    if signature:
        yield from (Fault(key, message) for key, message in call.faults(signature))
