"""Find the phases that do not fit into memory, and changes of the configuration that help. Every change is tried."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megarl.models.config import Recompute
from megarl.planning.host import host_memory
from megarl.planning.memory import PHASES, Phase, RankMemory
from megarl.planning.workload import REWARD_MODEL, TrainerModel, Workload

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
SECTIONS = {
    "actor": ACTOR,
    "critic": "critic",
    REWARD_MODEL: "reward_model",
}
SHARES = 20  # gpu_memory_utilization is proposed in multiples of 1 / SHARES
PARTIAL = (f"{ROLLOUT}.partial.enable=true", "algorithm.rollout_correction.rollout_is=token")
WORTHWHILE = 0.97  # the share of the least time that another split, or partial rollouts, have to reach
RESERVE = 0.05  # of a device: a proposal to go faster leaves it for the CUDA context, libraries and fragmentation
Trial = Callable[[Sequence[str]], tuple[Workload, RankMemory] | None]  # None: the configuration would be faulty


@dataclass(frozen=True, kw_only=True)
class Shortfall:
    """A phase that does not fit."""

    phase: Phase
    num_bytes: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Changes that help."""

    overrides: tuple[str, ...]  # a.b.c=value
    missing: int  # bytes still missing, over all phases; 0: it fits
    host_bytes: int  # host memory that a node then needs


def shortfalls(workload: Workload, memory: RankMemory, device_bytes: int) -> list[Shortfall]:
    """Return the phases that do not fit."""
    found = []
    for phase in PHASES:
        moment = memory.fullest[phase]
        missing = moment.total - device_bytes
        if missing > 0:
            reason = f"the device of a rank of stage {memory.stage} is too small while the {moment.worker} is at work"
            found.append(Shortfall(phase=phase, num_bytes=missing, reason=reason))
    missing = memory.engine.shortfall(workload.longest)
    if missing:
        share = workload.config.actor_rollout_ref.rollout.gpu_memory_utilization
        reason = (
            f"gpu_memory_utilization={share:g} gives the engine too little for its weights, its largest step and the "
            f"keys and values of one sequence of {workload.longest} tokens"
        )
        found.append(Shortfall(phase="generate", num_bytes=missing, reason=reason))
    return found


@dataclass(frozen=True, kw_only=True)
class MemoryLimits:
    """The memory that a run may take."""

    device_bytes: int  # of a rank
    host_bytes: int | None = None  # of a node, if it is the host that is too small while the devices are not

    def remedy(self, overrides: tuple[str, ...], workload: Workload, memory: RankMemory) -> Remedy | None:
        """Return what changes that lead to this run achieve; None if the devices no longer are enough."""
        missing = _total(workload, memory, self.device_bytes)
        needed = host_memory(workload, memory).total
        if self.host_bytes is not None:
            if missing:
                return None
            missing = max(0, needed - self.host_bytes)
        return Remedy(overrides=overrides, missing=missing, host_bytes=needed)


def remedies(
    workload: Workload, memory: RankMemory, device_bytes: int, trial: Trial, *, host_bytes: int | None = None
) -> list[Remedy]:
    """Return the changes that are enough alone, the cheapest first; if there are none, a few that are enough together.

    If no changes are enough, return those that come closest. With `host_bytes` they are those that make a node of this
    memory enough, and the device still enough.
    """
    limits = MemoryLimits(device_bytes=device_bytes, host_bytes=host_bytes)
    now = limits.remedy((), workload, memory)
    changes = candidates(workload, memory, device_bytes) if host_bytes is None else host_candidates(workload)
    return _choose(changes, limits, trial, now=now.missing if now else 0)


def host_candidates(workload: Workload) -> Iterator[str]:
    """Yield changes that leave less on the host, as `a.b.c=value`."""
    for flag in ("param_offload", "optimizer_offload"):
        for where, model in _by_section(workload).items():
            if getattr(model.section, flag):
                yield f"{where}.megatron.{flag}=false"
    yield from _splits(workload)


def faster(
    workload: Workload,
    memory: RankMemory,
    device_bytes: int,
    trial: Trial,
    seconds: Callable[[Workload, RankMemory], float],
) -> tuple[tuple[str, ...], Workload, RankMemory]:
    """Find the split of the trainer and the recomputation that fit and make a step the fastest.

    Args:
        workload: a run that fits.
        memory: its fullest rank.
        device_bytes: the memory of a rank's device.
        trial: plans other values.
        seconds: the least time of a step.

    Returns:
        The changes as `a.b.c=value`, none if the run is the fastest as it is, and the changed run with its fullest
        rank. The changes leave some memory free (`RESERVE`). Another split has to save a share of the time
        (`WORTHWHILE`): the least time leaves out what the host does.
    """
    room = int((1 - RESERVE) * device_bytes)
    changes: tuple[str, ...] = ()
    best = workload, memory
    least = seconds(workload, memory)
    for split in ((), *_other_splits(workload)):
        found = _with_least_recomputation(split, workload, memory, room, trial)
        if found is None:
            continue
        time = seconds(*found[1])
        if time < (WORTHWHILE * least if split else least):
            changes, best = found
            least = time
    return changes, *best


def _other_splits(workload: Workload) -> Iterator[tuple[str, ...]]:
    """Yield the changes to other tensor- and pipeline-parallel sizes, powers of two, the fewest parts first."""
    trainer = workload.config.trainer
    now = workload.grid
    pairs = [
        (tp, pp)
        for tp in _powers_of_two(trainer.n_gpus_per_node)
        for pp in _powers_of_two(min(now.num_ranks // tp, workload.policy.num_layers))
    ]
    for tp, pp in sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair)):
        changes = [f"{ACTOR}.megatron.tensor_model_parallel_size={tp}"] if tp != now.tp else []
        if pp != now.pp:
            changes.append(f"{ACTOR}.megatron.pipeline_model_parallel_size={pp}")
        if changes:
            yield tuple(changes)


def _powers_of_two(most: int) -> list[int]:
    return [1 << exponent for exponent in range(most.bit_length())]


def _with_least_recomputation(
    changes: tuple[str, ...], workload: Workload, memory: RankMemory, device_bytes: int, trial: Trial
) -> tuple[tuple[str, ...], tuple[Workload, RankMemory]] | None:
    """Add the least recomputation that fits to some changes. Return them and their trial, or None if nothing fits."""
    found = workload, memory
    for key, configured in _recomputation(workload, memory):
        for amount in ("false", "selective", "true"):
            more = () if amount == str(configured).lower() else (f"{key}={amount}",)
            tried = trial((*changes, *more))
            if tried and not _total(*tried, device_bytes):
                changes = (*changes, *more)
                found = tried
                break
        else:
            return None
    return changes, found


def _recomputation(workload: Workload, memory: RankMemory) -> Iterator[tuple[str, Recompute]]:
    """Yield the key and the value of the recomputation of each model that learns."""
    config = workload.config
    models = {"actor_rollout_ref": config.actor_rollout_ref.model}
    if "critic" in memory.states:
        models["critic"] = config.critic.model
    for where, checkpoint in models.items():
        yield f"{where}.model.enable_gradient_checkpointing", checkpoint.enable_gradient_checkpointing


def _by_section(workload: Workload) -> dict[str, TrainerModel]:
    """Return the models by their section of the configuration. All references share one."""
    return {SECTIONS.get(model.name, "actor_rollout_ref.ref"): model for model in workload.models}


def _choose(changes: Iterator[str], limits: MemoryLimits, trial: Trial, *, now: int) -> list[Remedy]:
    """Try changes alone, and if none is enough, those that help together; `now` bytes are missing without any."""
    helpful: dict[str, Remedy] = {}  # by key: the first value that is enough, else the last that helps
    for change in changes:
        key = change.partition("=")[0]
        if key in helpful and not helpful[key].missing:
            continue
        tried = _attempt((change,), limits, trial)
        if tried and tried.missing < now:
            helpful[key] = tried
    enough = [remedy for remedy in helpful.values() if not remedy.missing]
    if enough:
        return enough
    best: Remedy | None = None
    for remedy in helpful.values():
        overrides = (*best.overrides, *remedy.overrides) if best else remedy.overrides
        least = best.missing if best else now
        tried = _attempt(overrides, limits, trial)
        if tried and tried.missing < least:
            best = tried
        if best and not best.missing:
            break
    return [best] if best else []


def _attempt(overrides: tuple[str, ...], limits: MemoryLimits, trial: Trial) -> Remedy | None:
    tried = trial(overrides)
    return limits.remedy(overrides, *tried) if tried else None


def candidates(workload: Workload, memory: RankMemory, device_bytes: int) -> Iterator[str]:
    """Yield changes worth trying, as `a.b.c=value`, the least costly in time first."""
    policy = workload.config.actor_rollout_ref
    actor = policy.actor
    rollout = policy.rollout
    if not rollout.free_cache_engine:
        yield f"{ROLLOUT}.free_cache_engine=true"
    if not actor.megatron.use_distributed_optimizer:
        yield f"{ACTOR}.megatron.use_distributed_optimizer=true"
    for flag in ("optimizer_offload", "grad_offload", "param_offload"):
        for where, model in _by_section(workload).items():
            if not getattr(model.section, flag) and (model.updates or flag == "param_offload"):
                yield f"{where}.megatron.{flag}=true"
    for key, recompute in _recomputation(workload, memory):
        more = {False: ("selective", "true"), "selective": ("true",), True: ()}[recompute]
        yield from (f"{key}={amount}" for amount in more)
    yield from _shares(workload, memory, device_bytes)
    budget = actor.ppo_max_token_len_per_gpu // 2
    while budget >= workload.longest:
        yield f"{ACTOR}.ppo_max_token_len_per_gpu={budget}"
        budget //= 2
    yield f"{ROLLOUT}.tensor_model_parallel_size={2 * rollout.tensor_model_parallel_size}"
    yield from _splits(workload)


def _splits(workload: Workload) -> Iterator[str]:
    """Yield splits of the trainer's models into twice as many parts."""
    megatron = workload.config.actor_rollout_ref.actor.megatron
    yield f"{ACTOR}.megatron.tensor_model_parallel_size={2 * megatron.tensor_model_parallel_size}"
    yield f"{ACTOR}.megatron.pipeline_model_parallel_size={2 * megatron.pipeline_model_parallel_size}"


def _shares(workload: Workload, memory: RankMemory, device_bytes: int) -> Iterator[str]:
    """Yield the share of the device that the models at rest leave to the engine, or that the engine needs."""
    share = workload.config.actor_rollout_ref.rollout.gpu_memory_utilization
    engine = memory.engine
    at_rest = memory.fullest["generate"].total - engine.weights - engine.activations - engine.kv_cache
    left = (device_bytes - at_rest) * SHARES // device_bytes / SHARES
    needed = -(-(engine.budget + engine.shortfall(workload.longest)) * SHARES // device_bytes) / SHARES
    if 0 < left < share:
        yield f"{ROLLOUT}.gpu_memory_utilization={left:g}"
    elif share < needed < 1:
        yield f"{ROLLOUT}.gpu_memory_utilization={needed:g}"


def _total(workload: Workload, memory: RankMemory, device_bytes: int) -> int:
    return sum(shortfall.num_bytes for shortfall in shortfalls(workload, memory, device_bytes))
