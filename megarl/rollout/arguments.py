"""The arguments of vLLM's engine, from the sections of a run."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from megarl.models.architecture import Architecture
from megarl.platform.errors import UserError
from megarl.reshard.quantised import KEY, declared_in
from megarl.rollout.config import RolloutSection
from megarl.rollout.fields import OURS, engine_faults
from megarl.rollout.kv_cache import cpu_cache_bytes, cpu_cache_bytes_per_token, cpu_memory_bytes

ENGINE_KWARGS = "actor_rollout_ref.rollout.engine_kwargs"
GRAPHS = frozenset({"compilation_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size"})
"""Arguments of vLLM that choose the graphs."""
USUALLY_GRAPHED, MOST_GRAPHED = 512, 1024  # sequences; every 16 of them take a graph, its memory and its capture


def llm_arguments(
    section: RolloutSection,
    *,
    model_dir: Path,
    max_model_len: int,
    trust_remote_code: bool,
    on_cpu: bool,
    overrides: Mapping[str, object] = MappingProxyType({}),
) -> dict[str, object]:
    """Return the arguments of `vllm.LLM`; `overrides` replace fields of config.json.

    Raises:
        UserError: `engine_kwargs` contradict them, or vLLM does not know them.
    """
    loads = section.load_format == "auto"
    ours: dict[str, object] = {
        "model": str(model_dir),
        "trust_remote_code": trust_remote_code,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # the run's stop tokens and sampling, none of the checkpoint's
        "load_format": "auto" if loads else "dummy",
        "dtype": section.dtype,
        "seed": section.seed,
        "distributed_executor_backend": "external_launcher",
        "tensor_parallel_size": section.tensor_model_parallel_size,
        "max_model_len": max_model_len,
        "max_num_seqs": section.max_num_seqs,
        "max_num_batched_tokens": section.max_num_batched_tokens,
        "gpu_memory_utilization": section.gpu_memory_utilization,
        "enforce_eager": is_eager(section, on_cpu=on_cpu),
        "enable_prefix_caching": section.enable_prefix_caching,
        "enable_sleep_mode": section.free_cache_engine and not on_cpu,
        # The trainer computes the probabilities of all tokens, after the temperature. If top_p or top_k exclude tokens,
        # processed probabilities cover only the remaining tokens, so the engine returns raw ones.
        "logprobs_mode": "processed_logprobs" if section.draws_from_all else "raw_logprobs",
        # vLLM 0.26 - 0.33 by default rounds logits to the model's type; the trainer does not (`megarl.learner.heads`).
        # It would also make quantised layers for a quantised checkpoint; a sync brings plain weights.
        "hf_overrides": {"head_dtype": "float32"} | ({} if loads else {KEY: None}) | dict(overrides),
    }
    if on_cpu and section.has_whole_experts:
        raise UserError(
            f"{ENGINE_KWARGS}: vLLM crashes with enable_expert_parallel on CPU; remove it, and every expert is cut "
            "over the ranks of a replica"
        )
    if loads and declared_in(model_dir) is not None:
        raise UserError(
            f"actor_rollout_ref.rollout.load_format auto: vLLM would load the quantised weights of {model_dir} without "
            "their scales; leave the key out, and the first sync brings the weights"
        )
    assert ours.keys() == OURS
    for fault in engine_faults(section.engine_kwargs):
        raise UserError(f"{ENGINE_KWARGS}: {fault}")
    written = {name: value for name, value in section.engine_kwargs.items() if value is not None}
    return ours | _graph_sizes(section, on_cpu=on_cpu) | _kernels(section, on_cpu=on_cpu) | written


def engine_settings(architecture: Architecture) -> dict[str, object]:
    """Return settings that vLLM reads by another name than transformers, as fields of config.json."""
    scaling = architecture.query_scaling
    if scaling is None:
        return {}
    return {"llama_4_scaling": {"beta": scaling.beta, "original_max_position_embeddings": scaling.length}}


def is_eager(section: RolloutSection, *, on_cpu: bool) -> bool:
    """Return whether the engine runs without CUDA graphs and compilation."""
    return on_cpu if section.enforce_eager is None else section.enforce_eager


def _graph_sizes(section: RolloutSection, *, on_cpu: bool) -> dict[str, int]:
    """Return the argument that captures graphs for as many sequences as may decode together, up to `MOST_GRAPHED`.

    By default vLLM 0.26 - 0.33 captures up to `USUALLY_GRAPHED`, and runs a larger step without a graph.
    """
    is_usual = on_cpu or is_eager(section, on_cpu=on_cpu) or section.max_num_seqs <= USUALLY_GRAPHED
    if is_usual or GRAPHS & section.engine_kwargs.keys():
        return {}
    return {"max_cudagraph_capture_size": min(section.max_num_seqs, MOST_GRAPHED)}


def _kernels(section: RolloutSection, *, on_cpu: bool) -> dict[str, object]:
    """Return the arguments that start the engine without what FlashInfer would download or compile on every rank.

    A node may have neither a network nor a compiler. The fusion of all-reduce and norm also has no fixed order of sums.
    """
    found: dict[str, object] = {}
    if "kernel_config" not in section.engine_kwargs:
        found["enable_flashinfer_autotune"] = False
    if not on_cpu and section.tensor_model_parallel_size > 1:
        found["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
    if not on_cpu:  # for linear attention; other models leave it unread
        found["additional_config"] = {"gdn_prefill_backend": "triton"}
    return found


def cpu_fault(dtype: str, architecture: Architecture) -> str:
    """Return why vLLM's CPU engine cannot compute a model in a type; empty if it can."""
    if architecture.linear is None or dtype == "bfloat16":
        return ""
    return f"is {dtype}, and on the CPU vLLM computes linear attention in bfloat16 alone: write bfloat16"


def cpu_arguments(
    section: RolloutSection, architecture: Architecture, *, num_sequences: int, max_model_len: int
) -> dict[str, object]:
    """Return the argument of `vllm.LLM` for the CPU alone: the bytes of the KV cache.

    Raises:
        UserError: the CPU engine cannot compute the model in this type.
    """
    fault = cpu_fault(section.dtype, architecture)
    if fault:
        raise UserError(f"actor_rollout_ref.rollout.dtype {fault}")
    bytes_per_token = cpu_cache_bytes_per_token(section, architecture)
    num_bytes = cpu_cache_bytes(
        section,
        bytes_per_token,
        num_sequences=num_sequences,
        max_model_len=max_model_len,
        memory_bytes=cpu_memory_bytes(section, architecture),
    )
    return {"kv_cache_memory_bytes": num_bytes}
