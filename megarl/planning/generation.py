"""The least time in which an engine replica draws its samples, and what bounds it."""

from dataclasses import dataclass
from math import ceil

from megarl.models.architecture import Architecture
from megarl.models.flops import Tokens, active_weights, forward_flops
from megarl.planning.machine import Lengths, Machine
from megarl.planning.memory import RankMemory
from megarl.planning.movement import forward_bytes
from megarl.planning.states import DTYPE_BYTES
from megarl.planning.workload import Workload

SUMS_OF_LAYER = 2  # over the tensor-parallel ranks, in a forward pass


@dataclass(frozen=True, kw_only=True)
class GenerationTime:
    """The samples that a replica draws at once, and the seconds of what it does."""

    wanted: int  # samples of a replica that are open at once
    slots: int  # of these, as many as `rollout.max_num_seqs` allows
    at_once: int  # of these, as many as its KV cache holds
    prompts: float
    decoding: float  # the arithmetic of the responses, or the reading of weights, keys and values if that is slower
    messages: float  # the bytes of sums between the ranks of a replica
    latency: float  # what the same sums take if they have no bytes
    host: float

    @property
    def total(self) -> float:
        """Return the seconds of generation."""
        return self.prompts + self.decoding + self.messages + self.latency + self.host


def generation_time(workload: Workload, memory: RankMemory, machine: Machine, lengths: Lengths) -> GenerationTime:
    """Return the time of a replica: prompts at once, then token by token for as many samples as its cache holds.

    Weights are read in each step, keys and values for each token. A sample that ends makes room for none: the replica
    has begun all that its cache holds. Partial rollouts draw more samples at once, and equally many tokens in a step;
    no step waits for the longest response. The prefill of responses that continue is left out.
    """
    config = workload.config
    a = workload.policy
    rollout = config.actor_rollout_ref.rollout
    tp = rollout.tensor_model_parallel_size
    share = ceil(config.data.train_batch_size * rollout.n * tp / workload.grid.num_ranks)
    wanted = ceil(config.num_drawn * rollout.n * tp / workload.grid.num_ranks)
    full = lengths.prompt + lengths.response
    slots = min(wanted, rollout.max_num_seqs)
    at_once = max(1, min(slots, memory.engine.num_tokens // full))
    rounds = share / at_once
    flops = tp * machine.peaks.flops_at(a.hidden_size)
    prompts = forward_flops(a, Tokens(lengths=[lengths.prompt], num_outputs=1)) * share / flops
    tokens = Tokens(lengths=[full], num_outputs=lengths.response)
    every = forward_flops(a, tokens) * share / flops
    if config.trainer.device == "cpu":
        every += forward_bytes(a, tokens, dtype=rollout.dtype) * share / tp / machine.peaks.bytes_per_second
    cached = memory.engine.bytes_per_token * (lengths.prompt + lengths.response / 2) * at_once
    num_steps = rounds * (lengths.response if rollout.partial.enable else lengths.steps)
    read = num_steps * _touched(a, memory.engine.weights, at_once) + rounds * lengths.response * cached
    of_step = bytes_between_layers(a, num_tokens=at_once, size=tp, dtype=rollout.dtype)
    return GenerationTime(
        wanted=wanted,
        slots=slots,
        at_once=at_once,
        prompts=prompts,
        decoding=max(every - prompts, read / machine.peaks.bytes_per_second),
        messages=rounds * lengths.response * of_step / machine.sum_link(tp),
        latency=num_steps * SUMS_OF_LAYER * a.num_layers * machine.latency(tp),
        host=machine.engine.seconds(a.num_layers, num_steps=num_steps, num_tokens=share * lengths.response),
    )


def _touched(architecture: Architecture, weights: int, num_tokens: int) -> float:
    """Return the bytes of an engine's weights that a step of `num_tokens` tokens reads: of experts the chosen ones."""
    experts = architecture.experts
    if experts is None:
        return weights
    missed = (1 - experts.top_k / experts.num_experts) ** num_tokens
    routed = 3 * architecture.hidden_size * experts.ffn_hidden_size * experts.num_experts
    layers = sum(kind.is_sparse for kind in architecture.layer_kinds)
    chosen = routed * experts.top_k // experts.num_experts
    dense = active_weights(architecture) - layers * chosen + 2 * architecture.vocab_size * architecture.hidden_size
    share = layers * routed / (layers * routed + dense)
    return weights * (1 - share * missed)


def bytes_between_layers(architecture: Architecture, *, num_tokens: float, size: int, dtype: str) -> float:
    """Return the bytes that a tensor-parallel rank receives in a forward pass: two sums of hidden states a layer."""
    states = num_tokens * architecture.hidden_size * DTYPE_BYTES[dtype]
    return SUMS_OF_LAYER * architecture.num_layers * 2 * states * (size - 1) / size
