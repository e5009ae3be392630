"""Builds the validation of a checkpoint, as configured."""

import logging

from megarl.assembly.prompts import make_tokenizer, validation_prompts
from megarl.assembly.records import console_tracker, name_custom_code
from megarl.assembly.resume import resumed_checkpoint, template_time
from megarl.assembly.reward import make_environments, make_rules
from megarl.assembly.sampling import make_engine, make_sampler, make_scorer, make_validation
from megarl.checkpoint.state import State
from megarl.config.root import Config
from megarl.data.order import Position
from megarl.distributed.launch import Launch
from megarl.learner.checkpoint import load_learner
from megarl.learner.factory import make_learner
from megarl.learner.parallel import build_mesh
from megarl.models.source import Source
from megarl.platform.errors import UserError
from megarl.rollout.engine import RolloutEngine
from megarl.training.validation import Validation

logger = logging.getLogger(__name__)


def build_validation(config: Config, launch: Launch) -> tuple[Validation, RolloutEngine, int]:
    """Build the validation of the checkpoint that a run would resume from. Return its engine and step too.

    Raises:
        UserError: there are no validation files.
    """
    trainer = config.trainer
    policy = config.actor_rollout_ref
    name_custom_code(config)
    source = Source.read(policy.model)
    tokenizer = make_tokenizer(config.data, policy.model, source, now=template_time(trainer))
    prompts = validation_prompts(config, tokenizer)
    if prompts is None:
        raise UserError("data.val_files is not set: name the parquet files to evaluate on")
    rules = make_rules(config, tokenizer, source)
    environments = make_environments(config, tokenizer, source, prompts.prompt_of(0))
    if launch.rank == 0:
        logger.info(prompts.preview_prompt(Position()))
    engine = make_engine(config, source, tokenizer)
    mesh = build_mesh(policy.actor.megatron)
    actor = make_learner(
        source.directory,
        source.architecture,
        policy.actor.megatron,
        mesh,
        role="policy",
        lora=source.lora,
    )
    scorer = make_scorer(config, rules, mesh, tokenizer, source)
    step = 0
    checkpoint = resumed_checkpoint(trainer)
    if checkpoint:
        load_learner(actor, checkpoint / "actor")
        step = State.read(checkpoint).step
    tracker = console_tracker(launch, total_steps=step)
    sampler = make_sampler(config, engine, actor, scorer, launch, environments)
    return make_validation(config, prompts, sampler, scorer, tracker, replaces=False), engine, step
