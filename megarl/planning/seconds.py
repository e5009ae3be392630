"""The least time of a step: what arithmetic, memory and links need, if each works at its full speed.

Assumed: every response has the mean length; samples divide evenly; a phase is as slow as the slower of its arithmetic
and its memory; communication between tensor, context and expert parallel ranks is not hidden, nor are gradients; a
pipeline idles while it fills and drains; kernel launches, rewards and logging cost nothing. So a run takes longer, and
two splits compare by what differs between them.

On the CPU the operations between products of matrices take their time too (`movement`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from megarl.models.flops import Tokens, feed_forward_share, forward_flops, update_flops
from megarl.models.grid import Grid
from megarl.planning.activations import PhaseWork
from megarl.planning.generation import SUMS_OF_LAYER, GenerationTime, bytes_between_layers, generation_time
from megarl.planning.machine import Lengths, Machine
from megarl.planning.memory import RankMemory
from megarl.planning.movement import forward_bytes
from megarl.planning.states import DTYPE_BYTES, FLOAT32, MOMENTS, States, optimizer_bytes
from megarl.planning.workload import TrainerModel, Workload

OPTIMIZER_PASSES = 2  # weights and moments are read and written
TO_HOST = 50e9  # bytes per second and direction: PCI Express 5 with sixteen lanes


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The least seconds of the phases of a step, and their FLOPs over all ranks."""

    seconds: Mapping[str, float]  # by phase, under the names of `timing_s/*`
    generation: GenerationTime  # the parts of `gen`
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
    on_cpu = config.trainer.device == "cpu"
    num_samples = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    tokens = Tokens(
        lengths=[lengths.prompt + lengths.response] * num_samples, num_outputs=num_samples * lengths.response
    )
    flops = forward_flops(workload.policy, tokens)
    generation = generation_time(workload, memory, machine, lengths)
    seconds = {"sync": sync_seconds, "gen": generation.total}
    readers = [model for model in workload.models if not model.is_reference]
    references = workload.references
    if references:  # one reference reads a sample; the smallest takes the least time
        readers.append(min(references, key=lambda model: forward_flops(model.architecture, tokens)))
    for model in readers:
        if model.name != "actor" or not config.fused_old_log_probs:
            num_passes = sum(config.passes_of_reference.values()) if model.is_reference else 1
            passes = pass_seconds(grid, model, model.infers, machine, tokens, num_passes=num_passes, on_cpu=on_cpu)
            seconds[f"infer {model.name}"] = passes
            flops += num_passes * forward_flops(model.architecture, tokens, model.lora)
    for model in workload.models:
        if model.updates:
            section = config.actor_rollout_ref.actor if model.name == "actor" else config.critic
            states = memory.states[model.name]
            num_updates = section.ppo_epochs * -(-config.data.train_batch_size // section.ppo_mini_batch_size)
            seconds[f"update {model.name}"] = (
                pass_seconds(grid, model, model.updates, machine, tokens, num_passes=section.ppo_epochs, on_cpu=on_cpu)
                + num_updates * optimizer_seconds(model, states, machine, grid=grid)
                + _moves(model, states)
            )
            flops += section.ppo_epochs * update_flops(model.architecture, tokens, model.lora)
    peak = machine.peaks.flops_per_second * grid.num_ranks
    return StepTime(seconds=seconds, generation=generation, flops=flops, peak=peak)


def pass_seconds(
    grid: Grid,
    model: TrainerModel,
    work: PhaseWork,
    machine: Machine,
    tokens: Tokens,
    *,
    num_passes: float,
    on_cpu: bool,
) -> float:
    """Return the seconds of `num_passes` passes over all samples, with the messages and an idle pipeline.

    They are forward passes, and also backward in an update.
    """
    a = model.architecture
    section = model.section
    forward = forward_flops(a, tokens, model.lora)
    again = feed_forward_share(a, tokens) if work.recompute == "selective" else float(work.recompute)
    if work is model.updates:
        num_passes *= update_flops(a, tokens, model.lora) / forward + again
    computing = num_passes * forward / grid.num_ranks / machine.peaks.flops_at(a.hidden_size)
    if on_cpu:
        moved = num_passes * forward_bytes(a, tokens, dtype=section.dtype) / grid.num_ranks
        computing += moved / machine.peaks.bytes_per_second
    mine = tokens.num_tokens / (grid.dp * grid.cp)
    stage = num_passes * bytes_between_layers(a, num_tokens=mine, size=grid.tp, dtype=section.dtype) / grid.pp
    sums = num_passes * work.num_micro_batches * SUMS_OF_LAYER * a.num_layers / grid.pp
    talking = stage / machine.sum_link(grid.tp) + sums * machine.latency(grid.tp)
    itemsize = DTYPE_BYTES[section.dtype]
    if grid.cp > 1:
        keys = 2 * a.num_key_value_heads * a.head_dim * a.num_caching_layers * (grid.cp - 1)
        heads = a.linear.exchanged_size * len(a.linear.layers) * (grid.cp - 1) / grid.cp if a.linear else 0.0
        sent = (keys + heads) / grid.tp * itemsize / grid.pp
        talking += num_passes * mine * sent / machine.link(grid.tp * grid.cp)
    if a.experts and grid.ep > 1:
        sent = 2 * a.experts.top_k * a.hidden_size * itemsize * a.num_layers / grid.pp * (grid.ep - 1) / grid.ep
        talking += num_passes * mine / grid.tp * sent / machine.link(grid.etp * grid.ep)
    idle = (grid.pp - 1) / (work.num_micro_batches * grid.vpp)
    return (computing + talking) * (1 + idle)


def optimizer_seconds(model: TrainerModel, states: States, machine: Machine, *, grid: Grid) -> float:
    """Return the seconds of an optimizer step: gradients summed, weights and moments updated, weights gathered."""
    replicas = grid.dp * grid.cp
    learning = states.gradients + states.weights - states.frozen
    link = machine.sum_link(grid.num_ranks // grid.pp, stride=grid.tp)
    moved = learning * (replicas - 1) / replicas / link
    weights = states.optimizer / optimizer_bytes(model.section)
    touched = OPTIMIZER_PASSES * weights * (MOMENTS + FLOAT32) + weights * DTYPE_BYTES[model.section.dtype]
    return moved + (touched + states.gradients) / machine.peaks.bytes_per_second


def _moves(model: TrainerModel, states: States) -> float:
    """Return the seconds in which offloaded parts travel from the host and back; frozen weights do not travel back."""
    section = model.section
    weights = 2 * states.weights - states.frozen
    return (weights * section.param_offload + 2 * states.optimizer * section.optimizer_offload) / TO_HOST
