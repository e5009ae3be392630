"""Plan a run without ranks or weights: `python -m megarl.plan CONFIG.yaml [a.b.c=value ...]`.

Reads only `config.json` of the models. Exit code 1: the run does not fit into the memory of devices or hosts, or a
model cannot be planned. Exit code 2: the configuration is faulty.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence

from rich.console import Console

from megarl.config.faults import ConfigError
from megarl.config.report import show_plan
from megarl.planning.planner import H100, Planner
from megarl.planning.report import show, to_dict
from megarl.planning.seconds import Lengths
from megarl.planning.traffic import Links
from megarl.platform.peaks import Peaks
from megarl.platform.secrets import Parser, guard_output, redact

UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def main(argv: Sequence[str] = sys.argv[1:]) -> int:
    """Print the plan; return 1 if the run does not fit, else 0."""
    options, configuration = _parser().parse_known_args(argv)
    try:
        planner = Planner(
            configuration,
            device_bytes=options.gpu_memory,
            ranks_per_node=options.gpus_per_node,
            host_bytes=options.host_memory,
            links=Links(inside=options.intra_node_bandwidth, between=options.inter_node_bandwidth),
            peaks=Peaks(flops_per_second=options.peak_tflops * 1e12, bytes_per_second=options.memory_bandwidth),
            lengths=options.lengths,
        )
        plan = planner.plan()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except ValueError as error:
        print(redact(f"megarl: {error}"), file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(to_dict(plan)))
    else:
        show_plan(plan.workload.config)
        show(plan, Console())
    return 1 if plan.shortfalls or plan.host_missing else 0


def amount(text: str) -> int:
    """Parse `80GB`, `79.6GiB` or `45GB/s` as bytes, or bytes per second."""
    match = re.fullmatch(rf"\s*([\d.]+)\s*({'|'.join(UNITS)})(/s)?\s*", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number with one of the units {', '.join(UNITS)}")
    return int(float(match[1]) * UNITS[match[2]])


def mean_lengths(text: str) -> Lengths:
    """Parse `256,1024`: the mean tokens of a prompt and of a response."""
    numbers = text.split(",")
    if len(numbers) != 2 or not all(number.strip().isdigit() and int(number) for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is not PROMPT,RESPONSE, two numbers of tokens such as 256,1024")
    return Lengths(prompt=int(numbers[0]), response=int(numbers[1]))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m megarl.plan",
        usage="%(prog)s CONFIG.yaml [MORE.yaml] [a.b.c=value ...] [options]",
        description="Batches, memory and weight traffic of a run, without starting it.",
        allow_abbrev=False,
    )
    parser.add_argument("--gpu-memory", type=amount, default="80GB", help="memory of a device (default: %(default)s)")
    parser.add_argument(
        "--host-memory",
        type=amount,
        help="host memory of a node (default: this machine's, if the run has one node that fits this machine)",
    )
    parser.add_argument(
        "--gpus-per-node", type=int, help="ranks that share a node's links (default: trainer.n_gpus_per_node)"
    )
    parser.add_argument(
        "--intra-node-bandwidth",
        type=amount,
        default="400GB/s",
        help="bandwidth from a rank to the ranks of its node, per direction (default: %(default)s)",
    )
    parser.add_argument(
        "--inter-node-bandwidth",
        type=amount,
        default="45GB/s",
        help="bandwidth from a rank to other nodes, per direction (default: %(default)s)",
    )
    parser.add_argument(
        "--lengths", type=mean_lengths, metavar="PROMPT,RESPONSE", help="mean tokens, for the time (default: the most)"
    )
    parser.add_argument(
        "--peak-tflops",
        type=float,
        default=H100.flops_per_second / 1e12,
        help="greatest speed of a device at products of matrices (default: an H100's, %(default)s)",
    )
    parser.add_argument(
        "--memory-bandwidth",
        type=amount,
        default=int(H100.bytes_per_second),
        help="of a device's own memory (default: an H100's, 3.35TB/s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    return parser


if __name__ == "__main__":
    guard_output()
    sys.exit(main())
