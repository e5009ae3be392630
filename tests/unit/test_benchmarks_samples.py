"""The samples of a step: ranks that are simulated, the summary with its targets, and the page."""

from typing import Any

import pytest
import torch

from benchmarks import samples, samples_page, samples_peer, samples_simulated
from benchmarks.samples_meter import CROSSING_BYTES
from benchmarks.samples_step import PROMPT, Case
from megarl.learner.packing import partition

NUM_RANKS, SHARE, NUM_TOKENS = 4, 16, 8
CASE = Case(NUM_RANKS, NUM_RANKS * SHARE, NUM_TOKENS, "grpo", ragged=True)
EXCHANGES = [
    {"num_ranks": n, "us": 9.0 * n, "cpu_us": us, "messages": 2.0, "bytes": 296.0} for n, us in ((2, 4), (8, 10))
]
OF_CASE = {
    "num_jobs": 1,
    "num_processes": 2,
    "num_samples": 32,
    "num_tokens": 8,
    "estimator": "grpo",
    "ns_per_token_busiest_rank": 120.0,
    "ns_per_token_of_share": 240.0,
    "peak_over_share": 1.5,
    "times_each_token_crosses": 1.001,
}
OF_RANK = {
    "num_ranks": 8,
    "rank": 3,
    "estimator": "gae",
    "seconds": 0.25,
    "ns_per_token_of_share": 2000.0,
    "messages": 5,
    "bytes_sent": 2_000_000,
    "index_bytes": 40_000,
    "us_per_exchange": 700.0,
    "spots_us": {"of_groups": 12.0, "send": 34.0},
}


def found(**parts: Any) -> dict[str, Any]:
    """Return the results of a command that has measured some parts."""
    origin = {"command": "python -m benchmarks samples", "machine": {"date": "2030-01-02"}, "versions": {"torch": "2"}}
    return origin | {"cases": [], "exchange": [], "simulated": [], "log_probs": []} | parts


def owners(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rank that draws each sample, and the rank that learns from it."""
    groups = torch.tensor(case.groups)
    parts = partition(torch.tensor(case.lengths) + len(PROMPT), groups, case.num_processes)
    return (groups + 1) % case.num_processes, parts


def test_simulated_rank_has_traffic_of_a_run() -> None:
    drawn, learnt = owners(CASE)
    sizes = CROSSING_BYTES * torch.tensor(CASE.lengths) + 5  # a sample has a score and a flag too
    for rank in range(NUM_RANKS):
        with samples_simulated.simulated(rank, NUM_RANKS) as transport:
            of_rank = samples_simulated.found_on(rank, CASE, transport)
        leaves, comes = (drawn == rank) & (learnt != rank), (drawn != rank) & (learnt == rank)
        assert of_rank.get("bytes_sent", 0) == sizes[leaves].sum()
        assert of_rank.get("bytes_received", 0) == sizes[comes].sum()
        assert of_rank["messages"] == len(learnt[leaves].unique()) + len(drawn[comes].unique())
        assert of_rank["index_bytes"] == len(sizes) * (2 * 8 + 1) + len(set(CASE.groups)) * 3 * 8
        assert of_rank["seconds"] > 0.0
        spots = of_rank["spots_us"]
        assert (spots.pop("unpack") > 0.0) == bool(comes.any())
        assert all(spent > 0.0 for spent in spots.values())


def test_busiest_rank_draws_and_learns_most() -> None:
    drawn, learnt = owners(CASE)
    lengths = torch.tensor(CASE.lengths)
    tokens = [int(lengths[drawn == rank].sum() + lengths[learnt == rank].sum()) for rank in range(NUM_RANKS)]
    assert tokens[samples_simulated.busiest(CASE)] == max(tokens)


def test_summary_has_largest_numbers_and_growth() -> None:
    more = {"num_processes": 8, "peak_over_share": 2.5, "ns_per_token_of_share": 330.0}
    jobs = {"num_jobs": 4, "ns_per_token_of_share": 300.0, "ns_per_token_busiest_rank": 150.0}
    cases = [OF_CASE, OF_CASE | jobs, OF_CASE | more]
    assert samples.summary(found(cases=cases, exchange=EXCHANGES, peer={"over_transferqueue": 3.0})) == {
        "ns_per_token_busiest_rank": 120.0,
        "peak_over_share": 2.5,
        "times_each_token_crosses": 1.001,
        "growth_2_to_8": pytest.approx(1.1),
        "growth_of_sharing": 1.25,
        "growth_of_exchange": 2.5,
        "over_transferqueue": 3.0,
    }
    assert samples.summary(found(exchange=EXCHANGES[:1])) == {"growth_of_exchange": 1.0}
    simulated = [
        OF_RANK | {"num_ranks": number, "rank": rank, "ns_per_token_of_share": time}
        for number, rank, time in ((2, 0, 40.0), (2, 1, 50.0), (8, 0, 55.0), (64, 0, 60.0))
    ]
    assert samples.summary(found(simulated=simulated)) == {
        "growth_simulated_2_to_8": pytest.approx(1.1),
        "growth_simulated": pytest.approx(1.2),
    }


def test_ways_are_compared_by_whole_time() -> None:
    seconds = [{"put": 1.0, "get": 2.0}, {"put": 2.0, "get": 4.0}, {"put": 5.0, "get": 1.0}]
    theirs = {"seconds": seconds, "peak_bytes": 8e9, "versions": {"ray": "2"}}
    ours = {"seconds": [1.0, 3.0, 2.0], "peak_bytes": 2e9}
    compared = samples_peer.beside(ours, theirs, 4 * 10**9)
    assert compared["over_transferqueue"] == 3.0
    assert compared["megarl"] == {"gb_per_second": 2.0, "peak_over_samples": 0.5}
    assert compared["transferqueue"]["gb_per_second"] == pytest.approx(2 / 3)
    assert compared["transferqueue"]["peak_over_samples"] == 2.0


def test_missing_environment_of_transferqueue_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(samples_peer, "PYTHON", tmp_path / "python")
    with pytest.raises(ValueError, match="python is missing; run `make setup-peers` in "):
        samples_peer.check()


def test_results_become_the_page() -> None:
    ours, theirs = ({"gb_per_second": speed, "peak_over_samples": 2.0} for speed in (1.0, 0.25))
    peer = {"bytes": 10**6, "megarl": ours, "transferqueue": theirs | {"versions": {"ray": "9"}}}
    log_probs = {"num_requests": 16, "vocabulary": 32_000, "vllm_cpu_us": 450.0, "cpu_us": 60.0}
    whole = found(
        cases=[OF_CASE],
        exchange=EXCHANGES,
        simulated=[OF_RANK],
        log_probs=[log_probs],
        peer=peer | {"over_transferqueue": 4.0},
    )
    page = samples_page.markdown(whole | samples.summary(whole))
    assert "| processor time of an exchange, of the most ranks over the fewest | 2.50 | less than the ranks |" in page
    assert "| 1 | 2 | 32 x 8 | grpo | 120 | 240 | 1.5 | 1.001 |" in page
    assert "| 8 | 72 | 10 | 2.50 | 2 | 296 |" in page
    assert "| 8 | gae | 0.250 | 2000 | 0.00 | 5 | 0.04 | 700 |" in page
    assert "| 16 | 32000 | 450 | 60 |" in page
    assert "| TransferQueue | 0.250 | 2.0 |" in page
    assert "- Date: 2030-01-02\n- Command: `python -m benchmarks samples`\n" in page
    assert page.endswith("- Versions of the peer: ray 9\n")
    assert "##" not in samples_page.markdown(found())
