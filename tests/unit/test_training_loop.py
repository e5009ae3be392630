"""The loop itself, with interfaces that record their calls."""

import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.cases import MODELS
from megarl.algorithms.config import AlgorithmSection
from megarl.algorithms.kl import AdaptiveKL, FixedKL
from megarl.algorithms.losses import PolicyOutputs
from megarl.batch import Experience, Prompts, Rollouts
from megarl.checkpoint.state import Best
from megarl.data.order import Position
from megarl.distributed import signals
from megarl.distributed.sharded import Sharded
from megarl.learner.batching import Budget
from megarl.learner.per_data_source import PerDataSource
from megarl.models.architecture import read_architecture
from megarl.rollout.limits import Limits
from megarl.training import supervised
from megarl.training.collect import Collector
from megarl.training.flops import FlopsCounter
from megarl.training.gate import Gate, MismatchError
from megarl.training.interfaces import Metrics
from megarl.training.loop import Job, Progress, train
from megarl.training.steps import Schedule
from megarl.training.validation import Validation
from tests.support.loop import LENGTHS, Critic, Diary, Measured, OneFails, Policy, Records, World
from tests.support.ranks import world_of_one
from tests.support.records import alone, answer

PASSES = [(PerDataSource(other=read_architecture(MODELS["llama-1m"])), 3)]
FLOPS = FlopsCounter(passes=dict.fromkeys(("gen", "old_log_prob", "update_actor", "testing"), PASSES), peak=4e12)
LIMITS = Limits(probs_warn=1.0, probs_stop=1.0, mismatch_stop=1e-4, mismatch_growth=10.0, mismatch_share=0.3)


def run(
    kl: FixedKL | AdaptiveKL | None = None, *, exact: bool = False, diary: Diary | None = None, **changes: Any
) -> Diary:
    """Train PPO for three steps, or as `changes` of the schedule and the job say; `exact`: the actor knows its KL."""
    diary = diary or Diary()
    world, records = changes.get("world", World)(diary), Records(diary)
    schedule = {"first_step": 0, "last_step": 3, "test_freq": -1, "save_freq": -1}
    schedule |= {"save_best": False, "save_last": False, "validate_first": False}
    algorithm = changes.get("algorithm", AlgorithmSection(use_kl_in_reward=True))
    job = {
        "samples": Collector(prompts=world, sampler=world, scorer=world, algorithm=algorithm),
        "actor": (Measured if exact else Policy)(diary, "actor", says=-1.0),
        "reference": Policy(diary, "reference", says=-1.25),
        "critic": Critic(diary, "critic", says=0.5),
        "gate": Gate(limits=LIMITS),
        "algorithm": algorithm,
        "critic_warmup": 0,
        "schedule": Schedule(**schedule | {key: value for key, value in changes.items() if key in schedule}),
        "validation": Validation(prompts=world, sampler=world, scorer=world, tracker=records, num_shown=2),
        "checkpoints": records,
        "tracker": records,
        "num_ranks": 4,
        "flops": FLOPS,
        "fused_old_log_probs": False,
    }
    progress = Progress(kl=kl or FixedKL(0.1), position=Position(2, changes.get("first_step", 0)))
    train(Job(**job | {key: value for key, value in changes.items() if key in job}), progress)
    return diary


def test_a_step_of_ppo_in_order() -> None:
    diary = run(last_step=1)
    assert diary.calls == [
        *("wake", "take 0", "generate 0", "sleep", "score"),
        *("actor.infer", "reference.infer", "critic.infer"),
        *("actor.update 0", "critic.update 0"),
        "close",
    ]
    assert diary.advances == 1
    metrics = diary.logged[1]
    assert metrics["perf/total_num_tokens"] == 2 * 4 + 2 * 6 + sum(LENGTHS)
    assert metrics["perf/throughput"] == pytest.approx(28 / metrics["timing_s/step"] / 4)
    assert metrics["perf/mfu"] == pytest.approx(metrics["perf/tflop"] / metrics["timing_s/step"] / 4)
    update = metrics["perf/mfu/actor"] * metrics["timing_s/update_actor"] * 4
    assert metrics["perf/tflop"] == pytest.approx(3 * update)  # with gen and old_log_prob; nothing was tested
    assert metrics["actor/entropy"] == 2.0
    assert metrics["critic/score/mean"] == 1.5
    assert metrics["reward/error_rate"] == 0.25
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.25)
    assert metrics["training/rollout_probs_diff_max"] == 0.0
    assert metrics["sync/check_probs_diff_mean"] == 0.0
    assert metrics["actor/lr"] == metrics["critic/lr"] == 0.5
    phases = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "step")
    assert {f"timing_s/{phase}" for phase in phases} <= metrics.keys()


def test_failed_reward_sample_reaches_no_model_or_metric() -> None:
    met: list[list[float]] = []

    class Meets(Policy):
        def update(self, experience: Sharded[Experience], *, step: int, gradient: Any = None) -> dict[str, float]:
            met.append(experience.share.scores.tolist())
            return super().update(experience, step=step, gradient=gradient)

    diary = Diary()
    kl = AdaptiveKL(0.1, target=0.1, horizon=10)
    run(kl, diary=diary, world=OneFails, last_step=1, actor=Meets(diary, "actor", says=-1.0), save_freq=1)
    assert met == [[0.0, 2.0, 3.0]]
    metrics = diary.logged[1]
    assert metrics["reward/masked_rate"] == 0.25
    assert metrics["critic/score/mean"] == pytest.approx(5 / 3)
    assert metrics["response_length/mean"] == pytest.approx((3 + 2 + 2) / 3)
    assert metrics["perf/total_num_tokens"] == 2 * 4 + 2 * 6 + sum(LENGTHS)  # were drawn
    assert all(map(math.isfinite, metrics.values()))
    assert diary.saved[1].kl_coef == pytest.approx(0.1 * (1 + 0.2 * 3 / 10))  # of three samples


def test_grpo_asks_neither_critic_nor_an_absent_reference() -> None:
    diary = run(last_step=1, critic=None, reference=None, algorithm=AlgorithmSection(adv_estimator="grpo"))
    drawn = ["wake", "take 0", "generate 0", "sleep", "score"]
    assert diary.calls == [*drawn, "actor.infer", "actor.update 0", "close"]
    assert "actor/reward_kl_penalty" not in diary.logged[1]


def test_remax_hands_the_greedy_scores_to_the_estimate() -> None:
    diary = run(last_step=1, critic=None, reference=None, algorithm=AlgorithmSection(adv_estimator="remax"))
    assert diary.calls[:6] == ["wake", "take 0", "generate 0", "greedy 0", "sleep", "score"]
    metrics = diary.logged[1]
    assert metrics["critic/baselines/max"] == 1.0  # of the second prompt, whose samples score 2 and 3
    assert (metrics["critic/advantages/min"], metrics["critic/advantages/max"]) == (0.0, 2.0)


def test_only_the_critic_learns_during_its_warm_up() -> None:
    diary = run(critic_warmup=2)
    assert diary.steps_of("critic.update") == [0, 1, 2]
    assert diary.steps_of("actor.update") == [2]
    assert "actor/lr" not in diary.logged[2]
    assert "actor/entropy" in diary.logged[2]


@pytest.mark.parametrize(
    ("test_freq", "save_freq", "validate_first", "tested", "saved"),
    [
        (2, 3, True, [0, 2, 4, 5], [3]),
        (2, 3, False, [2, 4, 5], [3]),  # and a validation at the end
        (5, 1, False, [5], [1, 2, 3, 4, 5]),
        (-1, 0, False, [], []),
    ],
)
def test_frequencies_count_finished_steps(
    test_freq: int, save_freq: int, validate_first: bool, tested: list[int], saved: list[int]
) -> None:
    diary = run(last_step=5, test_freq=test_freq, save_freq=save_freq, validate_first=validate_first)
    assert diary.steps_of("validate") == tested
    assert diary.steps_of("save") == list(diary.saved) == saved
    assert list(diary.logged) == ([0] if validate_first else []) + [1, 2, 3, 4, 5]
    assert [step for step, metrics in diary.logged.items() if "val/test_score/countdown" in metrics] == tested


def test_checkpoint_has_metrics_of_step_and_best_validation() -> None:
    diary = run(last_step=4, test_freq=2, save_freq=1, validate_first=True)
    for step, state in diary.saved.items():
        assert state.best == Best(1.5, 0)  # every validation has the same score
        assert state.metrics.items() <= diary.logged[step].items()
        assert {"critic/score/mean", "actor/lr"} <= state.metrics.keys()
    best = [
        (logged["val/best_score"], logged["val/best_step"]) for step, logged in diary.logged.items() if step % 2 == 0
    ]
    assert best == [(1.5, 0.0)] * 3


def test_first_of_equal_validations_is_saved_as_best() -> None:
    diary = run(last_step=5, test_freq=2, save_best=True)
    assert [state.best_step for state in diary.saved.values()] == list(diary.saved) == [2]


class Graded:
    """A validation with another score after each step."""

    def run(self, *, step: int) -> Metrics:
        return {"val/test_score/countdown": {1: 0.2, 2: 0.9, 3: 0.9, 4: 1.0, 5: 0.1}[step]}


@pytest.mark.parametrize(
    ("changes", "saved"),
    [
        ({}, []),
        ({"save_last": True}, [5]),
        ({"save_freq": 3}, [3]),
        ({"save_freq": 3, "save_last": True}, [3, 5]),
        ({"save_best": True}, [1, 2, 4]),
        ({"save_best": True, "test_freq": 3}, [3]),
        ({"save_best": True, "test_freq": -1}, []),
        ({"save_best": True, "save_freq": 2, "save_last": True}, [1, 2, 4, 5]),
    ],
    ids=str,
)
def test_the_steps_that_are_saved(changes: dict[str, Any], saved: list[int]) -> None:
    diary = run(**{"last_step": 5, "test_freq": 1, "validation": Graded(), **changes})
    assert diary.steps_of("save") == saved


def test_resumed_run_continues_from_last_step() -> None:
    diary = run(first_step=2, last_step=4, save_freq=2, critic_warmup=3)
    assert diary.steps_of("take") == diary.steps_of("generate") == [2, 3]
    assert diary.steps_of("actor.update") == [3]
    assert list(diary.logged) == [3, 4]
    assert list(diary.saved) == [4]
    assert diary.saved[4].position == Position(2, 4)


def test_nothing_runs_after_the_last_step() -> None:
    assert run(first_step=3, save_freq=1, test_freq=1).calls == ["close"]


def test_kl_coefficient_adapts_to_kl_in_every_step() -> None:
    # The divergence is 0.25 a token, more than twice the target: each step's 4 samples of 10 raise it by 0.2 * 4 / 10.
    diary = run(kl=AdaptiveKL(0.1, target=0.1, horizon=10), save_freq=1)
    used = [diary.logged[step]["actor/reward_kl_penalty_coeff"] for step in (1, 2, 3)]
    assert used == pytest.approx([0.1, 0.1 * 1.08, 0.1 * 1.08**2])
    assert [state.kl_coef for state in diary.saved.values()] == pytest.approx(
        [0.1 * 1.08, 0.1 * 1.08**2, 0.1 * 1.08**3]
    )


class SpoiltOnce(Policy):
    """Its log-probabilities of one sample are not finite in the second step."""

    def infer(self, batch: Sharded[Rollouts]) -> PolicyOutputs:
        outputs = super().infer(batch)
        if self.diary.calls.count("actor.infer") == 2:
            outputs.log_probs[: LENGTHS[0]] = math.nan
        return outputs


def test_non_finite_kl_spares_later_steps_and_checkpoints() -> None:
    diary = Diary()
    run(kl=AdaptiveKL(0.1, target=0.1, horizon=10), diary=diary, actor=SpoiltOnce(diary, "actor", -1.0), save_freq=1)
    assert math.isnan(diary.logged[2]["actor/reward_kl_penalty"])
    assert math.isfinite(diary.logged[3]["critic/rewards/mean"])
    assert [state.kl_coef for state in diary.saved.values()] == pytest.approx([0.1 * 1.08, 0.1 * 1.08, 0.1 * 1.08**2])


def drift(outputs: PolicyOutputs, batch: Rollouts, samples: slice) -> None:
    """Move the log-probabilities of some samples."""
    for piece in batch.pieces(outputs.log_probs)[samples]:
        piece *= 1.5


class Drifting(Policy):
    """Disagrees with the engine about `drifted` samples, from its second reading on."""

    def __init__(self, diary: Diary, drifted: slice) -> None:
        super().__init__(diary, "actor", says=-1.0)
        self.drifted = drifted

    def infer(self, batch: Sharded[Rollouts]) -> PolicyOutputs:
        outputs = super().infer(batch)
        if self.diary.calls.count("actor.infer") > 1:
            drift(outputs, batch.share, self.drifted)
        return outputs


LONG = [12, 9, 10, 11]


class LongAnswers(World):
    """Draws more tokens than may disagree in a sample."""

    def generate(self, prompts: Prompts, *, step: int) -> tuple[Sharded[Rollouts], dict[str, float]]:
        return alone(answer(prompts, LONG, version=step)), {}


class Stale(World):
    """Its engine has the weights of the start for ever."""

    def generate(self, prompts: Prompts, *, step: int) -> tuple[Sharded[Rollouts], dict[str, float]]:
        return alone(answer(prompts, LENGTHS)), {}


def drawn_by(world: World) -> Collector:
    return Collector(prompts=world, sampler=world, scorer=world, algorithm=AlgorithmSection())


def test_step_with_engine_mismatch_updates_no_model() -> None:
    diary = Diary()
    actor, samples = Drifting(diary, slice(None)), drawn_by(LongAnswers(diary))
    with pytest.raises(MismatchError, match=r"the samples of step 2 .* 4 of 4 samples are far out \(rows 0, 1 "):
        run(diary=diary, actor=actor, samples=samples, save_freq=1)
    assert diary.steps_of("critic.update") == diary.steps_of("actor.update") == [0]
    assert list(diary.saved) == [1]
    assert diary.saved[1].mismatches == (0.0,)


def test_outlier_sample_is_excluded_and_counted() -> None:
    diary = Diary()
    actor, samples = Drifting(diary, slice(0, 1)), drawn_by(LongAnswers(diary))
    with world_of_one():
        run(diary=diary, actor=actor, samples=samples, algorithm=AlgorithmSection(use_kl_in_reward=False))
    assert diary.steps_of("actor.update") == [0, 1, 2]
    assert [diary.logged[step]["training/rollout_mismatch_left_out"] for step in (1, 2, 3)] == [0.0, 0.25, 0.25]
    assert [diary.logged[step]["critic/score/min"] for step in (1, 2, 3)] == [0.0, 1.0, 1.0]  # it is sample 0
    assert diary.logged[2]["training/rollout_mismatch"] == 0.0
    assert diary.logged[2]["training/rollout_probs_diff_max"] > 0.1  # of all samples


ON_POLICY: dict[str, Any] = {"algorithm": AlgorithmSection(use_kl_in_reward=False), "fused_old_log_probs": True}


def test_one_update_reads_and_learns_in_one_pass() -> None:
    diary = run(last_step=2, critic_warmup=1, **ON_POLICY)
    first = ["actor.infer", "reference.infer", "critic.infer", "critic.update 0"]  # only the critic learns
    frozen, update = ["reference.infer", "critic.infer"], ["actor.forward_backward 1", "actor.update 1"]
    second = [*frozen, *update, "critic.update 1"]
    assert [call for call in diary.calls if call.split(".")[0] in ("actor", "reference", "critic")] == [*first, *second]
    assert diary.learned[1].old_log_probs is None
    assert diary.logged[1].keys() | {"actor/lr", "timing_s/update_actor", "perf/mfu/actor"} == diary.logged[
        2
    ].keys() | {"timing_s/old_log_prob"}
    same = {"actor/entropy", "training/rollout_mismatch", "training/rollout_probs_diff_max", "critic/advantages/max"}
    assert {name: diary.logged[1][name] for name in same} == {name: diary.logged[2][name] for name in same}


class DriftingAsItLearns(Policy):
    """Disagrees with the engine about the samples `drifted`."""

    drifted = slice(0, 1)

    def outputs(self, batch: Rollouts) -> PolicyOutputs:
        outputs = super().outputs(batch)
        drift(outputs, batch, self.drifted)
        return outputs


class DriftingAway(DriftingAsItLearns):
    drifted = slice(None)


def test_outlier_sample_is_excluded_from_single_pass_update() -> None:
    diary = Diary()
    actor, samples = DriftingAsItLearns(diary, "actor", says=-1.0), drawn_by(LongAnswers(diary))
    with world_of_one():
        run(diary=diary, actor=actor, samples=samples, last_step=1, **ON_POLICY)
    [of_actor, of_critic] = diary.learned
    assert of_actor is of_critic
    gradient = ["actor.forward_backward 0", "discard", "actor.update 0"]
    assert [call for call in diary.calls if call in gradient] == gradient
    assert diary.calls.count("reference.infer") == diary.calls.count("critic.infer") == 1
    assert of_actor.ref_log_probs is not None and of_actor.ref_log_probs.shape == of_actor.mask.shape
    assert of_actor.scores.tolist() == [1.0, 2.0, 3.0]
    assert of_actor.old_log_probs is not None and of_actor.old_log_probs[of_actor.mask].unique().tolist() == [-1.0]
    assert diary.logged[1]["training/rollout_mismatch_left_out"] == 0.25
    assert diary.logged[1]["critic/score/min"] == 1.0


def test_single_pass_update_with_engine_mismatch_is_discarded() -> None:
    diary = Diary()
    actor, samples = DriftingAway(diary, "actor", says=-1.0), drawn_by(LongAnswers(diary))
    with pytest.raises(MismatchError, match="4 of 4 samples are far out"):
        run(diary=diary, actor=actor, samples=samples, save_freq=1, **ON_POLICY)
    assert diary.learned == [] and diary.saved == {}


def test_samples_of_other_weights_are_refused() -> None:
    diary = Diary()
    with pytest.raises(MismatchError, match="the weights after 1 finished steps, but the engine drew rows 0, 1 of the"):
        run(diary=diary, samples=drawn_by(Stale(diary)))
    assert diary.steps_of("actor.update") == [0]


def test_kl_in_loss_is_not_subtracted_from_reward() -> None:
    diary = run(algorithm=AlgorithmSection(use_kl_in_reward=False), save_freq=1)
    assert diary.logged[1]["critic/rewards/mean"] == diary.logged[1]["critic/score/mean"]
    assert "actor/reward_kl_penalty" not in diary.logged[1]


def test_exact_kl_needs_no_reference_log_probs() -> None:
    algorithm = AlgorithmSection(use_kl_in_reward=True, kl_penalty="full")
    diary = run(exact=True, reference=None, algorithm=algorithm, last_step=1)
    assert "reference.infer" not in diary.calls
    metrics = diary.logged[1]
    assert metrics["actor/reward_kl_penalty"] == 0.5
    assert metrics["critic/rewards/mean"] == pytest.approx(1.5 - 0.1 * 0.5 * sum(LENGTHS) / 4)


class Interrupted(Policy):
    """Its process receives a signal to end while it learns."""

    def update(self, experience: Sharded[Experience], *, step: int, gradient: Any = None) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGUSR1)
        return super().update(experience, step=step, gradient=gradient)


@pytest.fixture
def listening() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in signals.SIGNALS}
    signals.listen()
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("listening")
def test_stopped_run_finishes_and_saves_current_step() -> None:
    diary = Diary()
    with pytest.raises(signals.Stopped) as stopped, signals.graceful_stop():
        run(diary=diary, actor=Interrupted(diary, "actor", says=-1.0), first_step=1, test_freq=2)
    assert stopped.value.step == 2
    assert diary.steps_of("validate") == list(diary.logged) == list(diary.saved) == [2]
    assert diary.calls[-1] == "close"  # asynchronous saves are complete


def run_supervised(diary: Diary, monkeypatch: pytest.MonkeyPatch, take: Callable[[int], object], **saves: Any) -> None:
    """Take three steps of a supervised run, which learn nothing; `take` is asked for the batch of each."""
    monkeypatch.setattr("megarl.training.supervised.update", lambda *_, step, **__: {"actor/lr": float(step)})
    learner: Any = SimpleNamespace(spread=lambda batch, num_together: batch)
    budget = Budget(max_tokens=1, max_sequences=None)
    task: Any = SimpleNamespace(batches=SimpleNamespace(take=take), objective=None, budget=budget, validate=None)
    skips: Any = None
    schedule = Schedule(first_step=0, last_step=3, test_freq=-1, **{"save_freq": -1, **saves})
    records = Records(diary)
    supervised.train(learner, task, schedule, skips=skips, tracker=records, checkpoints=records)


@pytest.mark.usefixtures("listening")
def test_stopped_supervised_run_saves_current_step(monkeypatch: pytest.MonkeyPatch) -> None:
    diary = Diary()
    with pytest.raises(signals.Stopped) as stopped, signals.graceful_stop():
        run_supervised(diary, monkeypatch, lambda number: os.kill(os.getpid(), signal.SIGUSR1))
    assert stopped.value.step == 1
    assert list(diary.logged) == [1]
    assert diary.calls == ["save 1", "close"]


@pytest.mark.usefixtures("listening")
def test_supervised_run_saves_as_scheduled(monkeypatch: pytest.MonkeyPatch) -> None:
    diary = Diary()
    run_supervised(diary, monkeypatch, str, save_freq=2, save_last=True)
    assert diary.calls == ["save 2", "save 3", "close"]
    assert [metrics["actor/lr"] for metrics in diary.logged.values()] == [0.0, 1.0, 2.0]


@pytest.mark.usefixtures("listening")
def test_stop_request_in_last_step_ends_run_normally() -> None:
    diary = Diary()
    with signals.graceful_stop():
        run(diary=diary, actor=Interrupted(diary, "actor", says=-1.0), last_step=1)
    assert list(diary.logged) == [1]
    assert diary.saved == {}


@pytest.mark.usefixtures("listening")
def test_signal_of_one_run_never_stops_next_run() -> None:
    """The thread that listens may be late; 200 runs in a row find it late several times."""
    for _ in range(200):
        with signals.graceful_stop():
            os.kill(os.getpid(), signal.SIGUSR1)
        signals.listen()
    assert [thread.name for thread in threading.enumerate()].count("megarl-signals") == 1
