"""Runs of micro-batches through Megatron's schedules: plain, pipelined, or interleaved over chunks of layers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.platform import progress
from megarl.batch import Rollouts
from megarl.learner.experts import choices_of, replayed
from megarl.learner.lora import dropping
from megarl.learner.outputs import LogitFactors
from megarl.learner.packed import Packed
from megarl.learner.parallel import Mesh
from megarl.learner.patches.cpu import megatron_platform
from megarl.learner.patches.pipeline import known_shapes
from megarl.platform.determinism import deterministic_kernels


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Samples that pass through the model together."""

    row: Packed
    other: LogitFactors | None = None  # the policy that an exact divergence is taken from, on these samples
    term: int = 0  # the number of the loss term that the samples belong to
    samples: Rollouts | None = None  # what a loss needs of the samples, on the device
    choices: list[Tensor] | None = None  # gets the choice of each chunk's routers, [N, L, k]; None: nobody asks for it


Head = Callable[[Tensor, MicroBatch], object]
"""Takes the final hidden states of a micro-batch. For a backward pass it returns (loss, anything, result)."""


def run_schedule(
    models: Sequence[GPTModel | DistributedDataParallel],
    micro_batches: Sequence[MicroBatch],
    head: Head,
    row_length: int,
    *,
    forward_only: bool,
) -> list[Any]:
    """Run micro-batches through the model whose chunks on this rank are `models`, and backwards unless `forward_only`.

    Args:
        models: the chunks.
        micro_batches: in the order of the pass.
        head: reads the final hidden states of each micro-batch.
        row_length: the most tokens of a micro-batch.
        forward_only: compute no gradients.

    Returns:
        The results of the head in this order, on the last pipeline stage; nothing on the other stages.
    """

    def forward_step(
        remaining: Iterator[MicroBatch], model: GPTModel | DistributedDataParallel
    ) -> tuple[Tensor, Callable[..., object]]:
        micro_batch = next(remaining)
        row = micro_batch.row
        chunk = getattr(model, "module", model)
        padding_mask = _padding_mask(row, chunk)
        with replayed(chunk, row.routes), dropping(chunk, row.keys):
            hidden = model(row.tokens, row.positions, None, packed_seq_params=row.sequences, padding_mask=padding_mask)

        if micro_batch.choices is not None:
            micro_batch.choices.append(choices_of(chunk, row.tokens.shape[1], chunk.config.moe_router_topk))

        def read(hidden: Tensor, non_loss_data: bool = False) -> object:
            return head(hidden, micro_batch)

        progress.advance()
        return hidden, read

    progress.announce(len(micro_batches) * len(models), "micro-batches")
    config = models[0].config
    stage = parallel_state.get_pipeline_model_parallel_rank()
    arriving = partial(shapes_of_arrivals, [micro_batch.row for micro_batch in micro_batches], config)
    activations = arriving(leads=stage == 0)
    gradients = [] if forward_only else arriving(leads=stage == config.pipeline_model_parallel_size - 1)
    with megatron_platform(), deterministic_kernels(), known_shapes(activations, gradients):
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


def shapes_of_arrivals(rows: Sequence[Packed], config: TransformerConfig, *, leads: bool) -> list[tuple[int, int, int]]:
    """Return the shapes of the tensors that reach a pipeline stage from one side, in the order of their arrival.

    Args:
        rows: the micro-batches, in the order of the pass.
        config: Megatron's configuration of the model.
        leads: the stage is the first of the pass on this side; it computes a first chunk from tokens or from the loss.

    Returns:
        [tokens on a rank, 1, hidden_size] of each tensor; the gradients of the hidden states have their shapes.
    """
    chunks = config.virtual_pipeline_model_parallel_size or 1
    order = get_schedule_table(len(rows), chunks, config.pipeline_model_parallel_size)
    parts = config.tensor_model_parallel_size if config.sequence_parallel else 1
    # The last stage sends its output to the next chunk of the first stage, unless the chunk is the last.
    arriving = [number for number, chunk in order if not leads or chunk < chunks - 1]
    return [(rows[number].tokens.shape[1] // parts, 1, config.hidden_size) for number in arriving]


def _padding_mask(row: Packed, module: GPTModel) -> Tensor | None:
    """Return the mask of padding tokens among the tokens of this chunk's layers; None for a model without routers.

    Megatron splits the mask for sequence parallelism only on the stage that embeds the tokens.
    """
    config = module.config
    if row.padding_mask is None or config.num_moe_experts is None:
        return None
    if module.pre_process or not config.sequence_parallel:
        return row.padding_mask
    parts = row.padding_mask.chunk(config.tensor_model_parallel_size, dim=1)
    return parts[parallel_state.get_tensor_model_parallel_rank()]


def num_micro_batches(fewest: int, mesh: Mesh) -> int:
    """Round `fewest` micro-batches up to what the schedule takes.

    The interleaved schedule takes complete rounds; a round is one micro-batch for each stage.
    """
    round_size = mesh.pp_size if mesh.vpp_size > 1 else 1
    return -(-fewest // round_size) * round_size
