"""Where a run stands before it is built: at which checkpoint, and what is otherwise than when that was saved."""

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml

from megarl.checkpoint.contents import CODE_FILE, CONFIG_FILE, MODELS_FILE, VERSIONS_FILE, Contents
from megarl.checkpoint.differences import (
    ConfigDifference,
    Effect,
    code_differences,
    config_differences,
    size_differences,
)
from megarl.checkpoint.directory import saved_steps, set_aside, step_in
from megarl.checkpoint.find import find_checkpoint, last_intact
from megarl.checkpoint.mirror import Mirror
from megarl.checkpoint.remote import Remote
from megarl.checkpoint.state import State
from megarl.config.load import to_yaml
from megarl.config.report import own_code
from megarl.config.root import Config, SupervisedConfig
from megarl.config.schema import Schema
from megarl.distributed.exchange import on_first_rank, together
from megarl.distributed.launch import restarted
from megarl.learner.learner import Learner
from megarl.platform.files import write_whole
from megarl.platform.versions import running
from megarl.tracking.config import TrainerSection
from megarl.tracking.run_id import known_run_ids

MAX_SHOWN = 80  # characters of a value
RUN_NAMES = ("trainer.project_name", "trainer.experiment_name")


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where a run stands when it starts."""

    checkpoint: Path | None  # None: it starts afresh
    state: State
    same_curve: bool = True  # the steps that follow have the numbers that the checkpoint's run had

    @classmethod
    def find(cls, config: Config | SupervisedConfig, *, goes_on: bool = True) -> "Standing":
        """Where the run that `config` describes stands; the first rank says what differs. Collective.

        Args:
            config: of the run.
            goes_on: the job goes on with the run, so that the directory sets aside what is not of its past (see
                `entered_checkpoint`) and takes over the checkpoint's runs at MLflow and W&B.
        """
        trainer = config.trainer
        run_dir = Path(trainer.default_local_dir)
        checkpoint = entered_checkpoint(trainer) if goes_on else resumed_checkpoint(trainer)
        if checkpoint is None:
            return cls(checkpoint=None, state=State(step=0))
        contents = on_first_rank(lambda: Contents.read(checkpoint))
        found, other_versions = _compare(contents, config)
        kept_ids, own_ids = contents.run_ids, on_first_rank(lambda: known_run_ids(run_dir))
        is_foreign = trainer.resume_mode == "resume_path" and any(
            own_ids.get(name, run_id) != run_id for name, run_id in kept_ids.items()
        )
        if dist.get_rank() == 0:
            _show(checkpoint, found, other_versions)
            is_renamed = {difference.key for difference in found} & {*RUN_NAMES}
            for name in kept_ids.keys() - own_ids.keys() if goes_on and not is_renamed else ():  # as on an empty disk
                run_dir.mkdir(parents=True, exist_ok=True)
                write_whole(run_dir / name, kept_ids[name].encode())
        same_curve = not is_foreign and all(difference.effect is not Effect.CURVE for difference in found)
        state = contents.state
        if any(difference.makes_scores_incomparable for difference in found):
            state = replace(state, best=None)
        if not same_curve:
            state = replace(state, mismatches=())  # those of another temperature, type or policy
        return cls(checkpoint=checkpoint, state=state, same_curve=same_curve)

    @property
    def is_resumed(self) -> bool:
        """Whether the run goes on from a checkpoint."""
        return self.checkpoint is not None

    def is_at(self, last_step: int) -> bool:
        """Whether nothing is left to learn."""
        return self.is_resumed and self.state.step >= last_step

    def require_sizes(self, learners: Mapping[str, Learner], keys: Mapping[str, str]) -> None:
        """Refuse to bring weights into models of other sizes.

        Args:
            learners: the models by their names in checkpoints.
            keys: where the configuration names each of them.

        Raises:
            ValueError: naming the sizes that differ and the key.
        """
        was = Contents.read(self.checkpoint).models if self.checkpoint else None
        if was is None:
            return
        if faults := size_differences(was, _sizes(learners)):
            said = "".join(f"\n  {keys[model]}: {', '.join(found)}" for model, found in faults.items())
            raise ValueError(
                f"{self.checkpoint} was saved by a run of other models, and this one cannot go on from it:{said}\n"
                "Name the models that it was trained from, or begin with trainer.resume_mode=disable"
            )


def resumed_checkpoint(trainer: TrainerSection) -> Path | None:
    """The checkpoint that a run goes on from, as `find_checkpoint` says. Collective."""
    return find_checkpoint(
        Path(trainer.default_local_dir),
        mode=trainer.resume_mode,
        path=trainer.resume_from_path,
        mirror=trainer.default_hdfs_dir,
    )


def entered_checkpoint(trainer: TrainerSection) -> Path | None:
    """The checkpoint that a job goes on from that trains, in a directory that holds no other past then. Collective.

    With `disable` and `resume_path`, checkpoints that this one does not come from are set aside. A job that its
    launcher started again went that way before: it goes on from its own last one.
    """
    run_dir = Path(trainer.default_local_dir)
    if trainer.resume_mode == "auto":
        return resumed_checkpoint(trainer)
    if any(together(lambda: restarted(os.environ))) and (own := last_intact(run_dir)):
        if dist.get_rank() == 0:
            print(
                f"started again by its launcher: goes on from {own}, though trainer.resume_mode={trainer.resume_mode}"
            )
        return own
    before = on_first_rank(lambda: saved_steps(run_dir))
    checkpoint = resumed_checkpoint(trainer)
    on_first_rank(lambda: _leave_behind(run_dir, before, checkpoint))
    return checkpoint


def _leave_behind(run_dir: Path, steps: Collection[int], checkpoint: Path | None) -> None:
    """Set aside what `run_dir` had, at these `steps`, that does not lead to `checkpoint`, and say so."""
    step = step_in(run_dir, checkpoint) if checkpoint else None
    last_kept = step if step is not None and step in steps else -1  # one that was brought here has no steps before it
    left = [other for other in steps if other > last_kept]
    if target := set_aside(run_dir, left, latest=step):
        print(
            f"what {run_dir} had of another past, {len(left)} checkpoints, is set aside in {target}; it may be deleted"
        )


def mirror_of(trainer: TrainerSection) -> Mirror | None:
    """The mirror of a run's checkpoints; None: it has none."""
    if trainer.default_hdfs_dir is None:
        return None
    remote, run_dir = Remote(trainer.default_hdfs_dir), Path(trainer.default_local_dir)
    return Mirror(remote, run_dir, keep=trainer.max_ckpt_to_keep)


def checkpoint_texts(
    config: Config | SupervisedConfig, learners: Mapping[str, Learner], code: Mapping[str, str]
) -> dict[str, str]:
    """What a checkpoint keeps of the run that saves it, by file: configuration, versions, models, its runs at trackers.

    `code` is what `own_code` said when the run began: its files may have changed since.
    """
    texts = {
        CONFIG_FILE: to_yaml(config),
        VERSIONS_FILE: json.dumps(running(), indent=1),
        MODELS_FILE: json.dumps(_sizes(learners), indent=1),
        CODE_FILE: json.dumps(code, indent=1),
    }
    return texts | known_run_ids(Path(config.trainer.default_local_dir))


def _sizes(learners: Mapping[str, Learner]) -> dict[str, dict[str, Any]]:
    sizes: dict[str, dict[str, Any]] = json.loads(
        json.dumps({name: asdict(learner.architecture) for name, learner in learners.items()})
    )
    return sizes


def _compare(
    was: Contents, config: Config | SupervisedConfig
) -> tuple[list[ConfigDifference], dict[str, tuple[str, str]]]:
    """Return the keys, with the user's own code, and the packages that differ, as far as the checkpoint says them."""
    found: list[ConfigDifference] = []
    if was.config is not None:
        found = config_differences(was.config, yaml.safe_load(to_yaml(config)), Schema.of(type(config)).leaves)
    if was.code is not None:
        found = code_differences(was.code, own_code(config), found) + found
    old, now = was.versions, running()
    if old is None:
        return found, {}
    return found, {
        name: (old.get(name, "none"), now.get(name, "none"))
        for name in {**old, **now}
        if old.get(name) != now.get(name)
    }


def _show(checkpoint: Path, found: list[ConfigDifference], other_versions: Mapping[str, tuple[str, str]]) -> None:
    """Print what differs: what matters with both values, the rest by name."""
    mattering = [difference for difference in found if difference.effect is not Effect.NONE]
    if mattering or other_versions:
        print(f"otherwise than in {checkpoint}:")
    for one in mattering:
        print(f"  {one.key}: {_cut(one.was)} -> {_cut(one.now)} ({one.effect.value}: {one.reason})")
    for name, (was, now) in other_versions.items():
        print(f"  {name}: {was} -> {now} (another version: rounding, or more)")
    if any(difference.effect is Effect.CURVE for difference in found):
        print("note: the curve will not be the one of an undisturbed run")
    if harmless := [difference.key for difference in found if difference.effect is Effect.NONE]:
        print(f"changed without effect on the curve: {', '.join(harmless)}")
    if anew := [difference.key for difference in found if difference.makes_scores_incomparable]:
        print(f"note: validation scores do not compare with earlier ones, and the best begins anew: {', '.join(anew)}")


def _cut(value: Any) -> str:
    """A value for people: of a long one both ends, as a digest comes last."""
    text, half = str(value), (MAX_SHOWN - 3) // 2
    return text if len(text) <= MAX_SHOWN else f"{text[:half]}...{text[-half:]}"


def nothing_left(run_dir: Path, step: int, last_step: int) -> str:
    """What a run says that has no step left to take."""
    return (
        f"nothing left to do: {run_dir} is at step {step} of {last_step}; raise trainer.total_training_steps or "
        "trainer.total_epochs to go on"
    )
