"""PPO on a real model with a real reward: stories become cheerful, and stay varied because of the KL in the reward."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import pytest

from megarl.tracking.jsonl import read_jsonl
from tests.assets import asset
from tests.programs import run_python

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

STEPS = 40


def distinct_bigrams(texts: Sequence[str]) -> float:
    """The share of word pairs of all texts together that occur once or for the first time: 1 repeats nothing."""
    words = [text.lower().split() for text in texts]
    pairs = [pair for text in words for pair in zip(text, text[1:], strict=False)]
    return len(set(pairs)) / len(pairs)


def test_ppo_raises_the_sentiment_and_keeps_the_text_varied(tmp_path: Path) -> None:
    model, stories = asset("models/stories260K-hd32"), asset("data/tinystories")
    pytest.importorskip("vaderSentiment", reason="the reward needs vaderSentiment")
    data, run_dir = tmp_path / "data", tmp_path / "run"
    run_python("scripts/prepare_tinystories.py", "--from", stories, "--out", data, timeout_s=60)
    run_python(
        "-m",
        "megarl.train",
        "configs/ppo_tinystories.yaml",
        f"data.train_files={data / 'train.parquet'}",
        f"data.val_files={data / 'val.parquet'}",
        f"actor_rollout_ref.model.path={model}",
        f"trainer.default_local_dir={run_dir}",
        f"trainer.total_training_steps={STEPS}",
        timeout_s=1100,
    )

    steps = [line for line in read_jsonl(run_dir / "metrics.jsonl") if "critic/score/mean" in line]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    rewards = [line["critic/score/mean"] for line in steps]
    assert mean(rewards[:3]) == pytest.approx(0.45, abs=0.1)
    assert mean(rewards[-5:]) >= 0.8
    assert steps[0]["actor/reward_kl_penalty"] == pytest.approx(0.0, abs=1e-6)
    assert 0.02 < steps[-1]["actor/reward_kl_penalty"] < 0.3
    assert max(line["training/rollout_probs_diff_max"] for line in steps) < 1e-3

    answers = read_jsonl(run_dir / "val_generations.jsonl")
    first, last = ([row["response"] for row in answers if row["step"] == step] for step in (0, STEPS))
    assert len(set(last)) >= 0.9 * len(last)
    assert distinct_bigrams(last) >= 0.6 * distinct_bigrams(first)
