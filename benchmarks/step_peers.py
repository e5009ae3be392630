"""Measure the machine, or another library, at the work of a step: `python -m benchmarks.step_peers PEER DIRECTORY`.

DIRECTORY/peers.json names the model and the samples. The result is DIRECTORY/PEER.json.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from megarl.models.flops import Tokens
from megarl.platform.device import local_device
from megarl.platform.imports import silence_imports
from megarl.platform.peaks import measure

WARM_UP = 1
ROW_TOKENS = 16384  # of a micro-batch with its padding: the default budget of the trainer


def main(peer: str, directory: Path) -> None:
    """Measure one peer."""
    settings = json.loads((directory / "peers.json").read_text(encoding="utf-8"))
    (directory / f"{peer}.json").write_text(json.dumps(MEASURES[peer](settings)), encoding="utf-8")


def machine(settings: dict[str, Any]) -> dict[str, Any]:
    """Measure the products of matrices and the fastest copy of memory, on one GPU or on all cores."""
    return asdict(measure(local_device(), getattr(torch, settings["dtype"])))


def engine(settings: dict[str, Any]) -> dict[str, float]:
    """Let vLLM generate responses as long as the samples, without seeds and log-probabilities."""
    from vllm import LLM, SamplingParams

    samples = _samples(settings)
    llm = LLM(
        model=settings["model"],
        dtype=settings["dtype"],
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_num_seqs=len(samples),
        max_model_len=max(len(prompt) + len(response) for prompt, response in samples),
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=False,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in samples]
    params = [SamplingParams(max_tokens=len(response), ignore_eos=True, detokenize=False) for _, response in samples]
    seconds = _times(lambda: llm.generate(prompts, params, use_tqdm=False), settings["repeats"])
    return {"seconds": median(seconds)}


def transformers(settings: dict[str, Any]) -> dict[str, Any]:
    """Let transformers compute the log-probabilities of the samples, and take a step of AdamW on them."""
    from transformers import AutoModelForCausalLM

    samples = _samples(settings)
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=getattr(torch, settings["dtype"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    longest = max(len(prompt) + len(response) for prompt, response in samples)
    size = max(1, ROW_TOKENS // longest)
    batches = [_padded(samples[first : first + size]) for first in range(0, len(samples), size)]

    def log_probs(ids: torch.Tensor, is_token: torch.Tensor, is_response: torch.Tensor) -> torch.Tensor:
        hidden = model.model(ids, attention_mask=is_token).last_hidden_state[:, :-1][is_response[:, 1:]]
        logits = model.lm_head(hidden).float()
        return logits.log_softmax(-1).gather(1, ids[:, 1:][is_response[:, 1:]][:, None])[:, 0]

    def infer() -> None:
        with torch.no_grad():
            for batch in batches:
                log_probs(*batch)

    def update() -> None:
        optimizer.zero_grad()
        for batch in batches:
            (-log_probs(*batch).sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    read = Tokens(
        lengths=[len(prompt) + len(response) for prompt, response in samples],
        num_outputs=sum(len(response) for _, response in samples),
    )
    return {
        "infer": median(_times(infer, settings["repeats"])),
        "update": median(_times(update, settings["repeats"])),
        "tokens": read.num_tokens,
        "longest": max(len(response) for _, response in samples),
        "read": asdict(read),
    }


MEASURES = {"machine": machine, "engine": engine, "transformers": transformers}


def _samples(settings: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Return prompt and response of each sample, as token ids."""
    import pyarrow.parquet as pq

    table = pq.read_table(settings["samples"], columns=["prompt_ids", "response_ids"])
    return list(zip(table["prompt_ids"].to_pylist(), table["response_ids"].to_pylist(), strict=True))


def _padded(samples: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return [b, L] token ids, which of them are no padding, and which belong to a response."""
    length = max(len(prompt) + len(response) for prompt, response in samples)
    ids = torch.zeros(len(samples), length, dtype=torch.int64)
    is_token = torch.zeros_like(ids)
    is_response = torch.zeros_like(ids, dtype=torch.bool)
    for row, (prompt, response) in enumerate(samples):
        whole = len(prompt) + len(response)
        ids[row, :whole] = torch.tensor(prompt + response)
        is_token[row, :whole] = 1
        is_response[row, len(prompt) : whole] = True
    return ids, is_token, is_response


def _times(work: Callable[[], object], repeats: int) -> list[float]:
    """Return the seconds of each repetition after the warm-up."""
    seconds = []
    for _ in range(WARM_UP + repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return seconds[WARM_UP:]


if __name__ == "__main__":
    silence_imports()
    main(sys.argv[1], Path(sys.argv[2]))
