"""Checks that PPO and supervised runs share: of one section, or of one model against one mesh.

Each yields a `Fault` per thing to correct. `where` is the dotted path of the section that is looked at.
"""

from collections.abc import Iterator
from pathlib import Path

from megarl.config.faults import Fault
from megarl.config.model_files import ModelSizes, read_sizes
from megarl.data.config import DataSection, SFTDataSection
from megarl.learner.config import MegatronSection, ModelSection, OptimSection
from megarl.tracking.config import TrainerSection


def world_size(trainer: TrainerSection) -> int:
    """Return how many ranks the run has."""
    return trainer.nnodes * trainer.n_gpus_per_node


def data_parallel_size(megatron: MegatronSection, world: int) -> int:
    """Return how many replicas of a model `world` ranks hold."""
    return world // (megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size)


def launch_faults(trainer: TrainerSection, started: int | None) -> Iterator[Fault]:
    """The launcher must have started as many ranks as the configuration says."""
    if started is not None and started != world_size(trainer):
        yield Fault(
            path="trainer.n_gpus_per_node",
            message=f"the launcher started {started} processes, but trainer.nnodes={trainer.nnodes} x "
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node} is {world_size(trainer)}: make them agree",
        )


def mesh_faults(megatron: MegatronSection, trainer: TrainerSection, where: str) -> Iterator[Fault]:
    """The ranks must fall into whole model replicas."""
    tp, pp, world = (
        megatron.tensor_model_parallel_size,
        megatron.pipeline_model_parallel_size,
        world_size(trainer),
    )
    if world % (tp * pp):
        yield Fault(
            path=f"{where}.tensor_model_parallel_size",
            message=f"tensor {tp} x pipeline {pp} = {tp * pp} does not divide the world of {world} ranks "
            "(trainer.nnodes x trainer.n_gpus_per_node): choose sizes whose product does",
        )


def cut_faults(sizes: ModelSizes, model: str, tp_key: str, tp: int) -> Iterator[Fault]:
    """`tp` ranks must be able to share each layer of the model that the key `model` names."""
    if sizes.num_attention_heads % tp:
        yield Fault(
            path=tp_key,
            message=f"{tp} does not divide the {sizes.num_attention_heads} attention heads of {model}: "
            f"choose one of {_divisors(sizes.num_attention_heads)}",
        )
    heads = sizes.num_key_value_heads
    if heads % tp and tp % heads:
        yield Fault(
            path=tp_key,
            message=f"{tp} and the {heads} key-value heads of {model} do not divide one another: "
            f"choose a divisor or a multiple of {heads}",
        )
    if sizes.ffn_hidden_size % tp:
        yield Fault(
            path=tp_key,
            message=f"{tp} does not divide the feed-forward size {sizes.ffn_hidden_size} of {model}: choose a divisor",
        )


def partition_faults(model: ModelSection, key: str, megatron: MegatronSection, where: str) -> Iterator[Fault]:
    """The trainer's ranks must be able to share the model at `key`, in equal pipeline stages."""
    if not (sizes := read_sizes(model)):
        return
    yield from cut_faults(
        sizes, f"{key}.path", f"{where}.tensor_model_parallel_size", megatron.tensor_model_parallel_size
    )
    stages = megatron.pipeline_model_parallel_size
    if sizes.num_layers % stages:
        yield Fault(
            path=f"{where}.pipeline_model_parallel_size",
            message=f"{stages} does not divide the {sizes.num_layers} layers of {key}.path: "
            f"choose one of {_divisors(sizes.num_layers)}",
        )


def length_faults(sizes: ModelSizes | None, model: str, key: str, length: int) -> Iterator[Fault]:
    """A whole sequence must fit the positions the model knows."""
    if sizes and sizes.max_position_embeddings and length > sizes.max_position_embeddings:
        yield Fault(
            path=key,
            message=f"a sequence may reach {length} tokens, but {model} knows {sizes.max_position_embeddings} "
            "positions (max_position_embeddings): shorten it",
        )


def data_faults(data: DataSection | SFTDataSection) -> Iterator[Fault]:
    """Local files must be there; a URI is left to whoever opens it."""
    for key, value in (("train_files", data.train_files), ("val_files", data.val_files)):
        files = [] if value is None else [value] if isinstance(value, str) else value
        if key == "train_files" and not any(files):
            yield Fault(path="data.train_files", message="is empty: name at least one parquet file")
        for file in filter(None, files):
            yield from path_faults(file, f"data.{key}", "give parquet files that exist")
    if data.tokenizer and data.tokenizer.startswith(("/", ".")):
        yield from path_faults(data.tokenizer, "data.tokenizer", "give a directory, a .model file or a HF id")


def path_faults(path: str | None, key: str, remedy: str) -> Iterator[Fault]:
    """A local path must exist."""
    if path and "://" not in path and not Path(path).exists():
        yield Fault(path=key, message=f"no such file: {path}: {remedy}")


def schedule_faults(optim: OptimSection, where: str) -> Iterator[Fault]:
    """The warm-up must be shorter than the schedule."""
    if 0 < optim.total_training_steps < (optim.lr_warmup_steps or 0):
        yield Fault(
            path=f"{where}.lr_warmup_steps",
            message=f"{optim.lr_warmup_steps} steps of warm-up exceed {where}.total_training_steps="
            f"{optim.total_training_steps}: shorten it",
        )


def resume_faults(trainer: TrainerSection, *, check_paths: bool) -> Iterator[Fault]:
    """`resume_path` needs a path, and a path needs it."""
    if (trainer.resume_mode == "resume_path") != bool(trainer.resume_from_path):
        yield Fault(
            path="trainer.resume_from_path",
            message=f"is {trainer.resume_from_path!r} with trainer.resume_mode={trainer.resume_mode}: "
            "a path goes with resume_mode=resume_path, and only with it",
        )
    elif check_paths:
        yield from path_faults(trainer.resume_from_path, "trainer.resume_from_path", "give a checkpoint directory")


def _divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)
