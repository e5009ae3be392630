"""The promise of the learner's inputs: the parts of a mini-batch add up to the whole, in loss, metrics and gradient."""

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms.config import LOSSES, AlgorithmSection, PolicyLossSection, RolloutCorrectionSection
from megarl.algorithms.losses import PolicyOutputs, Totals
from megarl.batch import Experience, Marked, Prompt, Rewarded
from megarl.config.policy import ActorSection, CriticSection
from megarl.training.objectives import ActorObjective, CriticObjective, SFTObjective
from tests.support.estimates import estimate_alone, mark_alone

NUM_SAMPLES, NUM_TOKENS = 6, 5
PRESENT = torch.arange(NUM_TOKENS) < torch.tensor([5, 1, 3, 4, 2, 5])[:, None]
HOLES = [1, 3]  # places of tokens of an environment, in episodes
NAMES = [*(name for name in LOSSES if name != "custom"), "critic", "sft", "ptx"]
MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def mask_of(holes: Sequence[int]) -> Tensor:
    """Return `[N]` bool, False at these places of each response."""
    return torch.ones(NUM_SAMPLES, NUM_TOKENS).index_fill(1, torch.tensor(holes, dtype=torch.int64), 0.0)[PRESENT] > 0


def experience(*, holes: Sequence[int] = (), garbage: float = 0.0) -> Experience:
    """Six samples of two prompts; the tokens in the `holes` are outside the mask, and `garbage` is there."""
    randn = partial(torch.randn, NUM_SAMPLES, NUM_TOKENS, generator=torch.Generator().manual_seed(0))
    mask = mask_of(holes)
    prompts = [
        Prompt(index=i, token_ids=[1], text="", data_source="", ground_truth=None, extra_info={}) for i in range(2)
    ]

    def field(scale: float) -> Tensor:
        return (scale * randn())[PRESENT].masked_fill(~mask, garbage)

    return Experience(
        prompts=prompts,
        groups=torch.tensor([0, 0, 0, 1, 1, 1]),
        num_tokens=PRESENT.sum(-1),
        responses=torch.zeros(len(mask), dtype=torch.int32),
        mask=mask,
        rollout_log_probs=field(1.0),
        truncated=torch.zeros(NUM_SAMPLES, dtype=torch.bool),
        scores=torch.zeros(NUM_SAMPLES),
        old_log_probs=field(1.0),
        ref_log_probs=field(1.0),
        values=field(1.0),
        advantages=field(1.0),
        weights=field(1.0).abs(),
        returns=field(1.0),
    )


def outputs(*, holes: Sequence[int] = (), garbage: float = 0.0) -> Tensor:
    """Return possible outputs of a model: log-probabilities or values."""
    x = torch.randn(NUM_SAMPLES, NUM_TOKENS, generator=torch.Generator().manual_seed(1))
    return x[PRESENT].masked_fill(~mask_of(holes), garbage)


def contribution(
    name: str, x: Tensor, micro: Experience, totals: Totals, mode: str
) -> tuple[Tensor, dict[str, Tensor]]:
    match name:
        case "critic":
            return CriticObjective(CriticSection(loss_agg_mode=mode), horizon=NUM_TOKENS)(x, micro, totals)
        case "ptx":
            return SFTObjective("actor/ptx_loss", 0.5)(PolicyOutputs(log_probs=x, entropy=2.0 * x), micro, totals)
        case "sft":
            return SFTObjective()(PolicyOutputs(log_probs=x, entropy=2.0 * x), micro, totals)
        case _:
            policy = PolicyOutputs(log_probs=x, entropy=2.0 * x)
            return ActorObjective(actor_section(name, mode), horizon=NUM_TOKENS)(policy, micro, totals)


def actor_section(loss_mode: str, mode: str) -> ActorSection:
    policy_loss = PolicyLossSection(loss_mode=loss_mode, clip_cov_ratio=0.3, clip_cov_lb=0.0, kl_cov_ratio=0.3)
    return ActorSection(
        loss_agg_mode=mode, use_kl_loss=True, entropy_coeff=0.1, clip_ratio_high=0.3, policy_loss=policy_loss
    )


def prepared(name: str, mode: str, whole: Experience) -> Experience:
    """The mini-batch as its objective wants it, before it is divided."""
    return whole if name in ("critic", "sft", "ptx") else mark_alone(whole, actor_section(name, mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8)
@given(owners=st.lists(st.integers(0, 2), min_size=NUM_SAMPLES, max_size=NUM_SAMPLES))
def test_any_split_adds_up_to_the_whole(name: str, mode: str, owners: list[int]) -> None:
    check_split(name, mode, prepared(name, mode, experience()), owners)


@pytest.mark.parametrize("holes", [[], HOLES], ids=["responses", "episodes"])
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=8)
@given(owners=st.lists(st.integers(0, 2), min_size=NUM_SAMPLES, max_size=NUM_SAMPLES))
def test_tokens_of_older_weights_show_in_no_split(mode: str, holes: list[int], owners: list[int]) -> None:
    """Their weights come from the complete batch, before it is divided. Tokens of an environment are in the `holes`."""
    whole = experience(holes=holes, garbage=9.0)
    assert whole.old_log_probs is not None
    drift = 0.7 * torch.randn(NUM_SAMPLES, NUM_TOKENS, generator=torch.Generator().manual_seed(2))
    drift[:, 2:] = 0.0  # only the first tokens are of older weights
    stale = Rewarded(**{field.name: getattr(whole, field.name) for field in fields(Rewarded)})
    stale = replace(stale, rollout_log_probs=(whole.old_log_probs + drift[PRESENT]) * whole.mask)
    correction = RolloutCorrectionSection(rollout_is="token")
    algorithm = AlgorithmSection(adv_estimator="rloo", rollout_correction=correction)
    corrected, _ = estimate_alone(stale, whole.old_log_probs, None, None, algorithm=algorithm, kl_coef=None)
    assert (corrected.weights[whole.mask] != 1.0).any()
    check_split("vanilla", mode, replace(whole, weights=corrected.weights), owners)


def check_split(name: str, mode: str, whole: Experience, owners: list[int]) -> None:
    """Compare loss and gradient of a batch with the sums over the samples of three owners."""
    x = outputs().requires_grad_()
    totals = Totals.of(whole.num_learnt())
    loss, metrics = contribution(name, x, whole, totals, mode)
    (gradient,) = torch.autograd.grad(loss, x)

    x_parts = outputs().requires_grad_()
    parts = []
    for rank in range(3):
        samples = torch.tensor([sample for sample, owner in enumerate(owners) if owner == rank], dtype=torch.int64)
        x_part = whole.tokens_of(samples, x_parts)
        parts.append(contribution(name, x_part, whole.select(samples), totals, mode))
    loss_of_parts = torch.stack([part_loss for part_loss, _ in parts]).sum()
    (gradient_of_parts,) = torch.autograd.grad(loss_of_parts, x_parts)

    torch.testing.assert_close(loss_of_parts, loss)
    torch.testing.assert_close(gradient_of_parts, gradient)
    for metric, value in metrics.items():
        torch.testing.assert_close(sum(part_metrics[metric] for _, part_metrics in parts), value)
        assert not value.requires_grad


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_masked_tokens_never_matter(name: str, mode: str) -> None:
    records = (experience(holes=HOLES, garbage=garbage) for garbage in (0.0, float("nan")))
    clean, dirty = (prepared(name, mode, record) for record in records)
    totals = Totals.of(clean.num_learnt())
    x = outputs(holes=HOLES, garbage=float("inf")).requires_grad_()
    loss, metrics = contribution(name, x, dirty, totals, mode)
    expected_loss, expected_metrics = contribution(name, outputs(holes=HOLES), clean, totals, mode)
    assert torch.equal(loss, expected_loss)
    assert metrics == expected_metrics
    (gradient,) = torch.autograd.grad(loss, x)
    assert gradient.isfinite().all()
    assert not gradient[~clean.mask].any()


def test_actor_loss_equals_sum_of_named_terms() -> None:
    micro, x = experience(), outputs()
    totals = Totals.of(micro.num_learnt())
    section = ActorSection(use_kl_loss=True, kl_loss_coef=0.5, entropy_coeff=0.25, kl_loss_type="mse")
    policy = PolicyOutputs(log_probs=x, entropy=2.0 * x)
    loss, metrics = ActorObjective(section, horizon=NUM_TOKENS)(policy, micro, totals)
    assert micro.ref_log_probs is not None and micro.old_log_probs is not None
    expected = metrics["actor/pg_loss"] - 0.25 * metrics["actor/entropy_loss"] + 0.5 * metrics["actor/kl_loss"]
    torch.testing.assert_close(loss, expected)
    mask = micro.mask
    torch.testing.assert_close(metrics["actor/entropy_loss"], 2.0 * x[mask].mean())
    torch.testing.assert_close(metrics["actor/kl_loss"], (0.5 * (x - micro.ref_log_probs) ** 2)[mask].mean())
    torch.testing.assert_close(metrics["actor/ppo_kl"], (micro.old_log_probs - x)[mask].mean())


def test_no_kl_loss_unless_asked_for() -> None:
    micro, x = experience(), outputs()
    _, metrics = contribution("vanilla", x, micro, Totals.of(micro.num_learnt()), "token-mean")
    assert "actor/kl_loss" in metrics
    objective = ActorObjective(ActorSection(), horizon=NUM_TOKENS)
    loss, metrics = objective(PolicyOutputs(log_probs=x, entropy=x), micro, Totals.of(micro.num_learnt()))
    assert "actor/kl_loss" not in metrics
    torch.testing.assert_close(loss, metrics["actor/pg_loss"] - 0.001 * metrics["actor/entropy_loss"])


def test_each_clip_bound_follows_its_own_key() -> None:
    micro = replace(experience(), advantages=experience().mask.float())  # a good token: only the upper side acts
    assert micro.old_log_probs is not None
    x = micro.old_log_probs + 0.25  # a ratio of 1.28
    totals = Totals.of(micro.num_learnt())
    policy = PolicyOutputs(log_probs=x, entropy=x)

    def clip_fraction(**keys: float) -> float:
        _, metrics = ActorObjective(ActorSection(**keys), horizon=NUM_TOKENS)(policy, micro, totals)
        return metrics["actor/pg_clipfrac"].item()

    assert clip_fraction(clip_ratio=0.2) == 1.0
    assert clip_fraction(clip_ratio=0.2, clip_ratio_high=0.3) == 0.0
    assert clip_fraction(clip_ratio=0.3, clip_ratio_low=0.2) == 0.0


@pytest.mark.parametrize(
    ("loss_mode", "loss", "clip_fraction"),  # ratio 1.25, advantage 1, log-probabilities of log(1.25)
    [
        ("vanilla", -1.2, 1.0),
        ("gspo", -1.2, 1.0),
        ("cispo", -1.2 * math.log(1.25), 1.0),
        ("sapo", -4.0 / (1.0 + math.exp(-0.25)), 0.0),
        ("geo_mean", -math.exp(0.2), 1.0),
        ("dppo_tv", 0.0, 1.0),
        ("gpg", -math.log(1.25), 0.0),
        ("clip_cov", -1.2 * 14 / 20, 1.0),
        ("kl_cov", -1.25 + 0.5 * math.log(1.25) * 6 / 20, 0.0),
    ],
)
def test_each_loss_follows_its_own_name_and_keys(loss_mode: str, loss: float, clip_fraction: float) -> None:
    mask = experience().mask.float()
    zeros = torch.zeros_like(mask)
    micro = replace(experience(), advantages=0.5 * mask, weights=2.0 * mask, old_log_probs=zeros)
    settings = PolicyLossSection(
        loss_mode=loss_mode, clip_cov_ratio=0.3, clip_cov_lb=-1.0, clip_cov_ub=1.0, kl_cov_ratio=0.3, ppo_kl_coef=0.5
    )
    section = ActorSection(entropy_coeff=0.0, policy_loss=settings)
    policy = PolicyOutputs(log_probs=zeros + math.log(1.25), entropy=zeros)
    objective = ActorObjective(section, horizon=NUM_TOKENS)
    found, metrics = objective(policy, mark_alone(micro, section), Totals.of(micro.num_learnt()))
    assert found.item() == pytest.approx(loss, rel=1e-5)
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(clip_fraction)


@pytest.mark.parametrize("loss_mode", ["clip_cov", "kl_cov"])
def test_correction_weights_do_not_change_selected_loss_tokens(loss_mode: str) -> None:
    section, whole = actor_section(loss_mode, "token-mean"), experience()
    chosen = []
    for scale in (1.0, torch.rand(whole.mask.shape), 0.0):
        marked = mark_alone(replace(whole, weights=scale * whole.mask), section)
        assert isinstance(marked, Marked)
        chosen.append(marked.marked)
    assert chosen[0].any()
    assert torch.equal(chosen[0], chosen[1])
    assert torch.equal(chosen[0], chosen[2])


def test_critic_metrics_are_means_over_tokens() -> None:
    micro, x = experience(), outputs()
    section = CriticSection(cliprange_value=100.0)
    loss, metrics = CriticObjective(section, horizon=NUM_TOKENS)(x, micro, Totals.of(micro.num_learnt()))
    torch.testing.assert_close(loss, (0.5 * (x - micro.returns) ** 2)[micro.mask].mean())
    torch.testing.assert_close(metrics["critic/vpred_mean"], x[micro.mask].mean())
    assert metrics["critic/vf_clipfrac"].item() == 0.0


def test_exact_kl_is_used_directly_as_kl_loss() -> None:
    micro, x = experience(holes=HOLES), outputs()
    section = ActorSection(use_kl_loss=True, kl_loss_type="full", kl_loss_coef=0.5, entropy_coeff=0.0)
    exact = outputs(holes=HOLES, garbage=float("nan")).abs().requires_grad_()
    policy = PolicyOutputs(log_probs=x, entropy=x, kl=exact)
    loss, metrics = ActorObjective(section, horizon=NUM_TOKENS)(policy, micro, Totals.of(micro.num_learnt()))
    torch.testing.assert_close(metrics["actor/kl_loss"], exact.detach()[micro.mask].mean())
    torch.testing.assert_close(loss.detach(), metrics["actor/pg_loss"] + 0.5 * metrics["actor/kl_loss"])
    (gradient,) = torch.autograd.grad(loss, exact)
    torch.testing.assert_close(gradient, 0.5 * micro.mask / micro.mask.sum())
