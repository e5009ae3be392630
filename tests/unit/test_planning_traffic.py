"""Test the traffic of a sync for real models and splits: docs/resharding.md's figures and plain arithmetic."""

import json
import math
from pathlib import Path

import pytest

from megarl.config.load import load_config
from megarl.models.architecture import hf_shapes, read_architecture
from megarl.planning.traffic import Links, SyncTraffic, sync_traffic
from megarl.planning.workload import Workload, workload_of

MODELS = Path(__file__).parents[2] / "configs" / "models"
MEGATRON, ROLLOUT = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout"
LINKS = Links(inside=400e9, between=45e9)
GB = 10**9


def workload(model: str, *argv: str, ranks: int, tp: int, pp: int, engine: int) -> Workload:
    config = load_config(
        [
            "data.train_files=train.parquet",
            f"actor_rollout_ref.model.path={MODELS / model}",
            "algorithm.adv_estimator=grpo",
            f"{ROLLOUT}.n=8",
            f"trainer.n_gpus_per_node={min(ranks, 8)}",
            f"trainer.nnodes={-(-ranks // 8)}",
            f"{MEGATRON}.tensor_model_parallel_size={tp}",
            f"{MEGATRON}.pipeline_model_parallel_size={pp}",
            f"{ROLLOUT}.tensor_model_parallel_size={engine}",
            *argv,
        ],
        world_size=None,
        check_paths=False,
    )
    architecture = read_architecture(json.loads((MODELS / model / "config.json").read_text()))
    return workload_of(config, policy=architecture, critic=None)


def traffic(model: str, *argv: str, data_last: bool = False, **split: int) -> SyncTraffic:
    return sync_traffic(workload(model, *argv, **split), ranks_per_node=8, links=LINKS, data_last=data_last)


# (model, split): GB received on average and at most, times that of gathering, GB from other nodes on average.
FIGURES = [
    ("llama-3-8b", {"ranks": 8, "tp": 4, "pp": 2, "engine": 4}, 2.0, 2.0, 7.0, 0.0),
    ("llama-3-8b", {"ranks": 8, "tp": 8, "pp": 1, "engine": 2}, 7.0, 8.0, 2.0, 0.0),
    ("llama-3-8b", {"ranks": 8, "tp": 2, "pp": 1, "engine": 2}, 0.0, 0.0, math.inf, 0.0),
    ("llama-3-8b", {"ranks": 8, "tp": 4, "pp": 2, "engine": 8}, 1.8, 2.0, 8.0, 0.0),
    ("llama-3-8b", {"ranks": 8, "tp": 2, "pp": 4, "engine": 1}, 14.1, 14.3, 1.0, 0.0),
    ("llama-3-70b", {"ranks": 64, "tp": 8, "pp": 4, "engine": 8}, 13.2, 13.4, 10.3, 13.2),
    ("llama-3-70b", {"ranks": 64, "tp": 8, "pp": 4, "engine": 4}, 34.2, 35.3, 4.0, 26.5),
]


@pytest.mark.parametrize(("model", "split", "mean", "most", "ratio", "between"), FIGURES)
def test_figures(model: str, split: dict[str, int], mean: float, most: float, ratio: float, between: float) -> None:
    found = traffic(model, **split)
    assert found.received_mean / GB == pytest.approx(mean, abs=0.06)
    assert found.received_max / GB == pytest.approx(most, abs=0.06)
    assert found.ratio == pytest.approx(ratio, rel=0.02)
    assert found.between_mean / GB == pytest.approx(between, abs=0.3)
    assert found.inside_mean + found.between_mean == pytest.approx(found.received_mean, abs=1)


def test_gathering_receives_all_but_the_own_shard() -> None:
    split = {"ranks": 8, "tp": 4, "pp": 2, "engine": 4}
    model = workload("llama-3-8b", **split).policy
    full = 2 * sum(math.prod(shape) for shape in hf_shapes(model).values())
    norms = 2 * (2 * 32 + 1) * 4096  # whole on the four ranks of their stage
    own = (full - norms) / 8 + norms / 2
    assert traffic("llama-3-8b", **split).gathered_mean == pytest.approx(full - own, abs=1)


def test_sync_seconds_follow_slower_kind_of_link() -> None:
    inside = traffic("llama-3-8b", ranks=8, tp=4, pp=2, engine=4)
    assert inside.seconds == pytest.approx(inside.received_max / 400e9)
    between = traffic("llama-3-70b", ranks=64, tp=8, pp=4, engine=8)
    assert between.seconds == pytest.approx(between.between_max / 45e9)


def test_adjacent_pipeline_stages_keep_sync_inside_node() -> None:
    split = {"ranks": 64, "tp": 2, "pp": 4, "engine": 2}
    as_it_is, reordered = traffic("llama-3-8b", **split), traffic("llama-3-8b", **split, data_last=True)
    assert as_it_is.between_mean / GB == pytest.approx(6.0, abs=0.1)
    assert reordered.between_mean == 0
    assert reordered.received_mean == pytest.approx(as_it_is.received_mean, rel=0.05)


def test_experts_on_256_ranks() -> None:
    """DeepSeek-V3, pipeline 16 x expert 16 to engines of 32; here with stages of 4, 14 times 4, and 1 layers."""
    stages = "{num_layers_in_first_pipeline_stage: 4, num_layers_in_last_pipeline_stage: 1}"
    found = traffic(
        "deepseek-v3",
        f"{MEGATRON}.expert_model_parallel_size=16",
        f"{MEGATRON}.override_transformer_config={stages}",
        ranks=256,
        tp=1,
        pp=16,
        engine=32,
    )
    assert found.received_mean / GB == pytest.approx(43.6, abs=0.1)
    assert found.received_max / GB == pytest.approx(43.7, abs=0.2)
    assert found.gathered_mean / GB == pytest.approx(1335, abs=1)
    assert found.ratio == pytest.approx(30.6, abs=0.1)
    assert found.between_mean / GB == pytest.approx(42.5, abs=0.1)
