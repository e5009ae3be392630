"""The free dictionaries: their fields are checked with all other faults, before anything starts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.config.faults import ConfigError
from megarl.config.load import load_config
from tests.support.configs import make_model

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TRANSFORMER, ENGINE = f"{ACTOR}.megatron.override_transformer_config", f"{ROLLOUT}.engine_kwargs"
FILES = ("data.train_files", "actor_rollout_ref.model.path")
VARIABLES = "data.apply_chat_template_kwargs"
OVERRIDE = "actor_rollout_ref.model.override_config"


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    make_model(tmp_path / "model")
    (tmp_path / "train.parquet").touch()
    model = tmp_path / "model"
    return [
        f"data.train_files={tmp_path}/train.parquet",
        f"actor_rollout_ref.model.path={model}",
        "algorithm.adv_estimator=grpo",
        f"{ROLLOUT}.n=2",
        "trainer.n_gpus_per_node=1",
    ]


def faults(argv: list[str], *more: str) -> dict[str, str]:
    """Return the faults but those of the files, which are empty."""
    try:
        load_config([*argv, *more], world_size=None)
    except ConfigError as error:
        found = {fault.path: fault.message for fault in error.faults}
        return {path: said for path, said in found.items() if path not in FILES}
    return {}


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (f"{VARIABLES}.tools=x", "tools is set by megarl itself: leave it out"),
        (f"{VARIABLES}.enable_thinking=[1]", "enable_thinking is [1]: give true, false, null, a finite number"),
        (f"{TRANSFORMER}.nonsense=1", "Megatron-Core has no field nonsense: see"),
        (f"{TRANSFORMER}.attention_dropot=0.1", "no field attention_dropot: did you mean attention_dropout?"),
        (f"{TRANSFORMER}.hidden_dropout=much", "hidden_dropout should be a valid number"),
        (f"{TRANSFORMER}.num_layers=[2]", "num_layers should be a valid integer"),
        (f"{ENGINE}.max_num_seq=3", "vLLM has no argument max_num_seq: did you mean max_num_seqs?"),
        (f"{ENGINE}.dtype=float32", "dtype follows from other keys"),
        (f"{ENGINE}.vllm.enforce_eager=true", "enforce_eager follows from other keys"),
        (f"{ENGINE}.enable_eplb=true", "enable_eplb changes the engine's weights"),
        (f"{OVERRIDE}.attention_dropout=0.1", "dropout in training is megatron.override_transformer_config"),
        (f"{OVERRIDE}.hidden_dropout=0.1", "dropout in training is megatron.override_transformer_config"),
        (f"{OVERRIDE}.classifier_dropout=0.1", "dropout is a field of megatron.override_transformer_config"),
        (f"{OVERRIDE}.logit_scale=2", "logit_scale 2: logits are not scaled here; write 1"),
        (f"{OVERRIDE}.num_hidden_layer=4", "did you mean num_hidden_layers?"),
        (f"{OVERRIDE}.model_config.rope=3", "model_config is not read"),
    ],
)
def test_nonexistent_field_is_configuration_fault(argv: list[str], argument: str, message: str) -> None:
    found = faults(argv, f"+{argument}", "trainer.save_frq=1")
    (dictionary,) = found.keys() - {"trainer.save_frq"}
    assert argument.startswith(dictionary) and message in found[dictionary]


@pytest.mark.parametrize(
    "argument",
    [
        f"{VARIABLES}.enable_thinking=false",
        f"{TRANSFORMER}.recompute_granularity=selective",
        f"{TRANSFORMER}.recompute_modules=[core_attn]",
        f"{TRANSFORMER}.attention_dropout=0.1",
        f"{ENGINE}.block_size=16",
        f"{OVERRIDE}.attention_dropout=0.0",
        f"{OVERRIDE}.num_hidden_layers=4",
        f"{OVERRIDE}.hidden_size=48",
        f"{OVERRIDE}.rope_theta=500000.0",
    ],
)
def test_fields_that_are_there_are_accepted(argv: list[str], argument: str) -> None:
    assert faults(argv, f"+{argument}") == {}


def test_template_variables_need_an_applied_template(argv: list[str]) -> None:
    found = faults(argv, f"+{VARIABLES}.enable_thinking=false", "data.apply_chat_template=false")
    assert found[VARIABLES].startswith("no chat template is applied with data.apply_chat_template=false")


def test_neither_library_is_imported_without_a_dictionary(argv: list[str]) -> None:
    program = (
        "import json, sys; from megarl.config.load import load_config\n"
        "try: load_config(json.loads(sys.argv[1]), world_size=None, check_paths=False)\n"
        "finally: print({name for name in sys.modules} & {'megatron', 'vllm', 'torch'})"
    )
    said = subprocess.run([sys.executable, "-c", program, json.dumps(argv)], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "set()"
