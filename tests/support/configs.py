"""Configurations without a fault on small real files, and the faults of configurations."""

from pathlib import Path
from typing import Any

from megarl.config.faults import ConfigError
from megarl.config.load import load_config
from megarl.data.parquet import write_rows
from tests.support.hollow import write_hollow

ROW = {"prompt": "1 + 1", "data_source": "gsm8k", "reward_model": {"ground_truth": "2"}}
SIZES = {
    "model_type": "llama",
    "hidden_size": 48,
    "vocab_size": 100,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 2048,
}
ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
TP = "tensor_model_parallel_size"


def make_model(directory: Path, **changes: Any) -> Path:
    """Write a Llama of zeros; `changes` replace fields of its config.json. Its tokenizer is an empty file."""
    write_hollow(directory, {**SIZES, **changes})
    (directory / "tokenizer.json").touch()
    return directory


def sound_arguments(directory: Path) -> list[str]:
    """Return arguments without a fault for 8 ranks; write the files that they name under `directory`."""
    make_model(directory / "model")
    write_rows(directory / "train.parquet", [ROW])
    return [
        f"data.train_files={directory}/train.parquet",
        f"actor_rollout_ref.model.path={directory}/model",
        f"critic.model.path={directory}/model",
        "trainer.n_gpus_per_node=8",
    ]


def faults(argv: list[str], *more: str, world_size: int | None = None, check_paths: bool = True) -> dict[str, str]:
    """Return the message of every fault by its key."""
    try:
        load_config([*argv, *more], world_size=world_size, check_paths=check_paths)
    except ConfigError as error:
        found: dict[str, str] = {}
        for fault in error.faults:
            found[fault.path] = "\n".join(filter(None, (found.get(fault.path), fault.message)))
        return found
    return {}
