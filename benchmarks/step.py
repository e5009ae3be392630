"""`python -m benchmarks step`: the time of every phase of a step, next to other libraries on the same samples.

`megarl train` runs as users run it. Then vLLM alone generates as many tokens for the same prompts, and transformers
reads and learns the samples of the last step, both on all cores. The floor of a phase is the time that its products of
matrices take at the machine's own speed. With `--peer trl`, TRL's GRPO trains on the same workload in turn. `megarl
plan` predicts the step from the machine's speeds, which are measured in the same run.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.table import Table

from benchmarks import report, step_page, step_plan, step_trl
from benchmarks.options import step_parser
from benchmarks.workload import Workload
from megarl.commands.cli.command import print_error
from megarl.models.architecture import Architecture, read_architecture
from megarl.models.flops import UPDATE, Tokens, forward_flops
from megarl.planning import engine_cost
from megarl.platform.errors import UserError
from megarl.platform.screen import Screen
from megarl.platform.versions import versions
from megarl.tracking.jsonl import read_jsonl
from megarl.tracking.names import STEP_SECONDS, TIMING, TOKENS

WARM_UP = 2
"""Steps that are not counted. The engine's self-check runs in them."""
ROUNDS = 2
"""Runs of each configuration or trainer, in turn, if two are compared: a machine changes its speed with time."""
PEERS = ("machine", "engine", "transformers")
Step = Mapping[str, float]


def main(argv: Sequence[str]) -> int:
    """Measure, and print the results."""
    options, overrides = step_parser().parse_known_args(argv)
    command = report.command_line("step", argv)
    runs = []
    try:
        for lengths in options.lengths:
            workload = Workload(
                model=options.model,
                lengths=lengths,
                algorithm=options.algorithm,
                num_prompts=options.prompts,
                num_responses=options.responses,
            )
            with tempfile.TemporaryDirectory(prefix="megarl-bench-") as name:
                runs.append({"command": command} | measure(workload, Path(name), options, overrides))
    except UserError as error:
        print_error(error)
        return 1
    if options.markdown:
        print(step_page.markdown(runs), end="")
    for found in runs if not options.markdown else ():
        if options.json:
            print(json.dumps(found))
        else:
            show(found, Screen())
    return 0


def measure(
    workload: Workload, directory: Path, options: argparse.Namespace, overrides: Sequence[str]
) -> dict[str, Any]:
    """Run the steps, then the peers on the samples of the last step.

    Raises:
        UserError: a program failed, and its messages are on standard error; or the peer cannot do this work.
    """
    if options.peer:
        step_trl.check(workload, [*overrides, *options.against])
    written = workload.write(directory)
    steps = list[Step]()
    others = list[Step]()
    theirs = list[Step]()
    with step_trl.Trl(workload, directory, dtype=options.dtype) if options.peer else nullcontext() as trl:
        for number in range(ROUNDS if options.against or trl else 1):
            last = directory / f"run-{number}"
            steps += train(last, options, [*written, *overrides], is_traced=bool(options.profile and number == 0))
            if options.against:
                others += train(directory / f"other-{number}", options, [*written, *overrides, *options.against])
            if trl:
                theirs += trl.steps(WARM_UP + options.repeats)[WARM_UP:]
    model = workload.model_in(directory)
    settings = {"model": str(model), "samples": str(last / "samples" / f"step_{WARM_UP + options.repeats}.parquet")}
    settings |= {"dtype": options.dtype, "repeats": options.repeats}
    (directory / "peers.json").write_text(json.dumps(settings), encoding="utf-8")
    for peer in PEERS:
        run_module("benchmarks.step_peers", peer, str(directory))
    peers = {peer: json.loads((directory / f"{peer}.json").read_text(encoding="utf-8")) for peer in PEERS}
    peers["host"] = asdict(engine_cost.measure(options.dtype))
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return {
        "machine": report.machine("cpu"),
        "versions": versions(),
        "workload": asdict(workload) | {"dtype": options.dtype, "ranks": options.ranks},
        **summarize(steps, workload),
        **(compare(steps, others, workload) | {"against": options.against} if others else {}),
        **({"trl": step_trl.beside(steps, theirs, workload.num_samples) | {"versions": trl.versions}} if trl else {}),
        "peers": peers,
        "ratios": ratios(steps, peers),
        "floors": floors(read_architecture(config), peers),
        "plan": step_plan.beside(step_plan.predict([*_split(options), *written, *overrides], workload, peers), steps),
    }


def train(
    run_dir: Path, options: argparse.Namespace, arguments: Sequence[str], *, is_traced: bool = False
) -> list[Step]:
    """Run some steps, and return the metrics of those after the warm-up. Raises UserError as `run_module` does."""
    num_steps = WARM_UP + options.repeats
    run_module(
        "megarl.commands.train",
        *_split(options),
        "trainer.logger=[jsonl]",
        "trainer.save_freq=-1",
        "trainer.save_last=false",
        "trainer.val_before_train=false",
        f"trainer.total_training_steps={num_steps + is_traced}",
        f"trainer.default_local_dir={run_dir}",
        f"trainer.rollout_data_dir={run_dir / 'samples'}",
        f"trainer.profile_steps=[{num_steps + 1 if is_traced else ''}]",
        *arguments,
    )
    if is_traced:
        shutil.copytree(run_dir / "profile", options.profile, dirs_exist_ok=True)
    return [line for line in read_jsonl(run_dir / "metrics.jsonl") if WARM_UP < line["step"] <= num_steps]


def _split(options: argparse.Namespace) -> list[str]:
    """Return the arguments of a run about its ranks and types."""
    return [
        f"actor_rollout_ref.actor.megatron.dtype={options.dtype}",
        f"actor_rollout_ref.rollout.dtype={options.dtype}",
        f"trainer.n_gpus_per_node={options.ranks}",
    ]


def compare(steps: Sequence[Step], others: Sequence[Step], workload: Workload) -> dict[str, float]:
    """Return the throughput of other steps on the same workload, and how many times as fast `steps` are.

    All are means over all steps: with partial rollouts a step does part of the work of the next.
    """
    ours, theirs = (workload.num_samples / mean(step[STEP_SECONDS] for step in each) for each in (steps, others))
    generation, against = (mean(step[f"{TIMING}gen"] for step in each) for each in (steps, others))
    return {
        "mean_samples_per_second": ours,
        "samples_per_second_against": theirs,
        "times_faster": ours / theirs,
        "generation_times_faster": against / generation,
    }


def summarize(steps: Sequence[Mapping[str, float]], workload: Workload) -> dict[str, Any]:
    """Return the times of each phase and the throughput of the median step."""
    names = sorted({name for step in steps for name in step if name.startswith(TIMING)})
    seconds = median(step[STEP_SECONDS] for step in steps)
    return {
        "seconds": {
            name.removeprefix(TIMING): report.spread([step.get(name, 0.0) for step in steps]) for name in names
        },
        "samples_per_second": workload.num_samples / seconds,
        "tokens_per_second": median(step[TOKENS] / step[STEP_SECONDS] for step in steps),
    }


def ratios(steps: Sequence[Mapping[str, float]], peers: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds per token of each phase over those of the peer that does the same work.

    `other_share` is the share of the step that is neither generation, nor reading, nor learning.
    """

    def per_token(*phases: str, less: Sequence[str] = ()) -> float:
        return median(
            (sum(step.get(TIMING + name, 0.0) for name in phases) - sum(step.get(TIMING + name, 0.0) for name in less))
            / step[TOKENS]
            for step in steps
        )

    tokens = peers["transformers"]["tokens"]
    generation = per_token("gen", less=("sync", "sync_check"))
    reading = per_token("ref")
    learning = per_token("update_actor")
    models = per_token("old_log_prob", "ref", "values", "update_actor", "update_critic")
    whole = median(step[STEP_SECONDS] / step[TOKENS] for step in steps)
    return {
        "generation": generation / (peers["engine"]["seconds"] / tokens),
        "infer": reading / (peers["transformers"]["infer"] / tokens),
        "update": learning / (peers["transformers"]["update"] / tokens),
        "other_share": 1.0 - (generation + models) / whole,
    }


def floors(architecture: Architecture, peers: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of the products of matrices of one pass over the samples, at the machine's own speed."""
    flops = forward_flops(architecture, Tokens(**peers["transformers"]["read"]))
    forward = flops / peers["machine"]["flops_per_second"]
    return {"generation": forward, "infer": forward, "update": UPDATE * forward}


def show(found: Mapping[str, Any], console: Screen) -> None:
    """Print the times as a table."""
    table = Table("phase", "median s", "min s", "max s", "share")
    whole = found["seconds"]["step"]["median"]
    for name, times in found["seconds"].items():
        table.add_row(
            name, *(f"{times[key]:.3f}" for key in ("median", "min", "max")), f"{times['median'] / whole:.1%}"
        )
    console.print(table)
    if "trl" in found:
        step_trl.show(found["trl"], console)
    for title in (
        *("samples_per_second", "tokens_per_second"),
        *("mean_samples_per_second", "samples_per_second_against", "times_faster", "generation_times_faster"),
    ):
        if title in found:
            console.print(f"{title}: {found[title]:.2f}", highlight=False)
    for title in ("ratios", "floors", "peers", "workload", "machine", "versions", "command"):
        console.print(f"{title}: {found[title]}", highlight=False, soft_wrap=True)


def run_module(module: str, *arguments: str) -> None:
    """Run a module of megarl with its output on standard error. Raise UserError if it fails."""
    done = subprocess.run([sys.executable, "-m", module, *arguments], stdout=sys.stderr, env=os.environ, check=False)
    if done.returncode:
        raise UserError(f"{module} failed with exit code {done.returncode}; its messages are above")
