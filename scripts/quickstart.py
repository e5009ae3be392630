"""From nothing to a language model that learned arithmetic by PPO: data, tokenizer, warm-up, training, export, a plot.

    python scripts/quickstart.py [--task countdown] [--seed 1] [--out runs/quickstart] [--sft-steps N] [--ppo-steps N]
                                 [--num-problems N] [--warm-up-only] [section.key=value ...]

With `--task guess` it learns by GRPO to guess a number in several turns (docs/environments.md), in runs/guess.

Everything is made here; nothing is downloaded. Each stage is one of megarl's own commands, printed before it runs. It
takes the given keys that it knows. Two processes share the work; on CUDA, at most one process for each device.
"""

import argparse
import importlib
import importlib.util
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config.root import Config, SFTConfig
from megarl.config.schema import Schema
from megarl.platform.device import decide_device
from megarl.platform.errors import UserError
from megarl.tracking.names import REWARD, validation_of

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs"
MAX_NUMBER = 24
MAX_TARGET = 50
QUICK = ("matplotlib.figure", "pyarrow.parquet", "sentencepiece")  # imported to see what they need themselves
SLOW = ("transformers", "megatron", "vllm")
CARELESS = (
    0.55  # share of the demonstrations: imitation learns a habit that only the reward distinguishes from a solution
)
MOST_WARM_UP = 20
"""The steps of warm-up in the configurations of the supervised runs."""
SMOOTHING = 0.8  # weight of the past in the running mean of a curve
_INK = "#1f2933"
_GREY = "#9aa5b1"
_COLOURS = ("#0b6e99", "#d9730d", "#448361", "#9065b0", "#c14c8a")


@dataclass(frozen=True, kw_only=True)
class Task:
    """The task that the model learns."""

    out: str
    problems: Sequence[object]  # options of `megarl prepare`
    warm_up: str
    training: str
    directory: str  # of the training
    score: str


TASKS = {
    "countdown": Task(
        out="runs/quickstart",
        problems=(
            *("--train", 3072, "--val", 512, "--sft", 5120, "--careless", CARELESS),
            *("--num-numbers", 3, "--max-number", MAX_NUMBER, "--max-target", MAX_TARGET, "--operators", "+-"),
        ),
        warm_up="quickstart_sft.yaml",
        training="quickstart_ppo.yaml",
        directory="ppo",
        score="val/test_score/countdown/bare",
    ),
    "guess": Task(
        out="runs/guess",
        problems=("--train", 2048, "--val", 256, "--sft", 4096, "--largest", 8),
        warm_up="guess_sft.yaml",
        training="grpo_guess.yaml",
        directory="grpo",
        score="val/test_score/guess",
    ),
}


def main() -> None:
    """Run all stages and write OUT/summary.json, or run only the first stages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--task", choices=TASKS, default="countdown")
    parser.add_argument("--out", type=Path, help="runs/quickstart, or runs/guess")
    parser.add_argument("--num-problems", type=int, help="draw so few problems for each use, to try the stages")
    parser.add_argument("--sft-steps", type=int, help="shorten the warm-up")
    parser.add_argument("--ppo-steps", type=int, help="shorten the training")
    parser.add_argument("--warm-up-only", action="store_true", help="stop after the model that PPO starts from")
    parser.add_argument("keys", nargs="*", metavar="section.key=value", help="a key of the warm-up, of PPO or of both")
    arguments = parser.parse_intermixed_args()
    given = read_keys(arguments.keys)
    check_packages(loggers=given.get("trainer.logger", "mlflow"))
    keys = keys_of_machine(decide_device(given.get("trainer.device", "auto"))) | given
    task = TASKS[arguments.task]
    seed = arguments.seed
    out = (arguments.out or Path(task.out)).resolve()
    out.mkdir(parents=True, exist_ok=True)
    files = [f"data.train_files={out}/data/train.parquet", f"data.val_files={out}/data/val.parquet"]

    problems = [*task.problems]
    few = arguments.num_problems
    if few:
        problems += ["--train", few, "--val", few, "--sft", few]
    megarl("prepare", arguments.task, "--out", out / "data", "--seed", seed, *problems)
    make_model(out / "model", out / "data", seed)
    start = time.perf_counter()
    megarl(
        "sft",
        CONFIGS / task.warm_up,
        f"data.train_files={out}/data/sft.parquet",
        f"model.path={out}/model",
        f"data.seed={seed}",
        f"trainer.default_local_dir={out}/sft",
        *_shortened(arguments.sft_steps),
        *known_to(SFTConfig, keys),
    )
    if arguments.warm_up_only:
        return
    megarl(
        "train",
        CONFIGS / task.training,
        *files,
        f"actor_rollout_ref.model.path={out}/sft/huggingface",
        f"data.seed={seed}",
        f"actor_rollout_ref.rollout.seed={seed}",
        f"trainer.default_local_dir={out}/{task.directory}",
        *([f"trainer.total_training_steps={arguments.ppo_steps}"] if arguments.ppo_steps else []),
        *known_to(Config, keys),
    )
    seconds = time.perf_counter() - start
    megarl("export", out / task.directory, out / "actor")
    summarize(out, task, seconds)


def check_packages(*, loggers: str) -> None:
    """End with a message if a package is missing that any stage needs, the last one included."""
    slow = (*SLOW, *(["mlflow"] if "mlflow" in loggers else []))
    missing = [name for name in slow if importlib.util.find_spec(name) is None]
    for name in QUICK:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing.append(error.name or name)
    if missing:
        sys.exit(f"quickstart: install {', '.join(missing)} first, for a later stage needs it: make setup")


def read_keys(arguments: Sequence[str]) -> dict[str, str]:
    """Return the values of `section.key=value` by key; end with a message if neither command knows a key."""
    keys = dict(argument.partition("=")[::2] for argument in arguments)
    for key in keys:
        if not any(key in Schema.of(root) for root in (SFTConfig, Config)):
            sys.exit(f"quickstart: {key} is no key of megarl sft or of megarl train; see docs/configuration.md")
    return keys


def keys_of_machine(device: str) -> dict[str, str]:
    """Return the keys that fit the runs to this machine: the configurations are those of two processes on a CPU."""
    if device == "cpu":
        return {}
    import torch

    return {
        "trainer.n_gpus_per_node": str(min(2, torch.cuda.device_count())),
        # The kernels of CUDA for attention over sequences of different lengths have half precision only.
        "megatron.dtype": "bfloat16",
        "actor_rollout_ref.actor.megatron.dtype": "bfloat16",
        "actor_rollout_ref.rollout.dtype": "bfloat16",
    }


def _shortened(num_steps: int | None) -> list[str]:
    """Return the arguments of a supervised run of `num_steps` steps, in which the rate has time to warm up."""
    if num_steps is None:
        return []
    return [f"trainer.total_training_steps={num_steps}", f"optim.lr_warmup_steps={min(MOST_WARM_UP, num_steps // 2)}"]


def known_to(root: type, keys: Mapping[str, str]) -> list[str]:
    """Return the arguments for the command whose configuration is `root`."""
    schema = Schema.of(root)
    return [f"{key}={value}" for key, value in keys.items() if key in schema]


def make_model(directory: Path, data: Path, seed: int) -> None:
    """Write a small random Llama and a SentencePiece tokenizer trained on the problems."""
    import pyarrow.parquet as pq

    from megarl.commands.new.tiny import write_model
    from megarl.data.messages import plain_text

    pairs = pq.read_table(data / "sft.parquet").to_pylist()
    texts = (f"{plain_text(pair['prompt'])}{pair['response']}" for pair in pairs)
    print(write_model(directory, texts, length=64, seed=seed))


def summarize(out: Path, task: Task, seconds: float) -> None:
    """Write summary.json and curves.png, and print all paths."""
    from megarl.tracking.jsonl import read_jsonl

    curves = out / task.directory / "metrics.jsonl"
    rows = read_jsonl(curves)
    scores = [row[task.score] for row in rows if task.score in row]
    summary = {
        "val_score_first": scores[0],
        "val_score_last": scores[-1],
        "steps": rows[-1]["step"],
        "seconds": round(seconds, 1),
        "rollout_probs_diff_max": max(row.get("training/rollout_probs_diff_max", 0.0) for row in rows),
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2), encoding="utf-8")
    plot_curves(curves, out / "curves.png")
    print(json.dumps(summary, indent=2))
    print(f"curves  {out}/curves.png\nactor   {out}/actor (a Hugging Face directory)")
    print(f"MLflow  .venv/bin/mlflow ui --backend-store-uri sqlite:///{out}/mlflow.db")
    print("next    .venv/bin/megarl new mine --tiny    a project for data and a reward of your own: see mine/README.md")


def plot_curves(metrics_jsonl: Path, png: Path) -> None:
    """Draw training reward (left) and validation scores (right). Raise UserError if there are neither."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from megarl.tracking.jsonl import read_jsonl

    rows = read_jsonl(metrics_jsonl)
    rewards = [(row["step"], row[REWARD]) for row in rows if REWARD in row]
    validations: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for source, value in validation_of(row).items():
            validations.setdefault(source, []).append((row["step"], value))
    if not rewards and not validations:
        raise UserError(f"{metrics_jsonl} has neither {REWARD} nor a validation score to draw")

    figure = Figure(figsize=(10, 3.8), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _draw_reward(left, rewards)
    for number, (source, points) in enumerate(validations.items()):
        style = {"color": _COLOURS[number % len(_COLOURS)], "marker": "o", "markersize": 4, "linewidth": 2}
        right.plot(*zip(*points, strict=True), label=source, **style)
    if validations:
        right.legend(frameon=False, fontsize=8)
    for axes, title in ((left, "training reward"), (right, "validation score")):
        _dress(axes, title)
    figure.savefig(png)


def _draw_reward(axes: Any, points: list[tuple[int, float]]) -> None:
    if not points:
        return
    steps, values = zip(*points, strict=True)
    smooth = [values[0]]
    for value in values[1:]:
        smooth.append(SMOOTHING * smooth[-1] + (1 - SMOOTHING) * value)
    axes.plot(steps, values, color=_COLOURS[0], alpha=0.3, linewidth=1)
    axes.plot(steps, smooth, color=_COLOURS[0], linewidth=2)


def _dress(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=_INK, pad=10)
    axes.set_xlabel("step", color=_INK)
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_GREY)


def megarl(name: str, *arguments: object) -> None:
    """Run `python -m megarl NAME ARGUMENTS`, and exit if it fails."""
    command = [sys.executable, "-m", "megarl", name, *map(str, arguments)]
    print(f"\n$ python {shlex.join(command[1:])}", flush=True)
    code = subprocess.run(command, cwd=ROOT).returncode
    if code:
        sys.exit(f"quickstart: megarl {name} failed with code {code}; its messages are above")


if __name__ == "__main__":
    main()
