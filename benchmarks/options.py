"""The options of the measurements. Their help needs none of the libraries that are measured."""

import argparse
import tempfile
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path

from benchmarks import PROGRAM
from benchmarks.arguments import Arguments
from benchmarks.cases import LAYOUTS, LENGTHS, MODELS

STEP = "The time of every phase of a step, next to vLLM and transformers on the same samples."
SCALING = "Tokens per second of a step over growing ranks, batches and responses."
RESHARD = "The time and memory of a sync, next to a usual way of other trainers."
PHASES = "The time between training and generation: to wake the engine, to sync it, to make room, to let it sleep."
EPISODES = "The occupancy of the engine while environments of many turns take their time."
PLAN = "The time that one rank of thousands takes to plan its part of a sync, and the size of the plan."
CHECKPOINT = "The time of saves and loads of checkpoints, normal and asynchronous."
SAMPLES = "The processor time and the memory that the samples of a step take on a rank, outside of models."
REWARDS = "The responses that one rank scores in a second, by rule and by isolation."
NUM_RANKS = 2048
"""Ranks of the planned jobs."""


def parser() -> Arguments:
    """Return the measurements with their options."""
    root = Arguments(
        prog=PROGRAM,
        description="Measure a step, a sync, a save or a plan.",
        example=f"{PROGRAM} step --help\n{PROGRAM} step --json",
    )
    measurements = root.add_subparsers(title="Measurements", metavar="MEASUREMENT", required=True)
    for name, (text, options) in PARSERS.items():
        measurements.add_parser(name, help=text, parents=[options()], add_help=False)
    return root


def _parser(name: str, description: str, example: str, *, takes_keys: bool = False) -> Arguments:
    """Return the parser of a measurement; `example` are arguments, and with `takes_keys` others are keys of a run."""
    usage = {"usage": "%(prog)s [options] [a.b.c=value ...]"} if takes_keys else {}
    prog = f"{PROGRAM} {name}"
    return Arguments(prog=prog, description=description, example=f"{prog} {example}", **usage)


def _add_forms(parser: Arguments, *, json: str = "print one JSON object", markdown: str) -> None:
    """Add the options of the output: for people unless one of both is given."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help=json)
    form.add_argument("--markdown", action="store_true", help=markdown)


def _model(name: str) -> str:
    """Return the name of a shape, or of a directory that exists; argparse reports any other name."""
    if name in MODELS or Path(name).is_dir():
        return name
    close = get_close_matches(name, MODELS, n=1)
    remedy = f"did you mean {close[0]}?" if close else f"name a directory, or one of {', '.join(MODELS)}"
    raise argparse.ArgumentTypeError(f"{name!r} is neither a directory nor a known shape: {remedy}")


def _add_workload(parser: Arguments) -> None:
    """Add the options that measured steps and measured scaling share."""
    parser.add_argument("--model", default="llama-3m", type=_model, help=f"a directory, or one of {', '.join(MODELS)}")
    parser.add_argument("--responses", type=int, default=4, help="to each prompt")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32", help="of trainer and engine")


def step_parser() -> Arguments:
    """Return the options of a measured step; other arguments are keys of a run."""
    parser = _parser("step", STEP, "--lengths ragged actor_rollout_ref.rollout.partial.enable=true", takes_keys=True)
    _add_workload(parser)
    parser.add_argument(
        "--lengths",
        type=_lengths,
        default="equal",
        metavar="LENGTHS",
        help=f"of the responses: one or more of {','.join(LENGTHS)}",
    )
    parser.add_argument("--algorithm", choices=("grpo", "ppo"), default="grpo", help="PPO has a critic")
    parser.add_argument("--prompts", type=int, default=32, help="in each step")
    parser.add_argument("--ranks", type=int, default=1, help="processes")
    parser.add_argument("--repeats", type=int, default=8, help="steps after the warm-up")
    parser.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="run the same work with this key changed too, in turn, and print the ratio; may be repeated",
    )
    parser.add_argument("--peer", choices=("trl",), help="train with this library too, in turn (`make setup-peers`)")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="write torch.profiler's trace of one step more")
    _add_forms(
        parser,
        json="print one JSON object for each of the lengths",
        markdown="print the tables of docs/benchmarks/step.md",
    )
    return parser


def scaling_parser() -> Arguments:
    """Return the options of measured scaling; other arguments are keys of a run."""
    parser = _parser("scaling", SCALING, "--ranks 1,2 --picture scaling.svg --markdown", takes_keys=True)
    _add_workload(parser)
    parser.add_argument("--ranks", type=_sizes, default="1,2", help="processes, such as 1,2,4")
    parser.add_argument("--prompts", type=_sizes, default="8,16,32,64", help="in each step")
    parser.add_argument("--response-tokens", type=_sizes, default="32,64,128,256", help="of each response")
    parser.add_argument("--repeats", type=int, default=4, help="steps after the warm-up")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw the curves")
    _add_forms(parser, markdown="print the table of docs/benchmarks/step.md")
    return parser


def reshard_parser() -> Arguments:
    """Return the options of measured syncs."""
    parser = _parser("reshard", RESHARD, "--model llama-100m --layout tp2-tp1")
    parser.add_argument("--model", action="append", choices=MODELS, help="may be repeated")
    parser.add_argument("--layout", action="append", help=f"TRAINER-ENGINE, may be repeated ({', '.join(LAYOUTS)})")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="cuda runs with CUDA graphs")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of trainer and engine")
    parser.add_argument("--repeats", type=int, default=10, help="timed runs of each way")
    parser.add_argument("--bucket-megabytes", type=int, help="actor_rollout_ref.rollout.sync.bucket_megabytes")
    parser.add_argument("--logs", type=Path, help="directory for the output of the ranks, a file per case")
    _add_forms(parser, markdown="print the page docs/benchmarks/reshard.md")
    return parser


def phases_parser() -> Arguments:
    """Return the options of a measured wake, sync and sleep."""
    parser = _parser("phases", PHASES, "--layout tp2pp2-tp2")
    parser.add_argument("--model", choices=MODELS, default="llama-100m", help="a shape, with random weights")
    parser.add_argument("--layout", default="tp1-tp1", help="TRAINER-ENGINE, as in tp2pp2-tp2")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if there is one")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of trainer and engine")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def checkpoint_parser() -> Arguments:
    """Return the options of measured saves and loads."""
    parser = _parser("checkpoint", CHECKPOINT, "--ranks 4 --tensor 2")
    parser.add_argument("--model", choices=MODELS, default="llama-200m", help="a shape, with random weights")
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    parser.add_argument("--tensor", type=int, default=1, help="tensor parallel ranks")
    parser.add_argument("--pipeline", type=int, default=1, help="pipeline stages")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if there is one")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def episodes_parser() -> Arguments:
    """Return the options of measured episodes; other arguments are keys of a run."""
    parser = _parser("episodes", EPISODES, "--seconds 2 --overlap 1 4 --json", takes_keys=True)
    parser.add_argument("--seconds", type=float, default=2.0, help="most of a turn")
    parser.add_argument("--overlap", type=int, nargs="+", default=[1, 4], help="environment.overlap")
    parser.add_argument("--repeats", type=int, default=4, help="steps after the warm-up")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def rewards_parser() -> Arguments:
    """Return the options of measured rewards."""
    parser = _parser("rewards", REWARDS, "--workers 2")
    parser.add_argument("--responses", type=int, default=512, help="for each rule")
    parser.add_argument("--workers", type=int, default=1, help="reward_model.num_workers")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def samples_parser() -> Arguments:
    """Return the options of measured samples."""
    parser = _parser("samples", SAMPLES, "--exchange 2 8 32 --simulate 8 2048 --peer transferqueue --json")
    parser.add_argument("--samples", type=int, default=512, help="of two processes; more processes have more")
    parser.add_argument("--tokens", type=int, default=4096, help="of each response")
    parser.add_argument(
        "--processes", type=int, nargs="*", default=[2, 8], metavar="N", help="processes that take steps; no N: none"
    )
    parser.add_argument(
        "--exchange", type=int, nargs="+", default=[], metavar="N", help="exchange counts among N processes too"
    )
    parser.add_argument(
        "--simulate",
        type=_power_of_two,
        nargs="+",
        default=[],
        metavar="R",
        help="take the steps of one of R ranks too, alone; R is a power of two",
    )
    parser.add_argument(
        "--log-probs", type=int, nargs="+", default=[], metavar="N", help="take the log-probabilities of N requests too"
    )
    parser.add_argument(
        "--peer", choices=("transferqueue",), help="send samples through this library too (`make setup-peers`)"
    )
    parser.add_argument(
        "--page",
        type=Path,
        metavar="FILE.json",
        help="measure nothing; print docs/benchmarks/samples.md from FILE.json",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _power_of_two(text: str) -> int:
    """Return the number of ranks that reduce numbers in pairs, all alike; argparse reports any other number."""
    number = int(text)
    if number < 1 or number & (number - 1):
        raise argparse.ArgumentTypeError(f"{number} ranks are not alike: it is no power of two")
    return number


def plan_parser() -> Arguments:
    """Return the options of measured plans."""
    parser = _parser("plan", PLAN, "--rank 1000")
    parser.add_argument(
        "--rank",
        type=_rank,
        default=NUM_RANKS // 2,
        help="the rank to plan",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _rank(text: str) -> int:
    if not text.isdecimal() or int(text) >= NUM_RANKS:
        raise argparse.ArgumentTypeError(f"there are ranks 0 to {NUM_RANKS - 1}, not {text}")
    return int(text)


def _lengths(text: str) -> list[str]:
    """Read names of lengths that commas separate."""
    names = text.split(",")
    unknown = {*names} - {*LENGTHS}
    if unknown:
        raise argparse.ArgumentTypeError(f"there are {', '.join(LENGTHS)}, not {', '.join(sorted(unknown))}")
    return names


def _sizes(text: str) -> list[int]:
    """Read numbers that commas separate."""
    numbers = text.split(",")
    if not all(number.isdecimal() and int(number) for number in numbers):
        raise argparse.ArgumentTypeError(f"{text} is not numbers such as 1,2,4")
    return [*map(int, numbers)]


PARSERS: Mapping[str, tuple[str, Callable[[], Arguments]]] = {
    "step": (STEP, step_parser),
    "scaling": (SCALING, scaling_parser),
    "episodes": (EPISODES, episodes_parser),
    "reshard": (RESHARD, reshard_parser),
    "phases": (PHASES, phases_parser),
    "plan": (PLAN, plan_parser),
    "checkpoint": (CHECKPOINT, checkpoint_parser),
    "rewards": (REWARDS, rewards_parser),
    "samples": (SAMPLES, samples_parser),
}
"""Measurement -> its description and its options."""
