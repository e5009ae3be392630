"""A run whose ranks are killed again and again, at random moments, and one that nobody disturbs: both end the same.

    python scripts/chaos.py [--kills 20] [--seed 1] [--out runs/chaos] [--ranks 2]

Data, tokenizer and a model are made as the quickstart makes them. Both runs train it by PPO; the second under `torchrun
--max-restarts`, with a SIGKILL to one rank in each of its lives. The exit code is 1 where metrics, samples or models
differ in one bit. Started again, this goes on where it was stopped: OUT holds what is done.
"""

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megarl.platform.versions import versions  # noqa: E402
from megarl.tracking.jsonl import read_jsonl  # noqa: E402
from tests.support.faulty import START, Fault, Faults  # noqa: E402
from tests.support.outcomes import differences  # noqa: E402

CONFIG = "configs/quickstart_ppo.yaml"
WARM_UP_STEPS = 20
SAVE_FREQ = 2
KILLS_PER_STEP = 2
PHASES = ("sync", "gen", "reward", "old_log_prob", "values", "update_critic", "update_actor", "save_checkpoint")
START_S = 10.0  # within which a rank is killed that has not begun to train


def main() -> int:
    """Make what is missing in OUT, compare, and say what came of it; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"))
    parser.add_argument("--ranks", type=int, default=2, help="an even number: models are cut in two")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    num_steps = SAVE_FREQ * max(2, -(-options.kills // (KILLS_PER_STEP * SAVE_FREQ)) + 1)

    if not (out / "world" / "sft" / "huggingface").exists():
        script = [ROOT / "scripts" / "quickstart.py", "--warm-up-only", "--sft-steps", WARM_UP_STEPS]
        call("world", *script, "--seed", options.seed, "--out", out / "world", log=out / "world.log")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", options.ranks]
    common = [*arguments(out / "world"), f"trainer.n_gpus_per_node={options.ranks}"]
    common += [f"trainer.total_training_steps={num_steps}"]
    expected, found = out / "undisturbed", out / "killed"
    if not is_finished(expected, num_steps):
        call("undisturbed", *torchrun, "-m", "megarl.train", *common, *places(expected), log=out / "undisturbed.log")
    faults = Faults(out / "faults.json")
    if not faults.path.exists():
        durations = seconds_of(expected)
        faults.write(draw(options.kills, options.ranks, num_steps, durations, random.Random(options.seed)))
    if not is_finished(found, num_steps):
        restarts = ["--max-restarts", options.kills, "-m", "tests.support.faulty", faults.path]
        call("killed", *torchrun, *restarts, *common, *places(found), log=out / "killed.log")
    odd = differences(expected, found, step=num_steps)
    return report(out, faults, odd, num_kills=options.kills, num_steps=num_steps)


def arguments(world: Path) -> list[str]:
    """The quickstart's PPO with a smaller batch, and with a controller that remembers."""
    return [
        CONFIG,
        f"data.train_files={world}/data/train.parquet",
        f"data.val_files={world}/data/val.parquet",
        "data.train_batch_size=32",
        f"actor_rollout_ref.model.path={world}/sft/huggingface",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.rollout.max_num_seqs=64",
        "algorithm.kl_ctrl={type: adaptive, kl_coef: 0.001, target_kl: 0.01, horizon: 1000}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        f"trainer.save_freq={SAVE_FREQ}",
        "trainer.max_ckpt_to_keep=2",
        "trainer.logger=[jsonl,mlflow]",
        "trainer.resume_mode=auto",
    ]


def places(run_dir: Path) -> list[str]:
    """Where a run keeps what it leaves."""
    return [f"trainer.default_local_dir={run_dir}", f"trainer.rollout_data_dir={run_dir}/samples"]


def call(name: str, *command: object, log: Path) -> None:
    """Run `python COMMAND`; stop where it fails. What it prints is appended to `log`."""
    words = list(map(str, command))
    print(f"{name}: python {shlex.join(words)}", flush=True)
    with log.open("a") as file:
        environ = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        code = subprocess.run([sys.executable, *words], cwd=ROOT, env=environ, stdout=file, stderr=file).returncode
    if code:
        sys.exit(f"chaos: {name} failed with code {code}; see {log}")


def is_finished(run_dir: Path, num_steps: int) -> bool:
    """Whether a run has saved its last step, and logged it."""
    metrics = run_dir / "metrics.jsonl"
    is_saved = (run_dir / f"global_step_{num_steps}").exists()
    return is_saved and any(line["step"] == num_steps for line in read_jsonl(metrics))


def seconds_of(run_dir: Path) -> dict[str, float]:
    """How long each phase took on average."""
    found = defaultdict[str, list[float]](list)
    for line in read_jsonl(run_dir / "metrics.jsonl"):
        for phase in PHASES:
            found[phase] += [line[f"timing_s/{phase}"]] if f"timing_s/{phase}" in line else []
    return {START: START_S} | {phase: sum(found[phase]) / len(found[phase]) for phase in PHASES}


def draw(
    num_kills: int, num_ranks: int, num_steps: int, durations: dict[str, float], chance: random.Random
) -> list[Fault]:
    """Kills in the order of their steps, at any moment of a phase; each phase as often as another, give or take one."""
    last = num_steps - SAVE_FREQ - 1  # in each of the last steps but those, something is saved that is not the end
    steps = sorted(chance.choices(range(last + 1), k=num_kills))
    return [
        Fault(rank=chance.randrange(num_ranks), phase=phase, step=step, delay_s=chance.uniform(0.0, durations[phase]))
        for step, phase in zip(steps, shuffled((START, *PHASES), chance), strict=False)
    ]


def shuffled(items: Sequence[str], chance: random.Random) -> Iterator[str]:
    """All items in some order, again and again."""
    while True:
        yield from chance.sample(items, k=len(items))


def report(out: Path, faults: Faults, odd: Sequence[str], *, num_kills: int, num_steps: int) -> int:
    """Print and keep the table of the kills and a summary; returns the exit code."""
    begun = {life["number"]: life for life in faults.begun()}
    rows, again = [], 0
    for met in faults.met():
        life, before = begun.get(met["number"] + 1), begun.get(met["number"])
        place = f"{met['step'] + 1} | {met['phase']}" if before else "- | start"
        resumed = (
            f"{life['step'] or 'none'} | {life['time'] - met['time']:.0f}" if life else "killed before it trained | -"
        )
        again += max(0, met["step"] - life["step"]) if life and before else 0
        rows.append(f"| {met['number'] + 1} | {place} | {met['rank']} | {resumed} |")
    heads = ("kill", "step", "phase", "rank", "resumed from checkpoint", "after seconds")
    table = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *rows]
    (out / "table.md").write_text("\n".join(table) + "\n")
    print("\n".join(table))
    summary: dict[str, Any] = {
        "kills": len(rows),
        "steps": num_steps,
        "finished_steps_repeated": again,
        "differences": list(odd),
        "versions": versions(),
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary, indent=2))
    return int(bool(odd) or len(rows) < num_kills)


if __name__ == "__main__":
    sys.exit(main())
