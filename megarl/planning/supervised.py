"""The plan of a run that learns from files alone: memory of the fullest rank and of a node, the least time of a step.

The model, its optimizer and its activations are those of an actor. There is no engine, and no sample has to travel.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from rich.table import Table

from megarl.config.checks import world_size
from megarl.config.root import RewardTrainConfig, SFTConfig
from megarl.learner.grid import grid_of
from megarl.models.architecture import Architecture
from megarl.models.flops import Tokens
from megarl.models.grid import Grid
from megarl.models.peft import lora_of
from megarl.planning.activations import PhaseWork, training_bytes
from megarl.planning.adapter_dropout import dropout_bytes
from megarl.planning.device import Device
from megarl.planning.host import save_bytes
from megarl.planning.machine import Machine
from megarl.planning.memory import model_states
from megarl.planning.seconds import optimizer_seconds, pass_seconds
from megarl.planning.workload import TrainerModel, micro_batches
from megarl.platform.screen import Screen, labelled

GB = 10**9


@dataclass(frozen=True, kw_only=True)
class SupervisedPlan:
    """The contents of the report."""

    device: Device
    stage: int  # of the fullest rank
    parts: Mapping[str, int]  # bytes of its device in an update, by name
    host: int  # bytes of host memory of a node, for copies for a save
    host_bytes: int | None  # host memory of a node; None: unknown
    seconds: float  # the least of a step

    @property
    def total(self) -> int:
        """Return all bytes of the device."""
        return sum(self.parts.values())

    @property
    def missing(self) -> int:
        """Return the bytes that the device lacks."""
        return max(0, self.total - self.device.num_bytes)

    @property
    def host_missing(self) -> int:
        """Return the bytes of host memory that a node lacks."""
        return max(0, self.host - self.host_bytes) if self.host_bytes else 0

    @property
    def fits(self) -> bool:
        """Return whether device and host have room."""
        return not self.missing and not self.host_missing

    def to_dict(self) -> dict[str, object]:
        """Return the plan in plain types: bytes and seconds."""
        return {
            "fits": self.fits,
            "device": self.device.name,
            "gpu_memory_bytes": self.device.num_bytes,
            "memory": {"stage": self.stage, "parts": dict(self.parts), "total": self.total},
            "host": {"parts": {"copies for a save": self.host}, "total": self.host, "memory_bytes": self.host_bytes},
            "time": {"total": self.seconds},
        }

    def show(self, console: Screen) -> None:
        """Print the table of memory, the time and the verdict."""
        table = Table("", "GB", title=f"a rank of stage {self.stage}, the fullest, in an update, on {self.device.name}")
        for name, num_bytes in (*self.parts.items(), ("total", self.total)):
            table.add_row(name, f"{num_bytes / GB:.2f}")
        console.print(table)
        console.print(f"host memory that a node needs: {self.host / GB:.2f} GB (copies for a save)")
        console.print(f"the least time of a step: {self.seconds:.2f} s")
        if self.host_missing:
            short = f"host: {self.host_missing / GB:.2f} GB short"
            console.print(labelled(short, f"of a node's {(self.host_bytes or 0) / GB:.2f}", "red"))
        if self.missing:
            console.print(labelled("It does not fit:", f"{self.missing / GB:.2f} GB short on the device", "red"))
            return
        verdict = "The devices have room" if self.host_missing else "It fits"
        free = (self.device.num_bytes - self.total) / GB
        console.print(labelled(f"{verdict}:", f"{free:.2f} GB stay free", "green"))


def plan_supervised(
    config: SFTConfig | RewardTrainConfig,
    architecture: Architecture,
    device: Device,
    machine: Machine,
    *,
    host_bytes: int | None = None,
) -> SupervisedPlan:
    """Return the plan of a run whose sequences all have the greatest length.

    A step of a reward model reads two sequences of each pair, which share a micro-batch.
    """
    grid = grid_of(config.megatron, world_size(config.trainer))
    is_policy = isinstance(config, SFTConfig)
    data = config.data
    together = 1 if is_policy else 2
    num_tokens, num_micro_batches = micro_batches(
        grid,
        num_sequences=together * ceil(data.train_batch_size / grid.dp),
        longest=data.max_length,
        max_sequences=data.micro_batch_size and together * data.micro_batch_size,
        max_tokens=config.max_token_len_per_gpu * grid.cp,
    )
    work = PhaseWork(
        num_tokens=num_tokens,
        num_micro_batches=num_micro_batches,
        role="policy" if is_policy else "value",
        recompute=config.model.enable_gradient_checkpointing,
    )
    model = TrainerModel(
        name="model",
        architecture=architecture if is_policy else architecture.with_scalar_head(),
        section=config.megatron,
        infers=work,
        updates=work,
        lora=lora_of(config.model, architecture),
    )
    ranks = [(stage, stage * (grid.num_ranks // grid.pp)) for stage in range(grid.pp)]
    stage, rank, parts = max(
        ((stage, rank, _parts(model, work, grid, stage=stage, rank=rank)) for stage, rank in ranks),
        key=lambda found: sum(found[2].values()),
    )
    num_sequences = together * data.train_batch_size
    outputs = data.max_length if is_policy else 1
    tokens = Tokens(lengths=[data.max_length] * num_sequences, num_outputs=num_sequences * outputs)
    on_cpu = config.trainer.device == "cpu"
    seconds = pass_seconds(grid, model, work, machine, tokens, num_passes=1, on_cpu=on_cpu)
    seconds += optimizer_seconds(model, model_states(grid, model, rank), machine, grid=grid)
    host = save_bytes([model], grid, rank=rank, num_ranks=config.trainer.n_gpus_per_node)
    return SupervisedPlan(device=device, stage=stage, parts=parts, host=host, host_bytes=host_bytes, seconds=seconds)


def _parts(model: TrainerModel, work: PhaseWork, grid: Grid, *, stage: int, rank: int) -> dict[str, int]:
    states = model_states(grid, model, rank)
    activations = training_bytes(model.architecture, model.section, grid, stage=stage, work=work)
    return {
        "weights": states.weights,
        "gradients": states.gradients,
        "optimizer": states.optimizer,
        "activations": activations + dropout_bytes(model, grid, stage=stage, rank=rank),
    }
