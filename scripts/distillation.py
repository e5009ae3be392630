"""A student learns from its teacher's distributions: runs, picture and numbers of docs/benchmarks/curves.md.

    make quickstart
    python scripts/distillation.py [--quickstart runs/quickstart] [--out runs/distillation] [--picture FILE]

The student is the warmed-up model of the quickstart, the teacher is what PPO made of it. Each exact divergence is one
run of `configs/quickstart_distill.yaml`. Finished runs are kept, so the same command resumes after an interruption.
"""

import argparse
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt

from megarl.algorithms.config import EXACT, ExactKL
from megarl.tracking.jsonl import read_jsonl

mpl.use("svg")
mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "megarl", "font.size": 9}
ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "quickstart_distill.yaml"
SCORE = "val/test_score/countdown/bare"
Curve = dict[int, float]


def main() -> None:
    """Run what is not finished, draw the picture, and print the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quickstart", type=Path, default=Path("runs/quickstart"), help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/distillation"), help="(default: %(default)s)")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "images" / "distillation.svg")
    options = parser.parse_args()
    teacher = curve_of(options.quickstart / "ppo")
    if not teacher:
        sys.exit(f"distillation: {options.quickstart} has no finished run of PPO: make quickstart")
    students = {kind: distil(kind, options.quickstart.resolve(), options.out.resolve()) for kind in EXACT}
    draw(options.picture, teacher, students)
    print(f"the teacher: {teacher[max(teacher)]:.3f} after {max(teacher)} steps of PPO")
    for kind, curve in students.items():
        print(f"{kind}: " + ", ".join(f"{score:.3f} after {step}" for step, score in curve.items()))


def distil(kind: ExactKL, quickstart: Path, out: Path) -> Curve:
    """Train the student with one divergence, unless this is done. Return its curve."""
    directory = out / kind
    if not (directory / "finished").exists():
        arguments = [
            CONFIG,
            *(f"data.{name}_files={quickstart}/data/{name}.parquet" for name in ("train", "val")),
            f"actor_rollout_ref.model.path={quickstart}/sft/huggingface",
            f"actor_rollout_ref.ref.model.path={quickstart}/actor",
            f"actor_rollout_ref.actor.kl_loss_type={kind}",
            f"trainer.default_local_dir={directory}",
        ]
        subprocess.run([sys.executable, "-m", "megarl", "train", *map(str, arguments)], cwd=ROOT, check=True)
        (directory / "finished").touch()
    return curve_of(directory)


def curve_of(run: Path) -> Curve:
    """Return the validation score of a run by step."""
    file = run / "metrics.jsonl"
    return {row["step"]: row[SCORE] for row in (read_jsonl(file) if file.exists() else []) if SCORE in row}


def draw(picture: Path, teacher: Curve, students: Mapping[ExactKL, Curve]) -> None:
    """Draw the curves."""
    figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    for kind, curve in students.items():
        axes.plot([*curve], [*curve.values()], marker="o", markersize=3, label=f"student, {kind}")
    axes.plot([*teacher], [*teacher.values()], color="#8a8f98", marker="o", markersize=3, label="teacher, by PPO")
    axes.axhline(teacher[max(teacher)], color="#8a8f98", linestyle="--", linewidth=1)
    axes.set(xlabel="steps of 384 samples", ylabel="validation score", ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
