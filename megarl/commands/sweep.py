"""Run `megarl train` with several values of keys, one run after another, and compare the runs: `megarl sweep`.

Every run is a process of its own, with a directory that is named after its values.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import yaml

from megarl.platform import early
from megarl.checkpoint.directory import CONFIG_FILE
from megarl.commands import compare
from megarl.commands.cli.command import parse, print_error
from megarl.commands.cli.table import SWEEP
from megarl.commands.explain import try_here
from megarl.config.faults import ConfigError, Fault
from megarl.config.layers import override
from megarl.config.load import load_config, read, to_yaml
from megarl.config.root import Config
from megarl.config.trial import try_out
from megarl.distributed.place import detect
from megarl.platform.errors import UserError
from megarl.platform.files import explained, write_whole
from megarl.platform.log import show_on_console
from megarl.platform.processes import die_with_parent
from megarl.platform.safe_names import FILE_LONGEST, file_name, with_digest
from megarl.platform.secrets import redact
from megarl.platform.terminal import print_message, typed, visible
from megarl.report.differences import OWN_KEYS, between
from megarl.report.read import read_mapping
from megarl.report.tracker import REPORT_FILE
from megarl.tracking.status import STATUS_FILE

if TYPE_CHECKING:
    from megarl.data.tokenizer import Tokenizer

PROGRAM: Sequence[str] = (sys.executable, "-m", "megarl", "train")
SCRIPT = "sweep.sh"
LAUNCHER = Path(__file__).parents[2] / "scripts" / "launch_slurm.sh"
SEEDS = ("data.seed", "actor_rollout_ref.actor.megatron.seed", "actor_rollout_ref.rollout.seed")
SEED = "seed"
"""The keys that `--seeds` sets, and their name in the names of runs."""
OF_LAUNCHER = {"trainer.nnodes", "trainer.n_gpus_per_node"}
"""Keys that the Slurm script sets."""
NUM_SHOWN = 3
_CHANGE_OF_DIRECTORY = re.compile(r"^cd .*\n", re.MULTILINE)

Choice = tuple[str, tuple[str, ...]]
"""A value in the name of a run, and the arguments that set it."""


@dataclass(frozen=True)
class SweptRun:
    """A run of the sweep."""

    name: str
    directory: Path
    argv: tuple[str, ...]  # of `megarl train`

    @property
    def command(self) -> str:
        """The command line that a person would type."""
        return shlex.join(["megarl", "train", *self.argv])


def main(argv: Sequence[str]) -> int:
    """Run the sweep, or what `--dry-run` and `--slurm` do instead; return the exit code."""
    options = parse(SWEEP, argv)
    show_on_console(rank=0)
    configuration: tuple[str, ...] = options["configuration"]
    try:
        if detect(os.environ):
            raise UserError("start megarl sweep without a launcher: every run starts its own ranks")
        out = options["out"] or Path(read(Config, configuration)[0].trainer.default_local_dir)
        runs = list(combine(configuration, choices(options["over"], options["seeds"]), out))
        left = check(runs, on_cluster=options["slurm"])
        if options["dry_run"]:
            print("".join(f"{visible(redact(run.command))}\n" for run in left), end="")
        elif options["slurm"] and left:
            write_script(left, out / SCRIPT)
            show_commands(runs, out)
        else:
            return run_all(runs, left, out)
    except ConfigError as error:
        print_message(str(error))
        return 2
    except UserError as error:
        print_error(error)
        return 1
    return 0


def choices(over: Sequence[tuple[str, Mapping[str, str]]], num_seeds: int | None) -> list[list[Choice]]:
    """Return the choices of each key, and of the seeds.

    Raises:
        ConfigError: there is no key, a key stands twice, or the sweep sets it.
    """
    keys = [key for key, _ in over]
    own = [*OWN_KEYS]
    if num_seeds:
        keys.append(SEED)
        own += SEEDS
    faults = [Fault(key, "is given twice with --over") for key in {*keys} if keys.count(key) > 1]
    faults += [Fault(key, "cannot be in --over: the sweep sets it for each run") for key in {*keys} & {*own}]
    if not keys:
        faults.append(Fault("--over", "is missing: write --over KEY=VALUE,VALUE... or --seeds N"))
    if faults:
        raise ConfigError(faults)
    found = list[list[Choice]]()
    for key, values in over:
        short = short_name(key, keys)
        found.append([(f"{short}={name}", (f"{key}={written}",)) for name, written in values.items()])
    if num_seeds:
        seeds = range(1, num_seeds + 1)
        found.append([(f"{SEED}={seed}", tuple(f"{key}={seed}" for key in SEEDS)) for seed in seeds])
    return found


def short_name(key: str, keys: Sequence[str]) -> str:
    """Return the last parts of a key, as many as no other of the `keys` ends with."""
    parts = key.split(".")
    others = [f".{other}" for other in keys if other != key]
    for first in reversed(range(len(parts))):
        end = ".".join(parts[first:])
        if not any(other.endswith(f".{end}") for other in others):
            return end
    return key


def combine(configuration: Sequence[str], axes: Sequence[Sequence[Choice]], out: Path) -> Iterator[SweptRun]:
    """Yield a run for each combination of choices."""
    for chosen in product(*axes):
        name = ",".join(file_name(value.replace(",", ";")) for value, _ in chosen)
        name = name if len(name) <= FILE_LONGEST else with_digest(name, name, FILE_LONGEST)
        words = [*configuration, *chain.from_iterable(arguments for _, arguments in chosen)]
        experiment = read(Config, words)[0].trainer.experiment_name
        directory = out / name
        own = map(override, OWN_KEYS, (str(directory), f"{experiment}-{name}"))
        yield SweptRun(name, directory, (*words, *own))


def check(runs: Sequence[SweptRun], *, on_cluster: bool) -> list[SweptRun]:
    """Check all runs as their commands do before they start; return the runs that are not finished.

    Raises:
        ConfigError: has the faults of all runs, each with the names of its runs.
    """
    names: dict[Fault, list[str]] = {}
    left: list[SweptRun] = []
    tokenizers: dict[str, Tokenizer] = {}
    for run in runs:
        try:
            config = load_config(run.argv, world_size=None)
            unfit = list(_unfit(run, config, on_cluster=on_cluster))
            if unfit:
                raise ConfigError(unfit)
            if not is_finished(run.directory, config):
                left.append(run)
                list(try_out(config) if on_cluster else try_here(config, tokenizers))
        except ConfigError as error:
            for fault in error.faults:
                names.setdefault(fault, []).append(run.name)
    if names:
        raise ConfigError(
            [replace(fault, message=f"{fault.message} ({_among(of, runs)})") for fault, of in names.items()]
        )
    return left


def _unfit(run: SweptRun, config: Config, *, on_cluster: bool) -> Iterator[Fault]:
    """Yield faults of a configuration that could start, but not in a sweep."""
    trainer = config.trainer
    if trainer.resume_mode != "auto":
        yield Fault("trainer.resume_mode", "must be auto in a sweep, so that the same command continues it")
    if trainer.val_only:
        yield Fault("trainer.val_only", "must be false in a sweep: megarl evaluate scores a run")
    if trainer.nnodes > 1 and not on_cluster:
        yield Fault("trainer.nnodes", "must be 1 in a sweep on this machine; --slurm writes a script for several nodes")
    for key, place in (
        ("trainer.default_hdfs_dir", trainer.default_hdfs_dir),
        ("trainer.rollout_data_dir", trainer.rollout_data_dir),
    ):
        if place and run.name not in place:
            yield Fault(key, f"{place} may be the place of several runs: write ${{trainer.experiment_name}} in it")


def _among(names: Sequence[str], runs: Sequence[SweptRun]) -> str:
    if len(names) == len(runs):
        return "in all runs"
    more = f" and {len(names) - NUM_SHOWN} more" if len(names) > NUM_SHOWN else ""
    return f"in {' and '.join(names[:NUM_SHOWN])}{more}"


def is_finished(directory: Path, config: Config) -> bool:
    """Return whether a run finished with this configuration. If it had another one, `megarl train` decides."""
    if read_mapping(directory / STATUS_FILE).get("state") != "finished":
        return False
    kept = read_mapping(directory / CONFIG_FILE)
    return bool(kept) and between([yaml.safe_load(to_yaml(config)), kept]).keys() <= OF_LAUNCHER


def run_all(runs: Sequence[SweptRun], left: Sequence[SweptRun], out: Path) -> int:
    """Start the runs that are left one after another, and compare all that have not failed; return the exit code."""
    failed: dict[SweptRun, int] = {}
    for number, run in enumerate(left, 1):
        print(visible(redact(f"run {number} of {len(left)}: {run.name} in {run.directory}")), flush=True)
        code = complete([*PROGRAM, *run.argv])
        if code == early.EXIT_CODE:
            print_message(visible(redact(f"megarl: a signal stopped the sweep; continue it with\n  {typed()}")))
            return code
        if code:
            failed[run] = code
    done = [run for run in runs if run not in failed]
    if done:
        compare.main([str(run.directory) for run in done])
        show_commands(done, out)
    if failed:
        listed = "".join(f"\n  exit code {code}: {run.directory}" for run, code in failed.items())
        again = f"repeat only these with\n  {typed()}"
        print_message(visible(redact(f"megarl: {len(failed)} of {len(runs)} runs failed{listed}\n{again}")))
    return 1 if failed else 0


def show_commands(runs: Sequence[SweptRun], out: Path) -> None:
    """Print the commands that show runs side by side."""
    directories = [str(run.directory) for run in runs]
    print(visible(redact(f"in tables    {shlex.join(['megarl', 'compare', *directories])}")))
    report = ["megarl", "report", *directories, "--out", str(out / REPORT_FILE)]
    print(visible(redact(f"on one page  {shlex.join(report)}")), flush=True)


def complete(command: Sequence[str]) -> int:
    """Run a command and forward signals of this process to it; return its exit code, or 75 after a signal."""
    process: subprocess.Popen[bytes] | None = None
    is_stopped = False

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal is_stopped
        if process is None:
            early.end_at_once(number, frame)
        is_stopped = True
        process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in early.SIGNALS}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        process_group=0,  # a terminal would send Ctrl-C to the command too, and a second signal ends a run at once
        preexec_fn=partial(die_with_parent, signal.SIGKILL, parent=os.getpid()),
    )
    code = process.wait()
    for number, handler in before.items():
        signal.signal(number, handler)
    return early.EXIT_CODE if is_stopped else code


def write_script(runs: Sequence[SweptRun], path: Path) -> None:
    """Write `scripts/launch_slurm.sh` as an array with a job for each run.

    Raises:
        UserError: this is no checkout, an argument has a secret, or the file cannot be written.
    """
    if not LAUNCHER.is_file():
        raise UserError(f"--slurm needs {LAUNCHER}, which only a checkout has: run megarl from its checkout")
    cases = "\n".join(f"{index}) set -- {shlex.join(run.argv)} ;;" for index, run in enumerate(runs))
    if redact(cases) != cases:
        raise UserError(f"{path} would show a secret of the command line: put it into the environment")
    options, work = _CHANGE_OF_DIRECTORY.split(LAUNCHER.read_text(encoding="utf-8"), maxsplit=1)
    options = options[options.index("#SBATCH") :].replace("%j", "%A_%a")
    lines = [
        "#!/usr/bin/env bash",
        f"# {len(runs)} runs of megarl sweep. Options given to sbatch override those below;",
        f"# --array=0-{len(runs) - 1}%2 runs two at a time.",
        f"#SBATCH --array=0-{len(runs) - 1}",
        options,
        f"cd {shlex.quote(str(Path.cwd()))}",
        f"PYTHON=${{PYTHON:-{shlex.quote(sys.executable)}}}",
        f"case $SLURM_ARRAY_TASK_ID in\n{cases}\nesac",
        work,
    ]
    with explained(str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "\n".join(lines).encode())
    print(visible(f"submit       {shlex.join(['sbatch', str(path)])}"))
