"""`python -m benchmarks samples`: what the samples of a step cost the processors of the ranks, outside of models.

Processes exchange over gloo, as in a run. Each has vLLM's outputs as an engine replica of one rank returns them, and
takes the loop's own step with them: the reading of tokens and log-probabilities, a record, the exchange with the ranks
that learn, the gate, the advantages, metrics and mini-batches. Texts are left out, and models answer at once.
Processor time is counted, because the processes share the cores of this machine.
"""

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks import report, samples_exchange, samples_log_probs, samples_page, samples_peer, samples_simulated
from benchmarks.options import samples_parser
from benchmarks.samples_meter import CROSSING_BYTES, DRAWN_BYTES, counted, peak
from benchmarks.samples_step import STEP, Case, Exchange, first_step, job_of
from megarl.distributed.exchange import join_world
from megarl.distributed.sharded import Shares
from megarl.platform.heap import keep_freed_memory, prefer_huge_pages
from megarl.platform.imports import import_modules
from megarl.platform.screen import Screen
from megarl.tracking.timers import Timers
from megarl.training.loop import take_step

SHARE_BYTES = DRAWN_BYTES + 24  # and the outputs of models
REPEATS = 3
EXCHANGES = 100
SMALL, LARGE = 2, 8  # ranks, for the growth


def main(argv: Sequence[str]) -> int:
    """Measure, and print the results; or print the page of earlier results."""
    options = samples_parser().parse_args(argv)
    if options.page:
        print(samples_page.markdown(json.loads(options.page.read_text(encoding="utf-8"))), end="")
        return 0
    prefer_huge_pages()  # as a run does, in all processes that measure
    import_modules(["vllm.outputs"])  # once, before processes are forked

    if options.peer:
        samples_peer.check()
    share = options.samples // 2
    cases = [
        Case(number, share * number, options.tokens, estimator)
        for estimator in ("grpo", "gae")
        for number in options.processes
    ]
    found = report.origin("samples", argv)
    found["cases"] = [measured for case in cases for measured in _measured(case, options.processes)]
    found["exchange"] = [samples_exchange.measure(number) for number in options.exchange]
    found["simulated"] = [
        measured
        for estimator in ("grpo", "gae")
        for number in options.simulate
        for measured in samples_simulated.measure(Case(number, share * number, options.tokens, estimator, ragged=True))
    ]
    found["log_probs"] = [samples_log_probs.measure(number) for number in options.log_probs]
    if options.peer:
        found["peer"] = samples_peer.measure(num_samples=share, num_tokens=options.tokens)
    found |= summary(found)
    if options.json:
        print(json.dumps(found))
    else:
        samples_page.show(found, Screen())
    return 0


def summary(found: dict[str, Any]) -> dict[str, float]:
    """Return the numbers that have targets, as far as they were measured: the largest of all cases.

    `growth_simulated_2_to_8` and `growth_simulated` are those of a step with an equal share: the processor time of the
    busiest rank of 8 over that of 2, and of the most simulated ranks over the fewest. `growth_2_to_8` is the same of 8
    processes of one job over 8 of four jobs: they share cores, caches and memory alike. `growth_of_sharing` is what
    this sharing costs: four jobs of 2 processes over one. `growth_of_exchange` is that of an exchange, from the fewest
    to the most ranks.
    """
    alone = [case for case in found["cases"] if case["num_jobs"] == 1]
    numbers = {
        name: max(case[name] for case in alone)
        for name in ("ns_per_token_busiest_rank", "peak_over_share", "times_each_token_crosses")
        if alone
    }
    if found["simulated"]:
        simulated = _times(found["simulated"], "num_ranks")
        sizes = [size for _, *size in simulated]
        numbers |= _growth("growth_simulated_2_to_8", simulated, [SMALL], [LARGE])
        numbers |= _growth("growth_simulated", simulated, min(sizes), max(sizes))
    processes = _times(found["cases"], "num_jobs", "num_processes")
    many_jobs = [LARGE // SMALL, SMALL]
    numbers |= _growth("growth_2_to_8", processes, many_jobs, [1, LARGE])
    numbers |= _growth("growth_of_sharing", processes, [1, SMALL], many_jobs)
    if found["exchange"]:
        times = {each["num_ranks"]: each["cpu_us"] for each in found["exchange"]}
        numbers["growth_of_exchange"] = times[max(times)] / times[min(times)]
    if "peer" in found:
        numbers["over_transferqueue"] = found["peer"]["over_transferqueue"]
    return numbers


def _times(cases: Sequence[dict[str, Any]], *sizes: str) -> dict[tuple[Any, ...], float]:
    """Return the time of a token of the share on the busiest rank, by the estimator and these sizes of a case."""
    times: dict[tuple[Any, ...], float] = {}
    for case in cases:
        key = (case["estimator"], *(case[size] for size in sizes))
        times[key] = max(times.get(key, 0.0), case["ns_per_token_of_share"])
    return times


def _growth(
    name: str, times: dict[tuple[Any, ...], float], small: Sequence[int], large: Sequence[int]
) -> dict[str, float]:
    """Return the largest growth of all estimators, from `small` to `large` sizes, if both are there."""
    growths = [
        times[estimator, *large] / time
        for (estimator, *size), time in times.items()
        if size == list(small) and (estimator, *large) in times
    ]
    return {name: max(growths)} if growths else {}


def _measured(case: Case, processes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the cost of a case, and of as many jobs of it at once as have the processes of the largest case."""
    yield measure(case)
    if case.num_processes == SMALL and LARGE in processes:
        yield measure(case, num_jobs=LARGE // SMALL)


def measure(case: Case, *, num_jobs: int = 1) -> dict[str, Any]:
    """Return what a step costs the busiest process of a case, which so many jobs take at once."""
    num_processes = num_jobs * case.num_processes
    start = mp.get_context("fork").Barrier(num_processes)
    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as name:
        directory = Path(name)
        mp.start_processes(_work, (case, start, directory), nprocs=num_processes, start_method="fork")
        ranks = [json.loads((directory / f"{process}.json").read_text()) for process in range(num_processes)]
    num_tokens = case.num_samples * case.num_tokens
    share = num_tokens // case.num_processes
    seconds = max(rank["cpu_s"] for rank in ranks)
    return {
        "num_jobs": num_jobs,
        "num_processes": case.num_processes,
        "num_samples": case.num_samples,
        "num_tokens": case.num_tokens,
        "estimator": case.estimator,
        "ns_per_token_busiest_rank": seconds / num_tokens * 1e9,
        "ns_per_token_of_share": seconds / share * 1e9,
        "peak_over_share": max(rank["peak_bytes"] for rank in ranks) / (share * SHARE_BYTES),
        "times_each_token_crosses": sum(rank["sent_bytes"] for rank in ranks)
        / (num_jobs * num_tokens * CROSSING_BYTES),
        "us_per_exchange": max(rank["exchange_cpu_s"] for rank in ranks) * 1e6,
    }


def _work(process: int, case: Case, start: Barrier, directory: Path) -> None:
    """Take steps as one rank of one job, all processes at once, and write what they cost."""
    torch.set_num_threads(1)
    keep_freed_memory()
    job_number, rank = divmod(process, case.num_processes)
    place = {"init_method": f"file://{directory}/{job_number}", "rank": rank, "world_size": case.num_processes}
    join_world(timeout=timedelta(seconds=300), **place)
    job = job_of(case, Shares.blocks(1))
    progress = first_step(job)
    seconds = []
    with counted() as sent, peak() as rise:
        for _ in range(REPEATS):
            start.wait()
            before = time.process_time()
            take_step(job, progress, Timers(), step=STEP)
            seconds.append(time.process_time() - before)
    found = {
        "cpu_s": min(seconds),
        "sent_bytes": sent["bytes"] / REPEATS,
        "peak_bytes": rise["bytes"],
        "exchange_cpu_s": _exchange_seconds(rank, case.num_processes),
    }
    (directory / f"{process}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _exchange_seconds(rank: int, num_processes: int) -> float:
    """Return the processor time of an exchange of windows."""
    exchange = Exchange(rank, num_processes)
    start = time.process_time()
    for _ in range(EXCHANGES):
        exchange.run()
    return (time.process_time() - start) / EXCHANGES
