"""Train a reward model on preferences: `megarl train-reward CONFIG.yaml [MORE.yaml] [a.b.c=value ...]`.

Starts from a language model, whose head is replaced, or from a classifier. Writes RUN_DIR/huggingface at the end, a
directory for `AutoModelForSequenceClassification` and `reward_model.model.path`.
"""

import sys
from collections.abc import Sequence

from megarl.platform import early  # noqa: F401 - before what takes seconds to import
from megarl.commands.cli.table import TRAIN_REWARD
from megarl.commands.entry import run
from megarl.commands.supervised import program_of
from megarl.config.root import RewardTrainConfig

PROGRAM = program_of(TRAIN_REWARD, RewardTrainConfig)


def main(argv: Sequence[str] = sys.argv[1:]) -> None:
    """Train as configured, on every rank of the job."""
    run(PROGRAM, argv)


if __name__ == "__main__":
    main()
