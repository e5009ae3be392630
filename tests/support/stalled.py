"""A run of two ranks that stops making progress. Rank 1 is the cause, in step 1.

The cause is `stop` (SIGSTOP), `sleep` (outside of any collective), `sleep-begun` (and the other rank has begun the
collective before it waits), `lock` (C code that keeps Python from running), `apart` (both ranks wait, in collectives
of different groups), `slow-rewards` (twice as long as a phase may take, one after the other) or `hung-rewards` (after
the first, none ends).
"""

import ctypes
import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.distributed as dist

from megarl.distributed.launch import detect, init_process_groups, join, start
from megarl.distributed.place import WantedRanks
from megarl.distributed.watchdog import note, watching
from megarl.rewards.config import CustomRewardSection, RulesSection
from megarl.rewards.scoring import RuleScorer
from tests.support.records import answer, prompts
from tests.support.spread import spread

TIMEOUT_S, GRACE_S = 10.0, 6.0
REWARD = """
import itertools, time
calls = itertools.count()
def compute_score(**_):
    time.sleep({later} if next(calls) else 0)
    return 1.0
"""


def main(reports: Path, how: str) -> None:
    """Run on one rank of a launched job."""
    launch = detect(os.environ) or start("tests.support.stalled", [], WantedRanks(2, "cpu"))
    join(launch, Path())
    init_process_groups(launch, timeout_s=600)
    other = dist.new_group(backend="gloo")
    place = {"rank": launch.rank, "world_size": launch.world_size}
    with ExitStack() as held:
        directory = Path(held.enter_context(TemporaryDirectory()))
        scorer = begun_scorer(how, directory) if how.endswith("rewards") else None
        held.enter_context(watching(reports, **place, timeout_s=TIMEOUT_S, grace_s=GRACE_S))
        for step in range(3):
            note(step=step, phase="gen", rows=[4, 7])
            dist.barrier()
            note(phase="update_actor")
            if scorer and step == 1:
                score(scorer, launch.rank)
            elif launch.rank == 1 and step == 1:
                halt(how, other)
            if how == "sleep-begun":
                work = dist.barrier(async_op=True)
                work.wait()
            else:
                dist.barrier()
    dist.destroy_process_group()


def begun_scorer(how: str, directory: Path) -> RuleScorer:
    """Rewards that have been called once, so that their processes stand."""
    path = directory / "mine.py"
    path.write_text(REWARD.format(later=600 if how == "hung-rewards" else TIMEOUT_S / 5))
    section = RulesSection(num_workers=1, timeout_s=600.0, isolation="process", canary_every=0)
    scorer = RuleScorer.make(section, CustomRewardSection(path=str(path)), lambda token_ids: "")
    scorer.score(spread(answer(prompts([1]), [1, 1])))
    return scorer


def score(scorer: RuleScorer, rank: int) -> None:
    """Have rank 1 alone own and score responses, each well within its time."""
    note(phase="reward")
    responses = answer(prompts([1]), [1] * 10)
    for sample in range(len(responses) if rank == 1 else 0):
        scorer.begin(responses.prompt_of(sample), responses.response_ids(sample).tolist())
    scorer.score(spread(responses, [1] * len(responses)))


def halt(how: str, other: dist.ProcessGroup | None) -> None:
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how in ("sleep", "sleep-begun"):
        time.sleep(600)
    elif how == "lock":
        ctypes.PyDLL(None).sleep(600)  # PyDLL: the call holds the interpreter's lock
    elif how == "apart":
        dist.barrier(group=other)
