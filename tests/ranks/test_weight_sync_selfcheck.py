"""The self-check of a sync finds what can go wrong: each fault is planted between a real trainer and a real engine.

A fault shows in a weight that is not what was sent, in keys that should be gone, or in engine and trainer no longer
saying the same. One engine per family serves all faults; after each a sound sync puts everything right.
"""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.support.engines import start, tear_down
from tests.support.learners import make_test_learner
from tests.support.pairs import Pair, swap
from tests.support.ranks import RankPool, fresh_mesh
from tests.support.records import experience
from tests.support.tiny import write_checkpoint

pytestmark = pytest.mark.ranks

FLIPPED = "flipped bit"
DISAGREE = "give the same tokens probabilities that differ by"
SIGNS = {
    "q and k": DISAGREE,
    "gate and up": DISAGREE,
    "stale head": DISAGREE,
    "kept prefix cache": "its prefix cache was not dropped",
    "stale packs": "the weights that engine replica 0 (rank 0), engine replica 1 (rank 1) computes with did not",
    "spoilt byte": f"engine replica 1 (rank 1) and the trainer {DISAGREE}",
    "expert off by one": DISAGREE,
}
ROUNDING = 1e-5  # mean difference between the probabilities that two float32 models with the same weights give


def metrics_of(sync: Any, *, step: int) -> dict[str, float]:
    from megarl.tracking.timers import Timers

    with sync.awake(Timers(), step=step) as metrics:
        pass
    return metrics


def complaint(sync: Any, *, step: int) -> str:
    """Return the message of the check of a sync, before anything is sampled."""
    from megarl.tracking.timers import Timers

    try:
        with sync.awake(Timers(), step=step):
            return "samples were drawn"
    except (RuntimeError, ValueError) as error:
        return str(error)


def next_expert(name: str) -> str:
    before, found, after = name.partition(".experts.")
    number, _, rest = after.partition(".")
    return f"{before}{found}{(int(number) + 1) % 8}.{rest}" if found else name


def flipping_a_bit() -> AbstractContextManager[Any]:
    """The first byte of the first message that rank 0 sends arrives with a bit flipped."""
    send, sent = dist.batch_isend_irecv, []

    def send_wrongly(messages: list[Any]) -> Any:
        outgoing = [message.tensor for message in messages if message.op is dist.isend]
        if dist.get_rank() == 0 and outgoing and not sent:
            sent.append(outgoing[0])
            outgoing[0][0] ^= 1
        return send(messages)

    return patch.object(dist, "batch_isend_irecv", send_wrongly)


@contextmanager
def writing_astray(engine: Any) -> Iterator[None]:
    """Writes to the engine's weights never reach the weights that its kernels read."""
    from megarl.rollout import reload

    kind = type(engine.weights)
    open_for_real = kind.open
    with (
        patch.object(kind, "open", lambda weights, param: open_for_real(weights, param).clone()),
        patch.object(reload, "process", reload.to_kernel_format),
    ):
        yield


@contextmanager
def spoiling_a_byte(engine: Any) -> Iterator[None]:
    """Once all is written, and found to be what was sent, one byte of rank 1's engine changes."""
    kind = type(engine.weights)
    finish = kind._finish

    def finish_wrongly(weights: Any) -> None:
        finish(weights)
        if dist.get_rank() == 1:
            norm = dict(weights._model.named_parameters())["model.norm.weight"]
            norm.data.view(torch.uint8)[3] = 0x43  # of a float32: it is now between 128 and 512

    with patch.object(kind, "_finish", finish_wrongly):
        yield


def planted(fault: str, engine: Any) -> AbstractContextManager[Any]:
    """Plant a fault in the engine, unless the fault is in the names of the trainer's parameters."""
    if fault == "stale head":
        return patch.object(engine.weights, "_layout", replace(engine.weights._layout, tied=frozenset()))
    if fault == "kept prefix cache":
        return patch.object(engine._llm, "reset_prefix_cache", return_value=True)
    if fault == "stale packs":
        return writing_astray(engine)
    if fault == "spoilt byte":
        return spoiling_a_byte(engine)
    return flipping_a_bit() if fault == FLIPPED else nullcontext()


def complaints(checkpoint: Path, faults: list[str]) -> dict[str, str]:
    """On each rank: what the check says to each fault, after the sync before was found sound."""
    from megarl.learner.config import MegatronSection
    from megarl.learner.factory import make_learner
    from megarl.models.architecture import read_architecture

    engine = start(checkpoint, tp_size=1, free_cache_engine=False)
    section = MegatronSection(dtype="float32", tensor_model_parallel_size=2)
    architecture = read_architecture(json.loads((checkpoint / "config.json").read_text()))
    learner = make_learner(checkpoint, architecture, section, fresh_mesh(section), role="policy")
    pair, said = Pair(learner, engine), {}
    lies = {
        "q and k": swap("q_proj", "k_proj"),
        "gate and up": swap("gate_proj", "up_proj"),
        "expert off by one": next_expert,
    }
    for fault in faults:
        sync = pair.sync()
        assert metrics_of(sync, step=0)["sync/check_probs_diff_mean"] < ROUNDING
        pair.change(1e-6 if fault == "stale packs" else 0.05)
        with planted(fault, engine):
            if fault == "kept prefix cache":
                metrics_of(sync, step=1)  # whose keys stay
            said[fault] = complaint(pair.sync(lies[fault]) if fault in lies else sync, step=2)
        engine.weights._unwritten.clear()  # a sync may have stopped midway
    tear_down(engine)
    return said


def log_probs(checkpoint: Path, split: dict[str, Any], max_tokens: int) -> torch.Tensor:
    from megarl.learner.batching import Budget
    from megarl.weight_sync.selfcheck import log_probs_of_all

    learner = make_test_learner(checkpoint, split, optim=None)
    return log_probs_of_all(learner, experience(), Budget(max_tokens=max_tokens, max_sequences=None))


@pytest.mark.parametrize("split", [{}, {"context_parallel_size": 2}], ids=["data", "context"])
def test_trainer_reads_responses_beyond_its_budget(pool: RankPool, tmp_path: Path, split: dict[str, Any]) -> None:
    """The engine's limits of a prompt may be above those of the data, which the budget has to hold."""
    checkpoint = write_checkpoint(tmp_path / "qwen2", "qwen2")
    [expected] = pool.run(1, log_probs, checkpoint, {}, 1000)
    for found in pool.run(2, log_probs, checkpoint, split, 8):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("variant", "sizes", "faults"),
    [
        ("qwen2", {"num_key_value_heads": 4}, ["q and k", "gate and up", FLIPPED, "spoilt byte"]),
        ("qwen2", {"num_key_value_heads": 4}, ["stale head", "kept prefix cache", "stale packs"]),
        ("qwen3_moe", {}, ["expert off by one"]),
    ],
)
def test_every_planted_fault_is_found_on_all_ranks(
    pool: RankPool, tmp_path: Path, variant: str, sizes: dict[str, int], faults: list[str]
) -> None:
    checkpoint = write_checkpoint(tmp_path / variant, variant, **sizes)
    answers = pool.run(2, complaints, checkpoint, faults)
    for said in answers:
        for fault in faults:
            if fault == FLIPPED:
                assert said[fault].startswith("received data differ from the sent data: model.")
                assert "from rank 0 to rank 1" in said[fault]
            else:
                assert SIGNS[fault] in said[fault]
