"""Learners on tiny checkpoints: in float32, over the whole world of a test's ranks."""

import json
from pathlib import Path
from typing import Any

import torch

from megarl.learner.config import MegatronSection, OptimSection
from tests.support.ranks import fresh_mesh

OPTIM = OptimSection(lr=1e-3)
NUM_SCHEDULE_STEPS = 10


def make_test_learner(
    checkpoint: Path,
    split: dict[str, Any],
    *,
    role: Any = "policy",
    temperature: float = 1.0,
    optim: OptimSection | None = OPTIM,
    grad_clip: float = 1.0,
    mesh: Any = None,
    device: str = "cpu",
) -> Any:
    """This rank's part of a model whose MegatronSection has the fields `split`; without `optim` it only answers.

    `mesh` is that of a learner which it goes beside, of the same split; None: a new one, and earlier learners are over.
    """
    from megarl.learner.factory import make_learner  # Megatron is slow to import
    from megarl.models.architecture import read_architecture

    section = MegatronSection(dtype="float32", **split)
    return make_learner(
        checkpoint,
        read_architecture(json.loads((checkpoint / "config.json").read_text())),
        section,
        mesh or fresh_mesh(section),
        role=role,
        device=torch.device(device),
        temperature=temperature,
        training=(optim, grad_clip, NUM_SCHEDULE_STEPS) if optim else None,
    )
