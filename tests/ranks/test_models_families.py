"""Random models of every family, under random splits: every gradient of every parameter is that of `transformers`."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megarl.algorithms.losses import Totals
from megarl.batch import Experience
from megarl.models.families import FAMILIES
from megarl.reshard.layout import Box
from tests.support.layouts import slices
from tests.support.learners import draw_head, make_test_learner, outputs_of_all, update, value_head
from tests.support.ranks import RankPool
from tests.support.records import experience
from tests.support.references import outputs_of
from tests.support.tiny import VARIANTS, write_checkpoint

PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
EXPERT_PARALLEL = "expert_model_parallel_size"
VARIANT_OF = {changes["model_type"]: variant for variant, changes in reversed(VARIANTS.items())}


@st.composite
def sizes(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """Draw the fields of a small model's config.json that two ranks can share in every way."""
    traits = FAMILIES[family]
    heads = draw(st.sampled_from([2, 4]))
    head_dim = draw(st.sampled_from([16, 32]))
    layers = draw(st.sampled_from([2, 4]))
    own_keys = traits.latent or traits.fused_qkv
    found = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if own_keys else 2,
        "head_dim": 32 if traits.latent else head_dim,
        "hidden_size": heads * head_dim if traits.fused_qkv else draw(st.sampled_from([32, 64, 80])),
        "intermediate_size": draw(st.sampled_from([48, 96])),
        "vocab_size": draw(st.integers(211, 300)),
        traits.key("rms_norm_eps"): traits.norm_eps or draw(st.sampled_from([1e-6, 1e-3])),
        "tie_word_embeddings": traits.can_tie and draw(st.booleans()),
    }
    if traits.rotates_by_layer:
        found["no_rope_layers"] = draw(st.lists(st.integers(0, 1), min_size=layers, max_size=layers))
    if traits.windows == "all layers":
        found["sliding_window"] = draw(st.sampled_from([None, 3, 300]))
    elif traits.windows == "some layers":
        kinds = st.sampled_from(["full_attention", "sliding_attention"])
        found["layer_types"] = draw(st.lists(kinds, min_size=layers, max_size=layers))
        found["sliding_window"] = draw(st.sampled_from([3, 300]))
    if traits.linear_sections:
        kinds = st.lists(st.sampled_from(["full_attention", "linear_attention"]), min_size=layers, max_size=layers)
        found["layer_types"] = draw(kinds.filter(lambda kinds: len(set(kinds)) == 2))
        found["linear_num_key_heads"] = 4  # four ranks may share them
        found["linear_num_value_heads"] = found["linear_num_key_heads"] * draw(st.integers(1, 3))
        found |= {f"linear_{part}_head_dim": draw(st.sampled_from([8, 16])) for part in ("key", "value")}
        found["linear_conv_kernel_dim"] = draw(st.integers(2, 4))
    if traits.parallel_residual:
        found["use_parallel_residual"] = draw(st.booleans())
    return found


@st.composite
def splits(draw: st.DrawFn, family: str) -> tuple[int, dict[str, int]]:
    """Draw a split over at most four ranks; return their number and the fields of a MegatronSection."""
    first, second = draw(st.permutations(PARALLEL))[:2]
    split = {first: 2, second: draw(st.integers(1, 2))}
    if FAMILIES[family].experts:
        split |= {EXPERT_PARALLEL: 2, "expert_tensor_parallel_size": 1}
    shared = split.get(PARALLEL[0], 1) * split.get(PARALLEL[2], 1)
    pipeline = split.get(PARALLEL[1], 1)
    return max(shared, split.get(EXPERT_PARALLEL, 1)) * pipeline, split


def likelihood(outputs: Any, micro: Experience, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
    """An objective whose gradient reaches every parameter."""
    loss = -outputs.log_probs.sum()
    return loss, {"loss": loss.detach()}


def learnt(checkpoint: Path, split: dict[str, Any]) -> tuple[Tensor, Tensor, list[tuple[str, Box, Tensor]]]:
    """Return log-probabilities and values of a batch, and the gradients of the boxes that this rank holds."""
    from megarl.learner.batching import Budget

    learner = make_test_learner(checkpoint, split | {"use_distributed_optimizer": False}, grad_clip=1e9)
    batch, budget = experience(), Budget(max_tokens=48, max_sequences=None)
    log_probs = outputs_of_all(learner, batch, budget).log_probs
    update(learner, [batch], likelihood, budget)
    parameters = dict(learner.modules[0].named_parameters())
    boxes = [
        (piece.name, piece.box, piece.view(parameters[piece.param].main_grad).clone())
        for piece in learner.layout()
        if piece.param in parameters
    ]
    critic = make_test_learner(checkpoint, split, role="value")
    draw_head(critic)
    return log_probs, outputs_of_all(critic, batch, budget), boxes


def expected(checkpoint: Path, scratch: Path) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the same of `transformers`; gradients have the names and shapes of the checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    batch = experience()
    head = value_head(model.config.hidden_size)
    values = []
    for sample in range(len(batch)):
        prompt, response = list(batch.prompt_of(sample).token_ids), batch.response_ids(sample).tolist()
        with torch.no_grad():
            hidden = model.base_model(torch.tensor([prompt + response])).last_hidden_state[0]
        values.append(hidden[len(prompt) - 1 : -1] @ head[0])
    outputs = outputs_of(model, batch, {None: model}, temperature=1.0)
    (-outputs.log_probs.sum()).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(scratch)
    return outputs.log_probs.detach(), torch.cat(values), load_file(scratch / "model.safetensors")


def check(pool: RankPool, family: str, changes: dict[str, Any], world_size: int, split: dict[str, int]) -> None:
    """Compare a model that the ranks share with that of `transformers`."""
    with tempfile.TemporaryDirectory() as name:
        checkpoint = write_checkpoint(Path(name, "model"), VARIANT_OF[family], **changes)
        log_probs, values, wanted = expected(checkpoint, Path(name, "gradients"))
        found = pool.run(world_size, learnt, checkpoint, split)
    seen = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in wanted.items()}
    for our_log_probs, our_values, boxes in found:
        torch.testing.assert_close(our_log_probs, log_probs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(our_values, values, rtol=1e-4, atol=1e-4)
        for name, box, gradient in boxes:
            theirs = wanted[name][slices(box)]
            torch.testing.assert_close(
                gradient, theirs, rtol=1e-4, atol=3e-5 * float(wanted[name].abs().max() + 1e-6), msg=name
            )
            seen[name][slices(box)] = True
    assert [name for name, places in seen.items() if not places.all() and "e_score_correction" not in name] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_random_models_learn_as_in_transformers(pool: RankPool, family: str) -> None:
    @settings(max_examples=2, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(changes=sizes(family), drawn=splits(family))
    def check_drawn(changes: dict[str, Any], drawn: tuple[int, dict[str, int]]) -> None:
        check(pool, family, changes, *drawn)

    check_drawn()


@pytest.mark.parametrize("others", [{}, {PARALLEL[0]: 2, "sequence_parallel": True}, {PARALLEL[1]: 2}])
def test_context_parallel_ranks_share_linear_heads(pool: RankPool, others: dict[str, int]) -> None:
    changes = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    split = {PARALLEL[2]: 2 if others else 4} | others
    check(pool, "qwen3_5_text", changes, 4, split)
