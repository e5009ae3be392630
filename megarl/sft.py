"""Supervised learning with the same learner: `python -m megarl.sft CONFIG.yaml [MORE.yaml] [a.b.c=value ...]`.

Ends with a Hugging Face directory, RUN_DIR/huggingface, that `megarl.train` can start from.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from megarl.config.load import load_sft_config, to_dict
from megarl.config.root import SFTConfig
from megarl.distributed.launch import Launch
from megarl.entry import run


def main(argv: Sequence[str] = sys.argv[1:]) -> None:
    """Train as the configuration says, on every rank of the job."""
    run("megarl.sft", argv, load_sft_config, train)


def train(config: SFTConfig, launch: Launch) -> None:
    """Run the job on this rank."""
    from megarl.data.pairs import PairStream
    from megarl.export import export_policy
    from megarl.learner.factory import make_learner
    from megarl.learner.learner import Budget
    from megarl.learner.parallel import build_mesh
    from megarl.objectives import SFTObjective
    from megarl.platform.device import device_type, local_device
    from megarl.source import Source
    from megarl.tracking.timers import Timers
    from megarl.tracking.tracker import make_tracker

    trainer, run_dir = config.trainer, Path(config.trainer.default_local_dir)
    source = Source.read(config.model)
    tokenizer = source.tokenizer(
        config.data.tokenizer,
        chat_template=config.data.chat_template,
        trust_remote_code=config.model.trust_remote_code,
    )
    pairs = PairStream(config.data, config.data.train_files, tokenizer)
    last_step = trainer.total_training_steps or trainer.total_epochs * pairs.steps_per_epoch
    learner = make_learner(
        source.directory,
        source.architecture,
        config.megatron,
        build_mesh(config.megatron),
        role="policy",
        device=local_device(device_type(trainer.device)),
        recompute=config.model.enable_gradient_checkpointing,
        training=(config.optim, config.grad_clip, last_step),
    )
    budget = Budget(max_tokens=config.max_token_len_per_gpu, max_sequences=config.data.micro_batch_size)
    tracker = make_tracker(
        trainer.logger,
        run_dir=run_dir,
        project=trainer.project_name,
        experiment=trainer.experiment_name,
        params=to_dict(config),
        total_steps=last_step,
        is_main=launch.rank == 0,
        mlflow_tracking_uri=trainer.mlflow_tracking_uri,
    )
    failed = True
    try:
        for step in range(last_step):
            timers = Timers()
            with timers("step"):
                metrics = learner.update([pairs.take(step)], SFTObjective(), budget)
            tracker.log(metrics | timers.seconds(), step=step + 1)
        failed = False
    finally:
        tracker.close(failed=failed)
    export_policy(learner, source, tokenizer, run_dir / "huggingface", launch)


if __name__ == "__main__":
    main()
