"""The rules of `megarl verify`."""

from collections.abc import Iterator

from megarl.config.faults import Fault
from megarl.config.keys import POLICY
from megarl.config.model_files import model_faults
from megarl.config.root import VerifyConfig
from megarl.config.rule import CheckContext, Rule, rule

RULES: list[Rule[VerifyConfig]] = []


@rule(RULES, POLICY)
def _model(config: VerifyConfig, context: CheckContext) -> Iterator[Fault]:
    yield from model_faults(config.actor_rollout_ref.model, f"{POLICY}.path", needs_weights=False)
