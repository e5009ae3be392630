"""PPO on a real model: stories become cheerful, and the KL in the reward keeps them varied.

In bfloat16, the default type, engine and trainer stay far below the limits of the gate.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import pytest

from megarl.rollout.config import SyncSection
from megarl.rollout.limits import Limits
from megarl.tracking.jsonl import read_jsonl
from megarl.tracking.protocol import Row
from tests.support.assets import asset
from tests.support.programs import run_python

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1200)]

STEPS = 40
BFLOAT16 = Limits.of(SyncSection(), "bfloat16")


def distinct_bigrams(texts: Sequence[str]) -> float:
    """Return the share of distinct word pairs in all texts together; 1 means that no pair repeats."""
    words = [text.lower().split() for text in texts]
    pairs = [pair for text in words for pair in zip(text, text[1:], strict=False)]
    return len(set(pairs)) / len(pairs)


def prepared(data: Path) -> list[str]:
    """Write the stories to `data`; return arguments that name model and stories."""
    model, stories = asset("models/stories260K-hd32"), asset("data/tinystories")
    run_python("-m", "megarl", "prepare", "tinystories", "--from", stories, "--out", data, timeout_s=60)
    return [
        *("-m", "megarl", "train", "configs/ppo_tinystories.yaml"),
        f"data.train_files={data / 'train.parquet'}",
        f"data.val_files={data / 'val.parquet'}",
        f"actor_rollout_ref.model.path={model}",
    ]


def steps_of(run_dir: Path) -> list[Row]:
    return [line for line in read_jsonl(run_dir / "metrics.jsonl") if "critic/score/mean" in line]


def test_the_default_type_runs_far_below_its_limits(tmp_path: Path) -> None:
    """Train and sample in bfloat16 over two tensor-parallel ranks each, and check every sync."""
    run_dir, reward = tmp_path / "run", tmp_path / "reward.py"
    reward.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info):\n")
    with reward.open("a") as file:
        file.write("    return sum(letter in 'aeiou' for letter in solution_str) / 50\n")
    run_python(
        *prepared(tmp_path / "data"),
        "actor_rollout_ref.actor.megatron={dtype: bfloat16, tensor_model_parallel_size: 2}",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout={dtype: bfloat16, tensor_model_parallel_size: 2, temperature: 0.7}",
        "actor_rollout_ref.rollout.sync.check_every=1",
        f"custom_reward_function.path={reward}",
        f"trainer.default_local_dir={run_dir}",
        "trainer.total_training_steps=3",
        *("trainer.val_before_train=false", "trainer.test_freq=-1"),
        timeout_s=600,
    )
    steps = steps_of(run_dir)
    assert len(steps) == 3
    for line in steps:
        assert 1e-5 < line["training/rollout_mismatch"] < BFLOAT16.mismatch_stop / 8  # above zero because of bfloat16
        assert line["training/rollout_mismatch"] < line["training/rollout_mismatch_limit"] / 4
        assert line["training/rollout_mismatch_left_out"] == 0.0
        assert line["sync/check_probs_diff_mean"] < BFLOAT16.probs_stop / 4


def test_ppo_raises_sentiment_and_keeps_text_diverse(tmp_path: Path) -> None:
    pytest.importorskip("vaderSentiment", reason="the reward needs vaderSentiment")
    run_dir = tmp_path / "run"
    run_python(
        *prepared(tmp_path / "data"),
        f"trainer.default_local_dir={run_dir}",
        f"trainer.total_training_steps={STEPS}",
        timeout_s=1100,
    )

    steps = steps_of(run_dir)
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    rewards = [line["critic/score/mean"] for line in steps]
    assert mean(rewards[:3]) == pytest.approx(0.45, abs=0.1)
    assert mean(rewards[-5:]) >= 0.8
    assert steps[0]["actor/reward_kl_penalty"] == pytest.approx(0.0, abs=1e-6)
    assert 0.02 < steps[-1]["actor/reward_kl_penalty"] < 0.3
    assert max(line["training/rollout_probs_diff_max"] for line in steps) < 1e-3

    rows = read_jsonl(run_dir / "val_generations.jsonl")
    first, last = ([row["response"] for row in rows if row["step"] == step] for step in (0, STEPS))
    assert len(set(last)) >= 0.9 * len(last)
    assert distinct_bigrams(last) >= 0.6 * distinct_bigrams(first)
