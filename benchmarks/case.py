"""One measurement on its ranks: `python -m benchmarks.case DIRECTORY times|peaks`.

DIRECTORY has `case.json` and the model's `config.json`; `times.json` or `peaks.json` is written to it. Every repeat
changes the trainer's weights, and before each way the engine's weights are set to zero. Afterwards the engine must give
equal log-probabilities on fixed prompts for all ways, so that no way is fast because it is wrong.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cases import Case, Split
from benchmarks.memory import peak_extra_bytes
from megarl.commands.entry import JobProgram, run
from megarl.distributed.exchange import wait_for_all
from megarl.distributed.launch import Launch
from megarl.platform.errors import UserError
from megarl.tracking.config import TrainerSection

if TYPE_CHECKING:
    from benchmarks.subject import TrainerAndEngine
    from benchmarks.ways import Direct, FullTensors

GROWTH = 1.01  # of all weights between two repeats
LARGEST_DIFFERENCE = 0.01  # mean difference between the probabilities of a token in trainer and engine


@dataclass(frozen=True)
class Arguments:
    """The kind of measurement, and the directory with its description."""

    case: Case
    directory: Path
    what: str
    trainer: TrainerSection


def main(argv: Sequence[str] = sys.argv[1:]) -> None:
    """Measure one case."""
    imports = ("benchmarks.subject", "megarl.rollout.imported")
    run(JobProgram(module="benchmarks.case", load=read_arguments, body=measure, imports=imports), argv)


def read_arguments(argv: Sequence[str], *, world_size: int | None) -> Arguments:
    """Read the case, which has the number of ranks."""
    directory = Path(argv[0])
    what = argv[1]
    case = Case(**json.loads((directory / "case.json").read_text(encoding="utf-8")))
    num_ranks = Split.read(case.layout).num_ranks
    return Arguments(case, directory, what, TrainerSection(n_gpus_per_node=num_ranks, device=case.device))


def measure(arguments: Arguments, launch: Launch) -> None:
    """Build trainer and engine, run the ways, and write the results of every rank, rank by rank.

    Raises:
        UserError: after a way the weights of engine and trainer differ.
    """
    from benchmarks.subject import TrainerAndEngine
    from benchmarks.ways import Direct, FullTensors
    from megarl.distributed.exchange import together

    case = arguments.case
    subject = TrainerAndEngine.build(case, arguments.directory)
    direct = Direct(subject, bucket_bytes=case.bucket_megabytes << 20, ranks_per_node=launch.local_world_size)
    full = FullTensors(subject, json.loads((arguments.directory / "config.json").read_text(encoding="utf-8")))
    for way in (direct, full):
        way.run()
        subject.ask()
    if arguments.what == "times":
        mine = times(subject, direct, full, repeats=case.repeats)
    else:
        device = subject.learner.device
        peaks = {
            "megarl": peak_extra_bytes(direct.run_with_new_buckets, device),
            "mbridge": peak_extra_bytes(full.run, device),
        }
        mine = {"peak_extra_bytes": peaks}
    ranks = together(lambda: mine)
    if launch.rank == 0:
        (arguments.directory / f"{arguments.what}.json").write_text(json.dumps(ranks), encoding="utf-8")
    subject.engine.close()


def times(subject: "TrainerAndEngine", direct: "Direct", full: "FullTensors", *, repeats: int) -> dict[str, Any]:
    """Return the seconds of every way, repeat by repeat, and the bytes that the ways move.

    Raises:
        UserError: after a way the weights of engine and trainer differ.
    """
    from benchmarks.ways import Exchange, PlainCopy, Repack

    copy = PlainCopy(subject)
    exchange = Exchange(direct.plan, subject.learner.device)
    repack = Repack(subject)
    ways: dict[str, Callable[[], None]] = {"megarl": direct.run, "mbridge": full.run}
    seconds: dict[str, list[float]] = {name: [] for name in (*ways, "copy", "exchange", "repack")}
    differences = []
    for repeat in range(repeats):
        subject.scale(GROWTH)
        answers = {}
        for name in sorted(ways, reverse=bool(repeat % 2)):
            seconds["repack"].append(timed(repack.run) - repack.seconds_to_ignore)
            seconds["copy"].append(timed(copy.run))
            seconds["exchange"].append(timed(exchange.run))
            seconds[name].append(timed(ways[name]))
            answers[name] = subject.ask()
        check_equal(answers, repeat)
        differences.append(subject.difference(answers["megarl"]))
    if max(differences) > LARGEST_DIFFERENCE:
        raise UserError(f"engine and trainer give the same tokens probabilities that differ by {max(differences):.3f}")
    return {
        "seconds": seconds,
        "bytes_received": {"megarl": direct.bytes_received, "mbridge": full.bytes_received},
        "bytes_lower_bound": direct.bytes_lower_bound,
        "engine_bytes": copy.num_bytes,
        "mean_probability_difference": max(differences),
    }


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that the work takes on this rank; all ranks start together."""
    wait_for_all()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def check_equal(answers: dict[str, Any], repeat: int) -> None:
    """Raise UserError if the responses of the engine differ between two ways."""
    first, second = answers.values()
    same = first.responses.equal(second.responses) and first.rollout_log_probs.equal(second.rollout_log_probs)
    if not same:
        raise UserError(f"repeat {repeat}: the responses of the engine differ after {' and after '.join(answers)}")


if __name__ == "__main__":
    main()
