"""Rules between the sections of a run that learns from files; each fault names its remedy."""

from collections.abc import Iterator

from megarl.config.checks import (
    data_faults,
    length_faults,
    offload_faults,
    partition_faults,
    variables_faults,
    world_size,
)
from megarl.config.faults import Fault
from megarl.config.keys import WORLD
from megarl.config.mesh_checks import data_parallel_size, override_faults, size_faults
from megarl.config.model_files import model_faults, read_sizes
from megarl.config.root import RewardTrainConfig, SFTConfig
from megarl.config.rule import CheckContext, Rule, rule, rule_in_context
from megarl.data.template import VARIABLES

LearnsFromFiles = SFTConfig | RewardTrainConfig

RULES: list[Rule[LearnsFromFiles]] = []


@rule_in_context(RULES, "data.train_files", "data.val_files", "data.tokenizer", "data.chat_template", "model")
def _files(config: LearnsFromFiles, context: CheckContext) -> Iterator[Fault]:
    if context.check_paths:
        yield from data_faults(config.data, config.model)
        yield from model_faults(config.model, "model.path", needs_head=isinstance(config, SFTConfig))


@rule(RULES, "data.apply_chat_template", VARIABLES)
def _template_variables(config: LearnsFromFiles) -> Iterator[Fault]:
    yield from variables_faults(config.data)


@rule(RULES, *WORLD, "megatron", "model")
def _ranks(config: LearnsFromFiles) -> Iterator[Fault]:
    yield from size_faults(config.megatron, world_size(config.trainer), "megatron")
    yield from override_faults(config.megatron, "megatron")
    yield from partition_faults(config.model, "model", config.megatron, "megatron")
    yield from offload_faults(config.megatron, "megatron")


@rule(RULES, *WORLD, "megatron", "data.train_batch_size")
def _work_for_all(config: LearnsFromFiles) -> Iterator[Fault]:
    ranks = data_parallel_size(config.megatron, world_size(config.trainer))
    if config.data.train_batch_size < ranks:
        yield Fault(
            "data.train_batch_size",
            f"{config.data.train_batch_size} pairs are fewer than the {ranks} data-parallel ranks: raise it, "
            "or raise the tensor, pipeline or context parallel size",
        )


@rule(RULES, "data.max_length", "max_token_len_per_gpu", "model")
def _lengths(config: LearnsFromFiles) -> Iterator[Fault]:
    longest, ranks = config.data.max_length, config.megatron.context_parallel_size  # share the tokens of a sequence
    whole = 2 * (longest + 1) if isinstance(config, RewardTrainConfig) else longest
    if whole > config.max_token_len_per_gpu * ranks:
        row = "pair" if isinstance(config, RewardTrainConfig) else "sequence"
        yield Fault(
            "max_token_len_per_gpu",
            f"{config.max_token_len_per_gpu} tokens cannot hold one {row} of data.max_length={longest}: "
            f"write at least {-(-whole // ranks)}",
        )
    yield from length_faults(read_sizes(config.model), "model.path", "data.max_length", longest)
