"""Train a reward model on preferences: `megarl train-reward CONFIG.yaml [MORE.yaml] [a.b.c=value ...]`.

Starts from a language model, whose head is replaced, or from a classifier. Writes RUN_DIR/huggingface at the end, a
directory for `AutoModelForSequenceClassification` and `reward_model.model.path`.
"""

import sys
from collections.abc import Sequence
from functools import partial

from megarl.platform import early  # noqa: F401 - before what takes seconds to import
from megarl.commands.cli.command import parse
from megarl.commands.cli.table import TRAIN_REWARD
from megarl.commands.entry import JobProgram, run
from megarl.config.load import load_reward_train_config
from megarl.config.report import start_notes
from megarl.config.root import RewardTrainConfig
from megarl.config.trial import try_out
from megarl.distributed.place import Launch


def main(argv: Sequence[str] = sys.argv[1:]) -> None:
    """Train as configured, on every rank of the job."""
    run(PROGRAM, argv)


def read_configuration(argv: Sequence[str], *, world_size: int | None) -> RewardTrainConfig:
    """Parse the command line, and read the configuration as `load_reward_train_config` does."""
    return load_reward_train_config(parse(TRAIN_REWARD, argv)["configuration"], world_size=world_size)


def train(config: RewardTrainConfig, launch: Launch) -> None:
    """Run the job on this rank."""
    from megarl.assembly.clock import template_time
    from megarl.assembly.prompts import make_tokenizer
    from megarl.assembly.supervised import learn
    from megarl.checkpoint.huggingface import VALUE_ROLE
    from megarl.data.conversations import Conversations
    from megarl.data.preferences import PreferenceStream
    from megarl.learner.batching import Budget
    from megarl.models.source import Source
    from megarl.training.objectives import PreferenceObjective
    from megarl.training.supervised import SupervisedTask, preference_metrics

    data = config.data
    source = Source.read(config.model)
    tokenizer = make_tokenizer(data, config.model, source, now=template_time(config.trainer))
    reader = Conversations(tokenizer=tokenizer, pad_token_id=source.pad_token_id(tokenizer), max_length=data.max_length)
    budget = Budget(
        max_tokens=config.max_token_len_per_gpu,
        max_sequences=data.micro_batch_size and 2 * data.micro_batch_size,
        num_together=2,
    )
    objective = PreferenceObjective(config.center_rewards_coefficient)
    val_pairs = PreferenceStream(data, data.val_files, reader) if data.val_files else None
    name, role = VALUE_ROLE
    task = SupervisedTask(
        name=name,
        role=role,
        batches=PreferenceStream(data, data.train_files, reader),
        objective=objective,
        budget=budget,
        validate=partial(preference_metrics, pairs=val_pairs, objective=objective, budget=budget)
        if val_pairs
        else None,
    )
    learn(config, launch, source, tokenizer, task)


PROGRAM = JobProgram(
    module="megarl.commands.train_reward",
    load=read_configuration,
    body=train,
    trial=try_out,
    notes=start_notes,
    imports=("megarl.assembly.supervised", "megarl.learner.imported"),
    keeps_log=True,
)


if __name__ == "__main__":
    main()
