"""A learner that is saved and loaded continues exactly as without the save, also under another split."""

import io
import os
import pickle
import shutil
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from megarl.learner.config import OptimSection
from tests.support.learners import ACTOR, learn_twice, make_test_learner, sizes, update
from tests.support.ranks import RankPool
from tests.support.records import experience
from tests.support.shards import tensors_of

CHECKPOINTS = {variant: (variant, {}) for variant in ("llama", "qwen2", "qwen3_next", "qwen3_5_text")}
OPTIM = OptimSection(lr=1e-3, lr_warmup_steps=4)


@pytest.mark.parametrize("role", ["policy", "value"])
@pytest.mark.parametrize("distributed_optimizer", [True, False])
def test_continues_exactly(
    pool: RankPool, checkpoints: dict[str, Path], tmp_path: Path, role: str, distributed_optimizer: bool
) -> None:
    source = checkpoints["qwen2"]
    for tp, pp in [(1, 1), (2, 1), (1, 2)]:
        saved = tmp_path / f"tp{tp}pp{pp}"
        saved.mkdir()
        expected = pool.run(2, learn_twice, source, role, sizes(tp, pp), saved, None, distributed_optimizer)
        resumed = pool.run(2, learn_twice, source, role, sizes(tp, pp), None, saved, distributed_optimizer)
        for (metrics, outputs), (metrics_again, outputs_again) in zip(expected, resumed, strict=True):
            assert metrics == metrics_again
            assert torch.equal(outputs, outputs_again)


def save_twice(source: Path, split: dict[str, Any], optimizer: bool, at_once: Path, alongside: Path) -> None:
    """Save one state twice: while the learner waits, and while the learner continues."""
    from megarl.learner.batching import Budget
    from megarl.learner.checkpoint import save_learner
    from megarl.learner.staging import Staging

    learner = make_test_learner(source, split | {"use_distributed_optimizer": optimizer}, optim=OPTIM)
    batch, budget, staging = experience(), Budget(max_tokens=100, max_sequences=None), Staging()
    update(learner, [batch], ACTOR, budget)
    for directory in (at_once, alongside):
        writing = save_learner(learner, directory, staging)
        if directory == alongside:
            thread = Thread(target=writing.write)
            update(learner, [batch], ACTOR, budget)
            thread.start()
            update(learner, [batch], ACTOR, budget)
            thread.join()
        else:
            writing.write()
        writing.finish()


@pytest.mark.parametrize("distributed_optimizer", [True, False])
def test_asynchronous_save_equals_synchronous_save(
    pool: RankPool, checkpoints: dict[str, Path], tmp_path: Path, distributed_optimizer: bool
) -> None:
    for tp in (1, 2):
        at_once, alongside = tmp_path / f"at_once{tp}", tmp_path / f"alongside{tp}"
        for directory in (at_once, alongside):
            directory.mkdir()
        pool.run(2, save_twice, checkpoints["llama"], sizes(tp, 1), distributed_optimizer, at_once, alongside)
        names = sorted(path.name for path in at_once.iterdir())
        assert names == sorted(path.name for path in alongside.iterdir())
        sizes_of_files = [(at_once / name).stat().st_size for name in names if name.endswith(".distcp")]
        assert len(sizes_of_files) == 2 and min(sizes_of_files) > 0.8 * max(sizes_of_files)
        for name in set(names) - {".metadata"}:  # it contains a random number of each save
            assert (at_once / name).read_bytes() == (alongside / name).read_bytes(), name


def save_again(source: Path, split: dict[str, Any], saved: Path, to: Path) -> None:
    """Load the save of another split, and save it again."""
    from megarl.learner.checkpoint import load_learner, save_learner
    from megarl.learner.staging import Staging

    learner = make_test_learner(source, split, optim=OPTIM)
    load_learner(learner, saved)
    writing = save_learner(learner, to, Staging())
    writing.write()
    writing.finish()


def test_another_split_has_the_same_weights_and_moments(
    pool: RankPool, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    source, saved = checkpoints["qwen2"], tmp_path / "saved"
    saved.mkdir()
    pool.run(2, learn_twice, source, "policy", sizes(2, 1), saved, None, True)
    expected = tensors_of(saved)
    assert sum("exp_avg" in name for name in expected) > 0
    for tp, pp in [(1, 1), (1, 2)]:
        again = tmp_path / f"tp{tp}pp{pp}"
        again.mkdir()
        pool.run(2, save_again, source, sizes(tp, pp), saved, again)
        found = tensors_of(again)
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("variant", ["qwen2", "qwen3_next", "qwen3_5_text"])
def test_another_split(pool: RankPool, checkpoints: dict[str, Path], tmp_path: Path, variant: str) -> None:
    source = checkpoints[variant]
    saved = tmp_path / "saved"
    saved.mkdir()
    expected = pool.run(2, learn_twice, source, "policy", sizes(2, 1), saved, None, True)[0]
    for tp, pp in [(1, 1), (1, 2)]:
        metrics, outputs = pool.run(2, learn_twice, source, "policy", sizes(tp, pp), None, saved, True)[0]
        assert metrics == pytest.approx(expected[0], rel=1e-5)
        torch.testing.assert_close(outputs, expected[1], rtol=1e-4, atol=1e-4)


def test_resumed_learner_uses_new_learning_rate_and_length(
    pool: RankPool, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    source = checkpoints["llama"]
    saved = tmp_path / "saved"
    saved.mkdir()
    pool.run(1, learn_twice, source, "policy", sizes(1, 1), saved, None, True)
    now = OptimSection(lr=2e-3, warmup_style="linear", total_training_steps=8, min_lr_ratio=0.5)
    [(metrics, _)] = pool.run(1, learn_twice, source, "policy", sizes(1, 1), None, saved, True, now)
    assert metrics["lr"] == pytest.approx(2e-3 * (1 - 0.5 * 2 / 8))  # the second of 8 steps of a decay to one half


class Planted:
    """An object whose pickle calls code."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.witness),)


def plant_in_index(checkpoint: Path, witness: Path) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Planted(witness)))


def plant_in_common_state(checkpoint: Path, witness: Path) -> None:
    torch.save({"schedule": Planted(witness)}, checkpoint / "common.pt")


def plant_in_shards(checkpoint: Path, witness: Path) -> None:
    """Replace the shards; torch reads each as a pickle."""
    index = pickle.loads((checkpoint / ".metadata").read_bytes())
    buffer = io.BytesIO()
    torch.save(Planted(witness), buffer)
    (checkpoint / "planted.distcp").write_bytes(buffer.getvalue())
    for what in index.storage_data.values():
        what.relative_path, what.offset, what.length = "planted.distcp", 0, len(buffer.getvalue())
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))


def lead_index_elsewhere(checkpoint: Path, witness: Path) -> None:
    index = pickle.loads((checkpoint / ".metadata").read_bytes())
    for place in index.storage_data.values():
        place.relative_path = f"../saved/{place.relative_path}"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))


def load_refused(source: Path, directory: Path) -> str:
    """Return the error of a rank that loads a checkpoint that it must refuse."""
    with pytest.raises(BaseException) as refused:  # CheckpointException is a BaseException
        learn_twice(source, "policy", sizes(1, 1), None, directory, True)
    return repr(refused.value)


def test_checkpoint_with_code_or_outside_paths_is_refused(
    pool: RankPool, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    source, saved = checkpoints["qwen2"], tmp_path / "saved"
    saved.mkdir()
    pool.run(1, learn_twice, source, "policy", sizes(1, 1), saved, None, True)
    for plant in (plant_in_index, plant_in_common_state, plant_in_shards, lead_index_elsewhere):
        spoiled, witness = tmp_path / plant.__name__, tmp_path / f"{plant.__name__}_ran"
        shutil.copytree(saved, spoiled)
        plant(spoiled, witness)
        (message,) = pool.run(1, load_refused, source, spoiled)
        assert ("is no file below" if plant is lead_index_elsewhere else "mkdir") in message, plant.__name__
        assert not witness.exists(), plant.__name__
