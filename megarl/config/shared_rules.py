"""Rules that several roots share: of the trainer's section, and of the policy on its ranks and in the engine."""

from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from megarl.config.checks import (
    cpu_engine_faults,
    engine_cut_faults,
    file_faults,
    partition_faults,
    replay_faults,
    uri_faults,
    world_size,
)
from megarl.config.faults import Fault
from megarl.config.keys import ACTOR, CRITIC_WARM_UP, LAYERS, MESH, POLICY, ROLLOUT, WORLD
from megarl.config.learning_checks import learning_faults
from megarl.config.mesh_checks import override_faults, size_faults
from megarl.config.model_files import model_faults
from megarl.config.root import Config, SupervisedConfig, VerifyConfig
from megarl.config.rule import CheckContext, Rule, rule, rule_in_context
from megarl.platform.errors import UserError
from megarl.platform.files import WriteError, check_writable
from megarl.platform.uri import local_path
from megarl.rollout.fields import engine_faults
from megarl.tracking.offered import CONSOLE, FILES, find_tracker

MLFLOW_SCHEMES = ("http", "https", "file", "sqlite", "postgresql", "mysql", "mssql", "databricks", "databricks-uc")

LAUNCH_RULES: list[Rule[Config | SupervisedConfig | VerifyConfig]] = []
"""Rules of every root."""
RUN_RULES: list[Rule[Config | SupervisedConfig]] = []
"""Rules of every root that trains."""
POLICY_RULES: list[Rule[Config | VerifyConfig]] = []
"""Rules of every root with a policy and an engine."""
VERIFY_RULES: list[Rule[VerifyConfig]] = []
"""Rules of `megarl verify` alone."""


@rule_in_context(LAUNCH_RULES, *WORLD)
def _launch(config: Config | SupervisedConfig | VerifyConfig, context: CheckContext) -> Iterator[Fault]:
    trainer = config.trainer
    if context.world_size is not None and context.world_size != world_size(trainer):
        yield Fault(
            "trainer.n_gpus_per_node",
            f"the launcher started {context.world_size} processes, but trainer.nnodes={trainer.nnodes} x "
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node} is {world_size(trainer)}: make them agree",
        )


@rule_in_context(RUN_RULES, "trainer.default_local_dir", "trainer.rollout_data_dir")
def _directories(config: Config | SupervisedConfig, context: CheckContext) -> Iterator[Fault]:
    """The directory of the run, and that of its samples elsewhere, can be made and take files."""
    if context.check_paths and context.writes:
        run = Path(config.trainer.default_local_dir)
        samples = config.trainer.rollout_data_dir
        places = {"trainer.default_local_dir": run}
        if samples and not Path(samples).is_relative_to(run):
            places["trainer.rollout_data_dir"] = Path(samples)
        for key, place in places.items():
            try:
                check_writable(place, key)
            except WriteError as error:
                yield Fault(key, str(error).removeprefix(f"{key}="))


@rule_in_context(RUN_RULES, "trainer.resume_mode", "trainer.resume_from_path")
def _resume(config: Config | SupervisedConfig, context: CheckContext) -> Iterator[Fault]:
    key = "trainer.resume_from_path"
    path = config.trainer.resume_from_path
    mode = config.trainer.resume_mode
    if (mode == "resume_path") != bool(path):
        yield Fault(
            key,
            f"is {path!r} with trainer.resume_mode={mode}: a path goes with resume_mode=resume_path, and only with it",
        )
    elif path and context.check_paths:
        yield from file_faults(path, key, "give a checkpoint directory")


@rule_in_context(RUN_RULES, "trainer.default_hdfs_dir", "trainer.default_local_dir")
def _mirror(config: Config | SupervisedConfig, context: CheckContext) -> Iterator[Fault]:
    key = "trainer.default_hdfs_dir"
    mirror = config.trainer.default_hdfs_dir
    if mirror == "":
        yield Fault(key, "is empty: name a directory or a URI, or write null")
    if not mirror:
        return
    try:
        place = local_path(mirror)
    except UserError as error:
        yield Fault(key, str(error))
        return
    if place and place.resolve() == Path(config.trainer.default_local_dir).resolve():
        yield Fault(key, f"{mirror} is trainer.default_local_dir itself: name a place on another disk")
    elif context.check_paths:
        yield from uri_faults(mirror, key)


@rule_in_context(RUN_RULES, "trainer.logger", "trainer.mlflow_tracking_uri")
def _trackers(config: Config | SupervisedConfig, context: CheckContext) -> Iterator[Fault]:
    """Each tracker exists, its package is installed, and MLflow or a plug-in of it knows the server's scheme."""
    for name in set(config.trainer.logger) - {CONSOLE, FILES}:
        try:
            find_tracker(name)
        except UserError as error:
            yield Fault("trainer.logger", str(error))
    for name in ("tensorboard", "wandb"):
        if context.check_paths and name in config.trainer.logger and find_spec(name) is None:
            yield Fault(
                "trainer.logger",
                f"the package {name} is not installed: pip install 'megarl[{name}]', or leave {name} out",
            )
    scheme, separator, _ = (config.trainer.mlflow_tracking_uri or "").partition("://")
    kind = scheme.partition("+")[0]
    if not separator or kind in MLFLOW_SCHEMES:
        return
    if kind not in {plugin.name for plugin in entry_points(group="mlflow.tracking_store")}:  # reads all packages' files
        yield Fault(
            "trainer.mlflow_tracking_uri",
            f"{scheme}:// is no scheme of MLflow's: choose from {', '.join(MLFLOW_SCHEMES)}",
        )


@rule(RUN_RULES, "optim", f"{ACTOR}.optim", "critic.optim", CRITIC_WARM_UP, "trainer.total_training_steps")
def _schedules(config: Config | SupervisedConfig) -> Iterator[Fault]:
    yield from learning_faults(config, config.trainer.total_training_steps)


@rule(POLICY_RULES, *WORLD, *MESH, LAYERS)
def _mesh(config: Config | VerifyConfig) -> Iterator[Fault]:
    megatron = config.actor_rollout_ref.actor.megatron
    yield from size_faults(megatron, world_size(config.trainer), f"{ACTOR}.megatron")
    yield from override_faults(megatron, f"{ACTOR}.megatron")


@rule(POLICY_RULES, *WORLD, f"{ROLLOUT}.tensor_model_parallel_size")
def _replicas(config: Config | VerifyConfig) -> Iterator[Fault]:
    tp = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    world = world_size(config.trainer)
    if world % tp:
        yield Fault(
            f"{ROLLOUT}.tensor_model_parallel_size",
            f"{tp} does not divide the world of {world} ranks (trainer.nnodes x trainer.n_gpus_per_node): choose a "
            "divisor",
        )


@rule(POLICY_RULES, f"{ROLLOUT}.engine_kwargs")
def _engine_arguments(config: Config | VerifyConfig) -> Iterator[Fault]:
    """The engine has the arguments, and they do not follow from other keys."""
    arguments = config.actor_rollout_ref.rollout.engine_kwargs
    if arguments:
        for message in engine_faults(arguments):
            yield Fault(f"{ROLLOUT}.engine_kwargs", message)


@rule(
    POLICY_RULES,
    POLICY,
    *MESH,
    LAYERS,
    f"{ACTOR}.megatron.sequence_parallel",
    f"{ROLLOUT}.tensor_model_parallel_size",
    f"{ROLLOUT}.engine_kwargs",
)
def _policy_cut(config: Config | VerifyConfig) -> Iterator[Fault]:
    policy = config.actor_rollout_ref
    yield from partition_faults(policy.model, POLICY, policy.actor.megatron, f"{ACTOR}.megatron")
    yield from engine_cut_faults(policy.model, policy.rollout, num_ranks=world_size(config.trainer))


@rule(POLICY_RULES, POLICY, f"{ROLLOUT}.dtype", "trainer.device")
def _linear_attention(config: Config | VerifyConfig) -> Iterator[Fault]:
    """VLLM's CPU engine computes linear attention."""
    policy = config.actor_rollout_ref
    if config.trainer.device == "cpu":
        yield from cpu_engine_faults(policy.model, policy.rollout.dtype)


@rule(POLICY_RULES, POLICY, f"{ROLLOUT}.routing_replay")
def _routing_replay(config: Config | VerifyConfig) -> Iterator[Fault]:
    """Only a mixture of experts has routes."""
    policy = config.actor_rollout_ref
    yield from replay_faults(policy.model, f"{ROLLOUT}.routing_replay", policy.rollout.routing_replay)


@rule(VERIFY_RULES, POLICY)
def _model(config: VerifyConfig) -> Iterator[Fault]:
    yield from model_faults(config.actor_rollout_ref.model, f"{POLICY}.path", needs_weights=False)
