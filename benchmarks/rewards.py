"""`python -m benchmarks rewards`: how many responses a second a rank scores, by rule and by isolation.

The responses are scored as in a run: by the supervisors of a rank, which get them one by one. A custom function is
measured in both ways, because `reward_model.isolation` applies to it alone. Processor time does not depend on other
work of the machine, as the responses a second do.
"""

import json
import resource
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import report
from benchmarks.options import rewards_parser
from megarl.platform.screen import Screen
from megarl.rewards.config import CustomRewardSection, RulesSection
from megarl.rewards.configured import make_pool
from megarl.sandbox.pool import Pool
from megarl.sandbox.wire import pack

CUSTOM = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str.rpartition("#### ")[2] == ground_truth)
"""
GSM8K = [f"She sells {number} eggs a day, so she earns {2 * number} dollars.\n#### {number}" for number in range(64)]
MATH = [rf"The sum is $\frac{{{number}}}{{7}} + 1$, so \boxed{{\frac{{{number + 7}}}{{7}}}}." for number in range(64)]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A rule, the way to call it, and the responses that it scores."""

    rule: str
    isolation: str
    data_source: str
    responses: Sequence[str]


CASES = (
    Case(rule="custom", isolation="response", data_source="own", responses=GSM8K),
    Case(rule="custom", isolation="process", data_source="own", responses=GSM8K),
    Case(rule="gsm8k", isolation="process", data_source="gsm8k", responses=GSM8K),
    Case(rule="math", isolation="process", data_source="math", responses=MATH),
)


def main(argv: Sequence[str]) -> int:
    """Measure, and print the results."""
    options = rewards_parser().parse_args(argv)
    measured = [_measure(case, num=options.responses, num_workers=options.workers) for case in CASES]
    found = {
        **report.origin("rewards", argv),
        "cases": measured,
    }
    if options.json:
        print(json.dumps(found))
    else:
        _show(found, Screen())
    return 0


def _measure(case: Case, *, num: int, num_workers: int) -> dict[str, Any]:
    """Return the responses a second, and the milliseconds of processor time that each takes."""
    _, cpu_of_start_s = _score(case, num=0, num_workers=num_workers)
    seconds, cpu_s = _score(case, num=num, num_workers=num_workers)
    cpu_ms = 1000 * (cpu_s - cpu_of_start_s) / num
    return {"rule": case.rule, "isolation": case.isolation, "per_s": num / seconds, "cpu_ms": cpu_ms}


def _score(case: Case, *, num: int, num_workers: int) -> tuple[float, float]:
    """Score `num` responses after a first one; return their seconds, and the processor time of all processes."""
    texts = [case.responses[number % len(case.responses)] for number in range(num)]
    before_s = _cpu_s()
    with _pool_of(case, num_workers) as pool:
        pool.wait(_submit(pool, case, case.responses[:1]))  # loads the rule
        start = time.perf_counter()
        pool.wait(_submit(pool, case, texts))
        seconds = time.perf_counter() - start
    return seconds, _cpu_s() - before_s


def _cpu_s() -> float:
    """Return the processor time of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextmanager
def _pool_of(case: Case, num_workers: int) -> Iterator[Pool]:
    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as directory:
        path = Path(directory) / "own.py"
        path.write_text(CUSTOM, encoding="utf-8")
        section = RulesSection(num_workers=num_workers, isolation=case.isolation)  # type: ignore[arg-type]
        pool = make_pool(section, CustomRewardSection(path=str(path) if case.rule == "custom" else None))
        try:
            yield pool
        finally:
            pool.close()


def _submit(pool: Pool, case: Case, texts: Sequence[str]) -> Any:
    row = {"data_source": case.data_source, "ground_truth": "18", "extra_info": {}}
    return [pool.submit(pack(row | {"solution_str": text})) for text in texts]


def _show(found: Mapping[str, Any], console: Screen) -> None:
    """Print the results as a table."""
    table = Table("rule", "isolation", "responses a second", "CPU ms of one")
    for case in found["cases"]:
        table.add_row(case["rule"], case["isolation"], f"{case['per_s']:.0f}", f"{case['cpu_ms']:.2f}")
    console.print(table)
    for title in ("machine", "versions", "command"):
        console.print(f"{title}: {found[title]}", highlight=False, soft_wrap=True)
