"""The engine says what `transformers` says on the same weights, after every sync, however it is cut.

Weights are written straight from full Hugging Face tensors, sliced by the engine's own layout, so a wrong layout, a stale
packed weight and a stale cached key each show as wrong log-probabilities.
"""

import os
import random
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megarl.batch import Prompt
from megarl.rollout.config import RolloutSection, SamplingSection
from megarl.rollout.engine import RolloutEngine
from megarl.rollout.sampling import Generation
from tests.ranks import RankPool
from tests.tiny import SIZES, VARIANTS, write_checkpoint

pytestmark = pytest.mark.dist

SAMPLED = SamplingSection(n=2, do_sample=True, temperature=0.7)
GREEDY = SamplingSection()
RESPONSE = 12
Asked = tuple[int, bool, int]  # prompt index, sampled or greedy, sample number
# 130 shared tokens fill one block of the prefix cache, so a key that outlives a sync would be read.
PROMPTS = [
    Prompt(index=10 * number, token_ids=tokens, text="", data_source="", ground_truth=None, extra_info={})
    for number, tokens in enumerate(
        [[5, 9, 3], [7] * 40 + [8], [*range(3, 133), 40], [*range(3, 133), 41, 42], [11, 12], [13, 14, 15, 16]]
    )
]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Path]]:
    """Two checkpoints with different weights and a directory with nothing but their config, for a variant."""
    root = tmp_path_factory.mktemp("checkpoints")

    def written(variant: str) -> list[Path]:
        first, second, bare = (root / f"{variant}-{name}" for name in ("first", "second", "bare"))
        if not bare.exists():
            write_checkpoint(first, variant, seed=1)
            write_checkpoint(second, variant, seed=2)
            bare.mkdir()
            shutil.copy(first / "config.json", bare)
        return [first, second, bare]

    return written


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    return load_file(checkpoint / "model.safetensors")


def writer(tensors: dict[str, Tensor]) -> Callable[[Any], None]:
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
    section = RolloutSection(dtype="float32", tensor_model_parallel_size=tp_size, max_num_seqs=16, **settings)
    return RolloutEngine(
        section,
        model_dir=model_dir,
        shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
        num_key_value_heads=SIZES["num_key_value_heads"],
        stop_token_ids=[],
        max_model_len=160,
    )


def tear_down(engine: RolloutEngine) -> None:
    """Let the next engine start in this process."""
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    engine._llm.llm_engine.engine_core.shutdown()
    destroy_model_parallel()
    destroy_distributed_environment()


def answers_after_each_sync(paths: list[Path], tp_size: int) -> list[dict[Asked, Generation]]:
    """On each rank: what its replica answers to its share of PROMPTS, under each checkpoint in turn."""
    *checkpoints, bare = paths
    engine = start(bare, tensors_of(checkpoints[0]), tp_size=tp_size)
    share = PROMPTS[engine.replica :: engine.num_replicas]
    answers = []
    for checkpoint in checkpoints:
        answers.append({})
        with engine.awake(writer(tensors_of(checkpoint))):
            for sampling in (SAMPLED, GREEDY):
                generations = engine.generate(share, sampling, max_tokens=RESPONSE, step=3)
                assert [generation.prompt for generation in generations] == sorted([*range(len(share))] * sampling.n)
                for number, generation in enumerate(generations):
                    asked = (share[generation.prompt].index, sampling.do_sample, number % sampling.n)
                    answers[-1][asked] = generation
    tear_down(engine)
    return answers


def log_probs(model: Any, prompt: Prompt, response: list[int], temperature: float) -> Tensor:
    """[len(response)]: log-probability of each response token by `transformers`."""
    tokens = torch.tensor([[*prompt.token_ids, *response]])
    with torch.no_grad():
        logits = model(tokens).logits[0, len(prompt.token_ids) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_engine_follows_two_different_syncs(
    pool: RankPool, checkpoints: Callable[[str], list[Path]], variant: str, tp_size: int
) -> None:
    paths = checkpoints(variant)
    ranks = pool.run(2, answers_after_each_sync, paths, tp_size)
    if tp_size == 2:
        assert ranks[0] == ranks[1]
    for checkpoint, *answers in zip(paths[:2], *ranks, strict=True):
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        everything = answers[0] | answers[1]
        assert len(everything) == len(PROMPTS) * (SAMPLED.n + GREEDY.n)
        for (index, is_sampled, _), generation in everything.items():
            prompt = PROMPTS[index // 10]
            expected = log_probs(model, prompt, generation.token_ids, SAMPLED.temperature if is_sampled else 1.0)
            torch.testing.assert_close(torch.tensor(generation.log_probs), expected, rtol=0.0, atol=1e-4)
            if not is_sampled:
                tokens = torch.tensor([prompt.token_ids])
                greedy = model.generate(tokens, max_new_tokens=RESPONSE, do_sample=False, eos_token_id=None)
                assert generation.token_ids == greedy[0, tokens.shape[1] :].tolist()


def test_samples_do_not_depend_on_the_number_of_replicas(
    pool: RankPool, checkpoints: Callable[[str], list[Path]]
) -> None:
    paths = checkpoints("llama")
    [alone] = pool.run(1, answers_after_each_sync, paths, 1)
    for one, first, second in zip(alone, *pool.run(2, answers_after_each_sync, paths, 1), strict=True):
        assert first.keys().isdisjoint(second)
        tokens = {asked: generation.token_ids for asked, generation in one.items()}
        assert tokens == {asked: generation.token_ids for asked, generation in (first | second).items()}
        assert all(tokens[prompt.index, True, 0] != tokens[prompt.index, True, 1] for prompt in PROMPTS)


def behaviour(paths: list[Path]) -> dict[str, Any]:
    """Everything about one engine that needs no second one."""
    checkpoint, _, bare = paths
    tensors = tensors_of(checkpoint)
    os.environ["LOCAL_WORLD_SIZE"] = "7"
    before = (torch.get_rng_state(), random.getstate(), str(np.random.get_state()))
    engine = start(bare, tensors, tp_size=2)
    seen: dict[str, Any] = {}
    with engine.awake(writer(tensors)):
        free = engine.generate(PROMPTS[:1], SAMPLED, max_tokens=RESPONSE, step=0)
        seen["other_step"] = engine.generate(PROMPTS[:1], SAMPLED, max_tokens=RESPONSE, step=1) != free
        engine._stop = [free[0].token_ids[5]]
        seen["free"], seen["stopped"] = free[0], engine.generate(PROMPTS[:1], SAMPLED, max_tokens=RESPONSE, step=0)[0]
        seen["top_k"] = engine.generate(PROMPTS[:1], SamplingSection(do_sample=True, temperature=1.0, top_k=1), max_tokens=3, step=0)
        seen["nothing"] = engine.generate([], SAMPLED, max_tokens=RESPONSE, step=0)
        with pytest.raises(ValueError, match=r"Prompt 20 has 131 tokens.*data\.max_prompt_length"):
            engine.generate(PROMPTS[2:3], GREEDY, max_tokens=60, step=0)
    after = (torch.get_rng_state(), random.getstate(), str(np.random.get_state()))
    seen["random_kept"] = torch.equal(before[0], after[0]) and before[1:] == after[1:]
    seen["environment"] = os.environ["LOCAL_WORLD_SIZE"]
    seen["segments"] = sorted(file.name for file in Path("/dev/shm").glob("*cpushm*"))

    partial = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp" not in name}
    with pytest.raises(RuntimeError, match=r"unwritten.*layers\.1\.mlp"), engine.awake(only(partial)):
        pass
    tear_down(engine)
    return seen


def only(tensors: dict[str, Tensor]) -> Callable[[Any], None]:
    """A sync that leaves out the parameters which need more than `tensors`."""

    def sync(weights: Any) -> None:
        params = {piece.param for piece in weights.layout()}
        for param in params - {piece.param for piece in weights.layout() if piece.name not in tensors}:
            weights.open(param).zero_()
            weights.close(param)

    return sync


def test_engine_stops_keeps_the_trainers_state_and_refuses_half_a_sync(
    pool: RankPool, checkpoints: Callable[[str], list[Path]]
) -> None:
    for seen in pool.run(2, behaviour, checkpoints("llama")):
        free, stopped = seen["free"], seen["stopped"]
        assert free.truncated
        assert len(free.token_ids) == RESPONSE
        end = free.token_ids.index(free.token_ids[5]) + 1
        assert not stopped.truncated
        assert stopped.token_ids == free.token_ids[:end]  # the stop token is part of the response
        assert stopped.log_probs == pytest.approx(free.log_probs[:end], abs=1e-5)
        assert seen["top_k"][0].log_probs == [0.0] * 3  # one token is left to draw from
        assert seen["other_step"]
        assert seen["nothing"] == []
        assert seen["random_kept"]
        assert seen["environment"] == "7"
        assert all(name.startswith("megarl-") for name in seen["segments"])


def refusals(paths: list[Path]) -> None:
    tensors = tensors_of(paths[0])
    bare = paths[-1]
    with pytest.raises(ValueError, match="tensor_model_parallel_size=3 does not divide the 2 processes"):
        start(bare, tensors, tp_size=3)
    with pytest.raises(ValueError, match="engine_kwargs: max_model_len follow"):
        start(bare, tensors, tp_size=2, engine_kwargs={"max_model_len": 1})
    with pytest.raises(ValueError, match="engine_kwargs: vLLM has no argument max_modle_len"):
        start(bare, tensors, tp_size=2, engine_kwargs={"max_modle_len": 1})


def test_engine_refuses_what_does_not_fit(pool: RankPool, checkpoints: Callable[[str], list[Path]]) -> None:
    pool.run(2, refusals, checkpoints("llama"))
