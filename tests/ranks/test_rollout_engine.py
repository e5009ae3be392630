"""The engine says what `transformers` says on the same weights, after every sync, however it is cut.

Weights are written straight from full Hugging Face tensors, sliced by the engine's own layout, so a wrong layout, a
stale packed weight and a stale cached key each show as wrong log-probabilities.
"""

import os
import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from megarl.batch import Generation, Group
from megarl.rollout import patches
from megarl.rollout.config import SamplingSection
from megarl.rollout.requests import Request, RequestParams
from tests.support.cores import all_cores
from tests.support.engines import (
    PROMPTS,
    can_share_memory,
    check_against_rules,
    check_against_vllm,
    draw,
    forget_parallel_state,
    generating,
    log_probs,
    new_session,
    shared_memory_name,
    start,
    start_with_expert_parallel,
    tear_down,
    tear_down_vllm,
    tensors_of,
    write_two_checkpoints,
)
from tests.support.ranks import RankPool
from tests.support.tiny import VARIANTS

pytestmark = pytest.mark.ranks

SAMPLED = SamplingSection(n=2, do_sample=True, temperature=0.7)
GREEDY = SamplingSection()
RESPONSE = 12
Asked = tuple[int, bool, int]  # prompt index, sampled or greedy, sample number
SPINNING = {("llama", 2, "float32"), ("qwen2", 2, "bfloat16")}  # engines whose ranks use all cores; others share them
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}  # the two checkpoints differ by nats
LINEAR = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # computed in bfloat16 alone on the CPU
LINEAR_TOLERANCE = 0.4  # transformers itself is as far from its computation in float32
CHANGES = dict.fromkeys(
    ("qwen3_next", "qwen3_5_moe_text"), {"num_experts_per_tok": 8}
)  # all experts, because rounding changes the choice of some
OF_IMAGES = pytest.mark.skipif(
    find_spec("torchvision") is None, reason="vLLM's class of the family imports torchvision"
)
Checkpoints = Callable[[str], list[Path]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    root = tmp_path_factory.mktemp("checkpoints")
    return lambda variant: write_two_checkpoints(root, variant, **CHANGES.get(variant, {}))


def answers_through_shared_memory(paths: list[Path], tp_size: int, dtype: str) -> list[dict[Asked, Generation]]:
    """On each rank, with a core to itself if there are as many: call `answers_after_each_sync`."""
    with all_cores():
        return answers_after_each_sync(paths, tp_size, dtype)


def answers_after_each_sync(paths: list[Path], tp_size: int, dtype: str) -> list[dict[Asked, Generation]]:
    """On each rank: what its replica answers to its share of PROMPTS, under each checkpoint in turn."""
    *checkpoints, bare = paths
    engine = start(bare, tp_size=tp_size, dtype=dtype)
    assert tp_size == 1 or shared_memory_name().startswith("megarl-") == can_share_memory()
    share = PROMPTS[engine.replica :: engine.num_replicas]
    answers = []
    for checkpoint in checkpoints:
        answers.append({})
        with generating(engine, tensors_of(checkpoint)):
            for sampling in (SAMPLED, GREEDY):
                generations = engine.generate(share, sampling, max_tokens=RESPONSE, step=3)
                assert [generation.prompt for generation in generations] == sorted([*range(len(share))] * sampling.n)
                for number, generation in enumerate(generations):
                    asked = (share[generation.prompt].index, sampling.do_sample, number % sampling.n)
                    answers[-1][asked] = generation
    layout = engine.weights.layout()
    check_against_rules(layout, bare, tp_size=tp_size, dtype=getattr(torch, dtype))
    if dtype == "float32":
        check_against_vllm(engine._llm, layout, tensors_of(checkpoints[0]))
    tear_down(engine)
    return answers


@pytest.fixture(scope="module")
def responses(pool: RankPool, checkpoints: Checkpoints) -> Callable[[str, int, str], list[Any]]:
    """The responses on two ranks by variant, tensor-parallel size and type; each of these engines starts once."""

    @cache
    def ask(*engine: Any) -> list[Any]:
        variant, *settings = engine
        answers = answers_through_shared_memory if engine in SPINNING else answers_after_each_sync
        return pool.run(2, answers, checkpoints(variant), *settings)

    return ask


@pytest.mark.parametrize(
    ("variant", "tp_size", "dtype"),
    [
        *((variant, tp_size, "float32") for variant in VARIANTS if variant not in LINEAR for tp_size in (1, 2)),
        *(("qwen3_next", tp_size, "bfloat16") for tp_size in (1, 2)),
        *(pytest.param(variant, tp_size, "bfloat16", marks=OF_IMAGES) for variant in LINEAR[1:] for tp_size in (1, 2)),
        ("qwen2", 2, "bfloat16"),  # on CPU another kernel, which keeps biases in float32
    ],
)
def test_engine_follows_two_different_syncs(
    responses: Callable[[str, int, str], list[Any]], checkpoints: Checkpoints, variant: str, tp_size: int, dtype: str
) -> None:
    paths, ranks = checkpoints(variant), responses(variant, tp_size, dtype)
    if tp_size == 2:
        assert ranks[0] == ranks[1]
    for checkpoint, *answers in zip(paths[:2], *ranks, strict=True):
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).float()
        everything = answers[0] | answers[1]
        assert len(everything) == len(PROMPTS) * (SAMPLED.n + GREEDY.n)
        for (index, is_sampled, _), generation in everything.items():
            prompt = PROMPTS[index // 10]
            expected = log_probs(model, prompt, generation.token_ids, SAMPLED.temperature if is_sampled else 1.0)
            actual = torch.tensor(generation.log_probs)
            tolerance = LINEAR_TOLERANCE if variant in LINEAR else TOLERANCE[dtype]
            torch.testing.assert_close(actual, expected, rtol=0.0, atol=tolerance)
            if dtype == "float32" and not is_sampled:
                tokens = torch.tensor([prompt.token_ids])
                greedy = model.generate(tokens, max_new_tokens=RESPONSE, do_sample=False, eos_token_id=None)
                assert list(generation.token_ids) == greedy[0, tokens.shape[1] :].tolist()


def drawn_under_two_weights(paths: list[Path]) -> list[Group]:
    """Return groups that one session begins with the first weights and another completes with the second."""
    first, second, bare = paths
    engine = start(bare, tp_size=2)
    session = new_session(SAMPLED.n)
    for version, checkpoint in enumerate((first, second, second)):
        with generating(engine, tensors_of(checkpoint), version=version):
            queue = engine.open_queue(SAMPLED, max_tokens=RESPONSE, step=version, final_only=False)
            session = draw(queue, session, 5 if version < 2 else None)
            assert queue.num_steps == (5 if version < 2 else RESPONSE - 2 * 5)
    tear_down(engine)
    return session


def test_stopped_response_continues_under_new_weights(pool: RankPool, checkpoints: Checkpoints) -> None:
    """Each token has the log-probability of the weights that drew it, after all tokens before it, on both ranks."""
    paths = checkpoints("llama")
    groups, others = pool.run(2, drawn_under_two_weights, paths)
    assert groups == others
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in paths[:2]]
    for group in groups:
        assert group.samples[0].token_ids != group.samples[1].token_ids
        for sample in group.samples:
            assert (sample.complete, sample.truncated, len(sample.token_ids)) == (True, True, RESPONSE)
            assert list(sample.weight_versions) == [0] * 5 + [1] * 5 + [2] * 2
            old, new = (log_probs(model, group.prompt, sample.token_ids, SAMPLED.temperature) for model in models)
            expected = torch.cat([old[:5], new[5:]])
            torch.testing.assert_close(torch.tensor(sample.log_probs), expected, rtol=0.0, atol=TOLERANCE["float32"])


def trace_whole_experts(paths: list[Path]) -> None:
    from megarl.rollout.layout import trace

    tensors, bare = tensors_of(paths[0]), paths[-1]
    llm = start_with_expert_parallel(bare, tp_size=2)
    model = llm.collective_rpc(lambda worker: worker.get_model())[0]
    layout = trace(model, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, torch.device("cpu")).pieces
    check_against_rules(layout, bare, tp_size=2, expert_parallel=True)
    check_against_vllm(llm, layout, tensors)
    tear_down_vllm(llm)


def test_whole_experts_are_traced(pool: RankPool, checkpoints: Checkpoints) -> None:
    pool.run(2, trace_whole_experts, checkpoints("deepseek_v3"))


def test_samples_are_independent_of_replica_count(
    pool: RankPool, responses: Callable[[str, int, str], list[Any]], checkpoints: Checkpoints
) -> None:
    [alone] = pool.run(1, answers_after_each_sync, checkpoints("llama"), 1, "float32")
    for one, first, second in zip(alone, *responses("llama", 1, "float32"), strict=True):
        assert first.keys().isdisjoint(second)
        tokens = {asked: generation.token_ids for asked, generation in one.items()}
        assert tokens == {asked: generation.token_ids for asked, generation in (first | second).items()}
        assert all(tokens[prompt.index, True, 0] != tokens[prompt.index, True, 1] for prompt in PROMPTS)


def as_vllm_generates(engine: Any) -> list[tuple[list[int], list[float]]]:
    """Return the tokens and log-probabilities of `LLM.generate` for the samples of the first prompt in step 0."""
    shared = RequestParams(
        sampling=SAMPLED,
        max_tokens=RESPONSE,
        max_model_len=engine.max_model_len,
        seed=engine._section.seed,
        stop=(),
        log_probs=True,
    )
    begun = Group.new(PROMPTS[0], range(SAMPLED.n), started=0).samples
    params = [shared.of(Request(PROMPTS[0], 0, sample)) for sample in begun]
    prompts = [{"prompt_token_ids": list(PROMPTS[0].token_ids)}] * SAMPLED.n
    with patches.random_state_kept(), patches.compilation(allowed=False):
        outputs = [request.outputs[0] for request in engine._llm.generate(prompts, params, use_tqdm=False)]
    return [(list(output.token_ids), list(output.logprobs.logprobs)) for output in outputs]


def behaviour(paths: list[Path]) -> dict[str, Any]:
    """Everything about one engine that needs no second one."""
    checkpoint, _, bare = paths
    tensors = tensors_of(checkpoint)
    os.environ["LOCAL_WORLD_SIZE"] = "999"  # more than any machine has cores
    before = (torch.get_rng_state(), random.getstate(), str(np.random.get_state()))
    engine = start(bare, tp_size=2)
    seen: dict[str, Any] = {}
    with generating(engine, tensors):
        free = engine.generate(PROMPTS[:1], SAMPLED, max_tokens=RESPONSE, step=0)
        seen["alike"] = [(list(sample.token_ids), list(sample.log_probs)) for sample in free] == as_vllm_generates(
            engine
        )
        seen["other_step"] = engine.generate(PROMPTS[:1], SAMPLED, max_tokens=RESPONSE, step=1) != free
        seen["later"] = engine.generate(PROMPTS[:1], SAMPLED, max_tokens=RESPONSE, step=0, first_sample=1)
        seen["second"] = free[1]
        engine._stop = [free[0].token_ids[5]]
        seen["free"], seen["stopped"] = free[0], engine.generate(PROMPTS[:1], SAMPLED, max_tokens=RESPONSE, step=0)[0]
        one_token = SamplingSection(do_sample=True, temperature=1.0, top_k=1)
        seen["top_k"] = engine.generate(PROMPTS[:1], one_token, max_tokens=3, step=0)
        seen["nothing"] = engine.generate([], SAMPLED, max_tokens=RESPONSE, step=0)
        with pytest.raises(ValueError, match=r"Prompt 20 has 131 tokens.*data\.max_prompt_length"):
            engine.generate(PROMPTS[2:3], GREEDY, max_tokens=60, step=0)
    after = (torch.get_rng_state(), random.getstate(), str(np.random.get_state()))
    seen["random_kept"] = torch.equal(before[0], after[0]) and before[1:] == after[1:]
    seen["environment"] = os.environ.pop("LOCAL_WORLD_SIZE")
    seen["segment"] = shared_memory_name()

    partial = {name for name in tensors if "layers.1.mlp" not in name}
    with pytest.raises(RuntimeError, match="call receive_weights before"), engine.generating():
        pass
    with pytest.raises(RuntimeError, match=r"unwritten.*layers\.1\.mlp"), engine.receive_weights() as weights:
        write_only(partial, weights)
    tear_down(engine)
    return seen


def write_only(names: set[str], weights: Any) -> None:
    """Write the parameters that need nothing but the checkpoint's `names`."""
    params = {piece.param for piece in weights.layout()}
    for param in params - {piece.param for piece in weights.layout() if piece.name not in names}:
        weights.open(param).zero_()
        weights.close(param)


def test_engine_respects_stops_and_refuses_partial_sync(pool: RankPool, checkpoints: Checkpoints) -> None:
    for seen in pool.run(2, behaviour, checkpoints("llama")):
        free, stopped = seen["free"], seen["stopped"]
        assert seen["later"][0].token_ids == seen["second"].token_ids  # counted on from there
        assert seen["later"][1].token_ids not in (free.token_ids, seen["second"].token_ids)
        assert free.truncated
        assert len(free.token_ids) == RESPONSE
        end = free.token_ids.index(free.token_ids[5]) + 1
        assert not stopped.truncated
        assert stopped.token_ids == free.token_ids[:end]  # the stop token is part of the response
        assert stopped.log_probs == pytest.approx(free.log_probs[:end], abs=1e-5)
        assert list(seen["top_k"][0].log_probs) == [0.0] * 3  # one token is left to draw from
        assert seen["alike"], "the same bits as `LLM.generate`"
        assert seen["other_step"]
        assert seen["nothing"] == []
        assert seen["random_kept"]
        assert seen["environment"] == "999"
        assert seen["segment"] == ""


def refusals(paths: list[Path]) -> None:
    bare = paths[-1]
    with pytest.raises(ValueError, match="tensor_model_parallel_size=3 does not divide the 2 processes"):
        start(bare, tp_size=3)
    with pytest.raises(ValueError, match="engine_kwargs: max_model_len follow"):
        start(bare, tp_size=2, engine_kwargs={"max_model_len": 1})
    with pytest.raises(ValueError, match="engine_kwargs: vLLM crashes .* enable_expert_parallel on CPU"):
        start(bare, tp_size=2, engine_kwargs={"enable_expert_parallel": True})
    with pytest.raises(ValueError, match="engine_kwargs: enable_eplb changes the engine"):
        start(bare, tp_size=2, engine_kwargs={"enable_eplb": True})
    with pytest.raises(ValueError, match="engine_kwargs: vLLM has no argument max_modle_len"):
        start(bare, tp_size=2, engine_kwargs={"max_modle_len": 1})
    with pytest.raises(ValueError, match=r"(?s)KV cache.*actor_rollout_ref\.rollout"):  # vLLM 0.26 starts, and 0.32 not
        start(bare, tp_size=2, engine_kwargs={"num_gpu_blocks_override": 2})  # of 128 tokens, and one is taken
    dist.barrier()  # a rank that left now would cut off one that is still joining
    forget_parallel_state()


def test_engine_refuses_what_does_not_fit(pool: RankPool, checkpoints: Checkpoints) -> None:
    pool.run(2, refusals, checkpoints("llama"))


def failing_after(num_steps: int, do: Callable[[], Any]) -> Callable[[], Any]:
    """Does so often what it should."""
    left = iter(range(num_steps))

    def step() -> Any:
        if next(left, None) is None:
            raise OSError("the driver is gone")
        return do()

    return step


def complaints(paths: list[Path], tp_size: int) -> list[str]:
    """On each rank: what is said when the last replica returns too little, something else, or fails midway."""
    tensors = tensors_of(paths[0])
    engine = start(paths[-1], tp_size=tp_size)
    last, said, llm = engine.replica == engine.num_replicas - 1, [], engine._llm
    share = PROMPTS[engine.replica :: engine.num_replicas]

    def generate() -> list[Generation]:
        return engine.generate(share, SAMPLED, max_tokens=RESPONSE, step=4)

    def all_but_one() -> list[Any]:
        return step()[:-1]

    def of_others() -> list[Any]:
        outputs = step()
        for output in outputs:
            output.prompt_token_ids = [1, 2, 3]
        return outputs

    step = llm.llm_engine.step
    with generating(engine, tensors):
        for wrongly in (all_but_one, of_others):
            planted = patch.object(llm.llm_engine, "step", wrongly) if last else nullcontext()
            with planted, pytest.raises(RuntimeError) as caught:
                engine.on_all_ranks(generate)
            said.append(str(caught.value))
        assert len(engine.on_all_ranks(generate)) == engine.num_replicas
    core = llm.llm_engine.engine_core
    planted = patch.object(core, "get_output", failing_after(5, core.get_output)) if last else nullcontext()
    with pytest.raises(RuntimeError) as caught, generating(engine, tensors), planted:
        engine.on_all_ranks(generate)
    said.append(str(caught.value))
    if last:  # what it had begun is still there
        with pytest.raises(RuntimeError, match="a request is still running"), generating(engine, tensors):
            pass
    tear_down(engine)
    return said


@pytest.mark.parametrize("tp_size", [1, 2])
def test_engine_failure_is_reported_on_all_ranks(pool: RankPool, checkpoints: Checkpoints, tp_size: int) -> None:
    said, others = pool.run(2, complaints, checkpoints("llama"), tp_size)
    assert said == others
    name, rows = (
        ("engine replica 1 (rank 1)", "10, 30, 50") if tp_size == 1 else ("engine replica 0 (ranks 0-1)", "0, 10")
    )
    for words in said:
        assert words.startswith(f"{name} failed after 4 finished steps, asked for responses to rows {rows}")
    few, other, broken = said
    assert "it has lost 1 of the samples that it was asked for" in few
    assert "the response to another prompt for prompt" in other
    assert "OSError: the driver is gone" in broken
