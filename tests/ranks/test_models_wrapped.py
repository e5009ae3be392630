"""The text model of a model of images and text learns, is exported and is served as if it were alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from megarl.distributed.launch import Launch
from megarl.platform.errors import UserError
from megarl.rollout.config import RolloutSection, SamplingSection
from tests.support.engines import PROMPTS, generating, log_probs, tear_down, tensors_of
from tests.support.learners import ACTOR, make_test_learner, outputs_of_all, sizes, update
from tests.support.ranks import RankPool
from tests.support.records import experience
from tests.support.sentencepieces import train_sentencepiece
from tests.support.tiny import VARIANTS
from tests.support.wrapped import write_wrapped

pytestmark = pytest.mark.ranks


def learn_and_export(directory: Path, out: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """On each rank: infer, take a step, export, and infer again."""
    from megarl.checkpoint.huggingface import export_model
    from megarl.learner.batching import Budget
    from megarl.models.config import ModelSection
    from megarl.models.source import Source

    source = Source.read(ModelSection(path=str(directory)))
    rank, size = dist.get_rank(), dist.get_world_size()
    launch = Launch(rank=rank, world_size=size, local_rank=rank, local_world_size=size)
    learner, batch = make_test_learner(directory, sizes(2, 1)), experience()
    budget = Budget(max_tokens=100, max_sequences=None)
    before = outputs_of_all(learner, batch, budget).log_probs
    update(learner, [batch], ACTOR, budget)
    export_model(learner, source, source.tokenizer(), out, launch)
    return before, outputs_of_all(learner, batch, budget).log_probs


def served(directory: Path, weights: Path) -> list[Any]:
    """On each rank: the likeliest responses of an engine that starts from a directory and gets the exported weights."""
    from megarl.models.config import ModelSection
    from megarl.models.source import Source
    from megarl.rollout.start import start_engine

    source = Source.read(ModelSection(path=str(directory)))
    options: dict[str, Any] = {"stop_token_ids": [], "max_model_len": 160, "max_sequences": 16}
    section = RolloutSection(tensor_model_parallel_size=2, dtype="float32", max_num_seqs=16)
    with pytest.raises(UserError, match="vLLM would load the model of images and text"):
        start_engine(source, RolloutSection(load_format="auto"), trust_remote_code=False, **options)
    engine = start_engine(source, section, trust_remote_code=False, **options)
    with generating(engine, tensors_of(weights)):
        found = engine.generate(PROMPTS, SamplingSection(), max_tokens=8, step=0)
    tear_down(engine)
    return found


@pytest.fixture(scope="module")
def exported(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[Any]]:
    """Return a model of images and text, the export of its text model after a step, and what that said before it."""
    root = tmp_path_factory.mktemp("wrapped")
    write_wrapped(root / "whole", "ministral3", tie_word_embeddings=False)
    train_sentencepiece(root / "whole" / "tokenizer.model", vocab_size=200)
    return root / "whole", root / "text", pool.run(2, learn_and_export, root / "whole", root / "text")


def test_text_model_learns_and_is_exported_alone(exported: tuple[Path, Path, list[Any]]) -> None:
    whole, text, said = exported
    models = AutoModelForImageTextToText.from_pretrained(whole), AutoModelForCausalLM.from_pretrained(text)
    assert type(models[1]).__name__ == "Ministral3ForCausalLM"
    assert models[1].config.rope_parameters.items() >= VARIANTS["ministral3"]["rope_parameters"].items()
    assert AutoTokenizer.from_pretrained(text).eos_token_id == 2
    batch = experience()
    for number in range(len(batch)):
        prompt, response = batch.prompt_of(number), batch.response_ids(number).tolist()
        for model, ours in zip(models, said[0], strict=True):
            expected = log_probs(model, prompt, response, temperature=1.0)
            torch.testing.assert_close(batch.pieces(ours)[number], expected, rtol=1e-4, atol=1e-4)


def test_engine_serves_the_text_model(pool: RankPool, exported: tuple[Path, Path, list[Any]]) -> None:
    whole, text, _ = exported
    model = AutoModelForCausalLM.from_pretrained(text, dtype=torch.float32)
    for prompt, generation in zip(PROMPTS, pool.run(2, served, whole, text)[0], strict=True):
        expected = log_probs(model, prompt, generation.token_ids, temperature=1.0)
        torch.testing.assert_close(torch.tensor(generation.log_probs), expected, rtol=0.0, atol=1e-4)
