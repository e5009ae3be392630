"""A reward model scores and exports as the sequence classifiers of `transformers` do, however the model is cut."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from megarl.batch import Prompt, Rollouts
from megarl.data.conversations import Conversations, scoring_batch
from megarl.data.messages import encode_prompt
from megarl.data.tokenizer import load_tokenizer
from megarl.distributed.launch import Launch
from megarl.learner.config import MegatronSection
from megarl.models.config import ModelSection, RewardCheckpointSection
from tests.support.disks import Disk, small_disk
from tests.support.learners import make_test_learner, outputs_of_all, sizes
from tests.support.ranks import RankPool, fresh_mesh
from tests.support.sentencepieces import train_sentencepiece
from tests.support.spread import spread
from tests.support.tiny import write_checkpoint, write_classifier

SPLITS = {(1, 1): 2, (2, 1): 2, (1, 2): 2, (2, 2): 4}  # (TP, PP): world size
TOLERANCE = {"rtol": 0.0, "atol": 1e-4}


def sequences() -> list[list[int]]:
    """Eight sequences of very different lengths. None ends in the pad token 0."""
    generator = torch.Generator().manual_seed(3)
    lengths = [3, 17, 1, 9, 30, 4, 5, 12]
    return [torch.randint(1, 200, (length,), generator=generator).tolist() for length in lengths]


def classifier_scores(checkpoint: Path, ids: Sequence[Sequence[int]]) -> Tensor:
    """Return the scores by `transformers` of a batch that is padded on the right."""
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float32)
    rows = [torch.tensor(sequence) for sequence in ids]
    batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=model.config.pad_token_id)
    there = torch.arange(batch.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
    return model(batch, attention_mask=there).logits[:, 0]


def scores(checkpoint: Path, split: dict[str, Any], max_sequences: int | None) -> Tensor:
    from megarl.learner.batching import Budget

    budget = Budget(max_tokens=64, max_sequences=max_sequences)
    learner = make_test_learner(checkpoint, split, role="value", optim=None)
    scored: Tensor = outputs_of_all(learner, scoring_batch(sequences()), budget)
    return scored


@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3_moe"])
def test_scores_are_those_of_transformers(pool: RankPool, tmp_path: Path, variant: str) -> None:
    checkpoint = write_classifier(tmp_path / variant, variant)
    expected = classifier_scores(checkpoint, sequences()).detach()
    assert float(expected.std()) > 0.1
    for (tp, pp), world_size in SPLITS.items():
        for max_sequences in (None, 2):
            for found in pool.run(world_size, scores, checkpoint, sizes(tp, pp), max_sequences):
                torch.testing.assert_close(found, expected, **TOLERANCE)


POLICY_TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}:{% endif %}"
)
OWN_TEMPLATE = "{{ bos_token }}{% for m in messages %}({{ m.role }}) {{ m.content }}{{ eos_token }}{% endfor %}"
ANSWERS = ["ab 12 + 7", "c", "(40 / 5) ghij"]


def tokenizers(root: Path) -> tuple[Path, Path]:
    """A policy's tokenizer, and a checkpoint that scores, with fewer tokens and another template."""
    policy = train_sentencepiece(root / "policy.model", vocab_size=200)
    own = write_classifier(root / "own", "llama", vocab_size=101, pad_token_id=2)  # pads with end-of-sequence
    train_sentencepiece(own / "tokenizer.model", vocab_size=100, model_type="unigram")
    (own / "chat_template.jinja").write_text(OWN_TEMPLATE)
    return policy, own


def conversations(policy: Any, prompt: Any, inside: Sequence[str] = ()) -> Rollouts:
    """Three responses of the policy to one prompt, each with its end-of-sequence token, and some more `inside`."""
    ids = [
        [
            *policy.encode(answer, add_special_tokens=False),
            *policy._tokenizer.convert_tokens_to_ids(list(inside)),
            policy.eos_token_id,
        ]
        for answer in ANSWERS
    ]
    responses = torch.cat([torch.tensor(answer, dtype=torch.int32) for answer in ids])
    return Rollouts(
        prompts=[
            Prompt(
                index=5,
                token_ids=encode_prompt(prompt, policy),
                text="",
                data_source="",
                ground_truth=None,
                extra_info={},
                raw_prompt=prompt,
            )
        ],
        groups=torch.zeros(3, dtype=torch.int64),
        num_tokens=torch.tensor([len(answer) for answer in ids]),
        responses=responses,
        mask=torch.ones_like(responses, dtype=torch.bool),
        rollout_log_probs=None,
        truncated=torch.zeros(3, dtype=torch.bool),
    )


def judged(
    policy_path: Path,
    own_path: Path,
    prompt: Any,
    split: dict[str, Any],
    passes: bool,
    length: int,
    inside: Sequence[str] = (),
    owners: Sequence[int] | None = None,
) -> Any:
    """Return the scores of all responses on this rank, or the error. It has its own responses, or all."""
    from megarl.learner.batching import Budget
    from megarl.training.reward_model import RewardModel

    policy = load_tokenizer(str(policy_path), chat_template=POLICY_TEMPLATE)
    tokenizer = policy if passes else load_tokenizer(str(own_path))
    model = RewardModel(
        learner=make_test_learner(own_path, split, role="value", optim=None),
        budget=Budget(max_tokens=8, max_sequences=None),  # of the policy's tokens: less than one sequence has here
        reader=Conversations(tokenizer=tokenizer, pad_token_id=2, max_length=length),
        decoder=None if passes else policy,
        ends=[policy.eos_token_id],
    )
    try:
        return model.score(spread(conversations(policy, prompt, inside), owners))
    except ValueError as error:
        return str(error)


def test_another_vocabulary_and_chat_template(pool: RankPool, tmp_path: Path) -> None:
    policy, own = tokenizers(tmp_path)
    tokenizer = load_tokenizer(str(own), special_tokens_in_text="allow")
    messages = [{"role": "user", "content": "ab 3"}]
    rendered = [f"(user) ab 3</s>(assistant) {answer}</s>" for answer in ANSWERS]
    chats = [[1, *tokenizer.encode(text, add_special_tokens=False)] for text in rendered]
    texts = [tokenizer.encode(f"ab 3 {answer}", add_special_tokens=True) for answer in ANSWERS]
    assert all(ids[-1] == 2 for ids in chats)  # so that transformers reads the score before it
    for prompt, ids in ((messages, chats), ("ab 3", texts)):
        expected = classifier_scores(own, ids).detach()
        assert float(expected.std()) > 0.01
        for split in (sizes(2, 1), sizes(1, 2), sizes(1, 1)):
            for found in pool.run(2, judged, policy, own, prompt, split, False, 100):
                torch.testing.assert_close(found, expected, **TOLERANCE)
    cut = classifier_scores(own, [[1, *ids[-9:]] for ids in chats])
    for found in pool.run(2, judged, policy, own, messages, {}, False, 10):
        torch.testing.assert_close(found, cut, **TOLERANCE)


def test_special_tokens_inside_response_are_scored_as_written(pool: RankPool, tmp_path: Path) -> None:
    policy, own = tokenizers(tmp_path)
    tokenizer = load_tokenizer(str(own))
    asked = {"role": "user", "content": "ab 3"}
    for prompt, before in (([asked], ""), ("ab 3", " ")):
        inside = ["<s>", "</s>", "<s>"]
        read = Conversations(tokenizer=tokenizer, pad_token_id=2, max_length=100)
        expected = classifier_scores(
            own, [read.encode(prompt, f"{before}{answer}<s></s><s>") for answer in ANSWERS]
        ).detach()
        without = classifier_scores(own, [read.encode(prompt, before + answer) for answer in ANSWERS]).detach()
        assert float((expected - without).abs().min()) > 10 * TOLERANCE["atol"]
        for found in pool.run(2, judged, policy, own, prompt, {}, False, 100, inside):
            torch.testing.assert_close(found, expected, **TOLERANCE)


def test_shared_tokens_pass_and_unreadable_prompts_are_named(pool: RankPool, tmp_path: Path) -> None:
    policy, refusing = tokenizers(tmp_path)
    own = write_classifier(tmp_path / "same", "llama", pad_token_id=2)
    tokenizer = load_tokenizer(str(policy), chat_template=POLICY_TEMPLATE)
    messages = [{"role": "user", "content": "ab 3"}]
    batch = conversations(tokenizer, messages)
    ids = [[*batch.prompts[0].token_ids, *batch.response_ids(sample).tolist()] for sample in range(3)]
    for found in pool.run(2, judged, policy, own, messages, {}, True, 100):
        torch.testing.assert_close(found, classifier_scores(own, ids).detach(), **TOLERANCE)

    (refusing / "chat_template.jinja").write_text("{{ raise_exception('no roles') }}")
    for message in pool.run(2, judged, policy, refusing, messages, {}, False, 100):
        assert message.startswith("the reward model cannot read data row 5: the chat template of")


@pytest.mark.parametrize("owners", [[0, 1, 1], [1, 1, 1]])
def test_samples_of_two_replicas_reach_the_model(pool: RankPool, tmp_path: Path, owners: list[int]) -> None:
    """Every sample gets the score of one process from a model that two data-parallel ranks have."""
    policy, own = tokenizers(tmp_path)
    messages = [{"role": "user", "content": "ab 3"}]
    [alone] = pool.run(1, judged, policy, own, messages, {}, False, 100)
    first, second = pool.run(2, judged, policy, own, messages, {}, False, 100, (), owners)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, alone, **TOLERANCE)


def rewarded(policy_path: Path, own_path: Path, given: str | None, owners: Sequence[int] | None = None) -> Any:
    """Return scores, texts and metrics of responses to a text, in a run on these checkpoints.

    This rank has its own responses, or all.
    """
    from megarl.assembly.reward import make_reward
    from megarl.config.root import RewardModelSection
    from megarl.learner.batching import Budget
    from megarl.models.source import Source

    policy = load_tokenizer(str(policy_path))
    section = RewardModelSection(
        enable=True,
        model=RewardCheckpointSection(path=str(own_path), input_tokenizer=given),
        megatron=MegatronSection(dtype="float32"),
        weights={"model": 2.0},
    )
    try:
        reward = make_reward(
            None,
            section,
            policy,
            Source.read(ModelSection(path=str(own_path))),
            fresh_mesh(section.megatron),
            policy_path=str(policy_path),
            budget=Budget(max_tokens=64, max_sequences=section.micro_batch_size),
            balance=True,
        )
    except ValueError as error:
        return str(error)
    samples, metrics = reward.score(spread(conversations(policy, "ab 3"), owners))
    scored = samples.share
    return scored.scores, scored.accuracies, scored.texts, metrics


def test_a_model_alone_is_the_reward(pool: RankPool, tmp_path: Path) -> None:
    policy, own = tokenizers(tmp_path)
    tokenizer = load_tokenizer(str(own))
    ids = [tokenizer.encode(f"ab 3 {answer}", add_special_tokens=True) for answer in ANSWERS]
    expected = classifier_scores(own, ids).detach()
    for scores, accuracies, texts, metrics in pool.run(2, rewarded, policy, own, str(policy)):
        torch.testing.assert_close(scores, 2.0 * expected, **TOLERANCE)
        assert torch.equal(accuracies, scores)
        assert texts == ANSWERS
        statistics = {"mean": expected.mean(), "min": expected.min(), "max": expected.max()}
        assert metrics == pytest.approx({f"reward/model/{n}": float(x) for n, x in statistics.items()}, abs=1e-4)
    for owners in ([1, 0, 1], [1, 1, 1]):
        for rank, (scores, _, texts, others) in enumerate(pool.run(2, rewarded, policy, own, str(policy), owners)):
            mine = [sample for sample, owner in enumerate(owners) if owner == rank]
            torch.testing.assert_close(scores, 2.0 * expected[mine], **TOLERANCE)
            assert texts == [ANSWERS[sample] for sample in mine]
            assert others == pytest.approx(metrics, abs=1e-4)
    [message] = pool.run(1, rewarded, policy, own, None)
    assert message.startswith(
        "reward_model.model.input_tokenizer=null passes the policy's 200 tokens to a model of 101"
    )


def write_back(checkpoint: Path, out: Path, split: dict[str, Any]) -> None:
    import torch.distributed as dist

    from megarl.checkpoint.huggingface import export_model
    from megarl.models.source import Source

    source = Source.read(ModelSection(path=str(checkpoint)))
    size = dist.get_world_size()
    launch = Launch(rank=dist.get_rank(), world_size=size, local_rank=dist.get_rank(), local_world_size=size)
    learner = make_test_learner(checkpoint, split, role="value", optim=None)
    export_model(learner, source, source.tokenizer(), out, launch)


def refused(checkpoint: Path, out: Path, split: dict[str, Any]) -> str:
    with pytest.raises(ValueError, match="cannot be written") as raised:
        write_back(checkpoint, out, split)
    return str(raised.value)


def refused_at_the_end(checkpoint: Path, disk: Disk, split: dict[str, Any]) -> str:
    from megarl.reshard import files

    finish = files._finish
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_finish", lambda *args: (disk.fill(), finish(*args)))
        return refused(checkpoint, disk.path / "out", split)


def test_export_to_full_disk_leaves_no_files(pool: RankPool, tmp_path: Path) -> None:
    checkpoint = write_classifier(tmp_path / "source", "llama")
    train_sentencepiece(checkpoint / "tokenizer.model", vocab_size=200)
    weights = (checkpoint / "model.safetensors").stat().st_size
    with small_disk(tmp_path / "disk", 8 << 20) as disk:
        for leave in (0, (checkpoint / "tokenizer.model").stat().st_size + weights // 2):
            disk.fill(leave=leave)
            for message in pool.run(2, refused, checkpoint, disk.path / "out", sizes(2, 1)):
                assert message.startswith(f"{disk.path / 'out'} cannot be written: ")
                assert message.endswith(
                    "No space left on device; free space there, or name a directory on another disk"
                )
            assert not (disk.path / "out").exists()
            disk.clear()
        first, second = pool.run(2, refused_at_the_end, checkpoint, disk, sizes(2, 1))
        assert first == second
        assert not (disk.path / "out").exists()
        disk.clear()
        pool.run(2, write_back, checkpoint, disk.path / "out", sizes(2, 1))
        before = (disk.path / "out" / "model.safetensors").read_bytes()
        disk.fill()
        pool.run(2, refused, checkpoint, disk.path / "out", sizes(2, 1))
        assert (disk.path / "out" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("variant", ["llama", "qwen2"])
def test_classifier_round_trips_through_ranks_bit_for_bit(pool: RankPool, tmp_path: Path, variant: str) -> None:
    checkpoint = write_classifier(tmp_path / "source", variant)
    train_sentencepiece(checkpoint / "tokenizer.model", vocab_size=200)
    pool.run(4, write_back, checkpoint, tmp_path / "out", sizes(2, 2))
    before = AutoModelForSequenceClassification.from_pretrained(checkpoint)
    after, report = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    assert after.state_dict().keys() == before.state_dict().keys()
    assert all(torch.equal(tensor, before.state_dict()[name]) for name, tensor in after.state_dict().items())
    assert (after.config.num_labels, after.config.pad_token_id) == (1, 0)


def test_value_model_from_language_model_exports_as_classifier(pool: RankPool, tmp_path: Path) -> None:
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
    with pytest.raises(ValueError) as error:
        make_test_learner(checkpoint, {}, role=role, optim=None)
    return str(error.value)


@pytest.mark.parametrize("variant", ["llama", "gpt_neox"])
def test_other_heads_are_refused(pool: RankPool, tmp_path: Path, variant: str) -> None:
    checkpoint = write_classifier(tmp_path / "source", variant)
    assert "scores sequences and predicts no tokens" in pool.run(1, refusal, checkpoint, "policy")[0]
    weights = {name: tensor.clone() for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    head = weights.pop("score.weight")
    for others in ({"score.weight": head, "score.bias": torch.zeros(1)}, {"classifier.weight": head}):
        save_file(weights | others, checkpoint / "model.safetensors")
        message = pool.run(1, refusal, checkpoint, "value")[0]
        assert message.endswith(f"tensors outside the decoder are {', '.join(sorted(others))}")
