"""Every algorithm on the task of the quickstart, with the same budget: runs, table and picture of docs/results.md.

    python scripts/results.py [--jobs 2] [--seeds 3] [--steps 40] [--out runs/results] [--docs docs]

For each seed the quickstart makes data and a warmed-up model, which all algorithms share. Then each algorithm is one
`megarl train` on one process. Its own settings come from its file in `configs/`; nothing is tuned. Finished runs are
kept, so the same command resumes after an interruption.
"""

import argparse
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from results_page import write_page
from seeded import ROOT, Measure, directory_of, of_one_process, run_all, slug, warm_up

BASE = "configs/quickstart_ppo.yaml"
ALGORITHMS = {
    "PPO": None,  # the quickstart itself
    "GRPO": "grpo_gsm8k.yaml",
    "Dr. GRPO": "dr_grpo_gsm8k.yaml",
    "RLOO": "rloo_gsm8k.yaml",
    "ReMax": "remax_gsm8k.yaml",
    "REINFORCE++": "reinforce_plus_plus_gsm8k.yaml",
    "DAPO": "dapo_gsm8k.yaml",
    "GSPO": "gspo_gsm8k.yaml",
}
SAMPLES, UPDATES, GROUP = 384, 2, 8  # responses a step (of one batch), updates of the policy; responses to a prompt
OWN_ACTOR_KEYS = ("clip_", "loss_agg_mode", "policy_loss", "use_kl_loss", "kl_loss_")  # prefixes
MEASURE = Measure(score="val/test_score/countdown/bare", samples=SAMPLES)


def main() -> None:
    """Make the missing runs, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each on one core (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, from 1 (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help=f"of {SAMPLES} samples each (default: %(default)s)")
    parser.add_argument("--warm-up-steps", type=int, help="shorten the warm-up")
    parser.add_argument("--out", type=Path, default=Path("runs/results"), help="(default: %(default)s)")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="directory of the page (default: docs)")
    options = parser.parse_args()
    out = options.out.resolve()
    seeds = range(1, options.seeds + 1)
    warm_up(out, seeds, task="countdown", jobs=options.jobs, steps=options.warm_up_steps)
    commands = {
        (algorithm, seed): command_of(algorithm, seed, out, steps=options.steps)
        for seed in seeds
        for algorithm in ALGORITHMS
    }
    results = run_all(commands, out, MEASURE, jobs=options.jobs)

    command = shlex.join(["python", "scripts/results.py", *sys.argv[1:]])
    write_page(options.docs, results, tuple(ALGORITHMS), samples=SAMPLES, command=command)


def own_lines(algorithm: str) -> dict[str, Any]:
    """Return the algorithm's own settings, from its file in `configs/`, with the sizes of this budget."""
    file = ALGORITHMS[algorithm]
    if file is None:
        return {}
    tree = yaml.safe_load((ROOT / "configs" / file).read_text(encoding="utf-8"))
    base = yaml.safe_load((ROOT / BASE).read_text(encoding="utf-8"))
    actor = tree["actor_rollout_ref"]["actor"]
    settings = tree["algorithm"]
    responses = 1 if tree["actor_rollout_ref"]["rollout"]["n"] == 1 else GROUP - has_greedy_response(settings)
    if "overlong_buffer" in settings:  # the same share of the longest response
        share = settings["overlong_buffer"]["len"] / tree["data"]["max_response_length"]
        settings["overlong_buffer"]["len"] = round(share * base["data"]["max_response_length"])
    return {
        "algorithm": settings,
        "actor_rollout_ref": {
            "actor": {key: value for key, value in actor.items() if key.startswith(OWN_ACTOR_KEYS)},
            "rollout": {"n": responses},
        },
    }


def has_greedy_response(settings: Mapping[str, Any]) -> bool:
    """Return whether one response to each prompt serves only as a baseline."""
    return settings["adv_estimator"] == "remax"


def command_of(algorithm: str, seed: int, out: Path, *, steps: int) -> list[str]:
    """Return the arguments of Python for a run; write the algorithm's own settings into a file next to the runs."""
    own = own_lines(algorithm)
    responses = own["actor_rollout_ref"]["rollout"]["n"] + has_greedy_response(own["algorithm"]) if own else 1
    file = out / "algorithms" / f"{slug(algorithm)}.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(yaml.safe_dump(own, sort_keys=False), encoding="utf-8")
    return [
        *("-m", "megarl", "train", BASE, str(file)),
        *of_one_process(seed, out / f"seed{seed}", steps=steps),
        f"data.train_batch_size={SAMPLES // responses}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={SAMPLES // responses // UPDATES}",
        f"trainer.default_local_dir={directory_of(out, algorithm, seed)}",
    ]


if __name__ == "__main__":
    main()
