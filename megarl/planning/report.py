"""A plan for people, as tables, and for programs, as plain types. Bytes are shown in GB of 10^9."""

import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from rich.table import Table

from megarl.config.report import batch_table
from megarl.planning.advice import Remedy
from megarl.planning.host import reward_processes
from megarl.planning.memory import PHASES, RankMemory, optimizer_on_all_ranks
from megarl.planning.planner import ENGINE_TP, Plan
from megarl.planning.traffic import SyncTraffic
from megarl.platform.screen import Screen, labelled

GB = 10**9
LONG_S = 600  # of a step: longer ones get a note
NOTICEABLE = 0.95  # of the seconds as configured: an option that saves less gets no note


def to_dict(plan: Plan) -> dict[str, Any]:
    """Return the plan in plain types: bytes, seconds, and ratios, which are null if nothing travels."""
    grid = plan.workload.grid
    memory = plan.memory
    return {
        "fits": not plan.shortfalls and not plan.host_missing,
        "device": plan.device.name,
        "gpu_memory_bytes": plan.device.num_bytes,
        "batch": [row._asdict() for row in batch_table(plan.workload.config)],
        "grid": {**asdict(grid), "dp": grid.dp},
        "memory": {
            "rank": memory.rank,
            "stage": memory.stage,
            "states": {name: asdict(states) for name, states in memory.states.items()},
            "reward_host_bytes": plan.host.rewards,
            "kv_cache_tokens": memory.engine.num_tokens,
            "host_copies": memory.host_copies,
            "moments": [
                {"phase": moment.phase, "worker": moment.worker, "total": moment.total, "parts": dict(moment.parts)}
                for moment in memory.moments
            ],
        },
        "host": {
            "parts": dict(plan.host.parts),
            "total": plan.host.total,
            "samples": [asdict(phase) for phase in plan.host.samples],
            "memory_bytes": plan.host_bytes,
            "missing": plan.host_missing,
            "remedies": [asdict(remedy) for remedy in plan.host_remedies],
        },
        "sync": _sync_to_dict(plan.traffic),
        "time": {
            "lengths": asdict(plan.lengths),
            "peaks": asdict(plan.machine.peaks),
            "seconds": dict(plan.time.seconds),
            "generation": asdict(plan.time.generation),
            "total": plan.time.total,
            "flops": plan.time.flops,
            "mfu": plan.time.mfu,
        },
        "options": [
            {
                "change": option.change,
                "configurable": option.configurable,
                "sync": option.traffic and _sync_to_dict(option.traffic),
            }
            for option in plan.options
        ],
        "shortfalls": [asdict(shortfall) for shortfall in plan.shortfalls],
        "remedies": [asdict(remedy) for remedy in plan.remedies],
        "savings": [asdict(saving) for saving in plan.savings],
    }


def show(plan: Plan, console: Screen) -> None:
    """Print the tables of memory and traffic and the verdict."""
    console.print(f"for {plan.device.name}; --device plans for another", highlight=False)
    console.print(_memory_table(plan))
    for line in _adapters(plan):
        console.print(line, highlight=False)
    engine = plan.memory.engine
    longest = plan.workload.longest
    console.print(
        f"KV cache of an engine replica: {engine.num_tokens:,} tokens, {engine.num_tokens // longest:,} sequences of "
        f"{longest:,} at a time"
    )
    if plan.memory.host_copies:
        console.print(f"Asynchronous saves keep {_gb(plan.memory.host_copies)} GB of such a rank's host memory")
    console.print(_traffic_table(plan))
    ratio = f", {plan.traffic.ratio:.1f} times the mean of the plan" if plan.traffic.received_mean else ""
    console.print(f"gathering full tensors on every rank would receive {_gb(plan.traffic.gathered_mean)} GB{ratio}")
    console.print(_time_table(plan))
    _show_host(plan, console)
    for note in (*_bounds(plan), *_cheaper(plan), *_long(plan)):
        console.print(labelled("note:", note, "yellow"))
    for shortfall in plan.shortfalls:
        short = f"{shortfall.phase}: {_gb(shortfall.num_bytes)} GB short:"
        console.print(labelled(short, shortfall.reason, "red"))
    _show_remedies(plan.remedies, plan, console)
    if not plan.shortfalls:
        free = _gb(plan.device.num_bytes - plan.memory.peak)
        verdict = "The devices have room" if plan.host_missing else "It fits"
        others = "the imported libraries and other programs"
        if plan.device.is_gpu:
            others = "the CUDA context, the communication libraries and fragmentation"
        text = f"{free} GB of {_gb(plan.device.num_bytes)} stay free at the fullest moment, for {others}"
        console.print(labelled(f"{verdict}:", text, "green"))


def _show_host(plan: Plan, console: Screen) -> None:
    """Print the host memory that a node needs, the limit of rewards, and whether a node has that memory."""
    host = plan.host
    parts = ", ".join(f"{name} {_gb(num_bytes)}" for name, num_bytes in host.parts.items())
    console.print(f"host memory that a node needs: {_gb(host.total)} GB ({parts})")
    if host.rewards:
        num_processes, most_gb = reward_processes(plan.workload.config)
        console.print(
            f"host memory of a node that rewards may need in addition: {_gb(host.rewards)} GB ({num_processes} "
            f"processes of at most {most_gb:g} GB for each of its ranks; most runs need far less)"
        )
    if plan.host_missing:
        short = f"host: {_gb(plan.host_missing)} GB short"
        console.print(labelled(short, f"of a node's {_gb(plan.host_bytes or 0)}", "red"))
        _show_remedies(plan.host_remedies, plan, console)
    elif plan.host_bytes and host.total + host.rewards > plan.host_bytes:
        note = (
            f"of a node's {_gb(plan.host_bytes)} GB of host memory {_gb(plan.host_bytes - host.total)} are left for "
            "rewards: lower reward_model.num_workers or reward_model.max_memory_gb if they may need more"
        )
        console.print(labelled("note:", note, "yellow"))


def _show_remedies(remedies: list[Remedy], plan: Plan, console: Screen) -> None:
    for remedy in remedies:
        effect = f"leaves {_gb(remedy.missing)} GB missing" if remedy.missing else "is enough"
        if plan.host_bytes and remedy.host_bytes > plan.host_bytes and not remedy.missing:
            effect = f"is enough for the devices, but the host lacks {_gb(remedy.host_bytes - plan.host_bytes)} GB"
        cost = ""
        more = remedy.host_bytes - plan.host.total
        if more:
            cost = f"{_gb(abs(more))} GB {'more' if more > 0 else 'less'}, "
        host = f"host memory of a node: {cost}{_gb(remedy.host_bytes)} GB in all"
        console.print(f"  {' '.join(remedy.overrides)} {effect} ({host})", highlight=False)


def _memory_table(plan: Plan) -> Table:
    memory = plan.memory
    table = Table("", title=f"GB on rank {memory.rank} (stage {memory.stage}), the fullest, at its fullest moments")
    moments = [memory.fullest[phase] for phase in PHASES]
    for moment in moments:
        title = moment.phase if moment.worker == "engine" else f"{moment.phase} {moment.worker}"
        table.add_column(title, justify="right")
    for part in _parts(memory):
        cells = (_gb(moment.parts[part]) if part in moment.parts else "" for moment in moments)
        table.add_row(part, *cells)
    table.add_section()
    table.add_row("total", *(_gb(moment.total) for moment in moments))
    room = plan.device.num_bytes
    table.add_row(f"free of {_gb(room)}", *(_gb(room - moment.total) for moment in moments))
    return table


def _adapters(plan: Plan) -> Iterator[str]:
    """Yield what adapters save, by model."""
    for model in plan.workload.models:
        if model.lora:
            states = plan.memory.states[model.name]
            with_adapters = optimizer_on_all_ranks(plan.workload, model)
            without = optimizer_on_all_ranks(plan.workload, replace(model, lora=None))
            yield (
                f"{model.name}: adapters of rank {model.lora.rank} learn, {_gb(states.weights - states.frozen)} of "
                f"{_gb(states.weights)} GB of its weights; gradients and optimizer take {_gb(with_adapters)} GB on all "
                f"ranks together, instead of {_gb(without)} if all weights learnt"
            )
            if model.shares_base:
                yield f"{model.name}: its frozen weights are the actor's, in the same memory"
        elif model.is_start:
            yield f"{model.name}: the actor without its adapters, in the same memory"


def _parts(memory: RankMemory) -> list[str]:
    """Return the names of the parts at the moments shown, in the order of their first appearance."""
    names = {name for phase in PHASES for name, num_bytes in memory.fullest[phase].parts.items() if num_bytes}
    order = [name for moment in memory.moments for name in moment.parts]
    return sorted(names, key=order.index)


def _traffic_table(plan: Plan) -> Table:
    table = Table(title="a sync of the engine: GB that a rank receives, at most")
    table.add_column("", no_wrap=True)
    for column in ("in all", "of its node", "of others", "seconds"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_row("as configured", *_cells(plan.traffic))
    table.add_section()
    for option in plan.options:
        label = option.change.replace(ENGINE_TP + "=", "engine tensor ")
        if option.traffic:
            table.add_row(label, *_cells(option.traffic))
        else:
            table.add_row(f"{label}: no room")
    return table


def _time_table(plan: Plan) -> Table:
    """Return the least seconds of each phase of a step."""
    peaks = plan.machine.peaks
    lengths = plan.lengths
    time = plan.time
    table = Table(title="the least time of a step")
    speeds = f"{peaks.flops_per_second / 1e12:.4g} TFLOP/s, {peaks.bytes_per_second / 1e12:.3g} TB/s"
    table.add_column(f"{lengths.prompt:,} + {lengths.response:,} tokens at {speeds}", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    for phase, seconds in time.seconds.items():
        table.add_row(phase, f"{seconds:.2f}")
    table.add_section()
    table.add_row("step", f"{time.total:.2f}")
    table.add_row("share of the peak (MFU)", f"{time.mfu:.1%}")
    return table


def _cells(traffic: SyncTraffic) -> Iterator[str]:
    yield _gb(traffic.received_max)
    yield _gb(traffic.inside_max)
    yield _gb(traffic.between_max)
    yield f"{traffic.seconds:.3f}"


def _bounds(plan: Plan) -> Iterator[str]:
    """Yield what keeps generation from the speed of the devices."""
    found = plan.time.generation
    if found.at_once < found.slots:
        yield (
            f"generation is bound by the KV cache: a replica draws {found.at_once:,} of its {found.wanted:,} samples "
            "at a time. A larger share of the device (rollout.gpu_memory_utilization), a larger replica "
            "(rollout.tensor_model_parallel_size) or more replicas make room"
        )
    elif found.slots < found.wanted:
        yield f"generation is bound by rollout.max_num_seqs={found.slots:,}: a replica has {found.wanted:,} samples"
    sums = found.messages + found.latency
    if sums > found.decoding:
        yield (
            f"generation is bound by the size of a replica: sums between its ranks take {sums:.2f} of "
            f"{found.total:.2f} s, {found.latency:.2f} of it for latency. A smaller "
            "rollout.tensor_model_parallel_size waits less"
        )


def _cheaper(plan: Plan) -> Iterator[str]:
    """Yield what is cheaper than the configuration: the cheapest of the options, and what saves time."""
    for configurable in (True, False):
        seconds = {
            option.change: option.traffic.seconds
            for option in plan.options
            if option.configurable == configurable and option.traffic
        }
        best = min(seconds, key=seconds.__getitem__, default=None)
        if best and seconds[best] < NOTICEABLE * plan.traffic.seconds:
            where = "" if configurable else ", which megarl does not offer,"
            yield f"{best}{where} would sync in {seconds[best]:.3f} s instead of {plan.traffic.seconds:.3f} s"
    for saving in plan.savings:
        yield (
            f"with {' '.join(saving.overrides)} it fits, too: a step takes at least {saving.seconds:.2f} s instead of "
            f"{plan.time.total:.2f} s, and {_gb(plan.device.num_bytes - saving.peak)} GB stay free"
        )


def _long(plan: Plan) -> Iterator[str]:
    """Yield how long a step takes if a person would not wait for it, and the run if its length is known."""
    total = plan.time.total
    if total >= LONG_S:
        num_steps = plan.workload.config.trainer.total_training_steps
        run = f", and the {num_steps:,} steps {_duration(num_steps * total)}" if num_steps else ""
        yield (
            f"a step takes at least {_duration(total)} on {plan.device.name}{run}: a smaller model, shorter responses "
            "(data.max_response_length) or fewer samples (data.train_batch_size, rollout.n) take less"
        )


def _duration(seconds: float) -> str:
    hours = seconds / 3600
    if hours < 1:
        return f"{seconds / 60:.0f} minutes"
    return f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:.0f} days"


def _sync_to_dict(traffic: SyncTraffic) -> dict[str, object]:
    return {**asdict(traffic), "ratio": traffic.ratio if math.isfinite(traffic.ratio) else None}


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / GB:.2f}"
