"""Plan a run without ranks or weights: `megarl plan CONFIG.yaml [a.b.c=value ...]`.

Reads only `config.json` of the models. Exit code 1: the run does not fit into the memory of devices or hosts, or a
model cannot be planned. Exit code 2: the configuration is faulty, or the hub does not have a model.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megarl.commands.cli.command import parse, print_error
from megarl.commands.cli.table import PLAN
from megarl.config.faults import ConfigError
from megarl.config.load import load_config, load_reward_train_config, load_sft_config
from megarl.config.report import show_plan
from megarl.config.trial import find_architectures
from megarl.platform.errors import UserError
from megarl.platform.screen import Screen

if TYPE_CHECKING:
    from megarl.planning.device import Device
    from megarl.planning.traffic import Links


def main(argv: Sequence[str]) -> int:
    """Print the plan; return 1 if the run does not fit, else 0."""
    typed = parse(PLAN, argv)
    try:
        return _plan(typed) if typed["run"] == "train" else _plan_supervised(typed)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except UserError as error:
        print_error(error)
        return 1


def _plan(typed: Mapping[str, Any]) -> int:
    config = load_config(typed["configuration"], world_size=None, check_paths=False)
    find_architectures(config)
    # Models that are not found are reported before torch is imported.
    from megarl.planning.device import choose_device
    from megarl.planning.machine import EngineCost, Lengths
    from megarl.planning.planner import Planner
    from megarl.planning.report import show, to_dict

    device = choose_device(typed["device"], config.trainer, config.actor_rollout_ref.actor.megatron.dtype)
    planner = Planner(
        typed["configuration"],
        device=with_options(device, typed),
        ranks_per_node=typed["gpus_per_node"],
        host_bytes=typed["host_memory"],
        links=_links(typed),
        engine=EngineCost(*(ms / 1e3 for ms in typed["engine_ms"])),
        lengths=typed["lengths"] and Lengths(*typed["lengths"]),
    )
    plan = planner.plan()
    if typed["as_json"]:
        print(json.dumps(to_dict(plan)))
    else:
        show_plan(plan.workload.config)
        show(plan, Screen())
    return 1 if plan.shortfalls or plan.host_missing else 0


def _plan_supervised(typed: Mapping[str, Any]) -> int:
    """Plan a run that learns from files alone."""
    load = load_sft_config if typed["run"] == "sft" else load_reward_train_config
    config = load(typed["configuration"], world_size=None, check_paths=False)
    find_architectures(config)
    from megarl.planning.device import choose_device, host_bytes_here
    from megarl.planning.machine import Machine
    from megarl.planning.planner import architecture_of
    from megarl.planning.supervised import plan_supervised

    device = with_options(choose_device(typed["device"], config.trainer, config.megatron.dtype), typed)
    ranks_per_node = typed["gpus_per_node"] or config.trainer.n_gpus_per_node
    machine = Machine(peaks=device.peaks, links=_links(typed), ranks_per_node=ranks_per_node)
    host_bytes = typed["host_memory"] or host_bytes_here(config.trainer)
    plan = plan_supervised(config, architecture_of(config.model), device, machine, host_bytes=host_bytes)
    if typed["as_json"]:
        print(json.dumps(plan.to_dict()))
    else:
        plan.show(Screen())
    return 0 if plan.fits else 1


def _links(typed: Mapping[str, Any]) -> "Links":
    from megarl.planning.traffic import Links

    inside_latency_us, between_latency_us = typed["latency_us"]
    return Links(
        inside=typed["intra_node_bandwidth"],
        between=typed["inter_node_bandwidth"],
        domain=typed["nvlink_domain"],
        inside_latency=inside_latency_us / 1e6,
        between_latency=between_latency_us / 1e6,
    )


def with_options(device: "Device", typed: Mapping[str, Any]) -> "Device":
    """Return a device with the memory and the speeds that were typed."""
    peaks = device.peaks
    if typed["peak_tflops"]:
        narrow = {width: tflops * 1e12 for width, tflops in typed["peak_tflops"].items()}
        peaks = replace(peaks, flops_per_second=narrow.pop(None), narrow_flops=narrow)
    if typed["memory_bandwidth"]:
        peaks = replace(peaks, bytes_per_second=typed["memory_bandwidth"])
    return replace(device, num_bytes=typed["gpu_memory"] or device.num_bytes, peaks=peaks)
