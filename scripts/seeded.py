"""Runs of several settings and seeds from the warmed-up models of the quickstart. Finished runs are kept."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
Key = tuple[str, int]
"""The setting and the seed of a run."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a finished run."""

    algorithm: str
    seed: int
    command: list[str]
    seconds: float
    curve: list[tuple[int, float]]  # (generated samples, greedy validation score)


@dataclass(frozen=True, kw_only=True)
class Measure:
    """The points of a curve."""

    score: str  # the metric
    samples: int  # of a step, or of each of its batches


def warm_up(out: Path, seeds: Sequence[int], *, task: str, jobs: int, steps: int | None = None) -> None:
    """Make data and a model that has seen demonstrations for each seed, as in the quickstart, on one process."""
    shorter = ["--sft-steps", str(steps)] if steps else []

    def make(seed: int) -> None:
        directory = out / f"seed{seed}"
        if (directory / "sft" / "huggingface" / "config.json").exists():
            return
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        say(f"seed {seed}: data and warm-up")
        of_seed = ["--task", task, "--seed", str(seed), "--out", str(directory), "--warm-up-only", *shorter]
        execute(["scripts/quickstart.py", *of_seed, "trainer.n_gpus_per_node=1"], directory / "printed.txt")

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(make, seeds))


def of_one_process(seed: int, seeded: Path, *, steps: int) -> list[str]:
    """Return the keys of a run on one process, with the data and the model that `warm_up` made in `seeded`."""
    return [
        f"data.train_files={seeded}/data/train.parquet",
        f"data.val_files={seeded}/data/val.parquet",
        f"data.seed={seed}",
        f"actor_rollout_ref.model.path={seeded}/sft/huggingface",
        f"actor_rollout_ref.rollout.seed={seed}",
        "trainer.n_gpus_per_node=1",
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={max(1, steps // 10)}",
        "trainer.save_freq=-1",
        "trainer.save_last=false",
        "trainer.save_best=false",
        "trainer.logger=[jsonl]",
    ]


def run_all(commands: Mapping[Key, list[str]], out: Path, measure: Measure, *, jobs: int) -> list[Result]:
    """Return the results of all commands: read finished ones, and run the others, `jobs` at a time.

    If a run fails, exit after the others have ended.
    """
    finished = {key: read_result(directory_of(out, *key), command) for key, command in commands.items()}
    missing = [key for key, result in finished.items() if result is None]
    say(f"{len(commands) - len(missing)} of {len(commands)} runs are finished already")
    failures = []
    with ThreadPoolExecutor(jobs) as pool:
        pending = {pool.submit(run, key, commands[key], directory_of(out, *key), measure): key for key in missing}
        for number, future in enumerate(as_completed(pending), start=1):
            name, seed = pending[future]
            try:
                finished[name, seed] = result = future.result()
            except RuntimeError as error:
                failures.append(f"{name}, seed {seed}: {error}")
                say(failures[-1])
                continue
            say(
                f"{name}, seed {seed}: {result.curve[0][1]:.3f} -> {result.curve[-1][1]:.3f} "
                f"in {result.seconds:.0f} s ({number} of {len(missing)})"
            )
    if failures:
        sys.exit(f"{len(failures)} of {len(commands)} runs failed; the same command repeats only these")
    return [result for result in finished.values() if result]


def run(key: Key, command: list[str], directory: Path, measure: Measure) -> Result:
    """Train once; write the result to `directory` at the end, atomically."""
    from megarl.tracking.jsonl import read_jsonl

    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    seconds = execute(command, directory / "printed.txt")
    samples = 0
    curve = []
    for line in read_jsonl(directory / "metrics.jsonl"):
        samples += round(measure.samples * line.get("train/num_gen_batches", 1)) if line["step"] else 0
        if measure.score in line:
            curve.append((samples, line[measure.score]))
    name, seed = key
    result = Result(algorithm=name, seed=seed, command=command, seconds=seconds, curve=curve)
    part = directory / "result.part"
    part.write_text(json.dumps(asdict(result)), encoding="utf-8")
    part.replace(directory / "result.json")
    return result


def directory_of(out: Path, name: str, seed: int) -> Path:
    """Return the directory of a run."""
    return out / f"seed{seed}" / slug(name)


def slug(name: str) -> str:
    """Return a name for files."""
    return name.lower().replace(". ", "_").replace("+", "p").replace(": ", "_")


def read_result(directory: Path, command: list[str]) -> Result | None:
    """Return the result of this very command; None if it has not finished."""
    file = directory / "result.json"
    found = Result(**json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None
    return found if found and found.command == command else None


def execute(arguments: Sequence[str], log: Path) -> float:
    """Run Python with `arguments`, on one core; return the seconds it took. Raise RuntimeError if it fails."""
    start = time.perf_counter()
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    if process.returncode:
        end = "\n".join(log.read_text(encoding="utf-8").splitlines()[-15:])
        raise RuntimeError(f"ended with code {process.returncode}; {log} ends\n{end}")
    return time.perf_counter() - start


def say(text: str) -> None:
    """Print a line with the time of day."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)
