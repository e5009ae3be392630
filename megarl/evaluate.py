"""Score a checkpoint: `python -m megarl.evaluate CONFIG.yaml [MORE.yaml] [a.b.c=value ...]`.

Takes the configuration of the training run. Validates the checkpoint that `trainer.resume_mode` and
`trainer.resume_from_path` choose, by default the latest, or the model itself if there is no checkpoint. Prints one JSON
line.
"""

import json
import sys
from collections.abc import Sequence

from megarl.platform import early  # noqa: F401 - before what takes seconds to import
from megarl.config.load import load_config
from megarl.config.root import Config
from megarl.distributed.launch import Launch
from megarl.entry import run


def main(argv: Sequence[str] = sys.argv[1:]) -> None:
    """Evaluate as configured, on every rank of the job."""
    run("megarl.evaluate", argv, load_config, evaluate)


def evaluate(config: Config, launch: Launch) -> None:
    """Run the validation on this rank."""
    from megarl.assembly.run import build_validation

    validation, engine, step = build_validation(config, launch)
    scores = validation.run(step=step)
    validation.tracker.close()
    engine.close()
    if launch.rank == 0:
        print(json.dumps({"step": step, **scores}))


if __name__ == "__main__":
    main()
