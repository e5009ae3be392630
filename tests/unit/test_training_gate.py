"""The gate lets rounding and a few strange tokens pass, and nothing that engine and trainer disagree about."""

import json
import logging
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms.correction import token_mismatch
from megarl.batch import Rollouts
from megarl.checkpoint.state import State
from megarl.rollout.config import SyncSection
from megarl.rollout.limits import Limits
from megarl.training.gate import FREE_TOKENS, LEAST, WINDOW, Gate, GateResult, MismatchError, require_version
from tests.support.ranks import world_of_one
from tests.support.records import alone, answer, prompts

BFLOAT16, FLOAT32 = Limits.of(SyncSection(), "bfloat16", "float32"), Limits.of(SyncSection(), "float32", "float32")
HEALTHY = {"bfloat16": (0.032, BFLOAT16), "float32": (2e-6, FLOAT32)}  # the usual d, root mean square

STEP = 4


def samples(num: int = 40, length: int = 24) -> Rollouts:
    return answer(prompts([4] * (num // 2)), [length] * num, version=STEP)


def noise(rollouts: Rollouts, scale: float, *, seed: int = 0) -> Tensor:
    """Return a trainer's log-probabilities that differ from the engine's by `scale` on average."""
    generator = torch.Generator().manual_seed(seed)
    assert rollouts.rollout_log_probs is not None
    return rollouts.rollout_log_probs + scale * torch.randn(rollouts.mask.shape, generator=generator)


def check(
    rollouts: Rollouts, log_probs: Tensor, limits: Limits = BFLOAT16, *, healthy: tuple[float, ...]
) -> GateResult:
    return Gate(limits=limits).check(alone(rollouts), log_probs, healthy, step=STEP)


def test_token_mismatch_is_half_squared_difference_and_bounded() -> None:
    says, heard = torch.tensor([[-1.0, -2.0, -9.0, -1.0, float("nan")]]), torch.tensor([[-1.2, -2.0, -1.0, -3.0, -1.0]])
    mismatch, judged = token_mismatch(says, heard, torch.tensor([[True, True, True, False, True]]))
    torch.testing.assert_close(mismatch, torch.tensor([[0.02, 0.0, 0.5, 0.0, 0.0]]))
    assert judged.tolist() == [[True, True, True, False, False]]


def test_default_limits_follow_coarser_dtype() -> None:
    assert (BFLOAT16.mismatch_stop, BFLOAT16.probs_stop, BFLOAT16.probs_warn) == (2**-6, 2**-4, 2**-5)
    assert (FLOAT32.mismatch_stop, FLOAT32.probs_stop) == (2**-22, 2**-12)
    own = Limits.of(SyncSection(mismatch_stop=0.25, logprob_stop=0.0, logprob_warn=0.125), "bfloat16")
    assert (own.mismatch_stop, own.probs_stop, own.probs_warn) == (0.25, 0.0, 0.125)


@pytest.mark.parametrize("dtype", HEALTHY)
@given(seed=st.integers(0, 2**31), factor=st.floats(0.5, 2.0))
def test_rounding_passes_gate_in_every_dtype(dtype: str, seed: int, factor: float) -> None:
    scale, limits = HEALTHY[dtype]
    rollouts = samples()
    first = check(rollouts, noise(rollouts, scale, seed=seed), limits, healthy=())
    second = check(rollouts, noise(rollouts, factor * scale, seed=seed + 1), limits, healthy=first.healthy)
    assert second.rows is None
    assert second.metrics["training/rollout_mismatch_left_out"] == 0.0


@pytest.mark.parametrize("dtype", HEALTHY)
@given(seed=st.integers(0, 2**31), factor=st.floats(4.0, 1e4))
def test_four_times_the_healthy_distance_never_passes(dtype: str, seed: int, factor: float) -> None:
    scale, limits = HEALTHY[dtype]
    rollouts = samples()
    first = check(rollouts, noise(rollouts, scale, seed=seed), limits, healthy=())
    level = max(first.healthy[0], limits.mismatch_stop * LEAST / limits.mismatch_growth)
    distance = factor * (2 * level) ** 0.5
    with pytest.raises(MismatchError, match=r"samples of step 5 .* Nothing has learnt from them"):
        check(rollouts, noise(rollouts, distance, seed=seed + 1), limits, healthy=first.healthy)


@given(st.sets(st.integers(0, 40 * 24 - 1), min_size=1, max_size=FREE_TOKENS))
def test_a_few_tokens_may_disagree_wholly(places: set[int]) -> None:
    rollouts = samples()
    says = noise(rollouts, 2e-6)
    says.view(-1)[list(places)] = -30.0
    verdict = check(rollouts, says, FLOAT32, healthy=(2e-12,))
    assert verdict.rows is None


@pytest.mark.parametrize("dtype", HEALTHY)
def test_one_outlier_is_excluded_and_many_stop_run(dtype: str) -> None:
    scale, limits = HEALTHY[dtype]
    rollouts = samples()
    says = noise(rollouts, scale)
    healthy = check(rollouts, says, limits, healthy=()).healthy
    says.view(40, -1)[7] += 0.5  # as if one engine's shard were corrupt
    with world_of_one():
        verdict = check(rollouts, says, limits, healthy=healthy)
    assert verdict.rows is not None
    assert verdict.rows.tolist() == [row for row in range(40) if row != 7]
    assert verdict.metrics["training/rollout_mismatch_left_out"] == pytest.approx(1 / 40)
    says.view(40, -1)[20:23] += 0.5
    with pytest.raises(MismatchError, match=r"4 of 40 samples are far out \(rows 3, 10, 11 of the data\)"):
        check(rollouts, says, limits, healthy=healthy)


def test_non_finite_token_is_not_compared() -> None:
    rollouts = samples()
    says = noise(rollouts, 1e-3)
    says.view(40, -1)[1:] = float("nan")
    verdict = check(rollouts, says, healthy=(1e-3,))
    assert verdict.rows is None
    assert len(verdict.healthy) == 2


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("side", ["engine", "trainer"])
def test_a_gate_that_can_compare_no_token_stops(side: str, number: float) -> None:
    rollouts = samples()
    says = noise(rollouts, 1e-3)
    assert rollouts.rollout_log_probs is not None
    broken = says if side == "trainer" else rollouts.rollout_log_probs
    broken.fill_(number)
    counts = (
        "0 have no finite log-probability of the engine and 960 none" if side == "trainer" else "960 have no finite"
    )
    with pytest.raises(MismatchError, match=f"no token of step 5 can be compared .* of 960 tokens {counts}"):
        check(rollouts, says, healthy=(1e-3,))


def test_step_without_current_tokens_passes_with_warning(caplog: pytest.LogCaptureFixture) -> None:
    rollouts = samples()
    assert rollouts.weight_versions is not None
    rollouts.weight_versions.fill_(STEP - 1)
    with world_of_one(), caplog.at_level(logging.WARNING):
        verdict = check(rollouts, noise(rollouts, 9.0), healthy=(1e-3,))
    assert verdict.healthy == (1e-3,)
    assert caplog.messages == [
        "no token of step 5 is compared between engine and trainer: older weights drew all of them"
    ]


def test_tokens_of_older_weights_are_not_compared() -> None:
    """The actor has moved away from the weights that drew the first half of each response."""
    rollouts = samples()
    assert rollouts.weight_versions is not None
    rollouts.weight_versions.view(40, -1)[:, :12] = STEP - 2
    moved = noise(rollouts, 0.032)
    moved.view(40, -1)[:, :12] += 3.0
    verdict = check(rollouts, moved, healthy=())
    assert verdict.rows is None
    assert verdict.healthy[0] == pytest.approx(0.032**2 / 2, rel=0.2)
    moved.view(40, -1)[:, 12:] += 3.0
    with pytest.raises(MismatchError, match="the engine did not draw the samples of step 5"):
        check(rollouts, moved, healthy=())


def test_tokens_of_unknown_or_stale_weights_are_refused() -> None:
    rollouts = samples()
    assert require_version(alone(rollouts), step=STEP).share.weight_versions is None  # all have the same
    assert rollouts.weight_versions is not None
    versions = rollouts.weight_versions.view(40, -1)
    versions[3, 5], versions[9, 0] = STEP - 1, STEP - 2
    checked = require_version(alone(rollouts), step=STEP, max_staleness=2)
    assert checked.share.weight_versions is rollouts.weight_versions
    with pytest.raises(MismatchError, match=r"the engine drew rows 4 of the data with those after 2: the sync"):
        require_version(alone(rollouts), step=STEP, max_staleness=1)
    versions[0, 0] = STEP + 1
    with pytest.raises(MismatchError, match=r"the engine drew rows 0 of the data with those after 5"):
        require_version(alone(rollouts), step=STEP, max_staleness=2)


def test_gate_limit_follows_first_steps_even_after_resume(tmp_path: Path) -> None:
    rollouts, healthy = samples(), ()
    for number in range(WINDOW + 3):
        healthy = check(rollouts, noise(rollouts, 0.02, seed=number), healthy=healthy).healthy
    assert len(healthy) == WINDOW
    (tmp_path / "state.json").write_text(json.dumps(asdict(State(step=9, mismatches=healthy))))
    assert State.read(tmp_path).mismatches == healthy
    assert Gate(limits=BFLOAT16).limit(healthy) == pytest.approx(10 * 0.02**2 / 2, rel=0.1)
    assert Gate(limits=BFLOAT16).limit(()) == BFLOAT16.mismatch_stop
