"""The measured pair: a trainer with random weights and an engine, with prompts that reveal the engine's weights."""

import json
import math
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.cases import Case, Split
from megarl.batch import Rollouts
from megarl.learner.batching import Budget
from megarl.learner.config import MegatronSection
from megarl.learner.factory import make_learner
from megarl.learner.learner import Learner
from megarl.learner.parallel import build_mesh
from megarl.models.architecture import hf_shapes, read_architecture
from megarl.rollout.config import RolloutSection
from megarl.rollout.engine import RolloutEngine
from megarl.weight_sync.selfcheck import fixed_prompts, generate_on_replicas, log_probs_of_all, probability_differences

MAX_MODEL_LEN = 160  # tokens of the fixed prompts and their responses


@dataclass(frozen=True, kw_only=True)
class TrainerAndEngine:
    """This rank's part of trainer and engine."""

    learner: Learner
    engine: RolloutEngine

    @classmethod
    def build(cls, case: Case, model_dir: Path) -> "TrainerAndEngine":
        """Start the engine and build the trainer, all weights random. Collective."""
        split = Split.read(case.layout)
        architecture = read_architecture(json.loads((model_dir / "config.json").read_text(encoding="utf-8")))
        section = RolloutSection(
            tensor_model_parallel_size=split.engine_tp,
            dtype=case.dtype,
            enforce_eager=case.device == "cpu",
            free_cache_engine=case.sleeps,
            max_num_seqs=16,
        )
        engine = RolloutEngine(
            section,
            model_dir=model_dir,
            architecture=architecture,
            stop_token_ids=[],
            max_model_len=MAX_MODEL_LEN,
        )
        trainer = MegatronSection(
            tensor_model_parallel_size=split.tp,
            pipeline_model_parallel_size=split.pp,
            dtype=case.dtype,
        )
        learner = make_learner(None, architecture, trainer, build_mesh(trainer), role="policy")
        subject = cls(learner=learner, engine=engine)
        subject.fill()
        return subject

    def fill(self) -> None:
        """Draw every Hugging Face parameter from its own generator, so that all ranks have parts of one model."""
        shapes = hf_shapes(self.learner.architecture)
        full = torch.empty(0)
        name = ""
        with self.learner.weights() as tensors:
            for piece in sorted(self.learner.layout(), key=lambda piece: piece.name):
                if piece.name != name:
                    full = draw(piece.name, shapes[piece.name], self.learner.device)
                    name = piece.name
                box = tuple(slice(low, high) for low, high in zip(piece.box.lo, piece.box.hi, strict=True))
                piece.view(tensors[piece.param]).copy_(full[box])

    def scale(self, factor: float) -> None:
        """Multiply every weight of the trainer by `factor`."""
        with self.learner.weights() as tensors:
            for tensor in tensors.values():
                tensor.mul_(factor)

    def ask(self) -> Rollouts:
        """Return the responses of every replica to fixed prompts, the same on all ranks; call once after each sync."""
        prompts, num_tokens = fixed_prompts(
            self.learner.architecture.vocab_size, max_model_len=self.engine.max_model_len
        )
        return generate_on_replicas(self.engine, prompts, max_tokens=num_tokens)

    def difference(self, answers: Rollouts) -> float:
        """Return the mean difference between the probabilities of the responses' tokens in engine and trainer."""
        says = log_probs_of_all(self.learner, answers, Budget(max_tokens=4096, max_sequences=None))
        return float(probability_differences(answers, says, num_replicas=self.engine.num_replicas)[0].max())


def draw(name: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return random float32 values: matrices keep the scale of activations, norms and biases are around one."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    values = torch.empty(shape, device=device).normal_(generator=generator)
    return values.div_(math.sqrt(shape[-1])) if len(shape) > 1 else values.mul_(0.1).add_(1.0)
