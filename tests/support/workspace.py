"""Files for tests that run programs: Countdown problems, a SentencePiece tokenizer and a random Llama."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.support.programs import run_python
from tests.support.sentencepieces import train_sentencepiece
from tests.support.tiny import write_checkpoint

MAX_RESPONSE_LENGTH = 8
NUM_TOKENS = 200  # of the tokenizer; the model has more, and not a multiple of 64
SMALL = (  # a project that `megarl new` made, for a model of a few thousand parameters, which learns nothing
    *("data.max_prompt_length=64", "data.max_response_length=16", "data.train_batch_size=8"),
    *("actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.rollout.n=2"),
    *("actor_rollout_ref.actor.megatron.dtype=float32", "actor_rollout_ref.rollout.dtype=float32"),
    *("trainer.total_training_steps=2", "trainer.save_freq=2", "trainer.test_freq=2"),
)
DIGITS_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(character.isdigit() for character in solution_str) / 10
"""


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """The paths of the files."""

    model: Path  # Hugging Face directory, the tokenizer as `tokenizer.model` in it
    train: Path  # 48 problems
    val: Path  # 8 problems
    pairs: Path  # 12 problems with solutions
    reward: Path  # a reward function that gives random text some reward


def make_workspace(root: Path) -> Workspace:
    """Make all files under `root`."""
    data = root / "data"
    run_python(
        *("-m", "megarl", "prepare", "countdown", "--out", data),
        *("--template", "plain", "--train", 48, "--val", 8, "--sft", 12, "--max-number", 20),
        timeout_s=120,
    )
    model = write_checkpoint(root / "model", "llama")
    train_sentencepiece(model / "tokenizer.model", vocab_size=NUM_TOKENS, normalization_rule_name="identity")
    reward = root / "reward.py"
    reward.write_text(DIGITS_REWARD)
    files = {name: data / f"{file}.parquet" for name, file in (("train", "train"), ("val", "val"), ("pairs", "sft"))}
    return Workspace(model=model, reward=reward, **files)


def with_many_ends(model: Path, copy: Path, *, one_of: int = 16) -> Path:
    """Return a copy of a model in which one token of `one_of` ends a response."""
    shutil.copytree(model, copy)
    vocab_size = json.loads((copy / "config.json").read_text())["vocab_size"]
    ends = {"eos_token_id": list(range(0, vocab_size, one_of))}
    (copy / "generation_config.json").write_text(json.dumps(ends))
    return copy


def train_arguments(workspace: Workspace, run_dir: Path) -> list[str]:
    """Return arguments for two float32 ranks and a reward that random weights earn; splits are left to the caller."""
    return [
        f"data.train_files={workspace.train}",
        f"data.val_files={workspace.val}",
        "data.train_batch_size=8",
        "data.max_prompt_length=64",
        f"data.max_response_length={MAX_RESPONSE_LENGTH}",
        f"actor_rollout_ref.model.path={workspace.model}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.megatron.dtype=float32",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.max_num_seqs=64",
        f"custom_reward_function.path={workspace.reward}",
        "reward_model.trial_rows=0",
        "trainer.n_gpus_per_node=2",
        "trainer.logger=[jsonl]",
        f"trainer.default_local_dir={run_dir}",
    ]


def ppo_arguments(workspace: Workspace, run_dir: Path) -> list[str]:
    """Return arguments of a two-stage pipeline, a tensor-parallel engine, and every part of PPO that keeps state."""
    return [
        *train_arguments(workspace, run_dir),
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.ptx_coef=0.1",
        f"actor_rollout_ref.actor.ptx_files={workspace.pairs}",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        f"critic.model.path={workspace.model}",
        "critic.optim.lr=1e-3",
        "algorithm.kl_ctrl={type: adaptive, kl_coef: 0.1, target_kl: 0.01, horizon: 100}",
        "trainer.critic_warmup=1",
        f"trainer.rollout_data_dir={run_dir / 'samples'}",
        "trainer.save_freq=1",
        "trainer.test_freq=3",
    ]
