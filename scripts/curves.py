"""Learning curves of settings that a page compares, over several seeds: the runs, the picture and the table.

    python scripts/curves.py partial|guess|replay [--jobs 2] [--seeds 3] [--steps 40] [--out runs/STUDY]
                                                  [--picture FILE]

For docs/benchmarks/curves.md. `partial` compares waiting with partial rollouts, `guess` GRPO with PPO on episodes, and
`replay` routing replay with routers that choose for themselves, for a mixture of experts whose engine computes in
bfloat16 and whose trainer in float32. For each seed the quickstart makes data and a warmed-up model, which all settings
share. Each run has one process. Finished runs are kept, so the same command resumes after an interruption.
"""

import argparse
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import matplotlib as mpl
from experts import write_experts
from matplotlib import pyplot as plt
from seeded import ROOT, Measure, Result, directory_of, execute, of_one_process, run_all, say, warm_up

mpl.use("svg")
mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "megarl", "font.size": 9}
COLOURS = ("#8a8f98", "#0b6e99", "#c2571a")


@dataclass(frozen=True, kw_only=True)
class Study:
    """The settings that are compared."""

    task: str  # of the quickstart
    measure: Measure
    settings: Mapping[str, Sequence[str]]  # arguments of `megarl train`, by name
    has_experts: bool = False  # the model is a mixture of experts


GROUPS = (
    "configs/quickstart_ppo.yaml",
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=96",
    "actor_rollout_ref.actor.ppo_mini_batch_size=48",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.dtype=bfloat16",
)
QUICKSTART = ("configs/quickstart_ppo.yaml", "actor_rollout_ref.rollout.max_num_seqs=64")  # so that prompts wait
STUDIES = {
    "partial": Study(
        task="countdown",
        measure=Measure(score="val/test_score/countdown/bare", samples=384),
        settings={
            "waiting": QUICKSTART,
            "stop_when: 0.5": (
                *QUICKSTART,
                "actor_rollout_ref.rollout.partial={enable: true, stop_when: 0.5}",
                "algorithm.rollout_correction.rollout_is=token",
            ),
        },
    ),
    "guess": Study(
        task="guess",
        measure=Measure(score="val/test_score/guess", samples=1024),
        settings={"GRPO": ("configs/grpo_guess.yaml",), "PPO": ("configs/ppo_guess.yaml",)},
    ),
    "replay": Study(
        task="countdown",
        measure=Measure(score="val/test_score/countdown/bare", samples=384),
        settings={
            value: (*GROUPS, f"actor_rollout_ref.rollout.routing_replay={value}")
            for value in ("none", "engine", "engine_scores")
        },
        has_experts=True,
    ),
}


def main() -> None:
    """Make the missing runs, draw the picture, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each on one core (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, from 1 (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="of each run (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="runs/STUDY")
    parser.add_argument("--picture", type=Path, help="docs/images/STUDY.svg")
    options = parser.parse_args()
    study, out = STUDIES[options.study], (options.out or Path("runs") / options.study).resolve()
    seeds = range(1, options.seeds + 1)
    warm_up(out, seeds, task=study.task, jobs=options.jobs)
    if study.has_experts:
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(lambda seed: warm_up_experts(out / f"seed{seed}", seed), seeds))
    model = "experts" if study.has_experts else "sft"
    commands = {
        (name, seed): command_of(arguments, seed, out, name, steps=options.steps, model=model)
        for seed in seeds
        for name, arguments in study.settings.items()
    }
    results = run_all(commands, out, study.measure, jobs=options.jobs)
    draw(options.picture or ROOT / "docs" / "images" / f"{options.study}.svg", results, study)
    print(table(results, study))


def warm_up_experts(seeded: Path, seed: int) -> None:
    """Let a random mixture of experts see the demonstrations of a seed, as the quickstart's model does."""
    if (seeded / "experts" / "huggingface" / "config.json").exists():
        return
    say(f"seed {seed}: warm-up of a mixture of experts")
    write_experts(seeded / "random_experts", seeded / "model", seed)
    keys = {
        "data.train_files": seeded / "data" / "sft.parquet",
        "data.seed": seed,
        "model.path": seeded / "random_experts",
        "trainer.default_local_dir": seeded / "experts",
        "trainer.n_gpus_per_node": 1,
    }
    arguments = [f"{key}={value}" for key, value in keys.items()]
    execute(["-m", "megarl", "sft", "configs/quickstart_sft.yaml", *arguments], seeded / "experts.txt")


def command_of(
    arguments: Sequence[str], seed: int, out: Path, name: str, *, steps: int, model: str = "sft"
) -> list[str]:
    """Return the arguments of Python for a run that starts from what the warm-up called `model`."""
    of_run = of_one_process(seed, out / f"seed{seed}", steps=steps)
    places = [
        f"actor_rollout_ref.model.path={out}/seed{seed}/{model}/huggingface",
        f"trainer.default_local_dir={directory_of(out, name, seed)}",
    ]
    return ["-m", "megarl", "train", *arguments, *of_run, f"trainer.test_freq={max(1, steps // 6)}", *places]


def table(results: Sequence[Result], study: Study) -> str:
    """Return the scores before and after training, as Markdown."""
    seeds = sorted({result.seed for result in results})
    heads = ["", *(f"seed {seed}" for seed in seeds), "mean of the last"]
    lines = [heads, ["---"] * len(heads)]
    for name in study.settings:
        curves = [next(r.curve for r in results if (r.algorithm, r.seed) == (name, seed)) for seed in seeds]
        scores = [f"{curve[0][1]:.3f} -> {curve[-1][1]:.3f}" for curve in curves]
        lines.append([name, *scores, f"{mean(curve[-1][1] for curve in curves):.3f}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(picture: Path, results: Sequence[Result], study: Study) -> None:
    """Draw a line for the mean of the seeds of each setting, and a band from the worst to the best of them."""
    figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    for name, colour in zip(study.settings, COLOURS, strict=False):
        curves = [result.curve for result in results if result.algorithm == name]
        steps = [samples // study.measure.samples for samples, _ in curves[0]]
        scores = [[score for _, score in points] for points in zip(*curves, strict=True)]
        axes.fill_between(steps, list(map(min, scores)), list(map(max, scores)), color=colour, alpha=0.2, linewidth=0)
        axes.plot(steps, list(map(mean, scores)), color=colour, marker="o", markersize=3, label=name)
    axes.set(xlabel=f"steps of {study.measure.samples} samples", ylabel="validation score", ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
