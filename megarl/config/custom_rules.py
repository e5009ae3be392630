"""Rules of the user's own estimator and policy loss; the file is read and not run."""

from collections.abc import Iterator
from pathlib import Path

from megarl.config.checks import path_faults
from megarl.config.custom_functions import ESTIMATOR, LOSS, Call
from megarl.config.faults import Fault
from megarl.config.root import Config
from megarl.config.rule import CheckContext, Rule, rule
from megarl.platform.errors import UserError
from megarl.platform.functions import signature_in

ESTIMATOR_KEY = "algorithm.adv_estimator"
LOSS_KEY = f"{LOSS}.loss_mode"

RULES: list[Rule[Config]] = []


@rule(RULES, ESTIMATOR_KEY, ESTIMATOR)
def _custom_estimator(config: Config, context: CheckContext) -> Iterator[Fault]:
    algorithm = config.algorithm
    is_chosen = algorithm.adv_estimator == "custom"
    yield from _faults(ESTIMATOR_KEY, is_chosen, Call.of_estimator(algorithm.custom_estimator), context)


@rule(RULES, LOSS)
def _custom_loss(config: Config, context: CheckContext) -> Iterator[Fault]:
    section = config.actor_rollout_ref.actor.policy_loss
    yield from _faults(LOSS_KEY, section.loss_mode == "custom", Call.of_loss(section), context)


def _faults(chooser: str, is_chosen: bool, call: Call, context: CheckContext) -> Iterator[Fault]:
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
