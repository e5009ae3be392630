"""Export a checkpoint as a Hugging Face directory: `megarl export CHECKPOINT OUT [--best] [--adapter] [--base MODEL]`.

CHECKPOINT is RUN_DIR/global_step_N, or RUN_DIR for its latest checkpoint, or with `--best` for that of its best
validation. Writes the actor, or the reward model of a run of `megarl train-reward`. `transformers` and vLLM load the
result. Adapters are merged into their base, or with `--adapter` written alone for PEFT. `--push-to` uploads the result
to the Hugging Face hub. Under torchrun, mpirun or srun the model is split over all ranks, so it need not fit into one
process.
"""

import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING

from megarl.platform import early  # noqa: F401 - before what takes seconds to import
from megarl.checkpoint.directory import HUGGINGFACE, STEP_PREFIX, saved_steps
from megarl.checkpoint.publish import check_name, create_repository, upload
from megarl.checkpoint.state import best_checkpoint
from megarl.commands.cli.command import parse
from megarl.commands.cli.table import EXPORT
from megarl.commands.entry import JobProgram, run
from megarl.config.faults import ConfigError, Fault, fault_of
from megarl.distributed.place import Launch
from megarl.platform.errors import UserError
from megarl.platform.files import WriteError, check_writable, write_whole
from megarl.platform.hub import CARD_FILE
from megarl.reshard.headers import ADAPTERS_CONFIG
from megarl.tracking.config import TrainerSection

if TYPE_CHECKING:
    from megarl.models.lora import Lora

UPLOAD_S = 7 * 86400.0
"""Seconds until an upload counts as hanging; the other ranks wait for its end."""


@dataclass(frozen=True)
class ExportArguments:
    """The checkpoint to export, and the directory to write."""

    checkpoint: Path
    out: Path
    world_size: int
    adapter: bool = False  # write the adapters alone
    base: str | None = None  # the model that the adapters belong to; None: as the checkpoint says
    license: str | None = None  # None: that of the base model
    push_to: str | None = None  # a repository of the Hugging Face hub
    private: bool = False  # a new repository is private
    trust_remote_code: bool = False

    @property
    def trainer(self) -> TrainerSection:
        """The section that gives the number of ranks, and the directory of the run."""
        is_run = bool(saved_steps(self.checkpoint))
        run_dir = self.checkpoint if is_run else self.checkpoint.resolve().parent
        section = TrainerSection(n_gpus_per_node=1, default_local_dir=str(run_dir))
        return replace(section, phase_timeout_s=UPLOAD_S) if self.push_to else section


def main(argv: Sequence[str] = sys.argv[1:]) -> None:
    """Write the actor, or the reward model, of a checkpoint."""
    run(PROGRAM, argv)


def read_arguments(argv: Sequence[str], *, world_size: int | None) -> ExportArguments:
    """Parse the command line.

    Raises:
        ConfigError: there is no best checkpoint, the checkpoint has no adapters, the directory to write takes no
            files or has files of others, or the repository to upload to has no possible name.
    """
    typed = parse(EXPORT, argv)
    faults = []
    try:
        if typed.pop("best"):
            typed["checkpoint"] = best_checkpoint(typed["checkpoint"])
    except UserError as error:
        faults.append(Fault("--best", str(error)))
    for option in ("adapter", "base"):
        if typed[option] and not faults and not holds_adapters(typed["checkpoint"]):
            reason = f"{typed['checkpoint']} has no adapters, its weights learned: export it without this option"
            faults.append(Fault(f"--{option}", reason))
    try:
        check_writable(typed["out"], "OUT")
    except WriteError as error:
        faults.append(Fault("OUT", str(error).removeprefix("OUT=")))
    if holds_others(typed["out"]):
        faults.append(Fault("OUT", f"{typed['out']} has files that are no model: name a new directory"))
    faults += repository_faults(typed["push_to"], private=typed["private"])
    if faults:
        raise ConfigError(faults)
    return ExportArguments(**typed, world_size=world_size or 1)


def repository_faults(name: str | None, *, private: bool) -> Iterator[Fault]:
    """Yield the faults of a repository's name. Asks no host."""
    if private and not name:
        yield Fault("--private", "nothing is uploaded: name the repository with --push-to")
    try:
        if name:
            check_name(name)
    except UserError as error:
        yield Fault("--push-to", str(error))


def create_repository_if_missing(arguments: ExportArguments) -> None:
    """Create the repository to upload to, if there is none. Raises ConfigError if that is impossible."""
    if arguments.push_to:
        with fault_of("--push-to"):
            create_repository(arguments.push_to, private=arguments.private)


def holds_adapters(path: Path) -> bool:
    """Return whether a checkpoint, or some checkpoint of a run, has adapters."""
    return any(any(path.glob(f"{begin}*/{ADAPTERS_CONFIG}")) for begin in ("", f"{STEP_PREFIX}*/"))


def holds_others(out: Path) -> bool:
    """Return whether a directory has files, such as those of a run or a project, and no model to be replaced."""
    names = {path.name for path in out.iterdir()} if out.is_dir() else set()
    return bool(names) and not names & {"config.json", ADAPTERS_CONFIG}


def write(arguments: ExportArguments, launch: Launch) -> None:
    """Load the model on all ranks, write and upload it. Raises what `intact_checkpoint`, `base_of` and `upload` do."""
    from megarl.checkpoint.huggingface import POLICY_ROLE, VALUE_ROLE, export_adapters, export_model
    from megarl.learner.checkpoint import load_learner
    from megarl.learner.config import MegatronSection
    from megarl.learner.factory import make_learner
    from megarl.learner.parallel import build_mesh
    from megarl.models.config import ModelSection
    from megarl.models.peft import read_adapters
    from megarl.models.source import Source

    checkpoint = intact_checkpoint(arguments.checkpoint)
    source = Source.read(ModelSection(path=str(checkpoint / HUGGINGFACE)))
    section = MegatronSection(
        tensor_model_parallel_size=arguments.world_size, dtype=source.hf_config["torch_dtype"], sequence_parallel=False
    )
    name, role = VALUE_ROLE if source.architecture.scalar_head else POLICY_ROLE
    lora = read_adapters(checkpoint / name, base=arguments.base) if holds_adapters(checkpoint) else None
    if arguments.adapter and lora is None:
        raise UserError(f"{checkpoint} has no adapters: export it without --adapter")
    base, scores = base_of(lora, checkpoint) if lora else (None, False)
    learner = make_learner(
        base,
        replace(source.architecture, scalar_head=scores),
        section,
        build_mesh(section),
        role=role,
        lora=lora,
    )
    load_learner(learner, checkpoint / name)
    tokenizer = source.tokenizer(trust_remote_code=arguments.trust_remote_code)
    alone = lora if arguments.adapter else None
    if alone:
        export_adapters(learner, alone, source, tokenizer, arguments.out, launch)
    else:
        export_model(learner, source, tokenizer, arguments.out, launch)
    if launch.rank == 0:
        describe(checkpoint, arguments, scores=source.architecture.scalar_head, adapters=alone)
        if arguments.push_to:
            print(f"uploaded to {upload(arguments.out, arguments.push_to)}")


def base_of(lora: "Lora", checkpoint: Path) -> tuple[Path, bool]:
    """Return the directory of the model that adapters belong to, and whether it scores sequences.

    Raises:
        UserError: there is no such model.
    """
    from megarl.models.hub import local_directory, read_model

    try:
        directory = local_directory(lora.base)
        return directory, read_model(directory, {})[1].scalar_head
    except UserError as error:
        raise UserError(
            f"the adapters of {checkpoint} belong to the model {lora.base or 'of no known name'}, which cannot be read:"
            f" {error}; name its present place with --base"
        ) from error


def describe(checkpoint: Path, arguments: ExportArguments, *, scores: bool, adapters: "Lora | None" = None) -> None:
    """Write the model card, and print what was written and how it is loaded.

    Args:
        checkpoint: the exported checkpoint.
        arguments: of the command; `out` was written.
        scores: whether the model is a reward model.
        adapters: those that were written alone; None: a model was written.
    """
    from megarl.checkpoint.card import card, loading, serving
    from megarl.checkpoint.contents import Contents
    from megarl.report.read import read_curves

    out = arguments.out
    text = card(
        Contents.read(checkpoint),
        read_curves(checkpoint.resolve().parent),
        arguments.push_to or out,
        scores=scores,
        adapters=adapters,
        license_id=arguments.license,
    )
    write_whole(out / CARD_FILE, text.encode())
    files = [path for path in out.iterdir() if path.is_file()]
    num_bytes = sum(path.stat().st_size for path in files)
    print(f"{out}: {len(files)} files, {num_bytes / 1e9:.3g} GB, from {checkpoint}; {CARD_FILE} describes the model")
    print(f"load it with\n{indent(loading(out, scores=scores, adapters=adapters), '  ')}")
    if not scores:
        if not adapters:
            print(f"or talk to it with\n  megarl chat {shlex.quote(str(out))}")
        print(f"or serve it with\n  {serving(out, adapters)}")


def intact_checkpoint(path: Path) -> Path:
    """Return the checkpoint at `path`, or the latest intact checkpoint of the run at `path`. Collective.

    Raises:
        UserError: there is no checkpoint, or it is damaged.
    """
    from megarl.checkpoint.contents import find_damage
    from megarl.checkpoint.find import find_checkpoint

    latest = find_checkpoint(path, mode="auto", path=None)
    if latest:
        return latest
    if not (path / HUGGINGFACE / "config.json").is_file():
        raise UserError(f"{path} is not a checkpoint: it has no huggingface/config.json")
    damage = find_damage(path)
    if damage:
        raise UserError(f"{path} is damaged: {damage}")
    return path


PROGRAM = JobProgram(
    module="megarl.commands.export",
    load=read_arguments,
    body=write,
    trial=create_repository_if_missing,
    imports=("megarl.learner.imported",),
)


if __name__ == "__main__":
    main()
