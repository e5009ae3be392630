"""Models of every family learn and are saved and exported: another split and `transformers` read the same weights."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megarl.models.families import FAMILIES
from megarl.reshard.layout import Box
from tests.support.families import VARIANT_OF, likelihood, sizes, splits
from tests.support.layouts import slices
from tests.support.learners import make_test_learner, outputs_of_all, update
from tests.support.ranks import RankPool
from tests.support.records import experience
from tests.support.references import outputs_of
from tests.support.tiny import write_checkpoint


def trained(checkpoint: Path, split: dict[str, Any], saved: Path, exported: Path) -> Tensor:
    """Learn once, save and export. Return the log-probabilities afterwards."""
    from megarl.distributed.exchange import together
    from megarl.learner.batching import Budget
    from megarl.learner.checkpoint import save_learner
    from megarl.learner.staging import Staging
    from megarl.models.architecture import hf_shapes
    from megarl.models.config import ModelSection
    from megarl.models.source import Source
    from megarl.reshard.files import export

    learner = make_test_learner(checkpoint, split)
    batch, budget = experience(), Budget(max_tokens=48, max_sequences=None)
    update(learner, [batch], likelihood, budget)
    writing = save_learner(learner, saved, Staging())
    writing.write()
    writing.finish()
    with learner.weights() as tensors:
        export(
            exported,
            hf_shapes(learner.architecture),
            together(learner.layout),
            tensors,
            config=Source.read(ModelSection(path=str(checkpoint))).config_in("float32"),
            dtype=torch.float32,
            ranks_per_node=2,
            device=learner.device,
        )
    return outputs_of_all(learner, batch, budget).log_probs


def loaded(checkpoint: Path, split: dict[str, Any], saved: Path) -> list[tuple[str, Box, Tensor]]:
    """Return the boxes of this rank after it has loaded a checkpoint."""
    from megarl.learner.checkpoint import load_learner

    learner = make_test_learner(checkpoint, split)
    load_learner(learner, saved)
    with learner.weights() as tensors:
        return [(piece.name, piece.box, piece.view(tensors[piece.param]).clone()) for piece in learner.layout()]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_model_reaches_splits_and_transformers(pool: RankPool, family: str) -> None:
    @settings(max_examples=1, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(changes=sizes(family), first=splits(family), second=splits(family))
    def check(changes: dict[str, Any], first: tuple[int, dict[str, int]], second: tuple[int, dict[str, int]]) -> None:
        with tempfile.TemporaryDirectory() as name:
            checkpoint = write_checkpoint(Path(name, "model"), VARIANT_OF[family], **changes)
            saved, exported = Path(name, "saved"), Path(name, "exported")
            saved.mkdir()
            [log_probs, *_] = pool.run(first[0], trained, checkpoint, first[1], saved, exported)
            before, after = (load_file(path / "model.safetensors") for path in (checkpoint, exported))
            model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
            boxes = pool.run(second[0], loaded, checkpoint, second[1], saved)
        assert {name: tensor.shape for name, tensor in after.items()} == {
            name: tensor.shape for name, tensor in before.items()
        }
        assert sum(not torch.equal(after[name], tensor) for name, tensor in before.items()) > len(before) / 2
        theirs = outputs_of(model, experience(), {None: model}, temperature=1.0).log_probs
        torch.testing.assert_close(log_probs, theirs.detach(), rtol=1e-4, atol=1e-5)
        for tensor_name, box, part in (each for of_rank in boxes for each in of_rank):
            assert torch.equal(part, after[tensor_name][slices(box)]), tensor_name

    check()
