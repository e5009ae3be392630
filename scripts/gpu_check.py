"""Check megarl on a machine with GPUs, in stages: does it work, how fast is it, and how fast could it be?

    python scripts/gpu_check.py --out OUT [--stages a,b] [--budget-s 470] [--devices N]
    python scripts/gpu_check.py --out OUT --rehearse      # every stage, with tiny models on the CPU
    python scripts/gpu_check.py --out OUT --hollow        # every stage, with tiny models on the hollow device
    python scripts/gpu_check.py --page [--out OUT]        # write docs/benchmarks/gpu.md without running anything
    python scripts/gpu_check.py --list [--stages a,b]     # print the names of the stages

Each stage writes OUT/results/STAGE.json and OUT/logs/STAGE.txt. A stage that succeeded is not repeated, so the same
command continues after its time is over or after a failure. At the end it writes OUT/gpu.md and, unless it rehearses,
docs/benchmarks/gpu.json and gpu.md. Exit code 1: a stage failed. Exit code 3: stages are left.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the machine may have no installed megarl

from benchmarks.gpu_page import page  # noqa: E402
from benchmarks.gpu_site import Site, write_json  # noqa: E402
from benchmarks.gpu_stages import Stage, stages  # noqa: E402

PAGE = ROOT / "docs" / "benchmarks" / "gpu.md"
RESULTS = PAGE.with_suffix(".json")
LEFT = 3  # the exit code if stages are left
BUDGET_S = 470
PATIENCE = {"cpu": 5, "cuda": 20}  # times the limit of a stage, in a rehearsal on the CPU and on the hollow device


def main(argv: Sequence[str] = sys.argv[1:]) -> int:
    """Run the stages that are left and fit into the time, and write the page."""
    options = _parser().parse_args(argv)
    if options.page:
        publish(read(options.out) if options.out else published())
        return 0
    chosen = choose(options.stages)
    if options.list:
        print(*(stage.name for stage in chosen), sep="\n")
        return 0
    if options.out is None:
        raise SystemExit("gpu_check: --out names the directory of the results")
    rehearses = options.rehearse or options.hollow
    num_devices = options.devices or (1 if rehearses else count_devices())
    if options.hollow and "HOLLOW_MAIL" not in os.environ:
        start_on_hollow_device(num_devices, argv)
    site = Site(
        out=options.out.resolve(),
        num_devices=num_devices,
        device="cpu" if options.rehearse else "cuda",
        rehearses=rehearses,
    )
    left = run(site, chosen, budget_s=options.budget_s or (math.inf if site.rehearses else BUDGET_S))
    results = read(site.out)
    text = page(results, num_devices=num_devices)
    site.out.mkdir(parents=True, exist_ok=True)  # no stage may have run
    (site.out / "gpu.md").write_text(text, encoding="utf-8")
    if not site.rehearses:
        publish(results)
    print(text)
    failed = [stage.name for stage in chosen if stage.name in results and not results[stage.name]["done"]]
    if failed:
        print(f"failed: {', '.join(failed)}; see {site.out}/logs", file=sys.stderr)
        return 1
    if left:
        print(f"left: {', '.join(left)}; run the same command again", file=sys.stderr)
        return LEFT
    return 0


def start_on_hollow_device(num_devices: int, argv: Sequence[str]) -> NoReturn:
    """Start this program again in the environment of the hollow device (docs/hollow.md)."""
    python = ROOT / ".venv-cuda" / "bin" / "python"
    if not python.exists():
        raise SystemExit("gpu_check: there is no hollow device: run make hollow")
    command = [str(ROOT / "tests" / "hollow" / "run"), str(python), str(Path(__file__).resolve()), *argv]
    os.execve(command[0], command, os.environ | {"HOLLOW_DEVICES": str(num_devices)})  # noqa: S606 - our own script


def run(site: Site, chosen: Sequence[Stage], *, budget_s: float) -> list[str]:
    """Run the stages that have not succeeded yet, and return the names of those that the time does not suffice for.

    A stage starts only if at least half of its limit is left.
    """
    end = time.monotonic() + budget_s
    left = []
    for stage in chosen:
        path = site.out / "results" / f"{stage.name}.json"
        if path.exists() and json.loads(path.read_text(encoding="utf-8"))["done"]:
            continue
        limit_s = stage.limit_s * (PATIENCE[site.device] if site.rehearses else 1)
        remaining_s = end - time.monotonic()
        if remaining_s < limit_s / 2:
            left.append(stage.name)
            continue
        print(f"{stage.name} ...", file=sys.stderr, flush=True)
        start = time.monotonic()
        result: dict[str, Any] = {"stage": stage.name, "num_devices": site.num_devices, "rehearsed": site.rehearses}
        try:
            result |= {"done": True, "found": stage.run(site, replace(stage, limit_s=int(min(limit_s, remaining_s))))}
        except (ValueError, OSError, KeyError) as error:  # the next stages may work
            result |= {"done": False, "error": f"{type(error).__name__}: {error}"}
        result["seconds"] = time.monotonic() - start
        write_json(path, result)
        print(f"{stage.name}: {'done' if result['done'] else 'failed'} in {result['seconds']:.0f} s", file=sys.stderr)
    return left


def read(out: Path) -> dict[str, dict[str, Any]]:
    """Return the results in a directory, in the order of the stages."""
    paths = {stage.name: out / "results" / f"{stage.name}.json" for stage in stages()}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.exists()}


def publish(results: dict[str, dict[str, Any]]) -> None:
    """Write the results on GPUs to the documentation, and the page that shows them."""
    write_json(RESULTS, results)
    num_devices = max((result["num_devices"] for result in results.values()), default=1)
    PAGE.write_text(page(results, num_devices=num_devices), encoding="utf-8")


def published() -> dict[str, dict[str, Any]]:
    """Return the results on GPUs that the documentation has."""
    return dict(json.loads(RESULTS.read_text(encoding="utf-8"))) if RESULTS.exists() else {}


def choose(names: str | None) -> list[Stage]:
    """Return the named stages, by default all, in their order. A name that none has is the beginning of several."""
    every = stages()
    if names is None:
        return every
    wanted = names.split(",")
    unknown = [name for name in wanted if not any(stage.name.startswith(name) for stage in every)]
    if unknown:
        raise SystemExit(f"gpu_check: no stage {', '.join(unknown)}; there are {', '.join(s.name for s in every)}")
    exact = {stage.name for stage in every} & {*wanted}
    beginnings = tuple({*wanted} - exact)
    return [stage for stage in every if stage.name in exact or stage.name.startswith(beginnings)]


def count_devices() -> int:
    """Return the number of GPUs that a training may use: a power of two, at most eight."""
    import torch

    found = torch.cuda.device_count()
    if not found:
        raise SystemExit("gpu_check: torch sees no GPU; --rehearse runs every stage on the CPU")
    return max(size for size in (1, 2, 4, 8) if size <= found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="directory of the results")
    parser.add_argument("--stages", help="names of stages or their beginnings, separated by commas (default: all)")
    parser.add_argument(
        "--budget-s", type=float, help=f"seconds of this call (default: {BUDGET_S}; any, for a rehearsal)"
    )
    parser.add_argument("--devices", type=int, choices=(1, 2, 4, 8), help="(default: all GPUs; a rehearsal has one)")
    rehearsal = parser.add_mutually_exclusive_group()
    rehearsal.add_argument("--rehearse", action="store_true", help="tiny models on the CPU")
    rehearsal.add_argument(
        "--hollow", action="store_true", help="tiny models on the hollow device, which `make hollow` builds"
    )
    parser.add_argument("--page", action="store_true", help="only write docs/benchmarks/gpu.md")
    parser.add_argument("--list", action="store_true", help="only print the names of the stages")
    return parser


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("gpu_check: interrupted; the same command continues")
