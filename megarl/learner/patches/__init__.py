"""Every replacement of code of Megatron-Core, and of torch under it, by subject.

Importing this package imports neither Megatron-Core nor vLLM, so that its table can be read without them.
"""

from megarl.learner.fused import has_transformer_engine
from megarl.learner.patches import cpu, experts, gloo, latent, optimizer, pipeline, reading, rotary, writing
from megarl.platform.device import on_cuda

__all__ = ["apply_patches", "cpu", "experts", "gloo", "latent", "optimizer", "pipeline", "reading", "rotary", "writing"]


def apply_patches() -> None:
    """Apply the replacements that last as long as the process, as far as this machine needs them. Idempotent."""
    if not on_cuda():
        cpu.keep_random_state()
        experts.hand_out_counts_on_the_cpu()
        gloo.exchange_unequal_parts()
        gloo.keep_buckets_of_one_rank()
    if not has_transformer_engine():
        latent.accept_whole_down_projections()
        optimizer.clip_gradients_at_once()
    experts.route_without_transformer_engine()
    latent.leave_uncompressed_queries_alone()
    optimizer.load_state_of_torch_optimizers()
    rotary.rotate_packed_rows_at_once()
    writing.write_in_this_process()
