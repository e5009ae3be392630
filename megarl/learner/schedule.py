"""Runs of micro-batches through Megatron's schedules: plain, pipelined, or interleaved over chunks of layers."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megarl.platform import progress
from megarl.learner.packed import Packed
from megarl.learner.parallel import Mesh
from megarl.learner.patches.cpu import megatron_platform
from megarl.platform.determinism import deterministic_kernels

Head = Callable[[Tensor], Any]
MicroBatch = tuple[Packed, Head]  # a micro-batch, and the head that reads its final hidden states


def run_schedule(
    models: Sequence[Any], micro_batches: Sequence[MicroBatch], row_length: int, *, forward_only: bool
) -> list[Any]:
    """Run micro-batches through the model whose chunks on this rank are `models`, and backwards unless `forward_only`.

    Args:
        models: the chunks.
        micro_batches: in the order of the pass; for a backward pass a head returns (loss, anything, result).
        row_length: the most tokens of a micro-batch.
        forward_only: compute no gradients.

    Returns:
        The results of the heads in this order, on the last pipeline stage; nothing on the other stages.
    """

    def forward_step(remaining: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
        row, head = next(remaining)
        filling = _filling(row, getattr(model, "module", model))
        hidden = model(row.tokens, row.positions, None, packed_seq_params=row.sequences, padding_mask=filling)

        def read(hidden: Tensor, non_loss_data: bool = False) -> Any:
            return head(hidden)

        progress.advance()
        return hidden, read

    progress.announce(len(micro_batches) * len(models), "micro-batches")
    with megatron_platform(), deterministic_kernels():
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(micro_batches) for _ in models],  # every chunk reads the micro-batches at its own time
            model=list(models),
            num_microbatches=len(micro_batches),
            seq_length=row_length,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
    return results


def _filling(row: Packed, module: Any) -> Tensor | None:
    """Return the mask of padding tokens among the tokens of this chunk's layers; None for a model without routers.

    Megatron splits the mask for sequence parallelism only on the stage that embeds the tokens.
    """
    config = module.config
    if row.filling is None or config.num_moe_experts is None:
        return None
    if module.pre_process or not config.sequence_parallel:
        return row.filling
    parts = row.filling.chunk(config.tensor_model_parallel_size, dim=1)
    return parts[parallel_state.get_tensor_model_parallel_rank()]


def num_micro_batches(fewest: int, mesh: Mesh) -> int:
    """Round `fewest` micro-batches up to what the schedule takes.

    The interleaved schedule takes complete rounds; a round is one micro-batch for each stage.
    """
    round_size = mesh.pp_size if mesh.vpp_size > 1 else 1
    return -(-fewest // round_size) * round_size
