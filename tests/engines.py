"""A rollout engine on a tiny checkpoint, given weights straight from full Hugging Face tensors."""

import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from megarl.batch import Prompt
from megarl.rollout.config import RolloutSection
from megarl.rollout.engine import RolloutEngine
from tests.tiny import SIZES, write_checkpoint

Sync = Callable[[Any], None]


def prompt(index: int, token_ids: list[int]) -> Prompt:
    return Prompt(index=index, token_ids=token_ids, text="", data_source="", ground_truth=None, extra_info={})


# 130 shared tokens fill one block of the prefix cache, so a key that outlived a sync would be read.
PROMPTS = [
    prompt(10 * number, tokens)
    for number, tokens in enumerate(
        [[5, 9, 3], [7] * 40 + [8], [*range(3, 133), 40], [*range(3, 133), 41, 42], [11, 12], [13, 14, 15, 16]]
    )
]


def write_two_checkpoints(root: Path, variant: str) -> list[Path]:
    """Two checkpoints with different weights, and a directory with nothing but their config; written once."""
    first, second, bare = (root / f"{variant}-{name}" for name in ("first", "second", "bare"))
    if not bare.exists():
        write_checkpoint(first, variant, seed=1)
        write_checkpoint(second, variant, seed=2)
        bare.mkdir()
        shutil.copy(first / "config.json", bare)
    return [first, second, bare]


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    return load_file(checkpoint / "model.safetensors")


def writer(tensors: dict[str, Tensor]) -> Sync:
    """A sync that copies from full tensors what the engine's layout asks for."""

    def sync(weights: Any) -> None:
        pieces = defaultdict(list)
        for piece in weights.layout():
            pieces[piece.param].append(piece)
        for param, parts in pieces.items():
            target = weights.open(param)
            target.fill_(float("nan"))  # whatever is not written must show
            for part in parts:
                box = tuple(slice(low, high) for low, high in zip(part.box.lo, part.box.hi, strict=True))
                part.view(target).copy_(tensors[part.name][box])
            weights.close(param)

    return sync


def start(model_dir: Path, tensors: dict[str, Tensor], *, tp_size: int, **settings: Any) -> RolloutEngine:
    section = RolloutSection(tensor_model_parallel_size=tp_size, **{"dtype": "float32", "max_num_seqs": 16} | settings)
    return RolloutEngine(
        section,
        model_dir=model_dir,
        shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
        num_key_value_heads=SIZES["num_key_value_heads"],
        stop_token_ids=[],
        max_model_len=160,
    )


def tear_down(engine: RolloutEngine) -> None:
    """Let another engine start in this process, in another world."""
    from vllm.distributed.parallel_state import destroy_distributed_environment

    engine.close()
    destroy_distributed_environment()


def log_probs(model: Any, prompt: Prompt, response: list[int], temperature: float) -> Tensor:
    """[len(response)]: log-probability of each response token by `transformers`."""
    tokens = torch.tensor([[*prompt.token_ids, *response]])
    with torch.no_grad():
        logits = model(tokens).logits[0, len(prompt.token_ids) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]
