"""Rules about the files that a configuration names: models complete, experts that divide, columns and rewards known."""

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.config.faults import ConfigError
from megarl.config.load import load_sft_config
from tests.support.configs import ACTOR, REF, ROLLOUT, ROW, SIZES, TP, faults, make_model, sound_arguments
from tests.support.tiny import VARIANTS

EP = "expert_model_parallel_size"


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    return sound_arguments(tmp_path)


@pytest.mark.parametrize(
    ("remove", "add", "message"),
    [
        ("model.safetensors", None, "has no weights (*.safetensors): add them"),
        ("model.safetensors", "pytorch_model.bin", "convert them with transformers' save_pretrained"),
        ("config.json", None, "has no config.json"),
    ],
)
def test_a_model_directory_must_be_complete(
    argv: list[str], tmp_path: Path, remove: str, add: str | None, message: str
) -> None:
    (tmp_path / "model" / remove).unlink()
    if add:
        (tmp_path / "model" / add).touch()
    found = faults(argv)
    assert found.keys() == {"actor_rollout_ref.model.path", "critic.model.path"}
    assert message in found["critic.model.path"]
    assert faults(argv, check_paths=False) == {}


def test_a_model_needs_a_tokenizer_or_another_one(argv: list[str], tmp_path: Path) -> None:
    (tmp_path / "model" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    assert "has no tokenizer: give a directory" in faults(argv)["data.tokenizer"]
    assert faults(argv, f"data.tokenizer={tmp_path}") == {}
    assert "has no tokenizer" in faults(argv, f"data.tokenizer={tmp_path / 'model'}")["data.tokenizer"]
    assert faults(argv, check_paths=False) == {}


def test_a_model_config_must_have_sizes(argv: list[str], tmp_path: Path) -> None:
    (tmp_path / "model" / "config.json").write_text('{"model_type": "vit"}')
    assert "model_type is vit; known are llama" in faults(argv)["actor_rollout_ref.model.path"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(SIZES | {"num_hidden_layers": None}))
    assert "has no num_hidden_layers" in faults(argv)["actor_rollout_ref.model.path"]


MIXTRAL = {"model_type": "mixtral", "num_local_experts": 6, "intermediate_size": 36}
ETP = "expert_tensor_parallel_size"
MODEL = "actor_rollout_ref.model"
GPT_OSS = VARIANTS["gpt_oss"] | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}


@pytest.mark.parametrize(
    ("changes", "more", "key", "message"),
    [
        ({}, [f"{ACTOR}.megatron.{EP}=2"], f"{ACTOR}.megatron.{EP}", "no experts to divide among 2 ranks"),
        ({}, [f"{ROLLOUT}.routing_replay=engine"], f"{ROLLOUT}.routing_replay", "has no experts to choose"),
        ({}, [f"{ACTOR}.routing_replay=recompute"], f"{ACTOR}.routing_replay", "has no experts to choose"),
        ({}, [f"{MODEL}.freeze_moe_router=true"], f"{MODEL}.freeze_moe_router", f"{MODEL}.path has no experts"),
        (
            MIXTRAL,
            [f"{MODEL}.override_config={{moe_config: {{}}}}"],
            f"{MODEL}.override_config",
            "freeze_moe_router is",
        ),
        (
            MIXTRAL,
            [f"{ROLLOUT}.routing_replay=engine", f"{ACTOR}.routing_replay=recompute"],
            f"{ACTOR}.routing_replay",
            "updates replay the engine's choice",
        ),
        (MIXTRAL, [f"{ACTOR}.megatron.{EP}=4"], f"{ACTOR}.megatron.{EP}", "4 does not divide the 6 experts"),
        (MIXTRAL, [f"{ACTOR}.megatron.{ETP}=8"], f"{ACTOR}.megatron.{ETP}", "8 does not divide the size 36 of an"),
        (
            MIXTRAL,
            [f"{ACTOR}.megatron.{TP}=2", f"{ACTOR}.megatron.sequence_parallel=false"],
            f"{ACTOR}.megatron.sequence_parallel",
            "the same tokens",
        ),
        (
            MIXTRAL | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 4},
            [f"{ROLLOUT}.{TP}=8"],
            f"{ROLLOUT}.{TP}",
            "engine_kwargs.enable_expert_parallel=true",
        ),
        (
            {
                "model_type": "qwen2_moe",
                "num_experts": 4,
                "moe_intermediate_size": 8,
                "shared_expert_intermediate_size": 9,
            },
            [f"{ROLLOUT}.{TP}=2"],
            f"{ROLLOUT}.{TP}",
            "2 does not divide the shared experts' size 9",
        ),
        (GPT_OSS, [f"{ROLLOUT}.routing_replay=engine"], f"{ROLLOUT}.routing_replay", "slots of their own"),
        (GPT_OSS, [f"{ROLLOUT}.routing_replay=engine_scores"], f"{ROLLOUT}.routing_replay", "slots of their own"),
        (VARIANTS["qwen3_next"], [f"{ROLLOUT}.routing_replay=engine"], f"{ROLLOUT}.routing_replay", "slots of their"),
        (GPT_OSS, [f"{ACTOR}.megatron.{TP}=2"], f"{ACTOR}.megatron.{ETP}", "cannot share the biases of an expert"),
        (GPT_OSS, [f"{ROLLOUT}.{TP}=4"], f"{ROLLOUT}.{TP}", "4 ranks cannot share 2 key-value heads in vLLM"),
        (
            GPT_OSS | {"num_local_experts": 3},
            [f"{ROLLOUT}.{TP}=2", f"{ROLLOUT}.engine_kwargs.enable_expert_parallel=true"],
            f"{ROLLOUT}.{TP}",
            "2 does not divide the 3 experts of",
        ),
        (GPT_OSS | {"intermediate_size": 36}, [], "trainer.n_gpus_per_node", "do not divide the size 36 of an expert"),
    ],
)
def test_experts_must_divide(
    argv: list[str], tmp_path: Path, changes: dict[str, Any], more: list[str], key: str, message: str
) -> None:
    path = make_model(tmp_path / "experts", **changes)
    arguments = [*argv, "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2", f"actor_rollout_ref.model.path={path}", *more]
    found = faults(arguments)
    assert found.keys() == {key}, found
    assert message in found[key]


def test_whole_experts_need_not_be_cut(argv: list[str], tmp_path: Path) -> None:
    """8 ranks cannot cut experts of 36, but can have some of the 6 whole, as can 2 trainer ranks."""
    path = make_model(
        tmp_path / "experts", **MIXTRAL | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 4}
    )
    whole = [f"{ROLLOUT}.{TP}=8", f"{ROLLOUT}.engine_kwargs.enable_expert_parallel=true"]
    trainer = [f"{ACTOR}.megatron.{TP}=4", f"{ACTOR}.megatron.{EP}=2", f"{ACTOR}.megatron.{ETP}=1"]
    model = [f"actor_rollout_ref.model.path={path}", "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2"]
    assert faults(argv, *model, *whole, *trainer) == {}


def test_uris_and_hub_ids_are_not_checked_locally(argv: list[str]) -> None:
    remote = ["data.train_files=hdfs://host/train.parquet", "actor_rollout_ref.model.path=org/name-1.5B"]
    assert faults(argv, *remote, "data.tokenizer=org/name", world_size=8) == {}
    assert faults(argv, *remote).keys() == {"data.train_files"}  # before a launch there is time to open it


def test_columns_and_rules_are_checked_before_ranks_start(argv: list[str], tmp_path: Path) -> None:
    lines = [ROW | {"data_source": source} for source in ("gsm8k", "sudoku", "chess", None)]
    (tmp_path / "odd.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "bare.jsonl").write_text('{"question": "1 + 1"}')
    (tmp_path / "own.py").write_text("def compute_score(data_source, solution_str, ground_truth, extra_info): return 1")
    files = [f"data.train_files=file://{tmp_path}/odd.jsonl", f"data.val_files={tmp_path}/bare.jsonl"]
    found = faults(argv, *files)
    unknown = found["data.train_files"].splitlines()
    assert [line.partition(": ")[0] for line in unknown] == [
        f"file://{tmp_path}/odd.jsonl, line {number}, column data_source" for number in (2, 3, 4)
    ]
    assert "no built-in reward for data source 'sudoku'" in unknown[0]
    assert "is null" in unknown[2]
    assert "no column 'prompt' (data.prompt_key names another), 'data_source' (" in found["data.val_files"]
    assert "'reward_model' (not needed with custom_reward_function.path or a reward model)" in found["data.val_files"]
    own = [f"custom_reward_function.path={tmp_path}/own.py", f"data.train_files={tmp_path}/bare.jsonl"]
    assert faults(argv, *own, "data.prompt_key=question") == {}
    assert "no column 'prompt'" in faults(argv, *own)["data.train_files"]
    assert faults(argv, *files, world_size=8) == {}  # ranks look at whole rows


def test_supervised_runs_are_checked_the_same_way(tmp_path: Path) -> None:
    (tmp_path / "pairs.parquet").touch()
    sound = [
        f"data.train_files={tmp_path}/pairs.parquet",
        f"model.path={make_model(tmp_path / 'model')}",
        "trainer.n_gpus_per_node=8",
    ]
    assert load_sft_config(sound, world_size=8).model.path == f"{tmp_path}/model"
    with pytest.raises(ConfigError) as caught:
        load_sft_config(
            [
                *sound,
                f"megatron.{TP}=8",
                "data.max_length=4096",
                "max_token_len_per_gpu=4000",
                "data.val_files=nothere",
                "optim.total_training_steps=1",
                "optim.lr_warmup_steps=2",
                "trainer.resume_mode=resume_path",
                "trainer.default_hdfs_dir=nowhere://x",
            ],
            world_size=4,
        )
    assert [fault.path for fault in caught.value.faults] == [
        "data.max_length",
        "data.val_files",
        "max_token_len_per_gpu",
        f"megatron.{TP}",
        "optim.lr_warmup_steps",
        "trainer.default_hdfs_dir",
        "trainer.n_gpus_per_node",
        "trainer.resume_from_path",
    ]
    with pytest.raises(ConfigError, match="4 pairs are fewer than the 8 data-parallel ranks"):
        load_sft_config([*sound, "data.train_batch_size=4"], world_size=None)


def test_teacher_must_exist_fit_mesh_and_share_tokens(argv: list[str], tmp_path: Path) -> None:
    teacher, loss = f"{REF}.model.path", [f"{ACTOR}.use_kl_loss=true", "algorithm.use_kl_in_reward=false"]
    exact = f"{ACTOR}.kl_loss_type=full"
    assert "no directory" in faults(argv, *loss, f"{teacher}={tmp_path}/none")[teacher]
    larger = make_model(tmp_path / "larger", hidden_size=96)
    assert faults(argv, *loss, f"{teacher}={larger}", exact) == {}
    uneven = make_model(tmp_path / "uneven", num_attention_heads=3, num_key_value_heads=3)
    assert faults(argv, *loss, f"{teacher}={uneven}", f"{ACTOR}.megatron.{TP}=2").keys() == {f"{ACTOR}.megatron.{TP}"}
    others = make_model(tmp_path / "others", vocab_size=1000)
    assert faults(argv, *loss, f"{teacher}={others}") == {}
    assert "the exact divergence" in faults(argv, *loss, f"{teacher}={others}", exact)[teacher]


def test_each_teacher_of_a_data_source_is_checked(argv: list[str], tmp_path: Path) -> None:
    teachers, larger = f"{REF}.teachers", make_model(tmp_path / "larger", hidden_size=96)
    loss = [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=full_js", "algorithm.use_kl_in_reward=false"]
    assert faults(argv, *loss, f"{teachers}={{math: {larger}}}") == {}
    assert "no directory" in faults(argv, *loss, f"{teachers}={{math: {larger}, code: {tmp_path}/none}}")[teachers]
    others = make_model(tmp_path / "others", vocab_size=1000)
    assert "the exact divergence" in faults(argv, *loss, f"{teachers}={{math: {others}}}")[teachers]
    uneven = make_model(tmp_path / "uneven", num_attention_heads=3, num_key_value_heads=3)
    cut = f"{ACTOR}.megatron.{TP}"
    assert faults(argv, *loss, f"{teachers}={{math: {uneven}}}", f"{cut}=2").keys() == {cut}
