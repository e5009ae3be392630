"""The least time of a step: what arithmetic, memory and links need, if each works at its full speed.

Assumed: every response has the mean length; samples divide evenly; a phase is as slow as the slower of its arithmetic
and its memory; communication between tensor, context and expert parallel ranks is not hidden, nor are gradients; a
pipeline idles while it fills and drains; kernel launches, rewards and logging cost nothing. So a run takes longer, and
two splits compare by what differs between them.

Two costs have to be measured. An engine step has a cost on the host (`EngineCost`). On the CPU
the operations between products of matrices take their time too (`movement`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from megarl.models.architecture import Architecture
from megarl.models.flops import UPDATE, Tokens, active_weights, feed_forward_share, forward_flops
from megarl.models.grid import Grid
from megarl.planning.activations import PhaseWork
from megarl.planning.memory import RankMemory
from megarl.planning.movement import forward_bytes
from megarl.planning.states import DTYPE_BYTES, FLOAT32, MOMENTS, States
from megarl.planning.traffic import Links
from megarl.planning.workload import TrainerModel, Workload
from megarl.platform.peaks import Peaks

OPTIMIZER_PASSES = 2  # weights and moments are read and written
TO_HOST = 50e9  # bytes per second and direction: PCI Express 5 with sixteen lanes


@dataclass(frozen=True)
class EngineCost:
    """The seconds that an engine step takes on the host, whatever the size of the model."""

    step: float = 0.0  # to schedule, to prepare inputs, to sample
    layer: float = 0.0  # for each layer: to call its operations
    sample: float = 0.0  # for each sample that is drawn: to record its token

    def seconds(self, num_layers: int, *, num_steps: float, num_tokens: float) -> float:
        """Return the seconds of some steps that draw `num_tokens` tokens together."""
        return num_steps * (self.step + num_layers * self.layer) + num_tokens * self.sample


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The speeds of a rank's device and of its links, in bytes per second and direction."""

    peaks: Peaks
    links: Links
    ranks_per_node: int
    engine: EngineCost = EngineCost()

    def link(self, span: int) -> float:
        """Return the bandwidth of ranks that are neighbours within `span` ranks."""
        return self.links.inside if span <= self.ranks_per_node else self.links.between


@dataclass(frozen=True)
class Lengths:
    """The mean tokens of a prompt and of a response."""

    prompt: int
    response: int
    longest: int | None = None  # tokens of the longest response; None: all are as long as the mean

    @property
    def steps(self) -> int:
        """Return the steps that an engine takes for the longest response."""
        return self.longest or self.response


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The least seconds of the phases of a step, and their FLOPs over all ranks."""

    seconds: Mapping[str, float]  # by phase, under the names of `timing_s/*`
    flops: int
    peak: float  # FLOP/s of all ranks

    @property
    def total(self) -> float:
        """Return the seconds of the step."""
        return sum(self.seconds.values())

    @property
    def mfu(self) -> float:
        """Return the share of the peak that a step of these seconds uses."""
        return self.flops / self.total / self.peak


def step_time(
    workload: Workload, memory: RankMemory, machine: Machine, lengths: Lengths, *, sync_seconds: float
) -> StepTime:
    """Return the least time of a step of `workload`, whose fullest rank is `memory`."""
    config = workload.config
    grid = workload.grid
    num_samples = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    tokens = _tokens(num_samples, lengths)
    flops = forward_flops(workload.policy, tokens)
    seconds = {"sync": sync_seconds, "gen": _generation(workload, memory, machine, lengths)}
    readers = [model for model in workload.models if not model.is_reference]
    references = workload.references
    if references:  # one reference reads a sample; the smallest takes the least time
        readers.append(min(references, key=lambda model: forward_flops(model.architecture, tokens)))
    for model in readers:
        if model.name != "actor" or not config.fused_old_log_probs:
            num_passes = sum(config.passes_of_reference.values()) if model.is_reference else 1
            passes = _passes(workload, model, model.infers, machine, tokens, num_passes=num_passes)
            seconds[f"infer {model.name}"] = passes
            flops += num_passes * forward_flops(model.architecture, tokens)
    for model in workload.models:
        if model.updates:
            section = config.actor_rollout_ref.actor if model.name == "actor" else config.critic
            states = memory.states[model.name]
            num_passes = UPDATE * section.ppo_epochs
            num_updates = section.ppo_epochs * -(-config.data.train_batch_size // section.ppo_mini_batch_size)
            seconds[f"update {model.name}"] = (
                _passes(workload, model, model.updates, machine, tokens, num_passes=num_passes)
                + num_updates * _optimizer(model, states, machine, grid=grid)
                + _moves(model, states)
            )
            flops += num_passes * forward_flops(model.architecture, tokens)
    return StepTime(seconds=seconds, flops=flops, peak=machine.peaks.flops_per_second * grid.num_ranks)


def _tokens(num_samples: int, lengths: Lengths) -> Tokens:
    one = Tokens.of([lengths.prompt + lengths.response], num_outputs=lengths.response)
    return Tokens(
        num_tokens=num_samples * one.num_tokens,
        num_pairs=num_samples * one.num_pairs,
        num_outputs=num_samples * one.num_outputs,
    )


def _generation(workload: Workload, memory: RankMemory, machine: Machine, lengths: Lengths) -> float:
    """Return the seconds of a replica: prompts at once, then token by token for as many samples as its cache holds.

    Weights are read in each step, keys and values for each token. A sample that ends makes room for none: the replica
    has begun all that its cache holds. Partial rollouts draw more samples at once, and equally many tokens in a step;
    no step waits for the longest response. The prefill of responses that continue is left out.
    """
    config = workload.config
    a = workload.policy
    rollout = config.actor_rollout_ref.rollout
    tp = rollout.tensor_model_parallel_size
    share, open_at_once = (
        -(-num_prompts * rollout.n * tp // workload.grid.num_ranks)
        for num_prompts in (config.data.train_batch_size, config.num_drawn)
    )
    whole = lengths.prompt + lengths.response
    at_once = max(1, min(open_at_once, rollout.max_num_seqs, memory.engine.num_tokens // whole))
    rounds = share / at_once
    flops = tp * machine.peaks.flops_at(a.hidden_size)
    prompts = forward_flops(a, Tokens.of([lengths.prompt], num_outputs=1)) * share / flops
    tokens = Tokens.of([whole], num_outputs=lengths.response)
    every = forward_flops(a, tokens) * share / flops
    if config.trainer.device == "cpu":
        every += forward_bytes(a, tokens, dtype=rollout.dtype) * share / tp / machine.peaks.bytes_per_second
    cached = memory.engine.bytes_per_token * (lengths.prompt + lengths.response / 2) * at_once
    num_steps = rounds * (lengths.response if rollout.partial.enable else lengths.steps)
    read = num_steps * _touched(a, memory.engine.weights, at_once) + rounds * lengths.response * cached
    reading = read / machine.peaks.bytes_per_second
    messages = _between_layers(a, num_tokens=at_once, size=tp, dtype=rollout.dtype) / machine.link(tp)
    host = machine.engine.seconds(a.num_layers, num_steps=num_steps, num_tokens=share * lengths.response)
    return prompts + max(every - prompts, reading) + rounds * lengths.response * messages + host


def _touched(architecture: Architecture, weights: int, num_tokens: int) -> float:
    """Return the bytes of an engine's weights that a step of `num_tokens` tokens reads: of experts the chosen ones."""
    experts = architecture.experts
    if experts is None:
        return weights
    missed = (1 - experts.top_k / experts.num_experts) ** num_tokens
    routed = 3 * architecture.hidden_size * experts.ffn_hidden_size * experts.num_experts
    layers = sum(architecture.is_sparse(layer) for layer in range(architecture.num_layers))
    chosen = routed * experts.top_k // experts.num_experts
    dense = active_weights(architecture) - layers * chosen + 2 * architecture.vocab_size * architecture.hidden_size
    share = layers * routed / (layers * routed + dense)
    return weights * (1 - share * missed)


def _passes(
    workload: Workload, model: TrainerModel, work: PhaseWork, machine: Machine, tokens: Tokens, *, num_passes: float
) -> float:
    """Return the seconds of `num_passes` forward passes over all samples, with the messages and an idle pipeline."""
    a = model.architecture
    section = model.section
    grid = workload.grid
    again = feed_forward_share(a, tokens) if work.recompute == "selective" else float(work.recompute)
    num_passes *= 1 + again / UPDATE
    computing = num_passes * forward_flops(a, tokens) / grid.num_ranks / machine.peaks.flops_at(a.hidden_size)
    if workload.config.trainer.device == "cpu":
        moved = num_passes * forward_bytes(a, tokens, dtype=section.dtype) / grid.num_ranks
        computing += moved / machine.peaks.bytes_per_second
    mine = tokens.num_tokens / (grid.dp * grid.cp)
    stage = num_passes * _between_layers(a, num_tokens=mine, size=grid.tp, dtype=section.dtype) / grid.pp
    talking = stage / machine.link(grid.tp)
    itemsize = DTYPE_BYTES[section.dtype]
    if grid.cp > 1:
        keys = 2 * a.num_key_value_heads * a.head_dim / grid.tp * itemsize * a.num_layers / grid.pp
        talking += num_passes * mine * (grid.cp - 1) * keys / machine.link(grid.tp * grid.cp)
    if a.experts and grid.ep > 1:
        sent = 2 * a.experts.top_k * a.hidden_size * itemsize * a.num_layers / grid.pp * (grid.ep - 1) / grid.ep
        talking += num_passes * mine / grid.tp * sent / machine.link(grid.etp * grid.ep)
    idle = (grid.pp - 1) / (work.num_micro_batches * grid.vpp)
    return (computing + talking) * (1 + idle)


def _between_layers(architecture: Architecture, *, num_tokens: float, size: int, dtype: str) -> float:
    """Return the bytes that a tensor-parallel rank receives in a forward pass: two sums of hidden states a layer."""
    states = num_tokens * architecture.hidden_size * DTYPE_BYTES[dtype]
    return 2 * architecture.num_layers * 2 * states * (size - 1) / size


def _optimizer(model: TrainerModel, states: States, machine: Machine, *, grid: Grid) -> float:
    """Return the seconds of an optimizer step: gradients summed, weights and moments updated, weights gathered."""
    replicas = grid.dp * grid.cp
    moved = (states.gradients + states.weights) * (replicas - 1) / replicas / machine.link(grid.num_ranks // grid.pp)
    per_weight = MOMENTS if model.section.dtype == "float32" else MOMENTS + FLOAT32
    weights = states.optimizer / per_weight
    touched = OPTIMIZER_PASSES * weights * (MOMENTS + FLOAT32) + weights * DTYPE_BYTES[model.section.dtype]
    return moved + (touched + states.gradients) / machine.peaks.bytes_per_second


def _moves(model: TrainerModel, states: States) -> float:
    """Return the seconds in which offloaded parts travel from the host and back."""
    section = model.section
    parts = states.weights * section.param_offload + states.optimizer * section.optimizer_offload
    return 2 * parts / TO_HOST
