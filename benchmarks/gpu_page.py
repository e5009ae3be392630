"""The page docs/benchmarks/gpu.md: the results of `scripts/gpu_check.py`, and the least time that a step can take."""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from textwrap import fill
from typing import Any

from benchmarks.cases import MODELS
from benchmarks.gpu_stages import PROMPT_TOKENS, PROMPTS, RESPONSE_TOKENS, SIZES, SYNCED, Stage, stages
from benchmarks.phases import PHASES
from benchmarks.report import line
from megarl.planning.device import Device
from megarl.planning.planner import Planner
from megarl.planning.traffic import Links
from megarl.platform.peaks import Peaks
from megarl.tracking.names import STEP_SECONDS

REACHABLE = Peaks(flops_per_second=790e12, bytes_per_second=4.3e12)  # of an H200, whose published numbers are higher
LINKS = Links(inside=400e9, between=45e9)
DEVICE = Device(name="an H200", num_bytes=149 * 10**9, peaks=REACHABLE)
AIMS = {"0.5b": 2.0, "1.5b": 1.8, "3b": 1.6}  # a step over its floor
MEASURED = 2  # the step that counts: the first warms up, the last is traced
COMMAND = "python scripts/gpu_check.py --out OUT"
Results = Mapping[str, Mapping[str, Any]]  # of the stages that ran, by name


def page(results: Results, *, num_devices: int) -> str:
    """Return the page, with the floors and with what was measured so far."""
    parts = (_head(results, num_devices), _training(results, num_devices), _rest(results))
    return "\n\n".join(chain.from_iterable(parts)) + "\n"


def floor(model: str, algorithm: str, *, num_devices: int) -> float:
    """Return the least seconds of a step of `num_devices` data-parallel devices."""
    group = 1 if algorithm == "ppo" else 8
    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as name:
        Path(name, "config.json").write_text(json.dumps(MODELS[model]), encoding="utf-8")
        num_prompts = PROMPTS * num_devices // group
        arguments = [
            *("data.train_files=prompts.parquet", f"data.train_batch_size={num_prompts}"),
            *(f"data.max_prompt_length={PROMPT_TOKENS}", f"data.max_response_length={RESPONSE_TOKENS}"),
            *(f"actor_rollout_ref.model.path={name}", f"critic.model.path={name}"),
            f"actor_rollout_ref.actor.ppo_mini_batch_size={num_prompts}",
            f"actor_rollout_ref.rollout.n={group}",
            f"trainer.n_gpus_per_node={num_devices}",
            *(
                ["algorithm.use_kl_in_reward=true"]
                if algorithm == "ppo"
                else ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_kl_loss=true"]
            ),
        ]
        planner = Planner(arguments, device=DEVICE, ranks_per_node=None, links=LINKS)
        return planner.least_time().total


def _head(results: Results, num_devices: int) -> Iterator[str]:
    yield "# On a GPU"
    yield "<!-- Written by `python scripts/gpu_check.py --page`; change benchmarks/gpu_page.py instead. -->"
    if not results:
        yield "**Not run on a GPU yet.** The floors below are computed, and nothing was measured."
    else:
        done = [name for name, result in results.items() if result["done"]]
        failed = [name for name in results if name not in done]
        missing = [stage.name for stage in stages() if stage.name not in results]
        yield (
            f"On {num_devices} GPU{'s' if num_devices > 1 else ''}, {len(done)} of {len(stages())} stages succeeded. "
            f"Failed: {', '.join(failed) or 'none'}. Not run as stages: {', '.join(missing) or 'none'}. "
            "[h200.md](h200.md) describes other runs."
        )
    found = _found(results, "doctor")
    if found:
        yield "\n".join(f"- {title.capitalize()}: {line(found[title])}" for title in ("machine", "versions"))
    yield f"    {COMMAND}"
    yield _paragraph(
        "checks a machine in stages. A call takes 470 seconds (`--budget-s`), and the same command runs the remaining "
        "stages; `--stages NAME,...` chooses. OUT gets results, logs, traces and this page; results on GPUs also go to "
        "`docs/benchmarks/gpu.json`. The machine needs the packages of `requirements/gpu.lock`, and no network. "
        "`--rehearse` runs all stages with tiny models on the CPU, `--hollow` on the [hollow device](../hollow.md)."
    )


def _training(results: Results, num_devices: int) -> Iterator[str]:
    """Yield the table of steps and their floors."""
    yield "## A step of training"
    yield _paragraph(
        f"{PROMPTS} samples for each GPU, {PROMPT_TOKENS} + {RESPONSE_TOKENS} tokens each, random weights in bfloat16, "
        f"one optimizer step. The floor is that of `megarl plan` at "
        f"{REACHABLE.flops_per_second / 1e12:.0f} TFLOP/s and {REACHABLE.bytes_per_second / 1e12:.1f} TB/s, and the "
        "aim a multiple of it."
    )
    titles = (
        "Qwen2.5",
        "algorithm",
        "floor s",
        "aim s",
        "measured s",
        "over the floor",
        "MFU",
        "MFU of the actor's update",
        "GB of tensors",
    )
    rows = []
    for name, size in SIZES.items():
        for algorithm in ("ppo", "grpo"):
            least = floor(size.model, algorithm, num_devices=num_devices)
            found = _found(results, f"train-{name}-{algorithm}")
            rows.append((name, algorithm, f"{least:.1f}", f"{AIMS[name] * least:.1f}", *_measured(found, least)))
    yield _table(titles, rows)
    phases = sorted({key for found in _trained(results) for key in found if key.startswith("timing_s/")})
    if phases:
        names = [name for name in results if name.startswith("train-") and results[name]["done"]]
        yield _table(
            ("phase, seconds", *names),
            [(phase, *(f"{found.get(phase, 0.0):.2f}" for found in _trained(results))) for phase in phases],
        )


def _measured(found: Mapping[str, Any] | None, least: float) -> tuple[str, ...]:
    if found is None:
        return ("-",) * 5
    step = found["steps"][MEASURED - 1]
    seconds = step[STEP_SECONDS] - step.get("timing_s/sync_check", 0.0)
    shares = (f"{step[key]:.1%}" if key in step else "-" for key in ("perf/mfu", "perf/mfu/actor"))
    memory = step.get("perf/max_memory_allocated_gb")
    return (f"{seconds:.1f}", f"{seconds / least:.2f}", *shares, f"{memory:.1f}" if memory else "-")


def _trained(results: Results) -> list[Mapping[str, float]]:
    """Return the metrics of the step that counts, of each training that ran."""
    found = [_found(results, name) for name in results if name.startswith("train-")]
    return [one["steps"][MEASURED - 1] for one in found if one]


def _rest(results: Results) -> Iterator[str]:
    """Yield the tables of the other stages."""
    yield "## Between training and generation"
    rows = []
    for name, model in SYNCED.items():
        found = _found(results, f"phases-{name}")
        times = [f"{found['seconds'][phase]['median']:.3f}" if found else "-" for phase in PHASES]
        in_use = found["bytes_in_use"] if found else {}
        rows.append((model, *times, *(f"{in_use[phase] / 1e9:.1f}" if in_use else "-" for phase in PHASES)))
    yield _table(("model", *(f"{name} s" for name in PHASES), *(f"GB after {name}" for name in PHASES)), rows)
    yield "## Stages"
    ran = [(stage, results[stage.name]) for stage in stages() if stage.name in results]
    rows = [
        (stage.name, "succeeded" if result["done"] else "failed", f"{result['seconds']:.0f}", _remark(stage, result))
        for stage, result in ran
    ]
    yield _table(("stage", "result", "seconds", "found"), rows)


def _remark(stage: Stage, result: Mapping[str, Any]) -> str:
    """Return a few words about a stage that has no table of its own."""
    if not result["done"]:
        return str(result["error"]).split("\n", maxsplit=1)[0]
    found = result["found"]
    if "peaks" in found:
        flops = found["peaks"]["flops_per_second"]
        copies = found["peaks"]["bytes_per_second"]
        return f"{flops / 1e12:.0f} TFLOP/s, {copies / 1e12:.2f} TB/s"
    if stage.name.startswith("verify-"):
        apart = found["differences"]["trainer-engine"]
        return (
            f"log-probabilities differ by at most {apart['max_abs_logprob']:.2g}, probabilities by "
            f"{apart['mean_prob']:.2g} on average"
        )
    shown = {key: value for key, value in found.items() if isinstance(value, int | float | str | bool)}
    return ", ".join(f"{key} {value}" for key, value in shown.items())


def _found(results: Results, name: str) -> Mapping[str, Any] | None:
    result = results.get(name)
    return result["found"] if result and result["done"] else None


def _paragraph(text: str) -> str:
    return fill(text, width=120, break_on_hyphens=False, break_long_words=False)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
