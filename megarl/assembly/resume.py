"""Find the checkpoint that a run resumes from, before the run is built, and report what has changed since."""

import json
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

import torch.distributed as dist
import yaml

from megarl.assembly.inputs import Inputs, inputs_of
from megarl.checkpoint.contents import CODE_FILE, INPUTS_FILE, MODELS_FILE, VERSIONS_FILE, Contents
from megarl.checkpoint.differences import (
    ConfigDifference,
    code_differences,
    config_differences,
    input_differences,
    size_differences,
)
from megarl.checkpoint.directory import CONFIG_FILE, STEP_PREFIX, saved_steps, set_aside, step_in
from megarl.checkpoint.find import find_checkpoint, last_intact
from megarl.checkpoint.mirror import Mirror
from megarl.checkpoint.remote import Remote
from megarl.checkpoint.state import State
from megarl.checkpoint.store import CheckpointStore
from megarl.checkpoint.template_time import recorded_time
from megarl.config.keys import ACTOR, POLICY
from megarl.config.load import to_yaml
from megarl.config.report import custom_code
from megarl.config.root import COMMANDS, Config, SupervisedConfig, root_of
from megarl.config.schema import Schema
from megarl.distributed.exchange import on_first_rank, together
from megarl.distributed.launch import restarted
from megarl.learner.learner import Learner
from megarl.mark import Effect
from megarl.models.lora import adapted_projections
from megarl.platform.errors import UserError
from megarl.platform.files import write_whole
from megarl.platform.versions import installed_versions
from megarl.tracking.config import TrainerSection
from megarl.tracking.run_id import known_run_ids

logger = logging.getLogger(__name__)

MAX_SHOWN = 80  # characters of a value
RUN_NAMES = ("trainer.project_name", "trainer.experiment_name")


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """The start of a run: a checkpoint or the beginning."""

    checkpoint: Path | None  # None: the run starts from the beginning
    state: State
    same_curve: bool = True  # the next steps give the same numbers as in the run that saved the checkpoint

    @classmethod
    def find(cls, config: Config | SupervisedConfig, *, continues: bool = True) -> "ResumePoint":
        """Find the resume point of the run that `config` describes. The first rank prints the changes. Collective.

        Args:
            config: of the run.
            continues: the job continues the run. Checkpoints of another past are then set aside (see
                `prepare_checkpoint`), and the checkpoint's runs at MLflow and W&B are resumed.

        Raises:
            UserError: the checkpoint is of another command, or has the optimizer states of another form.
        """
        trainer = config.trainer
        run_dir = Path(trainer.default_local_dir)
        checkpoint = prepare_checkpoint(trainer) if continues else resumed_checkpoint(trainer)
        if checkpoint is None:
            return cls(checkpoint=None, state=State(step=0))
        contents = on_first_rank(lambda: Contents.read(checkpoint))
        _require_command(checkpoint, contents.config, config)
        found, other_versions = _compare(contents, config)
        _require_optimizers(checkpoint, found, config)
        saved_ids = contents.run_ids
        own_ids = on_first_rank(lambda: known_run_ids(run_dir))
        has_other_ids = any(own_ids.get(name, run_id) != run_id for name, run_id in saved_ids.items())
        is_foreign = trainer.resume_mode == "resume_path" and has_other_ids
        if dist.get_rank() == 0:
            _show(checkpoint, found, other_versions)
            if continues and not any(difference.key in RUN_NAMES for difference in found):
                for name in saved_ids.keys() - own_ids.keys():  # as after a lost disk
                    run_dir.mkdir(parents=True, exist_ok=True)
                    write_whole(run_dir / name, saved_ids[name].encode())
        same_curve = not is_foreign and all(difference.change.effect is not Effect.CURVE for difference in found)
        state = contents.state
        if any(difference.makes_scores_incomparable for difference in found):
            state = replace(state, best=None)
        elif continues and trainer.save_best and not on_first_rank(lambda: _is_kept(state.best_step, trainer)):
            if dist.get_rank() == 0:
                best = f"{STEP_PREFIX}{state.best_step}"
                logger.info(
                    "note: the best starts anew: %s, whose validation is the best so far, is not in %s", best, run_dir
                )
            state = replace(state, best=None)
        if not same_curve:
            state = replace(state, mismatches=())  # they are of another temperature, dtype or policy
        return cls(checkpoint=checkpoint, state=state, same_curve=same_curve)

    @property
    def is_resumed(self) -> bool:
        """Whether the run resumes from a checkpoint."""
        return self.checkpoint is not None

    def is_at(self, last_step: int) -> bool:
        """Return whether no steps are left."""
        return self.is_resumed and self.state.step >= last_step

    def restore(self, checkpoints: CheckpointStore, keys: Mapping[str, str]) -> None:
        """Load the checkpoint, if there is one, after `require_sizes`. Collective."""
        self.require_sizes(checkpoints.learners, keys)
        if self.checkpoint:
            checkpoints.load(self.checkpoint)

    def require_sizes(self, learners: Mapping[str, Learner], keys: Mapping[str, str]) -> None:
        """Refuse to load weights into models of other sizes.

        Args:
            learners: the models, by their names in checkpoints.
            keys: the configuration's key of each model.

        Raises:
            UserError: naming the sizes that differ and the key.
        """
        was = Contents.read(self.checkpoint).models if self.checkpoint else None
        if was is None:
            return
        faults = size_differences(was, _sizes(learners))
        if faults:
            lines = "".join(f"\n  {keys[model]}: {', '.join(found)}" for model, found in faults.items())
            raise UserError(
                f"{self.checkpoint} was saved by a run of other models, so this run cannot resume from it:{lines}\n"
                "Name the models that the checkpoint was trained from, or start anew with trainer.resume_mode=disable"
            )


def _require_command(checkpoint: Path, was: Mapping[str, object] | None, config: Config | SupervisedConfig) -> None:
    """Refuse to continue the schedule and the optimizer of another command."""
    command = COMMANDS[type(config)]
    saved_by = command if was is None else COMMANDS[root_of(was)]
    if saved_by != command:
        key, _ = next(config.checkpoints)
        raise UserError(
            f"{checkpoint} was saved by `megarl {saved_by}`, which `megarl {command}` cannot continue. Start from "
            f"its weights: `megarl export {checkpoint} DIRECTORY`, then {key}=DIRECTORY with "
            "trainer.resume_mode=disable or another trainer.default_local_dir"
        )


def _require_optimizers(checkpoint: Path, found: Sequence[ConfigDifference], config: Config | SupervisedConfig) -> None:
    """Refuse to resume a model from optimizer states of other names or of other weights.

    Megatron-Core names the states of a sharded optimizer and of a whole one differently.
    """
    if isinstance(config, Config):
        learning = [
            (f"{ACTOR}.megatron", POLICY),
            *([("critic.megatron", "critic.model")] if config.has_critic else []),
        ]
    else:
        learning = [("megatron", "model")]
    keys = [
        key for split, model in learning for key in (f"{split}.use_distributed_optimizer", f"{model}.freeze_moe_router")
    ]
    for difference in found:
        if difference.key in keys:
            was = str(difference.was).lower()
            raise UserError(
                f"{checkpoint} has the optimizer states of {difference.key}={was}, which no other value can read: "
                f"write {was}, or start anew with trainer.resume_mode=disable"
            )


def _is_kept(step: int | None, trainer: TrainerSection) -> bool:
    """Return whether the run or its mirror has the checkpoint of `step`; step 0 is the model that it started from."""
    if not step or step in saved_steps(Path(trainer.default_local_dir)):
        return True
    if trainer.default_hdfs_dir is None:
        return False
    try:
        return step in Remote(trainer.default_hdfs_dir).complete_steps()
    except Exception:  # each file system has errors of its own; the mirror itself warns when it cannot be reached
        return True


def resumed_checkpoint(trainer: TrainerSection) -> Path | None:
    """Return the checkpoint that a run resumes from, as `find_checkpoint` does. Collective."""
    return find_checkpoint(
        Path(trainer.default_local_dir),
        mode=trainer.resume_mode,
        path=trainer.resume_from_path,
        mirror=trainer.default_hdfs_dir,
    )


def template_time(trainer: TrainerSection) -> datetime:
    """Return the time that chat templates see: the local time of the first start, in full seconds. Collective.

    Raises:
        UserError: the checkpoint that the run resumes from is missing or damaged.
    """
    run_dir = Path(trainer.default_local_dir)
    known: datetime | None = None
    if trainer.resume_mode == "auto" or any(together(lambda: restarted(os.environ))):
        known = on_first_rank(lambda: recorded_time(run_dir))
    if known is None:
        checkpoint = resumed_checkpoint(trainer)
        known = on_first_rank(lambda: recorded_time(checkpoint)) if checkpoint else None
    return known or on_first_rank(lambda: datetime.now().replace(microsecond=0))


def prepare_checkpoint(trainer: TrainerSection) -> Path | None:
    """Return the checkpoint that a training job resumes from, and set aside those of another past. Collective.

    The run's directory then holds only checkpoints that lead to the returned one. If the launcher has restarted the
    job, the job resumes from its own last checkpoint, whatever the mode.
    """
    run_dir = Path(trainer.default_local_dir)
    mode = trainer.resume_mode
    own = None
    if mode != "auto" and any(together(lambda: restarted(os.environ))):
        own = last_intact(run_dir)
    if own and dist.get_rank() == 0:
        logger.info("restarted by its launcher: resumes from %s, although trainer.resume_mode=%s", own, mode)
    before = on_first_rank(lambda: saved_steps(run_dir))
    checkpoint = own or resumed_checkpoint(trainer)
    on_first_rank(lambda: _set_aside_others(run_dir, before, checkpoint, continues=bool(own) or mode == "auto"))
    return checkpoint


def _set_aside_others(run_dir: Path, steps: Collection[int], checkpoint: Path | None, *, continues: bool) -> None:
    """Set aside and report the checkpoints of `run_dir`, saved at `steps`, that do not lead to `checkpoint`.

    `continues`: the checkpoint is the run's own, even if it was fetched from the mirror.
    """
    step = step_in(run_dir, checkpoint) if checkpoint else None
    last_kept = step if step is not None and (continues or step in steps) else -1  # a copy from elsewhere has no past
    others = [other for other in steps if other > last_kept]
    if continues and not others:
        return
    target = set_aside(run_dir, others, latest=step)
    if target:
        logger.info(
            "moved %d checkpoints that this run does not continue from %s to %s; you may delete them",
            len(others),
            run_dir,
            target,
        )


def mirror_of(trainer: TrainerSection) -> Mirror | None:
    """Return the mirror of a run's checkpoints, or None if the run has no mirror."""
    if trainer.default_hdfs_dir is None:
        return None
    remote = Remote(trainer.default_hdfs_dir)
    run_dir = Path(trainer.default_local_dir)
    return Mirror(remote, run_dir, keep=trainer.max_ckpt_to_keep)


def checkpoint_texts(
    config: Config | SupervisedConfig, learners: Mapping[str, Learner], code: Mapping[str, str], inputs: Inputs
) -> dict[str, str]:
    """Return the texts, by file, that describe a run in its checkpoints: configuration, versions, models, code, data.

    `code` and `inputs` are the results of `custom_code` and `inputs_of` when the run began: files may have changed.
    """
    return {
        CONFIG_FILE: to_yaml(config),
        VERSIONS_FILE: json.dumps(installed_versions(), indent=1),
        MODELS_FILE: json.dumps(_sizes(learners), indent=1),
        CODE_FILE: json.dumps(code, indent=1),
        INPUTS_FILE: json.dumps(inputs, indent=1),
    }


def _sizes(learners: Mapping[str, Learner]) -> dict[str, dict[str, object]]:
    sizes: dict[str, dict[str, object]] = json.loads(
        json.dumps({name: asdict(learner.architecture) | _adapters(learner) for name, learner in learners.items()})
    )
    return sizes


def _adapters(learner: Learner) -> dict[str, object]:
    """Return what must stay the same of a model's adapters."""
    lora = learner.lora
    if lora is None:
        return {}
    return {"lora_rank": lora.rank, "adapted": adapted_projections(learner.architecture, lora)}


def _compare(
    was: Contents, config: Config | SupervisedConfig
) -> tuple[list[ConfigDifference], dict[str, tuple[str, str]]]:
    """Return what differs from what the checkpoint records: keys, the user's code and files, and packages. Collective.

    Each file is named by its key and its own name.
    """
    found: list[ConfigDifference] = []
    if was.config is not None:
        found = config_differences(was.config, yaml.safe_load(to_yaml(config)), Schema.of(type(config)).changes)
    if was.code is not None:
        found = code_differences(was.code, custom_code(config), found) + found
    if was.inputs is not None:
        found = input_differences(was.inputs, on_first_rank(lambda: inputs_of(config)), found) + found
    old = was.versions
    now = installed_versions()
    if old is None:
        return found, {}
    other = [name for name in {**old, **now} if old.get(name) != now.get(name)]
    return found, {name: (old.get(name, "none"), now.get(name, "none")) for name in other}


def _show(checkpoint: Path, found: list[ConfigDifference], other_versions: Mapping[str, tuple[str, str]]) -> None:
    """Report the differences: those with an effect with both values, the others by name."""
    effective = [difference for difference in found if difference.change.effect is not Effect.NONE]
    if effective or other_versions:
        logger.info("changes since %s:", checkpoint)
    for each in effective:
        was = _cut(each.was)
        now = _cut(each.now)
        effect = each.change.effect.value
        logger.info("  %s: %s -> %s (%s: %s)", each.key, was, now, effect, each.change.reason)
    for name, (was, now) in other_versions.items():
        logger.info("  %s: %s -> %s (another version: rounding or more)", name, was, now)
    if any(difference.change.effect is Effect.CURVE for difference in found):
        logger.info("note: the curve will differ from that of an uninterrupted run")
    harmless = [difference.key for difference in found if difference.change.effect is Effect.NONE]
    if harmless:
        logger.info("changed without effect on the curve: %s", ", ".join(harmless))
    incomparable = [difference.key for difference in found if difference.makes_scores_incomparable]
    if incomparable:
        keys = ", ".join(incomparable)
        logger.info("note: validation scores are not comparable with earlier ones, so the best starts anew: %s", keys)


def _cut(value: object) -> str:
    """Return a value as text. Keep both ends of a long value, because a digest comes last."""
    text = str(value)
    half = (MAX_SHOWN - 3) // 2
    return text if len(text) <= MAX_SHOWN else f"{text[:half]}...{text[-half:]}"
