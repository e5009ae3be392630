"""The work of `benchmarks step`: a model, prompts of random numbers, a reward, and the arguments of the run."""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from benchmarks.cases import MODELS
from megarl.data.parquet import write_rows

Lengths = Literal["equal", "ragged", "long-tail"]
Algorithm = Literal["grpo", "ppo"]

PROMPT_TOKENS = 16
NUM_BATCHES = 4  # of different prompts
MOST_TOKENS: Mapping[Lengths, int] = {"equal": 64, "ragged": 256, "long-tail": 1024}
MEAN_TOKENS: Mapping[Lengths, int | None] = {"equal": None, "ragged": 75, "long-tail": 150}
"""Tokens after which a response of a model with random weights ends on average; None: every response has the most."""
LEARNING_RATE = 1e-6
KL_COEF = 0.001  # of the loss to the reference
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str) % 97 / 97
"""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The work of one step."""

    model: str  # a name of MODELS, or a directory
    lengths: Lengths
    algorithm: Algorithm
    num_prompts: int
    num_responses: int  # to each prompt
    prompt_tokens: int = PROMPT_TOKENS
    response_tokens: int | None = None  # at most; None: as `lengths` says

    @property
    def num_samples(self) -> int:
        """Responses of a step."""
        return self.num_prompts * self.num_responses

    @property
    def is_equal(self) -> bool:
        """Whether all responses have the same length."""
        return MEAN_TOKENS[self.lengths] is None

    @property
    def most_prompt_tokens(self) -> int:
        """Tokens of a prompt, at most: the tokenizer of a real model may need several for a number."""
        return self.prompt_tokens if self.model in MODELS else 8 * self.prompt_tokens

    @property
    def most_response_tokens(self) -> int:
        """Tokens of a response, at most."""
        return self.response_tokens or MOST_TOKENS[self.lengths]

    def write(self, directory: Path) -> list[str]:
        """Write the files of the workload to `directory`; return the arguments of `megarl train` that name them."""
        model = self.model_in(directory)
        if self.model in MODELS and not model.exists():
            self._write_model(model)
        rng = random.Random(0)
        prompts = [
            {"prompt": " ".join(str(rng.randrange(3, 1000)) for _ in range(self.prompt_tokens))}
            for _ in range(NUM_BATCHES * self.num_prompts)
        ]
        write_rows(directory / "prompts.parquet", prompts)
        (directory / "reward.py").write_text(REWARD, encoding="utf-8")
        return self.arguments(directory)

    def arguments(self, directory: Path) -> list[str]:
        """Return the arguments of `megarl train`, if the workload is written to `directory`."""
        model = self.model_in(directory)
        return [
            f"data.train_files={directory / 'prompts.parquet'}",
            f"data.train_batch_size={self.num_prompts}",
            f"data.max_prompt_length={self.most_prompt_tokens}",
            f"data.max_response_length={self.most_response_tokens}",
            f"actor_rollout_ref.model.path={model}",
            f"data.tokenizer={self.tokenizer_in(directory)}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={self.num_prompts}",
            f"actor_rollout_ref.actor.optim.lr={LEARNING_RATE}",
            f"actor_rollout_ref.rollout.n={self.num_responses}",
            f"actor_rollout_ref.rollout.ignore_eos={str(self.is_equal).lower()}",
            f"actor_rollout_ref.rollout.max_num_seqs={self.num_samples}",
            f"custom_reward_function.path={directory / 'reward.py'}",
            *self._algorithm_arguments(model),
        ]

    def model_in(self, directory: Path) -> Path:
        """Return the directory of the model, if the workload is written to `directory`."""
        return directory / "model" if self.model in MODELS else Path(self.model).resolve()

    def tokenizer_in(self, directory: Path) -> Path:
        """Return the directory of the tokenizer, if the workload is written to `directory`.

        In that of a Qwen2 model transformers takes every tokenizer for Qwen2's own.
        """
        model = self.model_in(directory)
        return model / "tokenizer" if self.model in MODELS else model

    def settings(self, directory: Path) -> dict[str, Any]:
        """Return the work for a program of another library, if the workload is written to `directory`."""
        return {
            "model": str(self.model_in(directory)),
            "tokenizer": str(self.tokenizer_in(directory)),
            "prompts": str(directory / "prompts.parquet"),
            "reward": str(directory / "reward.py"),
            "num_prompts": self.num_prompts,
            "num_responses": self.num_responses,
            "prompt_tokens": self.most_prompt_tokens,
            "response_tokens": self.most_response_tokens,
            "ignore_eos": self.is_equal,
            "learning_rate": LEARNING_RATE,
            "kl_coef": KL_COEF,
        }

    def _algorithm_arguments(self, model: Path) -> list[str]:
        if self.algorithm == "grpo":
            return [
                "algorithm.adv_estimator=grpo",
                "actor_rollout_ref.actor.use_kl_loss=true",
                f"actor_rollout_ref.actor.kl_loss_coef={KL_COEF}",
            ]
        return [f"critic.model.path={model}", "algorithm.use_kl_in_reward=true"]

    def _write_model(self, directory: Path) -> None:
        """Write a model with random weights and a tokenizer of one token for each number."""
        fields: dict[str, Any] = dict(MODELS[self.model])
        size = fields["vocab_size"]
        mean = MEAN_TOKENS[self.lengths]
        if mean:  # a random model draws every token about equally often
            fields["eos_token_id"] = list(range(size - size // mean, size))
        directory.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=directory.parent) as place:  # so that an interrupted one is not used again
            part = Path(place) / "model"
            part.mkdir()
            _write_random_model(part, fields)
            try:
                part.rename(directory)
            except OSError:  # another process may have written the same
                if not directory.is_dir():
                    raise


def _write_random_model(directory: Path, fields: Mapping[str, Any]) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    (directory / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)).save_pretrained(directory)
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    names = [*special.values(), *map(str, range(len(special), fields["vocab_size"]))]
    words = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(directory / "tokenizer")
