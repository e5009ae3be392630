"""The effect of vLLM's arguments on a run: accepted arguments, and refused ones with the reason.

An argument that is in no table is refused: nobody has shown that samples, weights and ranks stay as megarl knows them.
"""

from collections.abc import Mapping
from typing import Any

UNKNOWN = "is unknown to megarl, which cannot tell whether samples, weights and ranks stay as it knows them"

REFUSED: Mapping[str, tuple[str, ...]] = {
    "changes what is drawn, and the trainer's probabilities do not know that": (
        *("speculative_config", "spec_method", "spec_model", "spec_tokens", "per_request_spec_decode_metrics"),
        *("logits_processors", "override_generation_config", "structured_outputs_config", "reasoning_config"),
        *("reasoning_parser", "reasoning_parser_plugin", "diffusion_config", "watermark", "watermark_config"),
        *("enable_batch_sharded_sampling", "kv_cache_dtype", "kv_sharing_fast_prefill", "enable_prompt_embeds"),
    ),
    "changes the engine's weights, or their places, which a sync has planned": (
        *("quantization", "quantization_config", "allow_deprecated_quantization", "enable_lora", "default_mm_loras"),
        *("model_impl", "model_class_overrides", "model_weights", "engram_config"),
        *("weight_transfer_config", "enable_eplb", "eplb_config", "expert_placement_strategy"),
        *("enable_ep_weight_filter", "worker_cls", "sleep_mode_backend"),
    ),
    "moves the engine's weights to the host, and a sync writes them on the device": (
        *("cpu_offload_gb", "offload_group_size"),
    ),
    "chooses another description of the model than the one that megarl reads": ("hf_config_path", "config_format"),
    "runs code in the engine that may change samples, weights and ranks": ("worker_extension_cls",),
    "changes the ranks of the engine, which are those of the run": (
        *("pipeline_parallel_size", "data_parallel_size", "data_parallel_size_local", "data_parallel_rank"),
        *("data_parallel_start_rank", "data_parallel_address", "data_parallel_rpc_port", "data_parallel_backend"),
        *("data_parallel_hybrid_lb", "data_parallel_external_lb", "data_parallel_multi_port_external_lb"),
        *("prefill_context_parallel_size", "decode_context_parallel_size", "enable_elastic_ep"),
        *("elastic_ep_max_dp_size", "enable_fault_tolerance", "fault_tolerance_config", "nnodes", "node_rank"),
        *("master_addr", "master_port", "device_ids", "numa_bind", "numa_bind_nodes", "numa_bind_cpus"),
        *("enable_dbo", "ubatch_size", "enable_hc_sp"),
    ),
    "may bring back cached keys of earlier weights": (
        *("kv_transfer_config", "kv_offloading_size", "kv_offloading_backend", "ec_transfer_config"),  # D263
        "ec_manager_config",
    ),
    "changes the order of requests and the time of tokens": (
        *(
            "async_scheduling",
            "scheduler_cls",
            "stream_interval",
            "max_num_active_seqs",
            "max_num_queued_reqs",
            "max_num_queued_tokens",
        ),
        *("enable_trace_replay", "prefill_schedule_interval"),
    ),
    "makes the engine return what megarl does not read": (
        *("enable_return_routed_experts", "return_sampling_mask", "aux_output_config", "io_processor_plugin"),
        "tokens_only",
    ),
    "makes the engine something other than a generator of text": ("runner", "convert", "pooler_config"),
}
"""Reason -> arguments that are refused, unless their value means none."""

_OLDER_SCHEDULING = ("max_num_partial_prefills", "max_long_partial_prefills")
OLDER = frozenset(_OLDER_SCHEDULING)
"""Judged arguments that the oldest tested release has and the newest lacks."""

ACCEPTED = frozenset(
    {
        # kernels and graphs, which round differently and compute the same
        *("attention_backend", "attention_config", "moe_backend", "linear_backend", "kernel_config", "all2all_backend"),
        *("compilation_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size", "optimization_level"),
        *(
            "performance_mode",
            "ir_op_priority",
            "jit_monitor_mode",
            "jit_monitor_verbose",
            "enable_flashinfer_autotune",
        ),
        *("disable_cascade_attn", "disable_custom_all_reduce", "use_fp64_gumbel", "sparse_indexer_topk_backend"),
        "monokernel",
        *("mamba_backend", "mamba_config", "mamba_ssu_algorithm", "gdn_prefill_backend", "kda_decode_backend"),
        *("kda_prefill_backend", "dcp_comm_backend", "dcp_q_replicate", "dbo_decode_token_threshold"),
        *("dbo_prefill_token_threshold", "dp_sync_interval", "disable_nccl_for_dp_synchronization"),
        # experts in parallel, which the plan of a sync knows
        "enable_expert_parallel",
        # memory and the cache
        *("block_size", "num_gpu_blocks_override", "kv_cache_memory_bytes", "disable_hybrid_kv_cache_manager"),
        *("prefix_caching_hash_algo", "prefix_match_unit", "prefix_cache_retention_interval"),
        *("cpu_offload_params", "offload_backend", "offload_num_in_group"),
        *("offload_prefetch_step", "offload_params", "enable_cumem_allocator", "enable_shm_tensor_arena"),
        *("sleep_mode_offload_cudagraph", "sleep_preserve_parameter_names", "kv_cache_dtype_skip_layers"),
        *("dcp_kv_cache_interleave_size", "cp_kv_cache_interleave_size", "mamba_cache_dtype", "mamba_ssm_cache_dtype"),
        *("mamba_block_size", "mamba_cache_mode", "mamba_cache_philox_rounds", "replayssm_buffer_len"),
        *("enable_mamba_cache_stochastic_rounding", "enable_mamba_shared_prefix_checkpoint", "use_replayssm"),
        *("swa_bounded_replay", "enable_nccl_comm_suspend"),
        # the order of work in an engine step
        *("enable_chunked_prefill", "scheduling_policy", *_OLDER_SCHEDULING),
        *("long_prefill_token_threshold", "long_prefill_token_threshold_adaptive"),
        *("max_num_scheduled_tokens", "scheduler_reserve_full_isl", "disable_sliding_window"),
        # reading of files; the weights come by a sync
        *("tokenizer", "tokenizer_mode", "tokenizer_revision", "revision", "code_revision"),
        *("hf_token", "download_dir", "ignore_patterns", "use_tqdm_on_load", "model_loader_extra_config"),
        *("safetensors_load_strategy", "safetensors_prefetch_num_threads", "safetensors_prefetch_block_size"),
        *("pt_load_map_location", "max_parallel_loading_workers", "served_model_name", "renderer_num_workers"),
        # logs, traces and limits of time
        *("disable_log_stats", "aggregate_engine_logging", "log_config_file", "log_level", "logging_config"),
        *("enable_logging_iteration_details", "show_hidden_metrics_for_version", "otlp_traces_endpoint"),
        *("collect_detailed_traces", "kv_cache_metrics", "kv_cache_metrics_sample", "cudagraph_metrics"),
        *("enable_mfu_metrics", "enable_layerwise_nvtx_tracing", "profiler_config", "kv_events_config"),
        "watchdog_config",
        *("custom_histogram_buckets", "ray_workers_use_nsight", "shutdown_timeout", "distributed_timeout_seconds"),
        *("cpu_distributed_timeout_seconds", "fail_on_environ_validation", "max_logprobs", "additional_config"),
        # of adapters, which need enable_lora
        *("enable_mixed_moe_lora_format", "enable_moe_shared_loras", "enable_tower_connector_lora", "lora_dtype"),
        *("fully_sharded_loras", "lora_target_modules", "max_cpu_loras", "max_lora_rank", "max_loras"),
        *("specialize_active_lora", "max_lora_cls_labels"),
        # of images and sound, which a text model does not read
        *("language_model_only", "limit_mm_per_prompt", "enable_mm_embeds", "interleave_mm_strings", "media_io_kwargs"),
        *("mm_processor_kwargs", "mm_processor_cache_gb", "mm_processor_cache_type", "mm_processor_device"),
        *("mm_shm_cache_max_object_size_mb", "mm_encoder_only", "mm_encoder_tp_mode", "mm_encoder_attn_backend"),
        *("mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path", "mm_encoder_fp8_scale_save_margin"),
        *("mm_encoder_fp8_scale_save_path", "mm_hasher_algorithm", "mm_ipc_gpu_memory_gb", "mm_tensor_ipc"),
        *("mm_device_do_normalize", "skip_mm_profiling", "video_pruning_method", "video_pruning_rate"),
        *("disable_chunked_mm_input", "enable_mm_processor_stats", "allowed_local_media_path"),
        "allowed_media_domains",
    }
)
"""Arguments that leave samples, weights and ranks as megarl knows them."""

_NEUTRAL: Mapping[str, Any] = {
    "config_format": "auto",
    "convert": "auto",
    "cpu_offload_gb": 0,
    "expert_placement_strategy": "linear",
    "kv_cache_dtype": "auto",
    "model_impl": "auto",
    "offload_group_size": 0,
    "runner": "generate",
    "sleep_mode_backend": "cumem",
    "worker_cls": "auto",
}
"""Values other than none, false for a switch, and one of anything that mean what vLLM does without the argument."""


def reason_against(name: str) -> str | None:
    """Return why an argument of vLLM is refused; None if it is accepted."""
    if name in ACCEPTED:
        return None
    return next((reason for reason, names in REFUSED.items() if name in names), UNKNOWN)


def is_neutral(name: str, value: object, *, is_switch: bool) -> bool:
    """Return whether a value of an argument that megarl knows means what vLLM does without it."""
    if isinstance(value, bool):
        return is_switch and not value and reason_against(name) != UNKNOWN
    is_one = value == 1 and name.endswith(("parallel_size", "nnodes", "_interval"))
    return value is None or is_one or (name in _NEUTRAL and value == _NEUTRAL[name])
