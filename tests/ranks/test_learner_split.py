"""No split changes a result: log-probabilities, values, losses and gradient norms equal one unsharded model's.

The same global batch runs through Megatron under every split over up to four processes. The results are compared with
`transformers` on the same weights, and with plain autograd through it.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.batch import Experience
from megarl.data.conversations import scoring_batch
from tests.support.learners import (
    ACTOR,
    CRITIC,
    TEMPERATURE,
    TOLERANCE,
    draw_head,
    learner_outputs,
    make_test_learner,
    outputs_of_all,
    sizes,
    update,
)
from tests.support.ranks import RankPool
from tests.support.records import experience, in_parts
from tests.support.references import reference_outputs

CHECKPOINTS = {
    variant: (variant, {})
    for variant in ("llama", "qwen2", "qwen3-tied", "gpt_neox", "phi3", "smollm3", "ernie4_5", "seed_oss", "ministral3")
}
SPLITS = {  # (TP, PP, DP): world size
    (1, 1, 1): 1,
    (2, 1, 1): 2,
    (1, 2, 1): 2,
    (1, 1, 2): 2,
    (2, 2, 1): 4,
    (2, 1, 2): 4,
}


@pytest.mark.parametrize("variant", CHECKPOINTS)
def test_policy(pool: RankPool, checkpoints: dict[str, Path], variant: str) -> None:
    expected, norm, metrics = reference_outputs(checkpoints[variant])
    first: dict[str, Any] | None = None
    for (tp, pp, _), world_size in SPLITS.items():
        for max_tokens in (24, 1000):
            results = pool.run(world_size, learner_outputs, checkpoints[variant], "policy", sizes(tp, pp), max_tokens)
            for result in results:
                torch.testing.assert_close(result["before"].log_probs, expected.log_probs.detach(), **TOLERANCE)
                torch.testing.assert_close(result["before"].entropy, expected.entropy.detach(), **TOLERANCE)
                assert result["metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-5)
                for name, value in metrics.items():
                    assert result["metrics"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
                first = first or result
                torch.testing.assert_close(result["after"].log_probs, first["after"].log_probs, rtol=1e-4, atol=1e-4)
                assert not torch.equal(result["after"].log_probs, result["before"].log_probs)


def micro_batches_counted(checkpoint: Path, split: dict[str, Any]) -> tuple[int, int]:
    """Return how many micro-batches people saw done after an update, of how many."""
    from megarl.platform import progress
    from megarl.learner.batching import Budget

    learner = make_test_learner(checkpoint, split, temperature=TEMPERATURE)
    cut = in_parts(experience(), num_prompts=2)
    with progress.within("update_actor"):
        update(learner, cut, ACTOR, Budget(max_tokens=40, max_sequences=1))
        phase = progress.now()
    assert phase
    return phase.done, phase.total


@pytest.mark.parametrize(("split", "expected"), [(sizes(1, 2), (8, 8)), (sizes(1, 1), (4, 4))])
def test_every_micro_batch_of_a_rank_is_counted(
    pool: RankPool, checkpoints: dict[str, Path], split: dict[str, Any], expected: tuple[int, int]
) -> None:
    """8 samples: each stage of a pipeline runs all of them, each data-parallel rank its half."""
    assert pool.run(2, micro_batches_counted, checkpoints["llama"], split) == [expected, expected]


def updates_without_failed(checkpoint: Path, split: dict[str, Any], failed: list[int]) -> tuple[dict[str, float], Any]:
    """Update in mini-batches of one prompt, without the failed samples; return metrics and log-probabilities."""
    from megarl.learner.batching import Budget

    learner = make_test_learner(checkpoint, split, temperature=TEMPERATURE)
    batch, budget = experience(), Budget(max_tokens=40, max_sequences=None)
    judged = batch.select(torch.tensor([sample for sample in range(len(batch)) if sample not in failed]))
    assert outputs_of_all(learner, judged, budget).log_probs.shape == judged.mask.shape
    cut = in_parts(judged, num_prompts=1)
    metrics = update(learner, cut, ACTOR, budget)
    return metrics, outputs_of_all(learner, batch, budget).log_probs


def updates_never_drawn(checkpoint: Path, samples: list[list[int]]) -> tuple[dict[str, float], Any]:
    """Update on mini-batches of the given samples; return the same. Runs on one rank."""
    from megarl.learner.batching import Budget

    learner = make_test_learner(checkpoint, {}, temperature=TEMPERATURE)
    batch, budget = experience(), Budget(max_tokens=1000, max_sequences=None)
    metrics = update(learner, [batch.select(torch.tensor(of)) for of in samples], ACTOR, budget)
    return metrics, outputs_of_all(learner, batch, budget).log_probs


def test_samples_whose_reward_failed_show_in_no_split(pool: RankPool, checkpoints: dict[str, Path]) -> None:
    """One of four prompts has no sample, and one has a single sample: a data-parallel rank then has no sample."""
    ((expected, after),) = pool.run(1, updates_never_drawn, checkpoints["llama"], [[3], [4, 5], [6, 7]])
    for tp, pp, dp in ((1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 2)):
        args = (checkpoints["llama"], sizes(tp, pp), [0, 1, 2])
        for metrics, found in pool.run(tp * pp * dp, updates_without_failed, *args):
            assert metrics == pytest.approx(expected | {"empty_minibatches": 1.0}, rel=1e-5, abs=1e-6)
            torch.testing.assert_close(found, after, rtol=1e-4, atol=1e-4)


def test_value(pool: RankPool, checkpoints: dict[str, Path]) -> None:
    first: dict[str, Any] | None = None
    for (tp, pp, _), world_size in SPLITS.items():
        for max_tokens in (24, 1000):
            results = pool.run(world_size, learner_outputs, checkpoints["llama"], "value", sizes(tp, pp), max_tokens)
            for result in results:
                first = first or result
                torch.testing.assert_close(result["before"], first["before"], **TOLERANCE)
                assert result["metrics"] == pytest.approx(first["metrics"], rel=1e-5, abs=1e-7)
                assert not torch.equal(result["after"], result["before"])
                torch.testing.assert_close(result["after"], first["after"], rtol=1e-4, atol=1e-5)


def read_in_other_tokens() -> Experience:
    """Return the batch in a critic's own tokens: longer or shorter; one state may precede several tokens."""
    batch, generator = experience(), torch.Generator().manual_seed(4)
    lengths = torch.randint(5, 20, (len(batch),), generator=generator).tolist()
    sequences = torch.randint(3, 200, (sum(lengths),), generator=generator, dtype=torch.int32)
    last = torch.tensor(lengths)[:, None] - 2
    steps = torch.randint(0, 3, (len(batch), 8), generator=generator)
    places = batch.flat((2 + steps.cumsum(-1)).minimum(last))
    return replace(batch, read_lengths=torch.tensor(lengths), sequences=sequences, places=places)


def read_values(checkpoint: Path, split: dict[str, Any]) -> dict[str, Any]:
    """Return the values of such a batch, the values of each state read alone, and the metrics of an update."""
    from megarl.learner.batching import Budget

    learner = make_test_learner(checkpoint, split, role="value")
    draw_head(learner)
    batch, budget = read_in_other_tokens(), Budget(max_tokens=40, max_sequences=None)
    assert batch.places is not None
    sequences = [part.tolist() for part in batch.tokens().split(batch.lengths().tolist())]
    samples = torch.arange(len(batch)).repeat_interleave(batch.num_tokens)
    read = zip(samples.tolist(), batch.places.tolist(), strict=True)
    states = scoring_batch([sequences[sample][: place + 1] for sample, place in read])
    alone = outputs_of_all(learner, states, budget)
    values = outputs_of_all(learner, batch, budget)
    return {"values": values, "alone": alone, "metrics": update(learner, [batch], CRITIC, budget)}


def test_critic_with_own_tokenizer_values_states_it_reads(pool: RankPool, checkpoints: dict[str, Path]) -> None:
    first: dict[str, Any] | None = None
    for (tp, pp, _), world_size in SPLITS.items():
        for result in pool.run(world_size, read_values, checkpoints["llama"], sizes(tp, pp)):
            first = first or result
            torch.testing.assert_close(result["values"], result["alone"], **TOLERANCE)
            torch.testing.assert_close(result["values"], first["values"], **TOLERANCE)
            assert result["metrics"] == pytest.approx(first["metrics"], rel=1e-5, abs=1e-7)
    assert first is not None and float(first["values"].std()) > 0.1
