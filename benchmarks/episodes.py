"""`python -m benchmarks episodes`: how busy the engine is while environments take their time.

`megarl train` plays the same episodes several times, with environments that answer at once and with slow ones. The
requests in the engine depend on counted steps, so equal `overlap` means the same engine steps and the same occupancy,
however slow the environments are. The price of slow environments is the time in which the engine waits for them.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from benchmarks import report
from benchmarks.options import episodes_parser
from benchmarks.step import WARM_UP, run_module
from benchmarks.workload import Workload
from megarl.commands.cli.command import print_error
from megarl.platform.errors import UserError
from megarl.platform.screen import Screen
from megarl.tracking.jsonl import read_jsonl

TURNS = 3
SLOW = '''
import random
import time

from megarl.environments.protocol import Step


class Slow:
    """Takes up to `most` seconds for a turn, the same for the same turn of an episode."""

    def __init__(self, most, turns):
        self.most, self.turns, self.responses = most, turns, []

    def reset(self, row):
        self.row = row
        return row.prompt

    def step(self, response):
        self.responses.append(response)
        time.sleep(random.Random(f"{self.row.seed} {self.responses}").uniform(0.0, self.most))
        return Step(" 5 6 7", len(response) % 7 / 7, done=len(self.responses) == self.turns)
'''


def main(argv: Sequence[str]) -> int:
    """Measure, and print the results."""
    options, overrides = episodes_parser().parse_known_args(argv)
    cases = [(most, overlap) for overlap in options.overlap for most in (0.0, options.seconds)]
    try:
        measured = [measure(most, overlap, options.repeats, overrides) for most, overlap in cases]
    except UserError as error:
        print_error(error)
        return 1
    found = {
        **report.origin("episodes", argv),
        "cases": measured,
    }
    if options.json:
        print(json.dumps(found))
    else:
        show(found, Screen())
    return 0


def measure(most: float, overlap: int, repeats: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Return occupancy and seconds of a step's generation if turns take up to `most` seconds. UserError if it fails.

    The engine draws 8 of 32 episodes at once, so there are others to draw while some wait.
    """
    workload = Workload(model="llama-3m", lengths="ragged", algorithm="grpo", num_prompts=8, num_responses=4)
    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as name:
        directory = Path(name)
        (directory / "slow.py").write_text(SLOW, encoding="utf-8")
        arguments = [
            *workload.write(directory),
            "custom_reward_function.path=null",
            "actor_rollout_ref.rollout.max_num_seqs=8",
            "data.max_response_length=1024",
            f"environment.path={directory / 'slow.py'}",
            "environment.name=Slow",
            f"environment.kwargs={{most: {most}, turns: {TURNS}}}",
            f"environment.overlap={overlap}",
            "environment.num_workers=32",
            "actor_rollout_ref.actor.megatron.dtype=float32",
            "actor_rollout_ref.rollout.dtype=float32",
            "trainer.n_gpus_per_node=1",
            "trainer.logger=[jsonl]",
            "trainer.save_freq=-1",
            "trainer.save_last=false",
            "trainer.val_before_train=false",
            f"trainer.total_training_steps={WARM_UP + repeats}",
            f"trainer.default_local_dir={directory / 'run'}",
            *overrides,
        ]
        run_module("megarl.commands.train", *arguments)
        steps = [line for line in read_jsonl(directory / "run" / "metrics.jsonl") if line["step"] > WARM_UP]
    return {
        "seconds": most,
        "overlap": overlap,
        "occupancy": fmean(step["rollout/occupancy"] for step in steps),
        "gen_s": fmean(step["timing_s/gen"] for step in steps),
        "turns": fmean(step["episode/turns/mean"] for step in steps),
    }


def show(found: Mapping[str, Any], console: Screen) -> None:
    """Print the results as a table."""
    table = Table("seconds of a turn", "overlap", "occupancy", "seconds of generation")
    for case in found["cases"]:
        limits = f"0 to {case['seconds']:g}" if case["seconds"] else "0"
        table.add_row(limits, str(case["overlap"]), f"{case['occupancy']:.3f}", f"{case['gen_s']:.1f}")
    console.print(table)
    for title in ("machine", "versions", "command"):
        console.print(f"{title}: {found[title]}", highlight=False, soft_wrap=True)
