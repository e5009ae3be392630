"""The user's own estimator and policy loss, from the configuration to their results."""

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algorithms.advantages import grpo
from megarl.algorithms.config import AlgorithmSection, PolicyLossSection
from megarl.algorithms.losses import PolicyOutputs, Totals, ppo_clip
from megarl.batch import Rewarded
from megarl.config.faults import ConfigError
from megarl.config.load import load_config
from megarl.config.policy import ActorSection
from megarl.config.report import custom_code
from megarl.training.custom import load_estimator, load_loss
from megarl.training.objectives import ActorObjective
from tests.support.estimates import estimate_alone
from tests.support.programs import ROOT
from tests.support.records import experience

ESTIMATOR, LOSS = "algorithm.custom_estimator", "actor_rollout_ref.actor.policy_loss"
CHOSEN = ["algorithm.adv_estimator=custom", f"{LOSS}.loss_mode=custom"]
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "custom_algorithms.md").read_text(), re.M | re.S)


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """Return the file that docs/custom_algorithms.md shows."""
    path = tmp_path / "mine.py"
    path.write_text(BLOCKS[0])
    return path


def faults(tmp_path: Path, *argv: str) -> dict[str, str]:
    """Return the messages by key about estimator and loss; data and models are faults of their own."""
    required = [f"data.train_files={tmp_path}/absent", "actor_rollout_ref.model.path=org/m", "critic.model.path=org/c"]
    with pytest.raises(ConfigError) as caught:
        load_config([*required, *argv], world_size=None)
    own = ("algorithm.", f"{LOSS}.")
    return {fault.path: fault.message for fault in caught.value.faults if fault.path.startswith(own)}


def test_documented_example_passes_its_own_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(BLOCKS[0])
    (tmp_path / "test_mine.py").write_text(BLOCKS[1])
    monkeypatch.syspath_prepend(tmp_path)
    tests: dict[str, Any] = {}
    exec(BLOCKS[1], tests)
    found = [function for name, function in tests.items() if name.startswith("test_")]
    assert len(found) == 2
    for test in found:
        test()


def test_documented_example_implements_its_stated_algorithm(example: Path) -> None:
    learned = replace(experience(), scores=torch.tensor([1.0, 0.0, 0.5, -0.5, 2.0, 2.0, 0.0, 3.0]))
    scored = Rewarded(**{field.name: getattr(learned, field.name) for field in fields(Rewarded)})
    section = AlgorithmSection(adv_estimator="custom")
    section = replace(section, custom_estimator=replace(section.custom_estimator, path=str(example), needs=["groups"]))
    estimated, _ = estimate_alone(
        scored, None, None, None, algorithm=section, kl_coef=None, custom=load_estimator(section)
    )
    expected = grpo(scored.scores, scored.groups, scored.rows(scored.mask), norm_adv_by_std_in_grpo=False)
    torch.testing.assert_close(estimated.advantages, scored.flat(expected))
    assert not estimated.returns.any()

    own = PolicyLossSection(loss_mode="custom", path=str(example), kwargs={"clip": 0.1})
    actor = ActorSection(policy_loss=own)
    assert learned.old_log_probs is not None
    outputs = PolicyOutputs(log_probs=learned.old_log_probs + 0.3, entropy=torch.zeros(learned.mask.shape))
    totals = Totals.of(learned.num_learnt())
    _, metrics = ActorObjective(actor, horizon=8, custom=load_loss(own))(outputs, learned, totals)
    tensors = outputs.log_probs, learned.old_log_probs, learned.advantages * learned.weights, learned.mask
    clipped = ppo_clip(*map(learned.rows, tensors), clip_low=0.1, clip_high=0.1, clip_c=1e30)
    torch.testing.assert_close(metrics["actor/pg_loss"], clipped.sums.sum() / totals.num_tokens)
    torch.testing.assert_close(metrics["actor/pg_clipfrac"], clipped.clip_frac / totals.num_tokens)


def test_faults_of_custom_functions_are_found_before_start(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("def estimate(values, scores, extra): ...\ndef loss(log_probs, mask): ...\n")
    assert faults(tmp_path, *CHOSEN) == {
        f"{ESTIMATOR}.path": "algorithm.adv_estimator=custom is a function of yours: name its Python file",
        f"{LOSS}.path": f"{LOSS}.loss_mode=custom is a function of yours: name its Python file",
    }
    assert faults(tmp_path, f"{ESTIMATOR}.path={path}", f"{LOSS}.path={path}") == {
        "algorithm.adv_estimator": f"is not custom, so that compute_advantages of {path} is never called: write custom",
        f"{LOSS}.loss_mode": f"is not custom, so that compute_policy_loss of {path} is never called: write custom",
    }
    named = [*CHOSEN, f"{ESTIMATOR}.path={path}", f"{LOSS}.path={path}"]
    assert faults(tmp_path, *named) == {
        f"{ESTIMATOR}.name": f"{path} has no function 'compute_advantages'; it has estimate, loss",
        f"{LOSS}.name": f"{path} has no function 'compute_policy_loss'; it has estimate, loss",
    }
    found = faults(
        tmp_path,
        *(*named, f"{ESTIMATOR}.name=estimate", f"{LOSS}.name=loss"),
        f"{ESTIMATOR}.needs=[baselines]",
        f"{ESTIMATOR}.kwargs.scores=1",
        f"{LOSS}.kwargs.beta=1",
    )
    assert found.keys() == {f"{ESTIMATOR}.{name}" for name in ("needs", "kwargs", "name")} | {f"{LOSS}.kwargs"}
    assert found[f"{ESTIMATOR}.kwargs"] == "scores is an argument that the run gives: leave it out"
    assert found[f"{ESTIMATOR}.needs"].startswith("estimate of ")
    assert "has a parameter extra without a value" in found[f"{ESTIMATOR}.name"]
    assert found[f"{LOSS}.kwargs"] == f"loss of {path} does not take beta: leave it out, or add a parameter beta"
    assert faults(tmp_path, *named, f"{ESTIMATOR}.path=absent.py")[f"{ESTIMATOR}.path"].startswith("no such file")


def test_needs_decide_about_critic_and_greedy_responses(example: Path) -> None:
    def section(*needs: str) -> AlgorithmSection:
        argv = ["data.train_files=a", "actor_rollout_ref.model.path=org/m", "critic.model.path=org/c", CHOSEN[0]]
        argv += ["actor_rollout_ref.rollout.n=2", f"{ESTIMATOR}={{path: {example}, needs: [{', '.join(needs)}]}}"]
        config = load_config(argv, world_size=None, check_paths=False)
        assert config.has_critic is ("values" in needs)
        return config.algorithm

    plain, every = section().estimator, section("values", "groups", "baselines").estimator
    assert (plain.critic, plain.compares, plain.greedy) == (False, False, False)
    assert (every.critic, every.compares, every.greedy) == (True, True, True)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "from megarl.algorithms.losses import ppo_clip as compute_policy_loss",
            "has a parameter clip_low without",
        ),
        ("import absent_package\ndef compute_policy_loss(): ...", "fails to load: ModuleNotFoundError"),
        (
            "def compute_policy_loss(log_probs): return log_probs.sum()",
            "random batches: compute_policy_loss returns",
        ),
        ("def compute_policy_loss(mask): return mask[99]", "random batches: IndexError: index 99 is out of bounds"),
        ("def compute_policy_loss(mask): raise SystemExit(3)", "random batches: SystemExit: 3"),
    ],
)
def test_invalid_loss_function_is_refused_before_models_load(tmp_path: Path, text: str, fault: str) -> None:
    (path := tmp_path / "mine.py").write_text(text)
    with pytest.raises(ValueError, match=rf"^{LOSS}\..*{fault}"):
        load_loss(PolicyLossSection(loss_mode="custom", path=str(path)))


def test_built_in_algorithms_load_nothing() -> None:
    assert load_estimator(AlgorithmSection()) is None
    assert load_loss(PolicyLossSection()) is None


def test_the_code_is_recorded(example: Path) -> None:
    argv = ["data.train_files=a", "actor_rollout_ref.model.path=org/m", *CHOSEN, f"{ESTIMATOR}.path={example}"]
    config = load_config([*argv, f"{LOSS}.path={example}"], world_size=None, check_paths=False)
    found = custom_code(config)
    assert found.keys() == {f"{ESTIMATOR}.path", f"{LOSS}.path"}
    assert found[f"{LOSS}.path"].startswith(f"compute_policy_loss of {example} (SHA-256: ")
