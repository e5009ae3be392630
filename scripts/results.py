"""Every algorithm on the task of the quickstart, with the same budget: runs, table and picture of docs/results.md.

    python scripts/results.py [--jobs 2] [--seeds 3] [--steps 40] [--out runs/results] [--docs docs]

For each seed the quickstart makes data and a warmed-up model, which all algorithms share. Then each algorithm is one
`megarl.train` on one process. Its own settings come from its file in `configs/`; nothing is tuned. Finished runs are
kept, so the same command resumes after an interruption.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from results_page import Result, write_page

ROOT = Path(__file__).resolve().parent.parent
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
VAL_SCORE = "val/test_score/countdown/bare"


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
    out, seeds = options.out.resolve(), range(1, options.seeds + 1)
    for seed in seeds:
        warm_up(out / f"seed{seed}", seed, options.warm_up_steps)
    commands = {
        (algorithm, seed): command_of(algorithm, seed, out, steps=options.steps)
        for seed in seeds
        for algorithm in ALGORITHMS
    }
    results = run_all(commands, out, jobs=options.jobs)

    lines = {name: own_lines(name) for name in ALGORITHMS}
    command = shlex.join(["python", "scripts/results.py", *sys.argv[1:]])
    write_page(options.docs, results, lines, samples=SAMPLES, command=command)


def warm_up(directory: Path, seed: int, steps: int | None) -> None:
    """Make data and a model that has seen demonstrations, as in the quickstart."""
    if (directory / "sft" / "huggingface" / "config.json").exists():
        return
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    say(f"seed {seed}: data and warm-up")
    shorter = ["--sft-steps", str(steps)] if steps else []
    command = ["scripts/quickstart.py", "--seed", str(seed), "--out", str(directory), "--warm-up-only", *shorter]
    execute(command, directory / "printed.txt")


def own_lines(algorithm: str) -> dict[str, Any]:
    """Return the algorithm's own settings, from its file in `configs/`, with the sizes of this budget."""
    if (file := ALGORITHMS[algorithm]) is None:
        return {}
    tree = yaml.safe_load((ROOT / "configs" / file).read_text())
    base = yaml.safe_load((ROOT / BASE).read_text())
    actor, settings = tree["actor_rollout_ref"]["actor"], tree["algorithm"]
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
    file.write_text(yaml.safe_dump(own, sort_keys=False))
    seeded = out / f"seed{seed}"
    return [
        *("-m", "megarl.train", BASE, str(file)),
        f"data.train_files={seeded}/data/train.parquet",
        f"data.val_files={seeded}/data/val.parquet",
        f"data.train_batch_size={SAMPLES // responses}",
        f"data.seed={seed}",
        f"actor_rollout_ref.model.path={seeded}/sft/huggingface",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={SAMPLES // responses // UPDATES}",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        f"actor_rollout_ref.rollout.seed={seed}",
        "trainer.n_gpus_per_node=1",
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={max(1, steps // 10)}",
        "trainer.save_freq=-1",
        "trainer.logger=[jsonl]",
        f"trainer.default_local_dir={seeded}/{slug(algorithm)}",
    ]


def slug(algorithm: str) -> str:
    """Return a name for files."""
    return algorithm.lower().replace(". ", "_").replace("+", "p")


def run_all(commands: dict[tuple[str, int], list[str]], out: Path, *, jobs: int) -> list[Result]:
    """Return the results of all commands: read finished ones, and run the others, `jobs` at a time.

    If a run fails, exit after the others have ended.
    """
    finished = {key: read_result(directory_of(out, *key), command) for key, command in commands.items()}
    missing = [key for key, result in finished.items() if result is None]
    say(f"{len(commands) - len(missing)} of {len(commands)} runs are finished already")
    failures = []
    with ThreadPoolExecutor(jobs) as pool:
        pending = {pool.submit(run, *key, commands[key], directory_of(out, *key)): key for key in missing}
        for number, future in enumerate(as_completed(pending), start=1):
            algorithm, seed = pending[future]
            try:
                finished[algorithm, seed] = result = future.result()
            except RuntimeError as error:
                failures.append(f"{algorithm}, seed {seed}: {error}")
                say(failures[-1])
                continue
            say(
                f"{algorithm}, seed {seed}: {result.curve[0][1]:.3f} -> {result.curve[-1][1]:.3f} "
                f"in {result.seconds:.0f} s ({number} of {len(missing)})"
            )
    if failures:
        sys.exit(f"results: {len(failures)} of {len(commands)} runs failed; the same command repeats only these")
    return [result for result in finished.values() if result]


def directory_of(out: Path, algorithm: str, seed: int) -> Path:
    """Return the directory of a run."""
    return out / f"seed{seed}" / slug(algorithm)


def run(algorithm: str, seed: int, command: list[str], directory: Path) -> Result:
    """Train once; write the result to `directory` at the end, atomically."""
    from megarl.tracking.jsonl import read_jsonl

    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    seconds = execute(command, directory / "printed.txt")
    samples, curve = 0, []
    for line in read_jsonl(directory / "metrics.jsonl"):
        samples += round(SAMPLES * line.get("train/num_gen_batches", 1)) if line["step"] else 0
        if VAL_SCORE in line:
            curve.append((samples, line[VAL_SCORE]))
    result = Result(algorithm=algorithm, seed=seed, command=command, seconds=seconds, curve=curve)
    part = directory / "result.part"
    part.write_text(json.dumps(asdict(result)))
    part.replace(directory / "result.json")
    return result


def read_result(directory: Path, command: list[str]) -> Result | None:
    """Return the result of this very command; None if it has not finished."""
    file = directory / "result.json"
    found = Result(**json.loads(file.read_text())) if file.exists() else None
    return found if found and found.command == command else None


def execute(arguments: Sequence[str], log: Path) -> float:
    """Run Python with `arguments`, on one core; return the seconds it took. Raise RuntimeError if it fails."""
    start = time.perf_counter()
    with log.open("w") as file:
        process = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    if process.returncode:
        end = "\n".join(log.read_text().splitlines()[-15:])
        raise RuntimeError(f"ended with code {process.returncode}; {log} ends\n{end}")
    return time.perf_counter() - start


def say(text: str) -> None:
    """Print a line with the time of day."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


if __name__ == "__main__":
    main()
