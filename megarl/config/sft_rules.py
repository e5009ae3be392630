"""Rules between the sections of a run that learns from files; each fault names its remedy."""

from collections.abc import Iterator

from megarl.config.checks import (
    data_faults,
    directory_faults,
    launch_faults,
    length_faults,
    mesh_faults,
    mirror_faults,
    offload_faults,
    partition_faults,
    resume_faults,
    tracking_faults,
    world_size,
)
from megarl.config.faults import Fault
from megarl.config.learning_checks import learning_faults
from megarl.config.mesh_checks import data_parallel_size
from megarl.config.model_files import model_faults, read_sizes
from megarl.config.root import RewardTrainConfig, SFTConfig
from megarl.config.rule import CheckContext, Rule, rule

LearnsFromFiles = SFTConfig | RewardTrainConfig


@rule("data.train_files", "data.val_files", "data.tokenizer", "data.chat_template", "model")
def _files(config: LearnsFromFiles, context: CheckContext) -> Iterator[Fault]:
    if context.check_paths:
        yield from data_faults(config.data, config.model)
        yield from model_faults(config.model, "model.path", needs_head=isinstance(config, SFTConfig))


@rule("trainer.nnodes", "trainer.n_gpus_per_node", "megatron", "model")
def _ranks(config: LearnsFromFiles, context: CheckContext) -> Iterator[Fault]:
    yield from launch_faults(config.trainer, context.world_size)
    yield from mesh_faults(config.megatron, config.trainer, "megatron")
    yield from partition_faults(config.model, "model", config.megatron, "megatron")
    yield from offload_faults(config.megatron, "megatron")


@rule("trainer.nnodes", "trainer.n_gpus_per_node", "megatron", "data.train_batch_size")
def _work_for_all(config: LearnsFromFiles, context: CheckContext) -> Iterator[Fault]:
    ranks = data_parallel_size(config.megatron, world_size(config.trainer))
    if config.data.train_batch_size < ranks:
        yield Fault(
            path="data.train_batch_size",
            message=f"{config.data.train_batch_size} pairs are fewer than the {ranks} data-parallel ranks: raise it, "
            "or raise the tensor, pipeline or context parallel size",
        )


@rule("data.max_length", "max_token_len_per_gpu", "model")
def _lengths(config: LearnsFromFiles, context: CheckContext) -> Iterator[Fault]:
    longest, ranks = config.data.max_length, config.megatron.context_parallel_size  # share the tokens of a sequence
    whole = 2 * (longest + 1) if isinstance(config, RewardTrainConfig) else longest
    if whole > config.max_token_len_per_gpu * ranks:
        row = "pair" if isinstance(config, RewardTrainConfig) else "sequence"
        yield Fault(
            path="max_token_len_per_gpu",
            message=f"{config.max_token_len_per_gpu} tokens cannot hold one {row} of data.max_length={longest}: "
            f"write at least {-(-whole // ranks)}",
        )
    yield from length_faults(read_sizes(config.model), "model.path", "data.max_length", longest)


@rule(
    "trainer.resume_mode",
    "trainer.resume_from_path",
    "trainer.default_local_dir",
    "trainer.rollout_data_dir",
    "trainer.default_hdfs_dir",
    "trainer.mlflow_tracking_uri",
    "trainer.logger",
    "optim",
)
def _schedule(config: LearnsFromFiles, context: CheckContext) -> Iterator[Fault]:
    yield from directory_faults(config.trainer, context)
    yield from resume_faults(config.trainer, check_paths=context.check_paths)
    yield from mirror_faults(config.trainer, check_paths=context.check_paths)
    yield from tracking_faults(config.trainer, check_packages=context.check_paths)
    yield from learning_faults(config, config.trainer.total_training_steps)


SFT_RULES: tuple[Rule[LearnsFromFiles], ...] = (_files, _ranks, _work_for_all, _lengths, _schedule)
