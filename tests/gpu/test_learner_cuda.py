"""On a GPU: every model computes what it computes on the CPU, rests on the host if asked, and resumes exactly."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algorithms.kl import Divergence
from megarl.config.policy import ActorSection
from megarl.training.objectives import ActorObjective
from tests.support.heads import assert_not_rounded, in_bfloat16
from tests.support.learners import learn_twice, make_test_learner, outputs_of_all, sizes, update
from tests.support.ranks import RankPool
from tests.support.records import experience
from tests.support.tiny import VARIANTS, write_checkpoint

pytestmark = pytest.mark.gpu

ACTOR = ActorObjective(ActorSection(use_kl_loss=True, kl_loss_type="full", kl_loss_coef=3.0), horizon=8)


@pytest.fixture(scope="module")
def cuda() -> Iterator[RankPool]:
    """Return processes for all tests but those of determinism, which a process decides once."""
    with RankPool("cuda") as pool:
        yield pool


@pytest.fixture(scope="module")
def cpu() -> Iterator[RankPool]:
    with RankPool() as pool:
        yield pool


def diverge(policy: Path, reference: Path, param_offload: bool) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the divergence before an update, and the metrics of the update. Runs on one rank."""
    from megarl.learner.batching import Budget
    from megarl.learner.forward import ReferenceDivergence
    from megarl.learner.per_data_source import PerDataSource

    split = {"param_offload": param_offload}
    learner = make_test_learner(policy, split)
    other = make_test_learner(reference, split, optim=None, mesh=learner.mesh)
    against = ReferenceDivergence(policies=PerDataSource(other=other.forward), divergence=Divergence())
    budget = Budget(max_tokens=24, max_sequences=None)
    kl = outputs_of_all(learner, experience(), budget, against=against).kl
    metrics: dict[str, Any] = update(learner, [experience()], ACTOR, budget, against=against)
    homes = {parameter.device.type for parameter in other.modules[0].parameters()}
    assert homes == {"cpu" if param_offload else "cuda"}
    return kl, metrics


def test_values_are_not_rounded_before_gradient(cuda: RankPool) -> None:
    [numbers] = cuda.run(1, in_bfloat16, "cuda")
    assert_not_rounded(*numbers)


def test_an_offloaded_reference_is_read_all_the_same(tmp_path: Path, cuda: RankPool) -> None:
    policy, reference = (write_checkpoint(tmp_path / f"{seed}", "qwen3-tied", seed=seed) for seed in (0, 1))
    [(kl, metrics)] = cuda.run(1, diverge, policy, reference, False)
    [(kl_again, metrics_again)] = cuda.run(1, diverge, policy, reference, True)
    assert kl.max() > 0.01
    torch.testing.assert_close(kl_again, kl)
    assert metrics_again == pytest.approx(metrics, rel=1e-4)


def read(source: Path) -> torch.Tensor:
    """Return the log-probabilities of a model that never learns."""
    from megarl.learner.batching import Budget

    torch.backends.cuda.matmul.allow_tf32 = False
    learner = make_test_learner(source, {}, optim=None)
    budget = Budget(max_tokens=100, max_sequences=None)
    log_probs: torch.Tensor = outputs_of_all(learner, experience(), budget).log_probs
    return log_probs


@pytest.mark.parametrize("variant", VARIANTS)
def test_model_infers_on_cuda_as_on_cpu(tmp_path: Path, variant: str, cpu: RankPool, cuda: RankPool) -> None:
    source = write_checkpoint(tmp_path, variant)
    [expected], [found] = cpu.run(1, read, source), cuda.run(1, read, source)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def save_unlearned(source: Path, to: Path) -> None:
    from megarl.learner.checkpoint import save_learner
    from megarl.learner.staging import Staging

    writing = save_learner(make_test_learner(source, {}), to, Staging(is_pinned=True))
    writing.write()
    writing.finish()


def test_a_learner_is_saved_before_its_first_step(tmp_path: Path, cuda: RankPool) -> None:
    source, saved = write_checkpoint(tmp_path / "source", "qwen2"), tmp_path / "saved"
    saved.mkdir()
    cuda.run(1, save_unlearned, source, saved)
    [(metrics, _)] = cuda.run(1, learn_twice, source, "policy", sizes(1, 1), None, saved, True)
    assert metrics["skipped_updates"] == 0.0


def learn_deterministically(*args: Any) -> Any:
    from megarl.platform.determinism import decide_determinism

    decide_determinism(True)
    return learn_twice(*args)


def test_a_deterministic_learner_continues_exactly(tmp_path: Path) -> None:
    source, saved = write_checkpoint(tmp_path / "source", "qwen2"), tmp_path / "saved"
    saved.mkdir()
    results = []
    for save, load in ((saved, None), (None, saved)):
        with RankPool("cuda") as pool:  # cuBLAS and Transformer Engine read the decision as they start
            results += pool.run(1, learn_deterministically, source, "policy", sizes(1, 1), save, load, True)
    (metrics, outputs), (metrics_again, outputs_again) = results
    assert metrics == metrics_again
    assert torch.equal(outputs, outputs_again)


def attention_of_a_deterministic_learner(source: Path) -> set[str]:
    from megarl.platform.determinism import decide_determinism

    decide_determinism(True)
    learner = make_test_learner(source, {}, optim=None)
    parts = (part for module in learner.modules for part in module.modules())
    return {type(part.core_attention).__name__ for part in parts if hasattr(part, "core_attention")}


@pytest.mark.parametrize(("variant", "core"), [("qwen2", "PackedAttention"), ("deepseek_v3", "LatentCore")])
def test_a_deterministic_learner_has_attention_of_bounded_memory(tmp_path: Path, variant: str, core: str) -> None:
    """Also with Transformer Engine, whose deterministic attention takes the square of a row."""
    with RankPool("cuda") as pool:
        assert pool.run(1, attention_of_a_deterministic_learner, write_checkpoint(tmp_path, variant)) == [{core}]
