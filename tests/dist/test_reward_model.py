"""Sequences are scored as `transformers`' sequence classifiers score them, however the model is cut; and written back."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from megarl.algorithms.losses import Totals
from megarl.data.conversations import to_be_scored
from megarl.distributed.launch import Launch
from megarl.learner.config import MegatronSection, ModelSection, OptimSection
from tests.dist.test_learner_split import sizes
from tests.ranks import RankPool, fresh_mesh
from tests.sentencepieces import train_sentencepiece
from tests.tiny import write_checkpoint, write_classifier

SPLITS = {(1, 1): 2, (2, 1): 2, (1, 2): 2, (2, 2): 4}  # (TP, PP): world size
TOLERANCE = {"rtol": 0.0, "atol": 1e-4}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


def sequences() -> list[list[int]]:
    """Eight sequences of very different lengths, none of which ends in the pad token 0."""
    generator = torch.Generator().manual_seed(3)
    lengths = [3, 17, 1, 9, 30, 4, 5, 12]
    return [torch.randint(1, 200, (length,), generator=generator).tolist() for length in lengths]


def classifier_scores(checkpoint: Path, ids: Sequence[Sequence[int]]) -> Tensor:
    """What `transformers` says of a batch that is padded on the right."""
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float32)
    rows = [torch.tensor(sequence) for sequence in ids]
    pad = model.config.pad_token_id
    batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)
    return model(batch, attention_mask=batch != pad).logits[:, 0]


def value_learner(checkpoint: Path, split: dict[str, Any], *, trained: bool = False) -> Any:
    from megarl.learner.factory import make_learner
    from megarl.models.architecture import read_architecture

    section = MegatronSection(dtype="float32", **split)
    return make_learner(
        checkpoint,
        read_architecture(json.loads((checkpoint / "config.json").read_text())),
        section,
        fresh_mesh(section),
        role="value",
        device=torch.device("cpu"),
        training=(OptimSection(lr=1e-3), 1.0, 10) if trained else None,
    )


def scores(checkpoint: Path, split: dict[str, Any], max_sequences: int | None) -> Tensor:
    from megarl.learner.learner import Budget

    budget = Budget(max_tokens=64, max_sequences=max_sequences)
    return value_learner(checkpoint, split).infer(to_be_scored(sequences()), budget)[:, 0]


@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3_moe"])
def test_scores_are_those_of_transformers(pool: RankPool, tmp_path: Path, variant: str) -> None:
    checkpoint = write_classifier(tmp_path / variant, variant)
    expected = classifier_scores(checkpoint, sequences()).detach()
    assert float(expected.std()) > 0.1
    for (tp, pp), world_size in SPLITS.items():
        for max_sequences in (None, 2):
            for found in pool.run(world_size, scores, checkpoint, sizes(tp, pp), max_sequences):
                torch.testing.assert_close(found, expected, **TOLERANCE)


def compare(outputs: Tensor, micro: Any, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
    """Each sequence at an even place should win over its neighbour."""
    won, lost = outputs[:, 0].view(-1, 2).unbind(-1)
    loss = -torch.nn.functional.logsigmoid(won - lost).sum() / (totals.num_sequences / 2)
    return loss, {"loss": loss.detach()}


def learn(checkpoint: Path, split: dict[str, Any], max_tokens: int) -> tuple[dict[str, float], Tensor]:
    from megarl.learner.learner import Budget

    learner, batch = value_learner(checkpoint, split, trained=True), to_be_scored(sequences())
    budget = Budget(max_tokens=max_tokens, max_sequences=None, num_together=2)
    metrics = learner.update([batch], compare, budget)
    return metrics, learner.infer(batch, budget)[:, 0]


def test_neighbours_are_compared_in_one_micro_batch_under_any_split(pool: RankPool, tmp_path: Path) -> None:
    checkpoint = write_classifier(tmp_path / "llama", "llama")
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float32)
    outputs = torch.cat([model(torch.tensor([ids])).logits for ids in sequences()])
    batch = to_be_scored(sequences())
    loss, _ = compare(outputs, batch, Totals.of(batch.mask))
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]).norm()
    after: Tensor | None = None
    for (tp, pp), world_size in SPLITS.items():
        for max_tokens in (44, 1000):
            for metrics, found in pool.run(world_size, learn, checkpoint, sizes(tp, pp), max_tokens):
                assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
                assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
                after = found if after is None else after
                torch.testing.assert_close(found, after, rtol=1e-4, atol=1e-4)


def write_back(checkpoint: Path, out: Path, split: dict[str, Any]) -> None:
    import torch.distributed as dist

    from megarl.export import export_model
    from megarl.source import Source

    source = Source.read(ModelSection(path=str(checkpoint)))
    size = dist.get_world_size()
    launch = Launch(rank=dist.get_rank(), world_size=size, local_rank=dist.get_rank(), local_world_size=size)
    export_model(value_learner(checkpoint, split), source, source.tokenizer(), out, launch)


@pytest.mark.parametrize("variant", ["llama", "qwen2"])
def test_a_classifier_goes_through_the_ranks_bit_for_bit(pool: RankPool, tmp_path: Path, variant: str) -> None:
    checkpoint = write_classifier(tmp_path / "source", variant)
    train_sentencepiece(checkpoint / "tokenizer.model", vocab_size=200)
    pool.run(4, write_back, checkpoint, tmp_path / "out", sizes(2, 2))
    before = AutoModelForSequenceClassification.from_pretrained(checkpoint)
    after, report = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    assert after.state_dict().keys() == before.state_dict().keys()
    assert all(torch.equal(tensor, before.state_dict()[name]) for name, tensor in after.state_dict().items())
    assert (after.config.num_labels, after.config.pad_token_id) == (1, 0)


def test_a_value_model_that_began_as_a_language_model_is_written_as_a_classifier(
    pool: RankPool, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "source", "qwen2")  # tied embeddings
    train_sentencepiece(checkpoint / "tokenizer.model", vocab_size=200)
    pool.run(2, write_back, checkpoint, tmp_path / "out", sizes(1, 2))
    trunk = AutoModelForCausalLM.from_pretrained(checkpoint).model.state_dict()
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert type(model).__name__ == "Qwen2ForSequenceClassification"
    assert all(torch.equal(tensor, trunk[name]) for name, tensor in model.model.state_dict().items())
    assert model.score.weight.shape == (1, 128)
    assert not model.score.weight.any()  # a new head starts at zero
    assert model.config.pad_token_id == 2  # the tokenizer has no pad token: end-of-sequence


def refusal(checkpoint: Path, role: str) -> str:
    from megarl.learner.factory import make_learner
    from megarl.models.architecture import read_architecture

    section, device = MegatronSection(dtype="float32"), torch.device("cpu")
    architecture = read_architecture(json.loads((checkpoint / "config.json").read_text()))
    with pytest.raises(ValueError) as error:
        make_learner(checkpoint, architecture, section, fresh_mesh(section), role=role, device=device)  # type: ignore[arg-type]
    return str(error.value)


def test_other_heads_are_refused(pool: RankPool, tmp_path: Path) -> None:
    checkpoint = write_classifier(tmp_path / "source", "llama")
    assert "scores sequences and predicts no tokens" in pool.run(1, refusal, checkpoint, "policy")[0]
    weights = {name: tensor.clone() for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    head = weights.pop("score.weight")
    for others in ({"score.weight": head, "score.bias": torch.zeros(1)}, {"classifier.weight": head}):
        save_file(weights | others, checkpoint / "model.safetensors")
        message = pool.run(1, refusal, checkpoint, "value")[0]
        assert message.endswith(f"its tensors outside the decoder are {', '.join(sorted(others))}")
