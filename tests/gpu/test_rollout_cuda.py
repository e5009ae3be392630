"""On a GPU: memory comes and goes with sleep, and captured graphs read the weights of the last sync."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.batch import Generation, Group
from megarl.rollout.config import SamplingSection
from tests.support.engines import (
    PROMPTS,
    check_against_rules,
    draw,
    generating,
    log_probs,
    new_session,
    start,
    tear_down,
    tensors_of,
    write_two_checkpoints,
)
from tests.support.ranks import RankPool

pytestmark = pytest.mark.gpu

VARIANTS = ["llama", "mistral", "qwen2", "qwen3-tied", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3"]
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64}
SIZES = {"deepseek_v3": LATENT}  # vLLM has kernels of latent attention for few sizes
SAMPLED = SamplingSection(n=2, do_sample=True, temperature=1.0)
TOLERANCE = 0.1  # bfloat16 against float32; the two checkpoints differ by more than one nat
ROUTED_ELSEWHERE = 0.1  # of the tokens, if two experts of a router are nearly equal


def answers(paths: list[Path], enforce_eager: bool) -> tuple[list[list[Generation]], list[int]]:
    """Return the engine's responses after each of four syncs (A, B, A, B), and the bytes in use asleep and awake."""
    first, second, bare = paths
    settings = {"dtype": "bfloat16", "gpu_memory_utilization": 0.2, "enforce_eager": enforce_eager}
    # Of vLLM's kernels for fused experts this one reads them as they are loaded.
    settings["engine_kwargs"] = {"moe_backend": "triton"}
    engine = start(bare, tp_size=1, **settings)
    assert engine.weights._layout.in_place == engine.weights._layout.params.keys()
    is_latent = "kv_lora_rank" in json.loads((bare / "config.json").read_text())
    check_against_rules(engine.weights.layout(), bare, tp_size=1, dtype=torch.bfloat16, latent_fused=is_latent)
    used, generations = [], []
    for checkpoint in (first, second, first, second):
        used.append(bytes_in_use())
        with generating(engine, tensors_of(checkpoint)):
            used.append(bytes_in_use())
            generations.append(engine.generate(PROMPTS, SAMPLED, max_tokens=12, step=0))
    tear_down(engine)
    return generations, used


def bytes_in_use() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_sync_reaches_kernels_and_sleep_frees_memory(tmp_path: Path, variant: str, enforce_eager: bool) -> None:
    paths = write_two_checkpoints(tmp_path, variant, **SIZES.get(variant, {}))
    with RankPool("cuda") as pool:  # vLLM lets memory sleep in one engine of a process
        [(rounds, used)] = pool.run(1, answers, paths, enforce_eager)
    assert rounds[0] == rounds[2]
    assert rounds[1] == rounds[3]
    for checkpoint, generations in zip(paths[:2], rounds, strict=False):
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        expected = [log_probs(model, PROMPTS[drawn.prompt], drawn.token_ids, 1.0) for drawn in generations]
        found = torch.cat([torch.tensor(drawn.log_probs) for drawn in generations])
        is_near = (found - torch.cat(expected)).abs() <= TOLERANCE  # false for what is no number
        has_experts = hasattr(model.config, "num_experts_per_tok")
        assert is_near.float().mean() >= (1 - ROUTED_ELSEWHERE if has_experts else 1.0)
    asleep, awake = used[0::2], used[1::2]
    cache = 0.1 * torch.cuda.get_device_properties(0).total_memory  # of the 0.2 that it may use
    assert min(awake) - max(asleep) > cache


def stopped_responses(paths: list[Path]) -> list[list[list[int]]]:
    """Return, twice, the tokens of each response that is stopped after three engine steps, and of all in the end."""
    settings = {"dtype": "bfloat16", "gpu_memory_utilization": 0.2, "enforce_eager": True}
    engine = start(paths[-1], tp_size=1, **settings)
    found = []
    with generating(engine, tensors_of(paths[0])):
        for _ in range(2):
            queue = engine.open_queue(SAMPLED, max_tokens=12, step=0, final_only=False)
            queue.add(new_session(SAMPLED.n))
            assert queue.run(3) == []
            found.append([list(generation.token_ids) for generation in queue.stop()])
        drawn = engine.generate(PROMPTS, SAMPLED, max_tokens=12, step=0)
        found.append([list(generation.token_ids) for generation in drawn])
    tear_down(engine)
    return found


def test_step_counts_when_its_tokens_arrive(tmp_path: Path) -> None:
    """The engine schedules a step ahead; prompts of one part draw one token in each step."""
    paths = write_two_checkpoints(tmp_path, "llama")
    with RankPool("cuda") as pool:
        [(first, second, complete)] = pool.run(1, stopped_responses, paths)
    assert first == second
    assert [len(tokens) for tokens in first] == [3] * len(first)
    assert sorted(first) == sorted(tokens[:3] for tokens in complete)


def continued_responses(paths: list[Path]) -> list[list[Group]]:
    """Return, twice, the session that is stopped after three steps, and completed with the second weights."""
    first, second, bare = paths
    settings = {"dtype": "bfloat16", "gpu_memory_utilization": 0.2, "enforce_eager": True}
    engine = start(bare, tp_size=1, **settings)
    found = []
    for _ in range(2):
        session = new_session(SAMPLED.n)
        for version, (checkpoint, num_steps) in enumerate([(first, 3), (second, None)]):
            with generating(engine, tensors_of(checkpoint), version=version):
                queue = engine.open_queue(SAMPLED, max_tokens=12, step=version, final_only=False)
                session = draw(queue, session, num_steps)
            found.append(session)
    tear_down(engine)
    return found


def test_stopped_response_continues_after_sleep_and_sync(tmp_path: Path) -> None:
    """Its first tokens stay, the others are those of the new weights, and all are the same when it is repeated."""
    paths = write_two_checkpoints(tmp_path, "llama")
    with RankPool("cuda") as pool:
        [(begun, complete, *again)] = pool.run(1, continued_responses, paths)
    assert again == [begun, complete]
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in paths[:2]]
    for beginning, group in zip(begun, complete, strict=True):
        for sample, whole in zip(beginning.samples, group.samples, strict=True):
            assert (len(sample.token_ids), len(whole.token_ids)) == (3, 12)
            assert whole.token_ids[:3] == sample.token_ids
            assert whole.log_probs[:3] == sample.log_probs
            assert list(whole.weight_versions) == [0] * 3 + [1] * 9
            old, new = (log_probs(model, group.prompt, whole.token_ids, 1.0) for model in models)
            expected = torch.cat([old[:3], new[3:]])
            torch.testing.assert_close(torch.tensor(whole.log_probs), expected, rtol=0.0, atol=TOLERANCE)
