"""A user's own estimator and policy loss train as built-in algorithms do, bit for bit, and their change is reported."""

from pathlib import Path

import pytest

from megarl.commands import train
from tests.support.forked import Job, run_job
from tests.support.outcomes import metrics_of
from tests.support.workspace import Workspace, train_arguments

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

LAUNCH_S = 300
BUILT_IN_AGAIN = """
from megarl.algorithms.advantages import gae, whiten
from megarl.algorithms.losses import ppo_clip as compute_policy_loss
from megarl.algorithms.masked import masked_moments


def compute_advantages(token_rewards, values, mask, gamma, lam):
    advantages, returns = gae(token_rewards, values, mask, gamma=gamma, lam=lam)
    mean, var = masked_moments(advantages, mask)
    return whiten(advantages, mask, mean=mean, var=var), returns
"""


def test_own_functions_train_as_the_built_in_ones(workspace: Workspace, tmp_path: Path) -> None:
    (own := tmp_path / "own.py").write_text(BUILT_IN_AGAIN)
    runs = {
        "built_in": ["algorithm.gamma=0.95", "algorithm.lam=0.9", "actor_rollout_ref.actor.clip_ratio_high=0.3"],
        "own": [
            "algorithm.adv_estimator=custom",
            f"algorithm.custom_estimator={{path: {own}, needs: [values], kwargs: {{gamma: 0.95, lam: 0.9}}}}",
            f"actor_rollout_ref.actor.policy_loss={{loss_mode: custom, path: {own}}}",
            "actor_rollout_ref.actor.policy_loss.kwargs={clip_low: 0.2, clip_high: 0.3, clip_c: 3.0}",
        ],
    }

    def run(name: str, steps: int) -> str:
        return run_job(
            *(1, train.main, *train_arguments(workspace, tmp_path / name), *runs[name]),
            f"critic.model.path={workspace.model}",
            "actor_rollout_ref.actor.ppo_epochs=2",  # so that ratios differ from 1
            "trainer.n_gpus_per_node=1",
            "trainer.val_before_train=false",
            "trainer.save_freq=2",
            f"trainer.total_training_steps={steps}",
            log=tmp_path / f"{name}-{steps}",
            timeout_s=LAUNCH_S,
        )

    run("built_in", 2)
    said = run("own", 2)
    assert f"code of your own: algorithm.custom_estimator.path: compute_advantages of {own} (SHA-256: " in said
    assert f"actor.policy_loss.path: compute_policy_loss of {own} (SHA-256: " in said
    kept, found = (
        {
            step: {name: value for name, value in metrics.items() if not name.startswith(("timing", "perf", "memory"))}
            for step, metrics in metrics_of(tmp_path / name).items()
        }
        for name in ("built_in", "own")
    )
    assert found.keys() == {1, 2}
    assert found[2]["actor/pg_clipfrac"] > 0.0
    assert found == kept

    own.write_text(BUILT_IN_AGAIN + "\n# another file\n")
    said = run("own", 3)
    assert "actor_rollout_ref.actor.policy_loss.path: compute_policy_loss of" in said
    assert "(another curve: the algorithm: another file content)" in said


SLIPS_IN_STEP_3 = """
from pathlib import Path


def compute_advantages(scores, mask):
    metrics = Path("{metrics}")
    if metrics.exists() and len(metrics.read_text().splitlines()) == 2:
        int("row 64")
    return scores[:, None] * mask
"""


def test_error_in_custom_estimator_shows_file_and_line(workspace: Workspace, tmp_path: Path) -> None:
    own, run_dir = tmp_path / "own.py", tmp_path / "run"
    own.write_text(SLIPS_IN_STEP_3.format(metrics=run_dir / "metrics.jsonl"))
    line = own.read_text().splitlines().index('        int("row 64")') + 1
    arguments = [
        *train_arguments(workspace, run_dir),
        "algorithm.adv_estimator=custom",
        f"algorithm.custom_estimator={{path: {own}}}",
        "actor_rollout_ref.rollout.n=2",
        "trainer.val_before_train=false",
    ]
    job = Job(2, train.main, arguments, log=tmp_path / "train")
    codes, printed = job.end_alone(timeout_s=LAUNCH_S), job.printed()
    assert codes == [1, 1], printed
    kept = "".join(file.read_text() for file in (run_dir / "errors").iterdir())
    for text in (printed, kept):
        assert f'File "{own}", line {line}, in compute_advantages' in text
        assert "ValueError: invalid literal for int() with base 10: 'row 64'" in text
    assert f"failed first; its traceback is in {run_dir / 'errors'}" in printed
