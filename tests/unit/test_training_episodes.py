"""The tokens of an environment are read and never learnt from: they change nothing but the context of the others."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms.config import AlgorithmSection
from megarl.algorithms.losses import PolicyOutputs, Totals
from megarl.batch import Experience, Generation, Prompts, Rewarded, StopReason, Turn, float32, int32
from megarl.config.policy import ActorSection, CriticSection
from megarl.learner.packed import pack_samples
from megarl.rollout.responses import as_rollouts
from megarl.training.objectives import ActorObjective, CriticObjective
from tests.support.estimates import estimate_alone, mark_alone
from tests.support.records import prompts

ASKED = prompts([2, 3])
ESTIMATORS = ["gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo", "gpg", "grpo_passk"]
MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]

parts = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=3)
"""Of one episode: the tokens of each turn, and of the observation after it."""
layouts = st.lists(parts, min_size=4, max_size=4)


def episode(place: int, layout: list[tuple[int, int]], *, observes: bool = True) -> Generation:
    """Return an episode whose tokens count up; its turns earn 1, 2, ... Without observations, the policy's alone."""
    turns, end, spoken = [], 0, list[bool]()
    for number, (said, seen) in enumerate(layout):
        turns.append(Turn(start=end, end=end + said, reward=number + 1.0 + place))
        is_last = number == len(layout) - 1
        gap = 0 if is_last or not observes else seen
        spoken += [True] * said + [False] * gap
        end += said + gap
    return Generation(
        prompt=place // 2,
        token_ids=int32(range(10, 10 + end)),
        log_probs=float32(-1.0 if is_policy else 0.0 for is_policy in spoken),
        truncated=False,
        weight_versions=int32([0]) * end,
        turns=tuple(turns),
        stop_reason=StopReason.DONE,
    )


def scored(layouts: list[list[tuple[int, int]]], *, observes: bool = True) -> Rewarded:
    episodes = [episode(place, layout, observes=observes) for place, layout in enumerate(layouts)]
    rollouts = as_rollouts(Prompts(prompts=ASKED.prompts), [0, 0, 1, 1], episodes, n=2)
    assert rollouts.turn_rewards is not None
    scores = rollouts.sums(rollouts.turn_rewards).to(torch.float32)
    return rollouts.extend(Rewarded, scores=scores)


def placed(values: Tensor, mask: Tensor, *, elsewhere: float = 0.0) -> Tensor:
    """Return `[N]` with the given numbers of the policy's tokens, and another number on all others."""
    return torch.full(mask.shape, elsewhere).masked_scatter(mask, values)


def noise(mask: Tensor, seed: int, **elsewhere: float) -> Tensor:
    return placed(torch.randn(int(mask.sum()), generator=torch.Generator().manual_seed(seed)), mask, **elsewhere)


def lesson(record: Rewarded, estimator: str, *, elsewhere: float) -> Experience:
    """Estimate from random numbers of the policy's tokens; `elsewhere` is on all others."""
    make = partial(noise, record.mask, elsewhere=elsewhere)
    algorithm = AlgorithmSection(adv_estimator=estimator, gamma=0.9, lam=0.8)
    return estimate_alone(record, make(1), make(2), make(3), algorithm=algorithm, kl_coef=0.1)[0]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@settings(max_examples=8)
@given(layouts)
def test_estimates_are_those_of_episodes_without_observations(
    estimator: str, layouts: list[list[tuple[int, int]]]
) -> None:
    """Also with NaN as log-probabilities and values of the observations: nothing reads them."""
    record, twin = scored(layouts), scored(layouts, observes=False)
    found, expected = lesson(record, estimator, elsewhere=float("nan")), lesson(twin, estimator, elsewhere=0.0)
    for name in ("advantages", "returns", "weights"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        torch.testing.assert_close(ours[record.mask], theirs[twin.mask])
        assert not ours[~record.mask].any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["vanilla", "gspo", "kl_cov", "critic"])
@settings(max_examples=8)
@given(layouts)
def test_observations_do_not_change_loss_or_gradient(
    name: str, mode: str, layouts: list[list[tuple[int, int]]]
) -> None:
    record, twin = scored(layouts), scored(layouts, observes=False)
    results = []
    for of, elsewhere in ((record, float("nan")), (twin, 0.0)):
        micro = lesson(of, "gae", elsewhere=elsewhere)
        x = noise(of.mask, 4, elsewhere=elsewhere).requires_grad_()
        totals = Totals.of(micro.num_learnt())
        if name == "critic":
            loss, metrics = CriticObjective(CriticSection(loss_agg_mode=mode), horizon=30)(x, micro, totals)
        else:
            section = ActorSection(loss_agg_mode=mode, use_kl_loss=True, entropy_coeff=0.1)
            section = replace(section, policy_loss=replace(section.policy_loss, loss_mode=name))
            policy = PolicyOutputs(log_probs=x, entropy=2.0 * x)
            loss, metrics = ActorObjective(section, horizon=30)(policy, mark_alone(micro, section), totals)
        (gradient,) = torch.autograd.grad(loss, x)
        results.append((loss, metrics, gradient))
    (loss, metrics, gradient), (loss_of_twin, metrics_of_twin, gradient_of_twin) = results
    torch.testing.assert_close(loss, loss_of_twin)
    torch.testing.assert_close(metrics, metrics_of_twin)
    torch.testing.assert_close(gradient[record.mask], gradient_of_twin[twin.mask])
    assert not gradient[~record.mask].any()


def test_gae_reaches_across_turns_to_their_rewards() -> None:
    """One episode: two tokens, two of the environment, one token. gamma = lam = 1: returns are rewards to go."""
    record = scored([[(2, 2), (1, 1)], [(1, 1)], [(1, 1)], [(1, 1)]])
    assert record.rows(record.mask)[0].tolist() == [True, True, False, False, True]
    assert record.turn_rewards is not None
    assert record.rows(record.turn_rewards)[0].tolist() == [0.0, 1.0, 0.0, 0.0, 2.0]
    values = torch.zeros(record.mask.shape)
    taught, _ = estimate_alone(record, None, None, values, algorithm=AlgorithmSection(), kl_coef=None)
    assert taught.rows(taught.returns)[0].tolist() == [3.0, 3.0, 0.0, 0.0, 2.0]


@settings(max_examples=8)
@given(layouts)
def test_models_read_all_tokens_and_predict_the_policys(layouts: list[list[tuple[int, int]]]) -> None:
    record = scored(layouts)
    chosen = [2, 0, 3]
    packed = pack_samples(record, chosen, device=torch.device("cpu"))
    sequences = [[*record.prompt_of(sample).token_ids, *record.response_ids(sample).tolist()] for sample in chosen]
    masks = record.mask.split(record.num_tokens.tolist())
    assert record.lengths()[chosen].tolist() == [len(sequence) for sequence in sequences]
    assert packed.tokens[0].tolist() == [token for sequence in sequences for token in sequence[:-1]]
    targets, predictors, start = [], [], 0
    for sample, sequence in zip(chosen, sequences, strict=True):
        num_prompt = len(record.prompt_of(sample).token_ids)
        for place, said in enumerate(masks[sample].tolist()):
            if said:
                targets.append(sequence[num_prompt + place])
                predictors.append(start + num_prompt + place - 1)
        start += len(sequence) - 1
    assert packed.targets.tolist() == targets
    assert packed.predictors.tolist() == predictors
    numbers = torch.arange(1.0, len(targets) + 1)
    expected = placed(numbers, torch.cat([masks[sample] for sample in chosen]))
    assert torch.equal(record.select(torch.tensor(chosen)).flat(packed.unpack(numbers)), expected)


def test_every_field_of_an_episode_follows_its_sample() -> None:
    record = scored([[(2, 1), (1, 1)], [(1, 1)], [(3, 2), (2, 1)], [(1, 3), (1, 1)]])
    some = record.select(torch.tensor([3, 0]))
    assert some.num_turns is not None
    assert some.num_turns.tolist() == [2, 2]
    assert some.stop_reasons == ["done", "done"]
    assert some.faults == [None, None]
    silent = record.without_responses(torch.tensor([True, False, False, False]))
    assert silent.lengths().tolist() == [2, *record.lengths()[1:].tolist()]
    assert {"mask", "turn_rewards"} <= {name for name, _ in record.columns()}
    for name, column in record.columns():
        by_sample = column.split(record.num_tokens.tolist())
        assert torch.equal(getattr(some, name), torch.cat([by_sample[3], by_sample[0]]))
        assert torch.equal(getattr(silent, name), torch.cat(by_sample[1:]))
