"""`python -m benchmarks reshard`: time and cost of the transfer of new weights from trainer to engine.

Each model and layout is a separate run. In it, three ways take turns on one trainer and engine: megarl's, mbridge's
`export_weights` into vLLM's own reload, and a plain copy of the bytes of the engine's weights.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from benchmarks import memory, report
from benchmarks.cases import DEFAULT_MODELS, LAYOUTS, MODELS, Case, Split
from benchmarks.options import reshard_parser
from megarl.commands.cli.command import print_error
from megarl.platform.device import decide_device
from megarl.platform.errors import UserError
from megarl.platform.screen import Screen
from megarl.platform.versions import versions

BUCKET_MEGABYTES = {"cpu": 4, "cuda": 512}


def main(argv: Sequence[str]) -> int:
    """Measure, and print the results."""
    options = reshard_parser().parse_args(argv)
    try:
        cases = list(_cases(options))
        results = []
        for number, case in enumerate(cases, 1):
            print(f"{number} of {len(cases)}: {case.model} {case.layout}", file=sys.stderr, flush=True)
            results.append(report.summary(run_case(case, logs=options.logs)))
    except UserError as error:
        print_error(error)
        return 1
    found = {
        "command": report.command_line("reshard", argv),
        "machine": report.machine(cases[0].device),
        "versions": versions("mbridge"),
        "cases": results,
    }
    if options.json:
        print(json.dumps(found))
    elif options.markdown:
        print(report.markdown(found), end="")
    else:
        report.show(found, Screen())
    return 0


def run_case(case: Case, *, logs: Path | None) -> dict[str, Any]:
    """Measure one case on new ranks: first the times, then, in another run, the peaks of memory.

    The output of the ranks goes to standard error, or to files in `logs`.

    Raises:
        UserError: the ranks failed.
    """
    environment = os.environ | ({"OMP_NUM_THREADS": "1"} if case.device == "cpu" else {})
    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as name:
        directory = Path(name)
        (directory / "config.json").write_text(json.dumps(MODELS[case.model]), encoding="utf-8")
        (directory / "case.json").write_text(json.dumps(asdict(case)), encoding="utf-8")
        for what, settings in (("times", {}), ("peaks", memory.ENVIRONMENT)):
            command = [sys.executable, "-m", "benchmarks.case", name, what]
            with ExitStack() as stack:
                output = sys.stderr
                if logs:
                    logs.mkdir(parents=True, exist_ok=True)
                    output = stack.enter_context(
                        (logs / f"{case.model}_{case.layout}_{what}.log").open("w", encoding="utf-8")
                    )
                done = subprocess.run(command, env=environment | settings, stdout=output, stderr=output, check=False)
            if done.returncode:
                raise UserError(
                    f"{case.model} {case.layout}: measuring {what} failed with exit code {done.returncode}; the ranks' "
                    f"own messages are {f'in {logs}' if logs else 'above'}"
                )
        times, peaks = (
            json.loads((directory / f"{what}.json").read_text(encoding="utf-8")) for what in ("times", "peaks")
        )
    return {"case": asdict(case), "ranks": [one | other for one, other in zip(times, peaks, strict=True)]}


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    if importlib.util.find_spec("mbridge") is None:
        raise UserError("mbridge is not installed: pip install --no-deps 'mbridge==0.15.1' (extra `bench`)")
    device: Literal["cpu", "cuda"] = "cuda" if decide_device(options.device) == "cuda" else "cpu"
    for model in options.model or DEFAULT_MODELS[device]:
        for layout in options.layout or LAYOUTS:
            Split.read(layout)  # so that a typo ends the program before the first measurement
            yield Case(
                model=model,
                layout=layout,
                device=device,
                dtype=options.dtype,
                repeats=options.repeats,
                bucket_megabytes=options.bucket_megabytes or BUCKET_MEGABYTES[device],
            )
