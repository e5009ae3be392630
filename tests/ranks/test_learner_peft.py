"""PEFT reads the adapters that megarl writes, and megarl starts from those that PEFT writes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from megarl.models.lora import Lora
from tests.support.adapters import drawn, fill
from tests.support.learners import TEMPERATURE, TOLERANCE, make_test_learner, outputs_of_all
from tests.support.ranks import RankPool
from tests.support.records import experience
from tests.support.references import outputs_of
from tests.support.sentencepieces import train_sentencepiece
from tests.support.supervised import here
from tests.support.tiny import write_checkpoint, write_classifier

LISTED = ["q_proj", "v_proj", "down_proj"]
STARTS: dict[str, dict[str, Any]] = {
    "list": {"target_modules": LISTED},
    "all": {"target_modules": "all-linear", "exclude_modules": ["k_proj"]},
    "scaled": {"target_modules": r".*self_attn\.[qo]_proj", "exclude_modules": r".*\.1\..*", "use_rslora": True},
}
SPLIT = {"tensor_model_parallel_size": 2}


def randomise(model: Any) -> None:
    """Give everything that learns random numbers: B begins as zeros."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0.0, 0.2)


def start(checkpoint: Path, directory: Path, role: str = "policy") -> Any:
    """Return the outputs of a learner that starts from a directory of PEFT."""
    from megarl.learner.batching import Budget
    from megarl.models.config import ModelSection
    from megarl.models.hub import read_model
    from megarl.models.peft import lora_of

    section = ModelSection(path=str(checkpoint), lora_adapter_path=str(directory))
    lora = lora_of(section, read_model(checkpoint, {})[1])
    learner = make_test_learner(checkpoint, SPLIT, role=role, temperature=TEMPERATURE, lora=lora)
    outputs = outputs_of_all(learner, experience(), Budget(max_tokens=100, max_sequences=None))
    return outputs if role == "value" else outputs.log_probs


def values_of(model: Any) -> torch.Tensor:
    """Return the scores of a classifier before each response token."""
    batch = experience()
    found = []
    for number in range(len(batch)):
        prompt, response = batch.prompt_of(number).token_ids, batch.response_ids(number).tolist()
        with torch.no_grad():
            hidden = model.base_model.model.model(torch.tensor([[*prompt, *response]])).last_hidden_state
            found.append(model.base_model.model.score(hidden)[0, len(prompt) - 1 : -1, 0])
    return torch.cat(found)


@pytest.mark.parametrize("kind", STARTS)
def test_a_policy_starts_from_peft(pool: RankPool, tmp_path: Path, kind: str) -> None:
    checkpoint = write_checkpoint(tmp_path / "base", "llama")
    base = AutoModelForCausalLM.from_pretrained(checkpoint)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=6, task_type=TaskType.CAUSAL_LM, **STARTS[kind]))
    randomise(model)
    model.save_pretrained(tmp_path / "adapters")
    expected = outputs_of(model, experience(), {None: model}).log_probs.detach()
    for found in pool.run(2, start, checkpoint, tmp_path / "adapters"):
        torch.testing.assert_close(found, expected, **TOLERANCE)


def test_a_critic_starts_from_peft(pool: RankPool, tmp_path: Path) -> None:
    checkpoint = write_classifier(tmp_path / "base", "llama")
    base = AutoModelForSequenceClassification.from_pretrained(checkpoint)
    model = get_peft_model(base, LoraConfig(r=4, task_type=TaskType.SEQ_CLS, target_modules=LISTED))
    randomise(model)
    model.save_pretrained(tmp_path / "adapters")
    expected = values_of(model)
    for found in pool.run(2, start, checkpoint, tmp_path / "adapters", "value"):
        torch.testing.assert_close(found, expected, **TOLERANCE)


def save(checkpoint: Path, run_dir: Path, role: str) -> Any:
    """Save a checkpoint of random adapters; return the outputs of the model."""
    from megarl.checkpoint.huggingface import SavedModel
    from megarl.checkpoint.state import State
    from megarl.checkpoint.store import CheckpointStore
    from megarl.learner.batching import Budget
    from megarl.models.config import ModelSection
    from megarl.models.source import Source

    launch = here()
    lora = Lora(rank=4, alpha=6.0, targets=tuple(LISTED), base=str(checkpoint))
    source = Source.read(ModelSection(path=str(checkpoint)))
    tokenizer = source.tokenizer()
    learner = make_test_learner(checkpoint, {}, role=role, temperature=TEMPERATURE, lora=lora)
    fill(learner, drawn(checkpoint, lora, scores=role == "value"))
    checkpoints = CheckpointStore(
        directory=run_dir,
        learners={"actor" if role == "policy" else "reward_model": learner},
        keep=1,
        models=[SavedModel(learner=learner, source=source, tokenizer=tokenizer, launch=launch)],
    )
    checkpoints.save(State(step=1))
    checkpoints.close()
    outputs = outputs_of_all(learner, experience(), Budget(max_tokens=100, max_sequences=None))
    return outputs if role == "value" else outputs.log_probs


def export(*argv: object) -> None:
    """Run `megarl export` on this rank."""
    from megarl.commands.export import read_arguments, write

    launch = here()
    write(read_arguments([str(word) for word in argv], world_size=launch.world_size), launch)


def refused(*argv: object) -> str:
    """Return the message of a failed export."""
    with pytest.raises(ValueError, match="cannot be read") as raised:
        export(*argv)
    return str(raised.value)


@pytest.mark.parametrize("role", ["policy", "value"])
def test_an_export_loads_in_peft_and_transformers(pool: RankPool, tmp_path: Path, role: str) -> None:
    checkpoint = write_checkpoint(tmp_path / "base", "llama")
    train_sentencepiece(checkpoint / "tokenizer.model", vocab_size=200)
    run_dir, out = tmp_path / "run", tmp_path / "out"
    [expected] = pool.run(1, save, checkpoint, run_dir, role)
    moved = checkpoint.rename(tmp_path / "moved")
    [message] = pool.run(1, refused, run_dir, out)
    assert message.endswith("name its present place with --base")
    kind, options = AutoModelForCausalLM, {}
    if role == "value":
        kind, options = AutoModelForSequenceClassification, {"num_labels": 1}

    def outputs(model: Any) -> torch.Tensor:
        if role == "value":
            return values_of(model)
        return outputs_of(model, experience(), {None: model}).log_probs.detach()

    pool.run(2, export, run_dir, out, "--base", moved, "--adapter")
    assert not (out / "config.json").exists()
    assert f'from_pretrained("{moved}"' in (out / "README.md").read_text()
    model = PeftModel.from_pretrained(kind.from_pretrained(moved, **options), out)
    torch.testing.assert_close(outputs(model), expected, **TOLERANCE)
    if role == "policy":
        for found in pool.run(2, start, moved, out):
            torch.testing.assert_close(found, expected, **TOLERANCE)

    pool.run(2, export, run_dir, out, "--base", moved)
    assert not list(out.glob("adapter*"))
    empty = get_peft_model(kind.from_pretrained(out), LoraConfig(target_modules=LISTED))
    torch.testing.assert_close(outputs(empty), expected, **TOLERANCE)
