"""Learners with Transformer Engine on the hollow device: `make test-te`.

Its kernels leave memory as it was, so no number of a learner is compared. Each learner infers and updates: its modules
are built, and called with arguments that they accept. Only the permutation of tokens is written in Triton and computed.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.support.learners import ACTOR, make_test_learner, update
from tests.support.ranks import RankPool
from tests.support.records import experience
from tests.support.tiny import VARIANTS, write_checkpoint

pytestmark = [
    pytest.mark.hollow,
    pytest.mark.skipif(find_spec("transformer_engine") is None, reason="needs Transformer Engine: `make test-te`"),
]
LINEAR = {"TELayerNormColumnParallelLinear", "TERowParallelLinear"}
EXPERTS = {"TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"}
OURS = {"PackedAttention", "LatentCore"}


def learn(source: Path, dtype: str, deterministic: bool) -> tuple[set[str], str | None]:
    """Return the classes of a learner's modules, and the attention that Transformer Engine chose, if it was asked."""
    from megarl.learner.batching import Budget
    from megarl.platform.determinism import decide_determinism

    decide_determinism(deterministic)
    learner = make_test_learner(source, {"dtype": dtype})
    budget = Budget(max_tokens=64, max_sequences=None)
    learner.infer(learner.spread(experience()), budget)
    update(learner, [experience()], ACTOR, budget)
    modules = {type(part).__name__ for module in learner.modules for part in module.modules()}
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention

    found = dot_product_attention._attention_backends
    if found["attention_params"] is None:
        return modules, None
    return modules, next(name for name in ("flash", "fused", "unfused") if found[f"use_{name}_attention"])


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankPool]:
    monkeypatch.setenv("HOLLOW_UNCOMPUTED", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # to interpret a learner's permutations takes minutes
    with RankPool("cuda") as processes:  # of the test: a process decides once how it computes
        yield processes


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_rows_have_the_attention_of_cudnn(tmp_path: Path, pool: RankPool, variant: str) -> None:
    [(modules, chosen)] = pool.run(1, learn, write_checkpoint(tmp_path, variant), "bfloat16", False)
    assert modules >= LINEAR if "deepseek" not in variant else modules >= {"TEDotProductAttention"}
    assert modules >= EXPERTS or not ("moe" in variant or variant == "mixtral")
    assert not modules & OURS
    assert chosen == "fused"


@pytest.mark.parametrize(("dtype", "deterministic"), [("bfloat16", True), ("float32", False)])
@pytest.mark.parametrize("variant", ["qwen2", "deepseek_v3"])
def test_other_attention_is_ours(tmp_path: Path, pool: RankPool, variant: str, dtype: str, deterministic: bool) -> None:
    [(modules, chosen)] = pool.run(1, learn, write_checkpoint(tmp_path, variant), dtype, deterministic)
    assert modules & OURS
    assert "TEDotProductAttention" not in modules
    assert chosen is None


def permuted(fused: bool) -> list[torch.Tensor]:
    """Return tokens in the order of their experts, their weights, the tokens brought back, and all gradients."""
    from megatron.core.transformer.moe.moe_utils import permute, sort_chunks_by_idxs, unpermute

    num_tokens, num_experts, top_k = 5, 4, 2
    random = torch.Generator().manual_seed(0)
    tokens = torch.randn(num_tokens, 8, generator=random).cuda().requires_grad_()
    weights, experts = torch.randn(num_tokens, num_experts, generator=random).softmax(-1).topk(top_k)
    weights = torch.zeros(num_tokens, num_experts).scatter(1, experts, weights).cuda().requires_grad_()
    chosen = torch.zeros(num_tokens, num_experts, dtype=torch.bool).scatter(1, experts, True).cuda()
    size = num_tokens * top_k
    sent, sent_weights, order, *_ = permute(tokens, chosen, weights, num_out_tokens=size, fused=fused)
    chunks = torch.tensor([3, 0, 5, 2]).cuda()
    sent, sent_weights = sort_chunks_by_idxs(
        sent, chunks, torch.tensor([2, 0, 3, 1]).cuda(), probs=sent_weights, fused=fused
    )
    back = unpermute(sent * sent_weights[:, None], order, tokens.shape, routing_map=chosen, fused=fused)
    back.square().sum().backward()
    return [part.detach().cpu() for part in (sent, sent_weights, back, tokens.grad, weights.grad)]


def test_fused_permutations_are_those_of_megatron(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    [expected], [found] = pool.run(1, permuted, False), pool.run(1, permuted, True)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
