"""Two equal runs, one undisturbed, one whose ranks are killed at random moments: both must end the same.

    python scripts/chaos.py [--task countdown|guess|experts] [--kills 20] [--seed 1] [--out runs/chaos] [--ranks 2]

Data, tokenizer and model are made as in the quickstart. Both runs train the model by PPO, the second run with `torchrun
--max-restarts` and a SIGKILL to one rank after each start. With `--task guess`, samples are episodes of several turns,
and unfinished episodes continue in the next step. With `--task experts`, adapters of a mixture of experts learn, tokens
go to the experts that the engine chose, and unfinished responses continue in the next step. The exit code is 1 if
metrics, samples or models differ in one bit. The same command resumes after an interruption, because OUT keeps finished
parts.
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

SPLIT = [
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
]
PARTIAL = "actor_rollout_ref.rollout.partial={enable: true, stop_when: 0.5, max_staleness: 3}"
TASKS = {
    "countdown": ["configs/quickstart_ppo.yaml", *SPLIT, "actor_rollout_ref.rollout.max_num_seqs=64"],
    "guess": [
        "configs/grpo_guess.yaml",
        "algorithm={adv_estimator: gae, use_kl_in_reward: true, rollout_correction: {rollout_is: token}}",
        "critic={model: {path: '${actor_rollout_ref.model.path}'}, optim: {lr: 1.0e-3}}",
        *SPLIT,
        "actor_rollout_ref.rollout.n=1",
        "actor_rollout_ref.rollout.max_num_seqs=4",  # episodes wait, so a step stops some in the middle of a turn
        "environment.max_turns=6",
        "data.max_response_length=56",
        PARTIAL,
    ],
    "experts": [
        "configs/quickstart_ppo.yaml",
        *SPLIT,
        "actor_rollout_ref.actor.megatron.expert_model_parallel_size=2",
        "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1",
        "actor_rollout_ref.model.lora_rank=4",
        "critic.model.lora_rank=2",
        "actor_rollout_ref.rollout.routing_replay=engine",
        "actor_rollout_ref.rollout.max_num_seqs=8",
        PARTIAL,
        "algorithm.rollout_correction.rollout_is=token",
    ],
}
"""The configuration of each task, and keys that change it."""
WORLDS = {"experts": "countdown"}
"""The task of the quickstart that makes the data, if it has another name."""
WARM_UP_STEPS = {"countdown": 20, "guess": 100}
SAVE_FREQ = 2
KILLS_PER_STEP = 2
PHASES = ("sync", "gen", "reward", "old_log_prob", "values", "update_critic", "update_actor", "save_checkpoint")
START_S = 10.0  # a rank that has not begun to train is killed within this time


def main() -> int:
    """Make the missing parts of OUT, compare the runs, print a report, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="countdown")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"))
    parser.add_argument("--ranks", type=int, default=2, help="an even number: models are cut in two")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    num_steps = SAVE_FREQ * max(2, -(-options.kills // (KILLS_PER_STEP * SAVE_FREQ)) + 1)

    if not (out / "world" / "sft" / "huggingface").exists():
        task = WORLDS.get(options.task, options.task)
        script = [ROOT / "scripts" / "quickstart.py", "--warm-up-only", "--task", task]
        of_world = ["--sft-steps", WARM_UP_STEPS[task], "--seed", options.seed, "--out", out / "world"]
        call("world", *script, *of_world, log=out / "world.log")
    if options.task == "experts" and not (out / "world" / "experts").exists():
        from scripts.experts import write_experts

        write_experts(out / "world" / "experts", out / "world" / "model", options.seed)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", options.ranks]
    common = [*arguments(options.task, out / "world"), f"trainer.n_gpus_per_node={options.ranks}"]
    common += [f"trainer.total_training_steps={num_steps}"]
    expected = out / "undisturbed"
    found = out / "killed"
    if not is_finished(expected, num_steps):
        call(
            "undisturbed",
            *torchrun,
            "-m",
            "megarl.commands.train",
            *common,
            *places(expected),
            log=out / "undisturbed.log",
        )
    faults = Faults(out / "faults.json")
    if not faults.path.exists():
        durations = seconds_of(expected)
        faults.write(draw(options.kills, options.ranks, num_steps, durations, random.Random(options.seed)))
    if not is_finished(found, num_steps):
        restarts = ["--max-restarts", options.kills, "-m", "tests.support.faulty", faults.path]
        call("killed", *torchrun, *restarts, *common, *places(found), log=out / "killed.log")
    odd = differences(expected, found, step=num_steps)
    return report(out, faults, odd, num_kills=options.kills, num_steps=num_steps)


def arguments(task: str, world: Path) -> list[str]:
    """Return the arguments of a task's PPO, with a smaller batch and an adaptive KL controller."""
    model = world / ("experts" if task == "experts" else "sft/huggingface")
    return [
        *TASKS[task],
        f"data.train_files={world}/data/train.parquet",
        f"data.val_files={world}/data/val.parquet",
        "data.train_batch_size=32",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "algorithm.kl_ctrl={type: adaptive, kl_coef: 0.001, target_kl: 0.01, horizon: 1000}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        f"trainer.save_freq={SAVE_FREQ}",
        "trainer.max_ckpt_to_keep=2",
        "trainer.logger=[jsonl,mlflow]",
        "trainer.resume_mode=auto",
    ]


def places(run_dir: Path) -> list[str]:
    """Return the arguments for the directories of a run."""
    return [f"trainer.default_local_dir={run_dir}", f"trainer.rollout_data_dir={run_dir}/samples"]


def call(name: str, *command: object, log: Path) -> None:
    """Run `python COMMAND`, append its output to `log`, and exit if it fails."""
    words = list(map(str, command))
    print(f"{name}: python {shlex.join(words)}", flush=True)
    with log.open("a", encoding="utf-8") as file:
        environ = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        code = subprocess.run([sys.executable, *words], cwd=ROOT, env=environ, stdout=file, stderr=file).returncode
    if code:
        sys.exit(f"chaos: {name} failed with code {code}; see {log}")


def is_finished(run_dir: Path, num_steps: int) -> bool:
    """Return whether a run has saved and logged its last step."""
    metrics = run_dir / "metrics.jsonl"
    is_saved = (run_dir / f"global_step_{num_steps}").exists()
    return is_saved and any(line["step"] == num_steps for line in read_jsonl(metrics))


def seconds_of(run_dir: Path) -> dict[str, float]:
    """Return the mean seconds of each phase."""
    found = defaultdict[str, list[float]](list)
    for line in read_jsonl(run_dir / "metrics.jsonl"):
        for phase in PHASES:
            found[phase] += [line[f"timing_s/{phase}"]] if f"timing_s/{phase}" in line else []
    return {START: START_S} | {phase: sum(found[phase]) / len(found[phase]) for phase in PHASES}


def draw(
    num_kills: int, num_ranks: int, num_steps: int, durations: dict[str, float], chance: random.Random
) -> list[Fault]:
    """Return kills in the order of their steps, at random moments; phases are equally frequent, give or take one."""
    last = num_steps - SAVE_FREQ - 1  # the last step after which a checkpoint before the final one is saved
    steps = sorted(chance.choices(range(last + 1), k=num_kills))
    return [
        Fault(rank=chance.randrange(num_ranks), phase=phase, step=step, delay_s=chance.uniform(0.0, durations[phase]))
        for step, phase in zip(steps, shuffled((START, *PHASES), chance), strict=False)
    ]


def shuffled(items: Sequence[str], chance: random.Random) -> Iterator[str]:
    """Yield all items in random order, again and again."""
    while True:
        yield from chance.sample(items, k=len(items))


def report(out: Path, faults: Faults, odd: Sequence[str], *, num_kills: int, num_steps: int) -> int:
    """Print and write the table of the kills and a summary; return the exit code."""
    started = {life["number"]: life for life in faults.started()}
    rows = []
    again = 0
    for met in faults.met():
        life = started.get(met["number"] + 1)
        before = started.get(met["number"])
        place = f"{met['step'] + 1} | {met['phase']}" if before else "- | start"
        resumed = (
            f"{life['step'] or 'none'} | {life['time'] - met['time']:.0f}" if life else "killed before it trained | -"
        )
        again += max(0, met["step"] - life["step"]) if life and before else 0
        rows.append(f"| {met['number'] + 1} | {place} | {met['rank']} | {resumed} |")
    heads = ("kill", "step", "phase", "rank", "resumed from checkpoint", "after seconds")
    table = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *rows]
    (out / "table.md").write_text("\n".join(table) + "\n", encoding="utf-8")
    print("\n".join(table))
    summary: dict[str, Any] = {
        "kills": len(rows),
        "steps": num_steps,
        "finished_steps_repeated": again,
        "differences": list(odd),
        "versions": versions(),
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(summary, indent=2))
    return int(bool(odd) or len(rows) < num_kills)


if __name__ == "__main__":
    sys.exit(main())
