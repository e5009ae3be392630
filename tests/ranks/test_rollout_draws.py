"""What an engine draws if few tokens are possible, and if a prompt takes several of its steps."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.batch import Generation
from megarl.rollout.config import SamplingSection
from tests.support.engines import PROMPTS, log_probs, start, tear_down, tensors_of, write_two_checkpoints, writer
from tests.support.ranks import RankPool

pytestmark = pytest.mark.ranks

RESPONSE = 12


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_two_checkpoints(tmp_path_factory.mktemp("checkpoints"), "llama")


def answers_with_few_tokens(paths: list[Path], step_tokens: int) -> list[Generation]:
    """Return the responses of an engine that draws from the 5 likeliest tokens, with steps of so many tokens."""
    section = {"top_k": 5, "n": 2}
    engine = start(paths[-1], tensors_of(paths[0]), tp_size=1, max_num_batched_tokens=step_tokens, **section)
    with engine.awake(writer(tensors_of(paths[0])), version=7):
        sampling = SamplingSection(do_sample=True, temperature=1.0, **section)
        generations = engine.generate(PROMPTS, sampling, max_tokens=RESPONSE, step=7)
    tear_down(engine)
    return generations


def test_log_probs_are_those_of_all_tokens_also_if_few_can_be_drawn(pool: RankPool, checkpoints: list[Path]) -> None:
    [generations] = pool.run(1, answers_with_few_tokens, checkpoints, 1024)
    model = AutoModelForCausalLM.from_pretrained(checkpoints[0], dtype=torch.float32)
    for generation in generations:
        expected = log_probs(model, PROMPTS[generation.prompt], generation.token_ids, 1.0)
        torch.testing.assert_close(torch.tensor(generation.log_probs), expected, rtol=0.0, atol=1e-4)
        assert generation.weight_versions == [7] * RESPONSE


def test_a_prompt_that_is_cut_has_the_same_responses(pool: RankPool, checkpoints: list[Path]) -> None:
    """The token that vLLM draws after each part but the last is not used, and must not change the next one."""
    (uncut,), (cut,) = (pool.run(1, answers_with_few_tokens, checkpoints, tokens) for tokens in (1024, 48))
    assert [generation.token_ids for generation in cut] == [generation.token_ids for generation in uncut]
