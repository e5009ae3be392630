"""Supervised fine-tuning: `megarl sft CONFIG.yaml [MORE.yaml] [a.b.c=value ...]`.

Writes a Hugging Face directory at the end, RUN_DIR/huggingface. `megarl train` can start from it.
"""

import sys
from collections.abc import Sequence

from megarl.platform import early  # noqa: F401 - before what takes seconds to import
from megarl.commands.cli.table import SFT
from megarl.commands.entry import run
from megarl.commands.supervised import program_of
from megarl.config.root import SFTConfig

PROGRAM = program_of(SFT, SFTConfig)


def main(argv: Sequence[str] = sys.argv[1:]) -> None:
    """Train as configured, on every rank of the job."""
    run(PROGRAM, argv)


if __name__ == "__main__":
    main()
