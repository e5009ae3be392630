"""Supervised learning with the same learner: `python -m megarl.sft CONFIG.yaml [MORE.yaml] [a.b.c=value ...]`.

Ends with a Hugging Face directory, RUN_DIR/huggingface, that `megarl.train` can start from.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.load import load_sft_config
from megarl.config.root import SFTConfig
from megarl.distributed.launch import Launch
from megarl.entry import run

if TYPE_CHECKING:
    from megarl.data.pairs import PairStream
    from megarl.learner.learner import Budget, Learner


def main(argv: Sequence[str] = sys.argv[1:]) -> None:
    """Train as the configuration says, on every rank of the job."""
    run("megarl.sft", argv, load_sft_config, train)


def train(config: SFTConfig, launch: Launch) -> None:
    """Run the job on this rank."""
    from megarl.build import run_tracker
    from megarl.checkpoints import Checkpoints, State, find_checkpoint
    from megarl.data.pairs import PairStream
    from megarl.export import export_model
    from megarl.learner.factory import make_learner
    from megarl.learner.learner import Budget
    from megarl.learner.parallel import build_mesh
    from megarl.loop import is_due
    from megarl.objectives import SFTObjective
    from megarl.platform.device import device_type, local_device
    from megarl.source import Source
    from megarl.tracking.timers import Timers

    trainer, data, run_dir = config.trainer, config.data, Path(config.trainer.default_local_dir)
    source = Source.read(config.model)
    tokenizer = source.tokenizer(
        data.tokenizer, chat_template=data.chat_template, trust_remote_code=config.model.trust_remote_code
    )
    pairs = PairStream(data, data.train_files, tokenizer)
    val_pairs = PairStream(data, data.val_files, tokenizer) if data.val_files else None
    last_step = trainer.total_training_steps or trainer.total_epochs * pairs.steps_per_epoch
    learner = make_learner(
        source.directory,
        source.architecture,
        config.megatron,
        build_mesh(config.megatron),
        role="policy",
        device=local_device(device_type(trainer.device)),
        recompute=config.model.enable_gradient_checkpointing,
        balance=trainer.balance_batch,
        training=(config.optim, config.grad_clip, last_step),
    )
    checkpoints = Checkpoints(
        directory=run_dir,
        learners={"actor": learner},
        keep=trainer.max_ckpt_to_keep,
        write_huggingface=lambda directory: source.write_companions(directory, tokenizer, dtype=config.megatron.dtype),
    )
    resumed = find_checkpoint(run_dir, mode=trainer.resume_mode, path=trainer.resume_from_path)
    first_step = (checkpoints.load(resumed) if resumed else State()).step
    budget = Budget(max_tokens=config.max_token_len_per_gpu, max_sequences=data.micro_batch_size)
    tracker = run_tracker(config, launch, last_step=last_step, resume_step=first_step if resumed else None)
    failed = True
    try:
        for step in range(first_step, last_step):
            timers = Timers()
            with timers("step"):
                metrics = learner.update([pairs.take(step)], SFTObjective(), budget)
            if val_pairs and is_due(trainer.test_freq, step + 1, last_step=last_step):
                metrics["val/loss"] = mean_loss(learner, val_pairs, budget)
            if is_due(trainer.save_freq, step + 1, last_step=last_step):
                checkpoints.save(step=step + 1)
            tracker.log(metrics | timers.seconds(), step=step + 1)
        failed = False
    finally:
        tracker.close(failed=failed)
    export_model(learner, source, tokenizer, run_dir / "huggingface", launch)


def mean_loss(learner: "Learner", pairs: "PairStream", budget: "Budget") -> float:
    """Cross-entropy per response token, in nats."""
    total, num_tokens = 0.0, 0
    for batch in pairs.batches():
        total -= float(learner.infer(batch, budget).log_probs.sum())
        num_tokens += int(batch.mask.sum())
    return total / num_tokens


if __name__ == "__main__":
    main()
