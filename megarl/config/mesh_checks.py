"""Checks of the mesh of one model: the ranks must form complete replicas, and the layers complete stages.

Each check yields `Fault`s. `where` is the dotted path of the checked `megatron` section.
"""

from collections.abc import Iterator

from megarl.config.faults import Fault
from megarl.learner.config import MegatronSection
from megarl.learner.fields import transformer_faults

SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
FIRST = "num_layers_in_first_pipeline_stage"
LAST = "num_layers_in_last_pipeline_stage"
OTHER_LAYOUTS = (
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def data_parallel_size(megatron: MegatronSection, world: int) -> int:
    """Return how many replicas of a model `world` ranks hold."""
    ranks = megatron.tensor_model_parallel_size * megatron.context_parallel_size
    return world // (ranks * megatron.pipeline_model_parallel_size)


def size_faults(megatron: MegatronSection, world: int, where: str) -> Iterator[Fault]:
    """Check that the ranks form complete replicas, of the model and of its experts."""
    tp = megatron.tensor_model_parallel_size
    pp = megatron.pipeline_model_parallel_size
    cp = megatron.context_parallel_size
    remedy = f"does not divide the world of {world} ranks (trainer.nnodes x trainer.n_gpus_per_node): choose sizes"
    if world % (tp * pp * cp):
        context = f" x context {cp}" if cp > 1 else ""
        yield Fault(
            f"{where}.tensor_model_parallel_size",
            f"tensor {tp} x pipeline {pp}{context} = {tp * pp * cp} {remedy} whose product does",
        )
    ep = megatron.expert_model_parallel_size
    etp = megatron.expert_tensor_parallel_size
    if (ep > 1 or etp is not None) and world % ((etp or tp) * ep * pp):
        yield Fault(
            f"{where}.expert_model_parallel_size",
            f"expert tensor {etp or tp} x expert {ep} x pipeline {pp} = {(etp or tp) * ep * pp} {remedy} whose "
            "product does (expert_tensor_parallel_size is tensor_model_parallel_size unless set)",
        )
    if megatron.virtual_pipeline_model_parallel_size and pp == 1:
        yield Fault(
            f"{where}.virtual_pipeline_model_parallel_size",
            "chunks take turns only if pipeline_model_parallel_size > 1: raise that key, or leave this key out",
        )


def override_faults(megatron: MegatronSection, where: str) -> Iterator[Fault]:
    """Check that overrides hold no sizes, which have keys of their own, and no layout that megarl does not read."""
    override = megatron.override_transformer_config
    path = f"{where}.override_transformer_config"
    for key in SIZES:
        if key in override:
            yield Fault(path, f"{key} does not belong here: write {where}.{key}")
    for key in OTHER_LAYOUTS:
        if override.get(key):
            yield Fault(path, f"{key} is not understood: lay uneven stages out with {FIRST} and {LAST}")
    unproven = {key: value for key, value in override.items() if key not in (*SIZES, *OTHER_LAYOUTS, FIRST, LAST)}
    if unproven:
        for message in transformer_faults(unproven):
            yield Fault(path, message)
    for key in (FIRST, LAST):
        value = override.get(key)
        if value is not None and (type(value) is not int or value < 1):
            yield Fault(path, f"{key}={value!r} is not a number of layers: write 1 or more")
        elif value is not None and megatron.pipeline_model_parallel_size == 1:
            yield Fault(path, f"{key} has no meaning with pipeline_model_parallel_size=1: leave it out")


def stage_faults(num_layers: int, model: str, megatron: MegatronSection, where: str) -> Iterator[Fault]:
    """Check that the layers of the model at the key `model` form complete stages and chunks.

    Expects a section without `override_faults`.
    """
    stages = megatron.pipeline_model_parallel_size
    override = megatron.override_transformer_config
    given = [override[key] for key in (FIRST, LAST) if override.get(key) is not None]
    rest = num_layers - sum(given)
    between = stages - len(given)
    is_even = rest == 0 if between == 0 else rest >= between and rest % between == 0
    if given and not is_even:
        yield Fault(
            f"{where}.override_transformer_config",
            f"first and last stage leave {rest} of the {num_layers} layers of {model} for {between} stages: "
            f"choose {FIRST} and {LAST} so that these get equally many, and at least one",
        )
        return
    if not given and num_layers % stages:
        yield Fault(
            f"{where}.pipeline_model_parallel_size",
            f"{stages} does not divide the {num_layers} layers of {model}: choose one of "
            f"{divisors(num_layers)}, or set override_transformer_config.{FIRST} or {LAST}",
        )
        return
    chunks = megatron.virtual_pipeline_model_parallel_size or 1
    sizes = given + [rest // between] * (between > 0)
    uneven = [size for size in sizes if size % chunks]
    if uneven:
        yield Fault(
            f"{where}.virtual_pipeline_model_parallel_size",
            f"{chunks} does not divide the {uneven[0]} layers that a stage has of {model}: choose a divisor",
        )


def divisors(number: int) -> str:
    """List the divisors of `number`."""
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)
