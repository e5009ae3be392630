"""The plan of a run: its needs, other placements, and changes if the run does not fit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from megarl.config.faults import ConfigError
from megarl.config.load import load_config
from megarl.config.model_files import model_faults
from megarl.config.root import Config
from megarl.models.architecture import Architecture
from megarl.models.config import CheckpointSection
from megarl.models.hub import config_place, read_model
from megarl.planning.advice import PARTIAL, WORTHWHILE, Remedy, Shortfall, faster, remedies, shortfalls
from megarl.planning.device import Device, host_bytes_here
from megarl.planning.host import HostMemory, host_memory
from megarl.planning.machine import EngineCost, Lengths, Machine
from megarl.planning.memory import RankMemory, fullest_rank
from megarl.planning.seconds import StepTime, step_time
from megarl.planning.traffic import Links, SyncTraffic, sync_traffic
from megarl.planning.workload import Workload, workload_of

ENGINE_TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"


@dataclass(frozen=True, kw_only=True)
class Option:
    """Another way to place the run, and the traffic of its sync."""

    change: str
    configurable: bool
    traffic: SyncTraffic | None  # None: the engine would not fit


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Changes that make a step faster; the run still fits."""

    overrides: tuple[str, ...]  # a.b.c=value
    seconds: float  # the least time of a step
    peak: int  # bytes of the device at the fullest moment


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The contents of the report."""

    workload: Workload
    device: Device
    memory: RankMemory
    traffic: SyncTraffic
    machine: Machine
    lengths: Lengths
    time: StepTime
    options: list[Option]
    shortfalls: list[Shortfall]
    remedies: list[Remedy]
    host: HostMemory
    host_bytes: int | None  # host memory of a node; None: unknown
    host_remedies: list[Remedy]
    savings: list[Saving]

    @property
    def host_missing(self) -> int:
        """Return the bytes of host memory that a node lacks."""
        return max(0, self.host.total - self.host_bytes) if self.host_bytes else 0


@dataclass(eq=False)
class Planner:
    """Plans a configuration, also with other values."""

    argv: Sequence[str]
    device: Device
    ranks_per_node: int | None
    links: Links
    host_bytes: int | None = None
    engine: EngineCost | None = None
    lengths: Lengths | None = None

    def __post_init__(self) -> None:
        self._workload = self._load([])
        config = self._workload.config
        rollout = config.actor_rollout_ref.rollout
        self._machine = Machine(
            peaks=self.device.peaks,
            links=self.links,
            ranks_per_node=self.ranks_per_node or config.trainer.n_gpus_per_node,
            engine=self.engine or EngineCost(),
        )
        self._lengths = self.lengths or Lengths(prompt=rollout.prompt_length, response=rollout.response_length)

    def plan(self) -> Plan:
        """Return the plan of the configuration itself.

        Raises:
            ConfigError: the configuration is faulty, or the files of a model are damaged or those of another model.
            UserError: a model cannot be found, or its family is unknown.
        """
        workload = self._workload
        self._check_files(workload.config)
        traffic, memory = self._own_traffic, self._memory(workload)
        missing = shortfalls(workload, memory, self.device.num_bytes)
        host = host_memory(workload, memory)
        host_bytes = self._node_bytes
        has_room = self._has_room(host)
        host_remedies = list[Remedy]()
        if not has_room:
            host_remedies = remedies(workload, memory, self.device.num_bytes, self._trial, host_bytes=host_bytes)
        return Plan(
            workload=workload,
            device=self.device,
            memory=memory,
            traffic=traffic,
            machine=self._machine,
            lengths=self._lengths,
            time=self._time(workload, memory, traffic.seconds),
            options=list(self._options(workload)),
            shortfalls=missing,
            remedies=remedies(workload, memory, self.device.num_bytes, self._trial) if missing else [],
            host=host,
            host_bytes=host_bytes,
            host_remedies=host_remedies,
            savings=[] if missing or not has_room else list(self._savings(workload, memory, traffic)),
        )

    def least_time(self) -> StepTime:
        """Return the time of `plan` alone. It costs a small part of a plan, and reads no file of weights."""
        return self._time(self._workload, self._memory(self._workload), self._own_traffic.seconds)

    @cached_property
    def _own_traffic(self) -> SyncTraffic:
        """The traffic of the configuration itself."""
        return self._traffic(self._workload)

    @cached_property
    def _bucket_bytes(self) -> int:
        full = self._workload.config.actor_rollout_ref.rollout.sync.bucket_megabytes << 20
        return min(full, max(self._own_traffic.received_max, self._own_traffic.sent_max))

    def _time(self, workload: Workload, memory: RankMemory, sync_seconds: float) -> StepTime:
        return step_time(workload, memory, self._machine, self._lengths, sync_seconds=sync_seconds)

    def _savings(self, workload: Workload, memory: RankMemory, traffic: SyncTraffic) -> Iterator[Saving]:
        """Yield what another split of the trainer or less recomputation saves, and what partial rollouts save.

        The host has room for what is yielded, too.
        """

        def trial(overrides: Sequence[str]) -> tuple[Workload, RankMemory] | None:
            tried = self._trial(overrides)
            return tried if tried and self._has_room(host_memory(*tried)) else None

        def seconds(tried: Workload, memory: RankMemory, sync_seconds: float = traffic.seconds) -> float:
            return self._time(tried, memory, sync_seconds).total

        changes, fastest, its_memory = faster(workload, memory, self.device.num_bytes, trial, seconds)
        if changes:
            time = seconds(fastest, its_memory, self._traffic(fastest).seconds)
            yield Saving(overrides=changes, seconds=time, peak=its_memory.peak)
        tried = trial(PARTIAL)
        if tried and not shortfalls(*tried, self.device.num_bytes):
            time = seconds(*tried)
            if time < WORTHWHILE * seconds(workload, memory):
                yield Saving(overrides=PARTIAL, seconds=time, peak=tried[1].peak)

    def _options(self, workload: Workload) -> Iterator[Option]:
        """Yield every possible engine size up to the size of a node, and Megatron's other rank order."""
        grid = workload.grid
        current = workload.config.actor_rollout_ref.rollout.tensor_model_parallel_size
        for size in range(1, max(self._machine.ranks_per_node, current) + 1):
            change = f"{ENGINE_TP}={size}"
            if size == current or grid.num_ranks % size:
                continue
            tried = self._try([change])
            if tried is None:
                continue
            fits = not self._memory(tried).engine.shortfall(tried.longest)
            yield Option(change=change, configurable=True, traffic=self._traffic(tried) if fits else None)
        if grid.pp > 1 and grid.dp > 1 and workload.policy.experts is None:
            yield Option(
                change="rank order tp-cp-ep-pp-dp",
                configurable=False,
                traffic=self._traffic(workload, data_last=True),
            )

    def _check_files(self, config: Config) -> None:
        checked = (
            model_faults(checkpoint, key, needs_weights=False, needs_head=key != "critic.model.path")
            for key, checkpoint in config.checkpoints
        )
        faults = [*chain.from_iterable(checked)]
        if faults:
            raise ConfigError(faults)

    def _load(self, overrides: Sequence[str]) -> Workload:
        config = load_config([*self.argv, *overrides], world_size=None, check_paths=False)
        policy = architecture_of(config.actor_rollout_ref.model)
        critic = architecture_of(config.critic.model) if config.has_critic else None
        reward_model = architecture_of(config.reward_model.model) if config.reward_model.enable else None
        teachers = {source: architecture_of(teacher) for source, teacher in config.teachers.items()}
        return workload_of(config, policy=policy, critic=critic, reward_model=reward_model, teachers=teachers)

    def _try(self, overrides: Sequence[str]) -> Workload | None:
        try:
            return self._load(overrides)
        except ConfigError:  # a value that this model or world does not allow
            return None

    @cached_property
    def _node_bytes(self) -> int | None:
        """The host memory of a node; None: unknown."""
        return self.host_bytes or host_bytes_here(self._workload.config.trainer)

    def _has_room(self, host: HostMemory) -> bool:
        """Return whether the host memory of a node is enough, as far as it is known."""
        return self._node_bytes is None or host.total <= self._node_bytes

    def _trial(self, overrides: Sequence[str]) -> tuple[Workload, RankMemory] | None:
        tried = self._try(overrides)
        return (tried, self._memory(tried)) if tried else None

    def _memory(self, workload: Workload) -> RankMemory:
        return fullest_rank(workload, device_bytes=self.device.num_bytes, bucket_bytes=self._bucket_bytes)

    def _traffic(self, workload: Workload, *, data_last: bool = False) -> SyncTraffic:
        return sync_traffic(
            workload, ranks_per_node=self._machine.ranks_per_node, links=self.links, data_last=data_last
        )


def architecture_of(section: CheckpointSection) -> Architecture:
    """Return the architecture in the `config.json` of a model; no other file of a Hugging Face id is downloaded.

    Raises:
        UserError: there is no such file, or it describes a model that megarl does not know.
    """
    return read_model(config_place(section.path), section.override_config)[1]
