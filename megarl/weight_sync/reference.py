"""The log-probabilities of `transformers`, computed in a process without vLLM.

vLLM serves some families by the classes of transformers, which it changes: in its process they no longer compute alone.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from megarl.batch import Rollouts
from megarl.data.patches import spare_statistics


@contextmanager
def reference_process() -> Iterator[Executor]:
    """A process for `reference_log_probs`, which starts with the first call: it imports for seconds."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        yield process


def reference_log_probs(process: Executor, checkpoint: Path, responses: Rollouts, *, dtype: torch.dtype) -> Tensor:
    """Return the log-probabilities of the responses by `transformers`, computed on the host: `[N]` float32."""
    samples = [
        (list(responses.prompt_of(sample).token_ids), responses.response_ids(sample).tolist())
        for sample in range(len(responses))
    ]
    return torch.tensor(process.submit(_log_probs, checkpoint, samples, dtype).result())


def _log_probs(checkpoint: Path, samples: Sequence[tuple[list[int], list[int]]], dtype: torch.dtype) -> list[float]:
    spare_statistics()
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, trust_remote_code=False).eval()
    found: list[float] = []
    for prompt, response in samples:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0, -len(response) - 1 : -1].float()
        found += logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0].tolist()
    return found
