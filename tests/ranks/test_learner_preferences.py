"""A reward model learns from pairs: under every split, loss, metrics and gradient equal one unsharded model's."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from megarl.algorithms.losses import Totals
from megarl.batch import Preferences
from megarl.data.conversations import scoring_batch
from megarl.training.objectives import PreferenceObjective
from tests.support.learners import make_test_learner, outputs_of_all, sizes, update
from tests.support.ranks import RankPool
from tests.support.tiny import write_classifier

OBJECTIVE = PreferenceObjective(centering=0.1)
MARGINS = torch.tensor([0.0, 0.5, -0.2, 1.0, 0.1])
LENGTHS = (4, 8, 2, 5, 6, 2, 18, 23, 3, 7)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classifier(tmp_path_factory.mktemp("checkpoint") / "llama", "llama")


def preferences() -> Preferences:
    """Return five pairs of very different lengths."""
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(3, 200, (length,), generator=generator).tolist() for length in LENGTHS]
    return scoring_batch(sequences).extend(Preferences, margins=MARGINS.repeat_interleave(2))


def megatron_outputs(checkpoint: Path, tp: int, pp: int, max_tokens: int) -> tuple[dict[str, float], Tensor]:
    """Return the metrics of an update, and the scores after it. Runs on every rank."""
    from megarl.learner.batching import Budget

    learner = make_test_learner(checkpoint, sizes(tp, pp), role="value")
    budget = Budget(max_tokens=max_tokens, max_sequences=None, num_together=2)
    metrics = update(learner, [preferences()], OBJECTIVE, budget)
    return metrics, outputs_of_all(learner, preferences(), budget)


def reference_metrics(checkpoint: Path) -> dict[str, float]:
    """Return metrics and gradient norm by `transformers` and autograd, sequence by sequence."""
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float32)
    batch = preferences()
    scores = torch.cat([model(torch.tensor([prompt.token_ids])).logits[0] for prompt in batch.prompts])
    loss, metrics = OBJECTIVE(scores, batch, Totals.of(batch.num_learnt()))
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    return {name: float(value) for name, value in metrics.items()} | {"grad_norm": float(norm)}


def test_no_split_shows(pool: RankPool, checkpoint: Path) -> None:
    expected = reference_metrics(checkpoint)
    first: Tensor | None = None
    for tp, pp, world_size in [(1, 1, 1), (2, 1, 2), (1, 2, 2), (1, 1, 2), (2, 1, 4), (1, 2, 4)]:
        for max_tokens in (43, 1000):  # room for the longest pair, and for all pairs
            for metrics, after in pool.run(world_size, megatron_outputs, checkpoint, tp, pp, max_tokens):
                found = {name: metrics[name] for name in expected}
                assert found == pytest.approx(expected, rel=1e-4, abs=1e-6), (tp, pp, world_size, max_tokens)
                first = after if first is None else first
                torch.testing.assert_close(after, first, rtol=1e-3, atol=1e-3)
