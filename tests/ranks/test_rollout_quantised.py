"""The engine of a checkpoint in FP8 or MXFP4 has plain layers, and a sync brings it the dequantised weights."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megarl.batch import Generation
from megarl.models.architecture import hf_shapes
from megarl.models.config import ModelSection
from megarl.models.source import Source
from megarl.reshard.files import CheckpointFiles
from megarl.reshard.layout import Piece, row_major, whole
from megarl.rollout.config import RolloutSection, SamplingSection
from megarl.rollout.start import start_engine
from tests.support.engines import PROMPTS, generating, log_probs, tear_down
from tests.support.quantised import compress, quantise_experts
from tests.support.quantised import quantise as quantise_matrices
from tests.support.ranks import RankPool
from tests.support.tiny import write_checkpoint

pytestmark = pytest.mark.ranks

RESPONSE = 8


def read_whole(source: Source) -> dict[str, Tensor]:
    """Return the full tensors of a checkpoint, as a trainer of one rank reads them."""
    shapes = hf_shapes(source.architecture)
    tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
    layout = [Piece(name, whole(shape), name, 0, row_major(shape), torch.float32) for name, shape in shapes.items()]
    CheckpointFiles(source.directory).load(layout, tensors, shapes=shapes)
    return tensors


def answers(directory: Path) -> list[Generation]:
    """On each rank: what the engine of a directory answers to all prompts, after a sync of its weights."""
    source = Source.read(ModelSection(path=str(directory)))
    engine = start_engine(
        source,
        RolloutSection(tensor_model_parallel_size=2, dtype="float32", max_num_seqs=16),
        stop_token_ids=[],
        max_model_len=160,
        max_sequences=len(PROMPTS),
        trust_remote_code=False,
    )
    config = engine._llm.llm_engine.vllm_config
    assert config.quant_config is None
    assert config.model_config.quantization is None
    with generating(engine, read_whole(source)):
        found = engine.generate(PROMPTS, SamplingSection(), max_tokens=RESPONSE, step=0)
    tear_down(engine)
    return found


@pytest.mark.parametrize(
    ("variant", "quantise"),
    [
        ("qwen3", quantise_matrices),
        ("deepseek_v3", quantise_matrices),
        ("glm4_moe", compress),
        ("gpt_oss", quantise_experts),
    ],
)
def test_engine_of_quantised_files_follows_dequantised_weights(
    pool: RankPool, tmp_path: Path, variant: str, quantise: Callable[[Path], dict[str, Tensor]]
) -> None:
    directory = write_checkpoint(tmp_path / "quantised", variant)
    weights = quantise(directory)
    plain = write_checkpoint(tmp_path / "plain", variant)
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    found, others = pool.run(2, answers, directory)
    assert found == others
    assert len(found) == len(PROMPTS)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    for generation in found:
        expected = log_probs(model, PROMPTS[generation.prompt], generation.token_ids, 1.0)
        torch.testing.assert_close(torch.tensor(generation.log_probs), expected, rtol=0.0, atol=1e-4)
