"""Train a reward model on preferences: `megarl train-reward CONFIG.yaml [MORE.yaml] [a.b.c=value ...]`.

Starts from a language model, whose head is replaced, or from a classifier. Writes RUN_DIR/huggingface at the end, a
directory for `AutoModelForSequenceClassification` and `reward_model.model.path`.
"""

import sys
from collections.abc import Sequence

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
    from megarl.assembly.supervised import learn

    learn(config, launch)


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
