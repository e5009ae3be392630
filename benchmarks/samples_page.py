"""The results of `python -m benchmarks samples`: for a terminal, and as the page docs/benchmarks/samples.md."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from rich.table import Table

from benchmarks import report
from megarl.platform.screen import Screen

Found = Mapping[str, Any]
WIDTH = 120
TARGETS = {
    "ns_per_token_busiest_rank": ("processor time of the busiest rank for a token of the step, ns", "at most 50"),
    "peak_over_share": ("peak of memory over the tokens and outputs of a rank", "at most 3"),
    "times_each_token_crosses": ("times that each token crosses between ranks", "at most 1.01"),
    "growth_simulated_2_to_8": ("processor time of a step of 8 ranks over one of 2, each rank alone", "0.85 to 1.15"),
    "growth_simulated": ("the same of the most simulated ranks over the fewest", "0.85 to 1.15"),
    "growth_2_to_8": ("the same of 8 processes of one job over 8 of four jobs", "0.85 to 1.15"),
    "growth_of_sharing": ("the same of four jobs of 2 processes at once over one, which share the cores", "-"),
    "growth_of_exchange": ("processor time of an exchange, of the most ranks over the fewest", "less than the ranks"),
    "over_transferqueue": ("GB/s point to point over GB/s through TransferQueue", "at least 5"),
}
"""Number of the summary -> its meaning and its target."""


@dataclass(frozen=True)
class Rows:
    """A table with its heading, and a text about it."""

    title: str
    text: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def markdown(found: Found) -> str:
    """Return the page."""
    head = [
        "# The samples of a step, outside of models",
        "<!-- Written by `python -m benchmarks samples --page`; change benchmarks/samples_page.py instead. -->",
        _paragraph(
            "Ranks take a step of the loop from vLLM's outputs on: samples become a record, which travels "
            "to the ranks that learn; then the gate, advantages, metrics and mini-batches, but no text and no model. "
            "Processor time is that of the busiest rank."
        ),
    ]
    parts = [
        f"{'## ' + each.title}\n\n{_paragraph(each.text)}\n\n{report.table(each.columns, each.rows)}"
        for each in tables(found)
    ]
    origin = [
        f"- Date: {found['machine']['date']}",
        f"- Command: `{found['command']}`",
        *(f"- {title.capitalize()}: {report.line(found[title])}" for title in ("machine", "versions")),
    ]
    if "peer" in found:
        origin.append(f"- Versions of the peer: {report.line(found['peer']['transferqueue']['versions'])}")
    return "\n\n".join([*head, *parts, "\n".join(origin)]) + "\n"


def show(found: Found, console: Screen) -> None:
    """Print the tables, and below them how they were measured."""
    console.width = max(console.width, report.WIDTH)
    parts = [_spots(found["simulated"])] if found["simulated"] else []
    for each in [*tables(found), *parts]:
        table = Table(*each.columns, title=each.title)
        for row in each.rows:
            table.add_row(*row)
        console.print(table)
    for title in ("command", "machine", "versions"):
        console.print(f"{title}: {report.line(found[title])}", highlight=False, soft_wrap=True)


def tables(found: Found) -> Iterator[Rows]:
    """Yield a table for each part that was measured."""
    numbers = [(text, f"{found[name]:.2f}", target) for name, (text, target) in TARGETS.items() if name in found]
    if numbers:
        text = "The largest number of all cases, and its target."
        yield Rows("Targets", text, ("number", "measured", "target"), numbers)
    if found["cases"]:
        yield _cases(found["cases"])
    if found["exchange"]:
        yield _exchange(found["exchange"])
    if found["simulated"]:
        yield _simulated(found["simulated"])
    if found["log_probs"]:
        yield _log_probs(found["log_probs"])
    if "peer" in found:
        yield _peer(found["peer"])


def _cases(cases: Sequence[Found]) -> Rows:
    columns = (
        "jobs",
        "ranks",
        "samples",
        "estimator",
        "ns a token",
        "ns a token of the share",
        "peak / share",
        "crosses",
    )
    rows = [
        (
            str(case["num_jobs"]),
            str(case["num_processes"]),
            f"{case['num_samples']} x {case['num_tokens']}",
            case["estimator"],
            f"{case['ns_per_token_busiest_rank']:.0f}",
            f"{case['ns_per_token_of_share']:.0f}",
            f"{case['peak_over_share']:.1f}",
            f"{case['times_each_token_crosses']:.3f}",
        )
        for case in cases
    ]
    text = (
        "Processes over gloo; all jobs of a row take it at once. The share is the samples that a rank learns from. "
        "Processes that share cores also share their caches, so only rows of as many processes compare."
    )
    return Rows("A step", text, columns, rows)


def _exchange(exchanges: Sequence[Found]) -> Rows:
    columns = ("ranks", "us", "processor us", "over the first", "messages of a rank", "bytes of a rank")
    rows = [
        (
            str(each["num_ranks"]),
            f"{each['us']:.0f}",
            f"{each['cpu_us']:.0f}",
            f"{each['cpu_us'] / exchanges[0]['cpu_us']:.2f}",
            f"{each['messages']:.0f}",
            f"{each['bytes']:.0f}",
        )
        for each in exchanges
    ]
    text = (
        "Each replica is one rank with 4 finished samples, which find their groups. The first time is the median, with "
        "waits for cores."
    )
    return Rows("An exchange of counts", text, columns, rows)


def _simulated(ranks: Sequence[Found]) -> Rows:
    columns = (
        *("ranks", "estimator", "step s", "ns a token of the share", "MB received", "messages", "index MB"),
        "us an exchange",
    )
    busiest = {(each["num_ranks"], each["estimator"]): each for each in ranks}  # measured after the first rank
    rows = [
        (
            str(each["num_ranks"]),
            each["estimator"],
            f"{each['seconds']:.3f}",
            f"{each['ns_per_token_of_share']:.0f}",
            f"{each.get('bytes_received', 0) / 1e6:.2f}",
            str(each["messages"]),
            f"{each['index_bytes'] / 1e6:.2f}",
            f"{each['us_per_exchange']:.0f}",
        )
        for each in busiest.values()
    ]
    text = (
        "The busiest rank alone, with as many samples a rank as above and ragged responses. Messages are counted "
        "instead of sent. So the processor time is that of the code; processes above also share caches and memory."
    )
    return Rows("Many ranks, simulated", text, columns, rows)


def _spots(ranks: Sequence[Found]) -> Rows:
    names = list(ranks[0]["spots_us"])
    rows = [
        (
            str(each["num_ranks"]),
            str(each["rank"]),
            each["estimator"],
            *(f"{each['spots_us'].get(name, 0.0):.0f}" for name in names),
        )
        for each in ranks
    ]
    return Rows("Parts of a simulated step", "Microseconds.", ("ranks", "rank", "estimator", *names), rows)


def _log_probs(sizes: Sequence[Found]) -> Rows:
    columns = ("requests", "vocabulary", "us in vLLM", "us here")
    rows = [
        (str(each["num_requests"]), str(each["vocabulary"]), f"{each['vllm_cpu_us']:.0f}", f"{each['cpu_us']:.0f}")
        for each in sizes
    ]
    return Rows("Log-probabilities of drawn tokens", "After the softmax of an engine's step, eager.", columns, rows)


def _peer(peer: Found) -> Rows:
    rows = [
        (name, f"{peer[key]['gb_per_second']:.3f}", f"{peer[key]['peak_over_samples']:.1f}")
        for name, key in (("megarl", "megarl"), ("TransferQueue", "transferqueue"))
    ]
    text = (
        f"One rank gives {peer['bytes'] / 1e6:.0f} MB of samples to another: megarl point to point over gloo, "
        "TransferQueue by a put and a get of SimpleStorage. The peak is the rise of all processes without these "
        "samples."
    )
    return Rows("Compared with TransferQueue", text, ("way", "GB/s", "peak / samples"), rows)


def _paragraph(text: str) -> str:
    return fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)
