"""No split shows: log-probabilities, values, losses and gradient norms are those of one unsharded model.

The same global batch runs through Megatron cut in every way over up to four processes; the answers are compared with
`transformers` on the same weights and with plain autograd through it.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megarl.algorithms.losses import PolicyOutputs, Totals
from megarl.batch import Experience, Prompt, Rollouts
from megarl.config.policy import ActorSection, CriticSection
from megarl.data.conversations import scoring_batch
from megarl.training.minibatches import minibatches
from megarl.training.objectives import ActorObjective, CriticObjective
from tests.support.learners import make_test_learner
from tests.support.ranks import RankPool

NUM_RANKS = 4
CHECKPOINTS = {variant: (variant, {}) for variant in ("llama", "qwen2", "qwen3-tied")}
SPLITS = {  # (TP, PP, DP): world size
    (1, 1, 1): 1,
    (2, 1, 1): 2,
    (1, 2, 1): 2,
    (1, 1, 2): 2,
    (2, 2, 1): 4,
    (2, 1, 2): 4,
}
TEMPERATURE = 0.8
ACTOR = ActorObjective(ActorSection(entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1), horizon=8)
CRITIC = CriticObjective(CriticSection(), horizon=8)
TOLERANCE = {"rtol": 1e-5, "atol": 2e-6}


def experience() -> Experience:
    """Four prompts with two samples each, of very different lengths."""
    generator = torch.Generator().manual_seed(1)
    prompts = [
        Prompt(
            index=number,
            token_ids=torch.randint(3, 200, (3 + 4 * number,), generator=generator).tolist(),
            text="",
            data_source="",
            ground_truth=None,
            extra_info={},
        )
        for number in range(4)
    ]
    lengths = torch.tensor([4, 8, 1, 5, 6, 2, 8, 3])
    mask = torch.arange(8) < lengths[:, None]

    def noise() -> Tensor:
        return torch.randn(mask.shape, generator=generator) * mask

    old = -noise().abs() - 4.0 * mask
    return Experience(
        prompts=prompts,
        groups=torch.arange(4).repeat_interleave(2),
        responses=torch.randint(3, 200, mask.shape, generator=generator) * mask,
        mask=mask,
        rollout_log_probs=old,
        truncated=torch.zeros(8, dtype=torch.bool),
        texts=[""] * 8,
        scores=torch.zeros(8),
        accuracies=torch.zeros(8),
        old_log_probs=old,
        ref_log_probs=old + 0.1 * noise(),
        values=0.1 * noise(),
        advantages=noise(),
        weights=mask.to(torch.float32),
        returns=noise(),
    )


def sizes(tp: int, pp: int) -> dict[str, Any]:
    return {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}


def megatron_answers(
    checkpoint: Path,
    role: str,
    split: dict[str, Any],
    max_tokens: int,
    objective: Any = None,
    against: Path | None = None,
) -> dict[str, Any]:
    """On one rank: infer, update, and infer again; `against` another policy, if one is given."""
    from megarl.learner.learner import Budget

    learner = make_test_learner(checkpoint, split, role=role, temperature=TEMPERATURE)
    other = None
    if against:
        other = make_test_learner(against, split, temperature=TEMPERATURE, optim=None, mesh=learner.mesh)
    if role == "value" and learner.mesh.is_last_stage:
        head = learner.modules[-1].output_layer.weight
        with torch.no_grad():
            head.copy_(torch.randn(head.shape, generator=torch.Generator().manual_seed(2)))
    batch, budget = experience(), Budget(max_tokens=max_tokens, max_sequences=None)
    before = learner.infer(batch, budget, against=other)
    objective = objective or (ACTOR if role == "policy" else CRITIC)
    metrics = learner.update([batch], objective, budget, against=other)
    after = learner.infer(batch, budget, against=other)
    return {"before": before, "metrics": metrics, "after": after}


def reference_answers(
    checkpoint: Path,
    objective: ActorObjective = ACTOR,
    batch: Experience | None = None,
    against: Path | None = None,
) -> tuple[PolicyOutputs, float, dict[str, float]]:
    """Log-probabilities, gradient norm and metrics by `transformers` and autograd."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    batch = experience() if batch is None else batch
    other = AutoModelForCausalLM.from_pretrained(against or checkpoint, dtype=torch.float32).requires_grad_(False)
    outputs = outputs_of(model, batch, other)
    loss, metrics = objective(outputs, batch, Totals.of(batch.mask))
    loss.backward()
    return outputs, gradient_norm(model), {name: float(value) for name, value in metrics.items()}


def outputs_of(model: Any, batch: Rollouts, other: Any, *, temperature: float = TEMPERATURE) -> PolicyOutputs:
    """What a model of `transformers` says, and how far it is from the other, one sequence at a time."""
    log_probs, entropy, kl = [], [], []
    for sample in range(len(batch)):
        prompt, response = list(batch.prompt_of(sample).token_ids), batch.response_ids(sample)
        log_p, log_q = (
            (says(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
            for says in (model, other)
        )
        padding = (0, batch.mask.shape[1] - len(response))
        chosen = log_p[torch.arange(len(response)), torch.tensor(response, dtype=torch.int64)]
        log_probs.append(torch.nn.functional.pad(chosen, padding))
        entropy.append(torch.nn.functional.pad(-(log_p.exp() * log_p).sum(-1), padding))
        kl.append(torch.nn.functional.pad((log_p.exp() * (log_p - log_q)).sum(-1), padding))
    return PolicyOutputs(log_probs=torch.stack(log_probs), entropy=torch.stack(entropy), kl=torch.stack(kl))


def gradient_norm(model: Any) -> float:
    """Of all its parameters together."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return float(torch.stack([gradient.norm() for gradient in gradients]).norm())


@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3-tied"])
def test_policy(pool: RankPool, checkpoints: dict[str, Path], variant: str) -> None:
    expected, norm, metrics = reference_answers(checkpoints[variant])
    first: dict[str, Any] | None = None
    for (tp, pp, _), world_size in SPLITS.items():
        for max_tokens in (24, 1000):
            answers = pool.run(world_size, megatron_answers, checkpoints[variant], "policy", sizes(tp, pp), max_tokens)
            for answer in answers:
                torch.testing.assert_close(answer["before"].log_probs, expected.log_probs.detach(), **TOLERANCE)
                torch.testing.assert_close(answer["before"].entropy, expected.entropy.detach(), **TOLERANCE)
                assert answer["metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-5)
                for name, value in metrics.items():
                    assert answer["metrics"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
                first = first or answer
                torch.testing.assert_close(answer["after"].log_probs, first["after"].log_probs, rtol=1e-4, atol=1e-4)
                assert not torch.equal(answer["after"].log_probs, answer["before"].log_probs)


def updates_without_failed(checkpoint: Path, split: dict[str, Any], failed: list[int]) -> tuple[dict[str, float], Any]:
    """On one rank: an epoch in mini-batches of one prompt without the failed samples, and what is inferred then."""
    from megarl.learner.learner import Budget

    learner = make_test_learner(checkpoint, split, temperature=TEMPERATURE)
    batch, budget = experience(), Budget(max_tokens=40, max_sequences=None)
    failures = ["timeout" if sample in failed else None for sample in range(len(batch))]
    judged = replace(batch, failures=failures).select(torch.tensor([f is None for f in failures]).nonzero()[:, 0])
    assert learner.infer(judged, budget).log_probs.shape == judged.mask.shape
    cut = minibatches(judged, num_prompts=1, num_epochs=1, shuffle=False, seed=0)
    metrics = learner.update(cut, ACTOR, budget)
    return metrics, learner.infer(batch, budget).log_probs


def updates_never_drawn(checkpoint: Path, samples: list[list[int]]) -> tuple[dict[str, float], Any]:
    """On one rank: the same from mini-batches that are put together by hand."""
    from megarl.learner.learner import Budget

    learner = make_test_learner(checkpoint, {}, temperature=TEMPERATURE)
    batch, budget = experience(), Budget(max_tokens=1000, max_sequences=None)
    metrics = learner.update([batch.select(torch.tensor(of)) for of in samples], ACTOR, budget)
    return metrics, learner.infer(batch, budget).log_probs


def test_samples_whose_reward_failed_show_in_no_split(pool: RankPool, checkpoints: dict[str, Path]) -> None:
    """Of the four prompts one is without a sample, and one has a single sample: a data-parallel rank is without one."""
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
            answers = pool.run(world_size, megatron_answers, checkpoints["llama"], "value", sizes(tp, pp), max_tokens)
            for answer in answers:
                first = first or answer
                torch.testing.assert_close(answer["before"], first["before"], **TOLERANCE)
                assert answer["metrics"] == pytest.approx(first["metrics"], rel=1e-5, abs=1e-7)
                assert not torch.equal(answer["after"], answer["before"])
                torch.testing.assert_close(answer["after"], first["after"], rtol=1e-4, atol=1e-5)


def read_in_other_tokens() -> Experience:
    """The batch as a critic with tokens of its own reads it: longer or shorter, several tokens from one state."""
    batch, generator = experience(), torch.Generator().manual_seed(4)
    lengths = torch.randint(5, 20, (len(batch),), generator=generator).tolist()
    sequences = [torch.randint(3, 200, (length,), generator=generator).tolist() for length in lengths]
    last = torch.tensor(lengths)[:, None] - 2
    steps = torch.randint(0, 3, batch.mask.shape, generator=generator)
    return replace(batch, sequences=sequences, places=(2 + steps.cumsum(-1)).minimum(last))


def read_values(checkpoint: Path, split: dict[str, Any]) -> dict[str, Any]:
    """On one rank: the values of such a batch, those of each state read alone, and an update's metrics."""
    from megarl.learner.learner import Budget

    learner = make_test_learner(checkpoint, split, role="value")
    if learner.mesh.is_last_stage:
        head = learner.modules[-1].output_layer.weight
        with torch.no_grad():
            head.copy_(torch.randn(head.shape, generator=torch.Generator().manual_seed(2)))
    batch, budget = read_in_other_tokens(), Budget(max_tokens=40, max_sequences=None)
    assert batch.sequences and batch.places is not None
    rows = batch.mask.nonzero().tolist()
    states = [batch.sequences[row][: int(batch.places[row, token]) + 1] for row, token in rows]
    alone = learner.infer(scoring_batch(states), budget)[:, 0]
    values = learner.infer(batch, budget)
    return {"values": values[batch.mask], "alone": alone, "metrics": learner.update([batch], CRITIC, budget)}


def test_a_critic_of_other_tokens_values_the_states_it_reads(pool: RankPool, checkpoints: dict[str, Path]) -> None:
    first: dict[str, Any] | None = None
    for (tp, pp, _), world_size in SPLITS.items():
        for answer in pool.run(world_size, read_values, checkpoints["llama"], sizes(tp, pp)):
            first = first or answer
            torch.testing.assert_close(answer["values"], answer["alone"], **TOLERANCE)
            torch.testing.assert_close(answer["values"], first["values"], **TOLERANCE)
            assert answer["metrics"] == pytest.approx(first["metrics"], rel=1e-5, abs=1e-7)
    assert first is not None and float(first["values"].std()) > 0.1
