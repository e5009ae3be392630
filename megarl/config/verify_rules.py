"""Rules between the sections of `megarl verify`; each fault names its remedy."""

from collections.abc import Iterator

from megarl.config.checks import (
    engine_argument_faults,
    engine_cut_faults,
    launch_faults,
    mesh_faults,
    partition_faults,
    replica_faults,
)
from megarl.config.faults import Fault
from megarl.config.model_files import model_faults
from megarl.config.root import VerifyConfig
from megarl.config.rule import CheckContext, Rule, rule

MODEL = "actor_rollout_ref.model"
MEGATRON = "actor_rollout_ref.actor.megatron"
ROLLOUT = "actor_rollout_ref.rollout"


@rule(MODEL)
def _model(config: VerifyConfig, context: CheckContext) -> Iterator[Fault]:
    yield from model_faults(config.actor_rollout_ref.model, f"{MODEL}.path", needs_weights=False)


@rule("trainer.nnodes", "trainer.n_gpus_per_node", MEGATRON, ROLLOUT)
def _ranks(config: VerifyConfig, context: CheckContext) -> Iterator[Fault]:
    yield from launch_faults(config.trainer, context.world_size)
    yield from mesh_faults(config.actor_rollout_ref.actor.megatron, config.trainer, MEGATRON)
    yield from replica_faults(config.actor_rollout_ref.rollout, config.trainer, ROLLOUT)
    yield from engine_argument_faults(config.actor_rollout_ref.rollout, ROLLOUT)


@rule(MODEL, MEGATRON, ROLLOUT)
def _cuts(config: VerifyConfig, context: CheckContext) -> Iterator[Fault]:
    policy = config.actor_rollout_ref
    yield from partition_faults(policy.model, MODEL, policy.actor.megatron, MEGATRON)
    yield from engine_cut_faults(policy.model, MODEL, policy.rollout, ROLLOUT)


VERIFY_RULES: tuple[Rule[VerifyConfig], ...] = (_model, _ranks, _cuts)
