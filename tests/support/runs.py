"""A run's directory with files as a run of reinforcement learning writes them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from megarl.config.load import load_config, to_dict

PROMPTS = ("3 5 = 8 :", "</script><img src=http://example.com/a.png>", "1 1 = 3 :")


def config_of(*arguments: str) -> dict[str, Any]:
    """Return the resolved configuration of a run with these arguments, as `config.yaml` has it."""
    paths = ["data.train_files=a", "data.val_files=b", "actor_rollout_ref.model.path=c", "critic.model.path=d"]
    return to_dict(load_config([*paths, *arguments], world_size=None, check_paths=False))


def step_metrics(step: int) -> dict[str, float]:
    """Return the metrics of a step of a run that learns."""
    return {
        "critic/score/mean": step / 20,
        "actor/entropy": 1.0 - step / 20,
        "actor/reward_kl_penalty": step / 100,
        "actor/grad_norm": 0.5,
        "actor/skipped_updates": float(step == 2),
        "training/rollout_mismatch": 1e-7,
        "training/rollout_mismatch_limit": 1e-5,
        "timing_s/gen": 3.0,
        "timing_s/sync": 1.0,
        "timing_s/update_actor": 1.0,
        "timing_s/step": 4.0,
    }


def write_run(
    directory: Path,
    *,
    steps: int = 4,
    config: Mapping[str, Any] | None = None,
    scores: Mapping[int, float] | None = None,
) -> Path:
    """Write metrics of `steps` steps, validation `scores` by step, samples, a configuration and a history."""
    directory.mkdir(parents=True)
    scores = {0: 0.125, 2: 0.5, steps: 0.375} if scores is None else scores
    validated = {step: {"val/test_score/countdown": score} for step, score in scores.items()}
    rows = [{"step": 0, "time": 1.0, **validated.get(0, {})}] if 0 in scores else []
    rows += [
        {"step": step, "time": 1.0 + step, **step_metrics(step), **validated.get(step, {})}
        for step in range(1, steps + 1)
    ]
    samples = [
        {"step": step, "prompt": prompt, "response": f"of step {step}", "score": score}
        for step, good in ((0, 0), (steps, 1))
        for prompt, score in zip(PROMPTS, (float(good), float(1 - good), 0.5), strict=True)
    ]
    history = [
        {
            "step": 0,
            "time": 1.0,
            "event": "start",
            "command": "python -m megarl train x.yaml",
            "commit": "c0ffee" * 6,
        },
        {"step": steps, "time": 9.0, "event": "finished"},
    ]
    for name, lines in (("metrics", rows), ("val_generations", samples), ("history", history)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "config.yaml").write_text(yaml.safe_dump(dict(config or config_of())))
    return directory
