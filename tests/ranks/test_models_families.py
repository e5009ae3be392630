"""Random models of every family, under random splits: every gradient of every parameter is that of `transformers`."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megarl.learner.config import MegatronSection
from megarl.learner.grid import grid_of
from megarl.models.families import FAMILIES
from megarl.models.hub import read_model
from megarl.models.trainer import parameter_shapes
from megarl.planning.states import States, trained_states
from megarl.reshard.layout import Box
from tests.support.families import OF_EXPERTS, PARALLEL, VARIANT_OF, likelihood, sizes, splits
from tests.support.layouts import slices
from tests.support.learners import draw_head, make_test_learner, outputs_of_all, states_of, update, value_head
from tests.support.ranks import RankPool
from tests.support.records import experience
from tests.support.references import outputs_of
from tests.support.tiny import write_checkpoint

LOCAL_OPTIMIZER = {"dtype": "float32", "use_distributed_optimizer": False}


def learnt(checkpoint: Path, split: dict[str, Any]) -> tuple[Tensor, Tensor, list[tuple[str, Box, Tensor]], States]:
    """Return log-probabilities and values of a batch, gradients of this rank's boxes, and the bytes of the model."""
    from megarl.learner.batching import Budget

    learner = make_test_learner(checkpoint, split | LOCAL_OPTIMIZER, grad_clip=1e9)
    batch, budget = experience(), Budget(max_tokens=48, max_sequences=None)
    log_probs = outputs_of_all(learner, batch, budget).log_probs
    update(learner, [batch], likelihood, budget)
    parameters = dict(learner.modules[0].named_parameters())
    boxes = [
        (piece.name, piece.box, piece.view(parameters[piece.param].main_grad).clone())
        for piece in learner.layout()
        if piece.param in parameters
    ]
    states = states_of(learner)
    critic = make_test_learner(checkpoint, split, role="value")
    draw_head(critic)
    return log_probs, outputs_of_all(critic, batch, budget), boxes, states


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
        architecture = read_model(checkpoint, {})[1]
    section = MegatronSection(**split | LOCAL_OPTIMIZER)
    grid = grid_of(section, world_size)
    seen = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in wanted.items()}
    for rank, (our_log_probs, our_values, boxes, states) in enumerate(found):
        planned = trained_states(parameter_shapes(architecture, grid, rank), section, grid)
        assert states.weights == pytest.approx(planned.weights, rel=0.01)
        assert states.gradients == pytest.approx(planned.gradients, rel=0.01)
        assert states.optimizer == pytest.approx(planned.optimizer, rel=0.01)
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


@pytest.mark.parametrize("family", FAMILIES)
def test_eight_ranks_share_every_dimension(pool: RankPool, family: str) -> None:
    traits = FAMILIES[family]
    linear = {"linear_num_key_heads": 4, "linear_num_value_heads": 8} if traits.linear_sections else {}
    check(pool, family, linear, 8, dict.fromkeys(PARALLEL, 2) | (OF_EXPERTS if traits.experts else {}))


@pytest.mark.parametrize("others", [{}, {PARALLEL[0]: 2, "sequence_parallel": True}, {PARALLEL[1]: 2}])
def test_context_parallel_ranks_share_linear_heads(pool: RankPool, others: dict[str, int]) -> None:
    changes = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    split = {PARALLEL[2]: 2 if others else 4} | others
    check(pool, "qwen3_5_text", changes, 4, split)
