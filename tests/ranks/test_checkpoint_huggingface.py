"""A checkpoint with Hugging Face weights: `transformers` and vLLM compute the same from it as the saved models."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from megarl.checkpoint.find import find_checkpoint
from megarl.distributed.launch import Launch
from tests.support.engines import PROMPTS, load_as_published, log_probs, tear_down_vllm
from tests.support.learners import ACTOR, CRITIC, make_test_learner, outputs_of_all, sizes, update
from tests.support.ranks import RankPool
from tests.support.records import experience
from tests.support.sentencepieces import train_sentencepiece
from tests.support.tiny import write_checkpoint

RESPONSE = 8


def save(model: Path, run_dir: Path) -> tuple[Any, Any]:
    """Learn, save asynchronously, and learn again; return the outputs of actor and critic at the save."""
    from megarl.checkpoint.huggingface import SavedModel
    from megarl.checkpoint.state import State
    from megarl.checkpoint.store import CheckpointStore
    from megarl.learner.batching import Budget
    from megarl.models.config import ModelSection
    from megarl.models.source import Source

    source = Source.read(ModelSection(path=str(model)))
    tokenizer = source.tokenizer()
    rank, size = dist.get_rank(), dist.get_world_size()
    launch = Launch(rank=rank, world_size=size, local_rank=rank, local_world_size=size)
    actor = make_test_learner(model, sizes(2, 1))
    critic = make_test_learner(model, sizes(2, 1), role="value", mesh=actor.mesh)
    batch, budget = experience(), Budget(max_tokens=100, max_sequences=None)

    def learn() -> None:
        update(actor, [batch], ACTOR, budget)
        update(critic, [batch], CRITIC, budget)

    saved = SavedModel(learner=actor, source=source, tokenizer=tokenizer, launch=launch)
    checkpoints = CheckpointStore(
        directory=run_dir,
        learners={"actor": actor, "critic": critic},
        keep=1,
        models=[saved, replace(saved, learner=critic, folder="huggingface_critic")],
        with_weights=True,
        is_async=True,
    )
    learn()
    said = outputs_of_all(actor, batch, budget).log_probs, outputs_of_all(critic, batch, budget)
    checkpoints.save(State(step=1))
    learn()
    checkpoints.close()
    assert find_checkpoint(run_dir, mode="auto", path=None) == run_dir / "global_step_1"
    return said


def vllm_says(directory: Path) -> list[tuple[list[int], torch.Tensor]]:
    """Return the likeliest responses to PROMPTS, and their log-probabilities."""
    from vllm import SamplingParams

    llm = load_as_published(directory)
    sampling = SamplingParams(temperature=0, max_tokens=RESPONSE, logprobs=0, ignore_eos=True, detokenize=False)
    asked = [{"prompt_token_ids": list(prompt.token_ids)} for prompt in PROMPTS]
    answers = []
    with torch.compiler.set_stance("force_eager"):  # the compiler cannot write below a path with a blank
        requests = llm.generate(asked, sampling, use_tqdm=False)
    for request in requests:
        [output] = request.outputs
        tokens = list(output.token_ids)
        found = [at[token].logprob for token, at in zip(tokens, output.logprobs, strict=True)]
        answers.append((tokens, torch.tensor(found)))
    tear_down_vllm(llm)
    return answers


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[Any, Any]]:
    """Return a checkpoint, and the outputs of its models."""
    root = tmp_path_factory.mktemp("saved")
    model = write_checkpoint(root / "model", "llama")
    train_sentencepiece(model / "tokenizer.model", vocab_size=200)
    return root / "run" / "global_step_1", pool.run(2, save, model, root / "run")[0]


def test_transformers_reads_actor_and_critic(saved: tuple[Path, tuple[Any, Any]]) -> None:
    checkpoint, (log_probs_of_actor, values_of_critic) = saved
    policy = AutoModelForCausalLM.from_pretrained(checkpoint / "huggingface")
    critic = AutoModelForSequenceClassification.from_pretrained(checkpoint / "huggingface_critic")
    assert AutoTokenizer.from_pretrained(checkpoint / "huggingface").eos_token_id == 2
    batch = experience()
    for number in range(len(batch)):
        prompt, response = batch.prompt_of(number), batch.response_ids(number)
        found = log_probs(policy, prompt, response.tolist(), temperature=1.0)
        torch.testing.assert_close(found, batch.pieces(log_probs_of_actor)[number], rtol=1e-4, atol=1e-4)
        tokens = torch.tensor([[*prompt.token_ids, *response.tolist()]])
        with torch.no_grad():
            values = critic.score(critic.model(tokens).last_hidden_state)[0, len(prompt.token_ids) - 1 : -1, 0]
        torch.testing.assert_close(values, batch.pieces(values_of_critic)[number], rtol=1e-4, atol=1e-4)
    assert values_of_critic.abs().max() > 1e-3  # the head has learnt: it started as zeros


def test_vllm_reads_the_actor(saved: tuple[Path, tuple[Any, Any]], pool: RankPool) -> None:
    directory = saved[0] / "huggingface"
    policy = AutoModelForCausalLM.from_pretrained(directory)
    for prompt, (tokens, found) in zip(PROMPTS, pool.run(1, vllm_says, directory)[0], strict=True):
        torch.testing.assert_close(found, log_probs(policy, prompt, tokens, temperature=1.0), rtol=1e-4, atol=1e-4)
