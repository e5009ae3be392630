"""Checks that several roots share: of one section, or of one model on one mesh.

Each check yields `Fault`s. `where` is the dotted path of the checked section.
"""

from collections.abc import Iterator
from pathlib import Path

from megarl.config.faults import Fault
from megarl.config.keys import POLICY, ROLLOUT
from megarl.config.mesh_checks import divisors, override_faults, stage_faults
from megarl.config.model_files import read_sizes, tokenizer_faults
from megarl.data.config import TextSection
from megarl.data.remote_tokenizer import is_without_tokenizer
from megarl.data.template import VARIABLES, check_template, variable_faults
from megarl.learner.config import MegatronSection
from megarl.models.architecture import VOCAB_MULTIPLE, Architecture, padded_vocabulary
from megarl.models.config import CheckpointSection
from megarl.models.experts import Experts
from megarl.platform.errors import UserError
from megarl.platform.files import similar
from megarl.platform.uri import why_unopened
from megarl.rewards.built_in import RULES
from megarl.rewards.config import CustomRewardSection, RulesSection
from megarl.rewards.rules import CUSTOM, JUDGE
from megarl.rewards.signature import DATA_SOURCE
from megarl.rollout.arguments import cpu_fault
from megarl.rollout.config import RolloutSection
from megarl.section import listed
from megarl.tracking.config import TrainerSection


def world_size(trainer: TrainerSection) -> int:
    """Return how many ranks the run has."""
    return trainer.nnodes * trainer.n_gpus_per_node


def cut_faults(sizes: Architecture, model: str, tp_key: str, tp: int) -> Iterator[Fault]:
    """Check that `tp` ranks can share each layer of the model at the key `model`."""
    if sizes.num_attention_heads % tp:
        yield Fault(
            tp_key,
            f"{tp} does not divide the {sizes.num_attention_heads} attention heads of {model}: "
            f"choose one of {divisors(sizes.num_attention_heads)}",
        )
    heads = sizes.num_key_value_heads
    if heads % tp and tp % heads:
        yield Fault(
            tp_key,
            f"{tp} and the {heads} key-value heads of {model} do not divide one another: "
            f"choose a divisor or a multiple of {heads}",
        )
    if sizes.linear and sizes.linear.num_key_heads % tp:
        heads = sizes.linear.num_key_heads
        yield Fault(
            tp_key,
            f"{tp} does not divide the {heads} key heads of {model}'s linear attention: choose one of "
            f"{divisors(heads)}",
        )
    shared = sizes.experts.shared_ffn_hidden_size if sizes.experts else 0
    for part, size in (
        ("feed-forward", sizes.ffn_hidden_size if not sizes.kind(0).is_sparse else 0),
        ("shared experts'", shared),
    ):
        if size % tp:
            yield Fault(tp_key, f"{tp} does not divide the {part} size {size} of {model}: choose a divisor")


def expert_faults(experts: Experts | None, model: str, megatron: MegatronSection, where: str) -> Iterator[Fault]:
    """Check that the trainer's ranks can share the experts of the model at the key `model`."""
    ep = megatron.expert_model_parallel_size
    etp = megatron.expert_tensor_parallel_size
    if experts is None:
        if ep > 1:
            yield Fault(
                f"{where}.expert_model_parallel_size",
                f"{model} has no experts to divide among {ep} ranks: leave it out",
            )
        return
    if experts.num_experts % ep:
        yield Fault(
            f"{where}.expert_model_parallel_size",
            f"{ep} does not divide the {experts.num_experts} experts of {model}: "
            f"choose one of {divisors(experts.num_experts)}",
        )
    yield from _expert_cut_faults(
        experts,
        model,
        f"{where}.expert_tensor_parallel_size",
        etp or megatron.tensor_model_parallel_size,
        "choose a divisor (1 leaves every expert whole)",
    )
    if megatron.tensor_model_parallel_size > 1 and not megatron.sequence_parallel:
        yield Fault(
            f"{where}.sequence_parallel",
            f"is false, and tensor-parallel ranks would send the experts of {model} the same tokens: "
            "set it true, or tensor_model_parallel_size to 1",
        )


def replay_faults(model: CheckpointSection, key: str, value: str) -> Iterator[Fault]:
    """Check that the policy has experts if their choice is replayed, and that the engine can tell its choice."""
    sizes = read_sizes(model)
    if value != "none" and sizes and not sizes.experts:
        yield Fault(key, f"{POLICY}.path has no experts to choose: leave it out")
    is_of_engine = value not in ("none", "recompute")
    if is_of_engine and sizes and len({kind.attention for kind in sizes.layer_kinds}) > 1:
        yield Fault(
            key,
            f"layers of {POLICY}.path attend in several ways, and vLLM caches each way with slots of their own, which "
            "have no routes: leave it out; actor_rollout_ref.actor.routing_replay=recompute is possible",
        )


def cpu_engine_faults(model: CheckpointSection, dtype: str) -> Iterator[Fault]:
    """Check that vLLM's CPU engine can compute the policy."""
    sizes = read_sizes(model)
    fault = cpu_fault(dtype, sizes) if sizes else ""
    if fault:
        yield Fault(f"{ROLLOUT}.dtype", fault)


def engine_cut_faults(model: CheckpointSection, rollout: RolloutSection, *, num_ranks: int) -> Iterator[Fault]:
    """Check that the engine's ranks can share the policy; `num_ranks` are those of the run."""
    sizes = read_sizes(model)
    if not sizes:
        return
    name = f"{POLICY}.path"
    key = f"{ROLLOUT}.tensor_model_parallel_size"
    tp = rollout.tensor_model_parallel_size
    yield from cut_faults(sizes, name, key, tp)
    rows = padded_vocabulary(sizes.vocab_size)
    if rows % tp:
        yield Fault(
            key,
            f"{tp} does not divide the {rows} rows of the engine's vocabulary ({sizes.vocab_size} of {name}, rounded "
            f"up to a multiple of {VOCAB_MULTIPLE}): choose a power of two",
        )
    if sizes.experts and not rollout.has_whole_experts:
        remedy = "choose a divisor, or keep experts whole with engine_kwargs.enable_expert_parallel=true"
        yield from _expert_cut_faults(sizes.experts, name, key, tp, remedy)
    if sizes.experts and sizes.expert_names.gate_up:
        yield from _stacked_expert_faults(sizes, sizes.experts, rollout, num_ranks)


def _stacked_expert_faults(
    sizes: Architecture, experts: Experts, rollout: RolloutSection, num_ranks: int
) -> Iterator[Fault]:
    """Check what vLLM's class of gpt-oss asserts, or computes wrongly."""
    key = f"{ROLLOUT}.tensor_model_parallel_size"
    tp = rollout.tensor_model_parallel_size
    heads = sizes.num_key_value_heads
    if tp > heads:
        yield Fault(
            key, f"{tp} ranks cannot share {heads} key-value heads in vLLM's class of this family: at most {heads}"
        )
    if rollout.has_whole_experts and experts.num_experts % tp:
        yield Fault(key, f"{tp} does not divide the {experts.num_experts} experts of {POLICY}.path: choose a divisor")
    if experts.ffn_hidden_size % num_ranks:
        yield Fault(
            "trainer.n_gpus_per_node",
            f"the run's {num_ranks} ranks do not divide the size {experts.ffn_hidden_size} of an expert, as vLLM's "
            "class of this family demands: choose a divisor",
        )


def _expert_cut_faults(experts: Experts, model: str, key: str, parts: int, remedy: str) -> Iterator[Fault]:
    if experts.ffn_hidden_size % parts:
        yield Fault(
            key, f"{parts} does not divide the size {experts.ffn_hidden_size} of an expert of {model}: {remedy}"
        )


def partition_faults(model: CheckpointSection, key: str, megatron: MegatronSection, where: str) -> Iterator[Fault]:
    """Check that the trainer's ranks can share the model at `key`."""
    sizes = read_sizes(model)
    if not sizes:
        return
    tp = megatron.tensor_model_parallel_size
    cp = megatron.context_parallel_size
    yield from cut_faults(sizes, f"{key}.path", f"{where}.tensor_model_parallel_size", tp)
    if sizes.traits.wide_qk_norm and tp > sizes.num_key_value_heads:
        yield Fault(
            f"{where}.tensor_model_parallel_size",
            f"{tp} ranks cannot share the norm over all "
            f"{sizes.num_key_value_heads} key-value heads of {key}.path: choose at most {sizes.num_key_value_heads}",
        )
    if sizes.linear and sizes.linear.num_key_heads % tp == 0 and sizes.linear.num_key_heads // tp % cp:
        heads = sizes.linear.num_key_heads // tp
        yield Fault(
            f"{where}.context_parallel_size",
            f"{cp} does not divide the {heads} key heads that a tensor-parallel rank has of the linear attention of "
            f"{key}.path: choose one of {divisors(heads)}",
        )
    yield from expert_faults(sizes.experts, f"{key}.path", megatron, where)
    expert_ranks = megatron.expert_tensor_parallel_size or tp
    if sizes.experts and sizes.traits.linear_bias and expert_ranks > 1:
        yield Fault(
            f"{where}.expert_tensor_parallel_size",
            f"{expert_ranks} ranks cannot share the biases of an expert of {key}.path: write 1",
        )
    if not any(override_faults(megatron, where)):
        yield from stage_faults(sizes.num_layers, f"{key}.path", megatron, where)


def offload_faults(megatron: MegatronSection, where: str) -> Iterator[Fault]:
    """Check that a model that learns leaves its device only as the one buffer of the distributed optimizer."""
    if megatron.param_offload and not megatron.use_distributed_optimizer:
        yield Fault(
            f"{where}.param_offload",
            "the weights of a model that learns leave the device as one buffer, which only the distributed "
            "optimizer has: write use_distributed_optimizer=true, or param_offload=false",
        )


def length_faults(sizes: Architecture | None, model: str, key: str, length: int) -> Iterator[Fault]:
    """Check that a complete sequence fits the positions of the model."""
    if sizes and length > sizes.max_position_embeddings:
        yield Fault(
            key,
            f"a sequence may reach {length} tokens, but {model} knows {sizes.max_position_embeddings} "
            "positions (max_position_embeddings): shorten it",
        )


def data_faults(data: TextSection, model: CheckpointSection) -> Iterator[Fault]:
    """Check that local files exist, that URIs are of a kind that is opened, the tokenizer and the chat template."""
    for key, value in (("train_files", data.train_files), ("val_files", data.val_files)):
        files = listed(value)
        if key == "train_files" and not any(files):
            yield Fault("data.train_files", "is empty: name at least one data file")
        for file in filter(None, files):
            yield from file_faults(file, f"data.{key}")
            if Path(file).is_dir():
                yield Fault(
                    f"data.{key}",
                    f"{file} is a directory: name the files in it, or convert a saved data set with "
                    f"`megarl prepare own {file} --out DIR`",
                )
    if data.chat_template is not None:
        try:
            check_template(data.chat_template)
        except UserError as error:
            yield Fault("data.chat_template", str(error))
    place = data.tokenizer
    remedy = "give a directory, a .model file, a URI or a HF id"
    yield from tokenizer_faults(place, "data.tokenizer", remedy)
    if place is None and model.path and is_without_tokenizer(Path(model.path)):
        yield Fault("data.tokenizer", f"is not set, and {model.path} has no tokenizer: {remedy}")


def variables_faults(data: TextSection) -> Iterator[Fault]:
    """Check the variables of the chat template, and that one may be applied."""
    for fault in variable_faults(data.apply_chat_template_kwargs):
        yield Fault(VARIABLES, fault)
    if data.apply_chat_template_kwargs and data.apply_chat_template is False:
        yield Fault(
            VARIABLES, "no chat template is applied with data.apply_chat_template=false: remove one of the keys"
        )


def reward_faults(section: RulesSection, custom: CustomRewardSection) -> Iterator[Fault]:
    """Check that the weights name existing rules, and that the user's own rule and the judge have a weight."""
    key = "reward_model.weights"
    weights = section.weights
    own = {
        CUSTOM: (custom.path, "custom_reward_function.path"),
        JUDGE: (section.judge.url, "reward_model.judge.url"),
    }
    if weights is None:
        if custom.path and section.judge.url:
            yield Fault(
                key,
                f"lets {custom.path} score alone, so that the judge at {section.judge.url} is never asked: "
                f"weigh both, as in {{{CUSTOM}: 1.0, {JUDGE}: 0.5}}, or remove one",
            )
        return
    if not weights:
        yield Fault(key, "is empty, so there is no score: name rules, or leave the key out")
    rules = [DATA_SOURCE, CUSTOM, JUDGE, *sorted(RULES)]
    for name in weights:
        if name not in rules:
            yield Fault(key, f"there is no rule {name!r}: choose from {', '.join(rules)}")
    for name, (place, its_key) in own.items():
        if name in weights and place is None:
            yield Fault(key, f"{name} is what {its_key} names: set it")
        if name not in weights and place is not None:
            yield Fault(
                key, f"leaves out {name}, so that {place} is never called: give it a weight, or remove {its_key}"
            )


def file_faults(
    file: str, key: str, remedy: str = "give data files that exist (`megarl prepare` makes some)"
) -> Iterator[Fault]:
    """Check that a local file exists, or that a URI is of a kind that is opened."""
    yield from uri_faults(file, key) if "://" in file else path_faults(file, key, remedy)


def uri_faults(name: str, key: str) -> Iterator[Fault]:
    """Check that pyarrow or fsspec opens the URI with the installed packages."""
    why = why_unopened(name)
    if why:
        yield Fault(key, f"{why}: give a local path, or s3://, gs://, abfs://, hdfs://, https:// or another of theirs")


def path_faults(path: str | None, key: str, remedy: str) -> Iterator[Fault]:
    """Check that a local path exists."""
    if path and not Path(path).exists():
        yield Fault(key, f"no such file: {path}{similar(Path(path)) or f': {remedy}'}")
