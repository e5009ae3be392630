"""The verdict of `megarl verify`, its ranks, and the change that all shards make alike."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megarl.config.faults import ConfigError
from megarl.config.load import load_verify_config
from megarl.reshard.layout import Box, Piece, row_major, whole
from megarl.weight_sync.verification import Deviation, SyncCost, VerifyReport, _places, _slabs
from tests.support.tiny import write_checkpoint

ACTOR, ROLLOUT = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout"
SOUND = VerifyReport(
    differences={
        "trainer-engine": Deviation(5e-5, 1e-6),
        "trainer-transformers": Deviation(5e-5, 1e-6),
    },
    roundtrip_mismatches=[],
    sync=SyncCost(bytes_received=[8, 0], seconds=0.5, peak_extra_bytes=16),
    lower_bounds=[8, 0],
    is_float32=True,
)


def test_a_sound_report_says_what_was_measured() -> None:
    report = SOUND.report(probability_limit=0.01)
    assert report["ok"]
    assert report["max_abs_logprob_diff"] == 5e-5
    assert (report["bytes_received_max"], report["bytes_received_mean"], report["bytes_lower_bound"]) == (8, 4.0, 8)
    assert (report["peak_extra_bytes"], report["seconds"], report["roundtrip_exact"]) == (16, 0.5, True)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (
            {"differences": {"trainer-engine": Deviation(2e-4, 1e-6)}},
            "trainer-engine: log-probabilities differ by",
        ),
        (
            {"differences": {"trainer-engine": Deviation(float("nan"), 0.0)}},
            "trainer-engine: log-probabilities",
        ),
        (
            {"differences": {"a-b": Deviation(0.5, 0.02)}, "is_float32": False},
            "a-b: probabilities differ by 0.02",
        ),
        ({"roundtrip_mismatches": ["model.norm.weight"]}, "1 tensors changed between loading and export: model.norm"),
        ({"lower_bounds": [8, 1]}, "rank 1 received 0 bytes, but lacked 1"),
    ],
)
def test_every_problem_is_reported_and_fails_verification(changes: dict, fault: str) -> None:
    report = replace(SOUND, **changes).report(probability_limit=0.01)
    assert not report["ok"]
    assert len(report["faults"]) == 1
    assert report["faults"][0].startswith(fault)


def test_bfloat16_is_judged_by_probabilities() -> None:
    rough = replace(SOUND, is_float32=False, differences={"trainer-engine": Deviation(0.5, 0.009)})
    assert rough.report(probability_limit=0.01)["ok"]
    assert not rough.report(probability_limit=0.005)["ok"]


@pytest.mark.parametrize("worse", [Deviation(0.2, 0.1), Deviation(float("nan"), 0.1)])
def test_the_worse_of_two_comparisons_counts(worse: Deviation) -> None:
    for merged in (worse.or_larger(Deviation(0.1, 0.01)), Deviation(0.1, 0.01).or_larger(worse)):
        assert not merged.max_abs_logprob < 0.2
        assert merged.mean_prob == 0.1


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_checkpoint(tmp_path_factory.mktemp("model") / "qwen3_moe", "qwen3_moe")
    for file in directory.glob("*.safetensors"):
        file.unlink()
    return directory


@pytest.mark.parametrize(
    ("sizes", "num_ranks"),
    [
        ([], 1),
        ([f"{ROLLOUT}.tensor_model_parallel_size=2"], 2),
        ([f"{ACTOR}.tensor_model_parallel_size=2", f"{ACTOR}.pipeline_model_parallel_size=2"], 4),
        ([f"{ACTOR}.expert_model_parallel_size=4", f"{ROLLOUT}.tensor_model_parallel_size=2"], 4),
        ([f"{ACTOR}.context_parallel_size=2", "trainer.n_gpus_per_node=4"], 4),
    ],
)
def test_verification_without_launcher_uses_fewest_possible_ranks(bare: Path, sizes: list[str], num_ranks: int) -> None:
    config = load_verify_config([f"actor_rollout_ref.model.path={bare}", *sizes], world_size=None)
    assert config.trainer.n_gpus_per_node == num_ranks
    policy = config.actor_rollout_ref
    assert policy.actor.megatron.dtype == policy.rollout.dtype == "float32"


def test_a_file_may_give_the_ranks(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "ranks.yaml").write_text("trainer: {n_gpus_per_node: 4}\n")
    argv = [str(tmp_path / "ranks.yaml"), f"actor_rollout_ref.model.path={bare}"]
    assert load_verify_config(argv, world_size=None).trainer.n_gpus_per_node == 4


def test_a_launcher_says_how_many_ranks_there_are(bare: Path) -> None:
    config = load_verify_config([f"actor_rollout_ref.model.path={bare}", "trainer.nnodes=2"], world_size=8)
    assert config.trainer.n_gpus_per_node == 4


@pytest.mark.parametrize(
    ("argument", "fault"),
    [
        (f"{ACTOR}.tensor_model_parallel_size=3", "3 does not divide the 4 attention heads"),
        (f"{ACTOR}.expert_model_parallel_size=16", "16 does not divide the 8 experts"),
        (f"{ROLLOUT}.tensor_model_parallel_size=8", "8 does not divide the 4 attention heads"),
        ("actor_rollout_ref.model.override_config={model_type: mamba}", "mamba"),
        ("data.train_batch_size=8", "unknown key"),
    ],
)
def test_impossible_settings_are_configuration_faults(bare: Path, argument: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        load_verify_config([f"actor_rollout_ref.model.path={bare}", argument], world_size=None)


def test_slabs_tile_piece_and_index_full_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.weight_sync.verification.CHUNK", 6)
    shape = (7, 4)
    numbers = torch.arange(28.0).view(shape)
    box = Box((1, 1), (6, 4))
    piece = Piece("w", box, "w", 5, row_major(shape), torch.float32)  # a view into the full tensor itself
    slabs = list(_slabs(piece))
    assert [slab.box.shape for slab in slabs] == [(2, 3), (2, 3), (1, 3)]
    for slab in slabs:
        torch.testing.assert_close(_places(slab.box, shape).float(), slab.view(numbers))
    assert torch.equal(_places(whole((3,)), (3,)), torch.arange(3.0, dtype=torch.float64))
