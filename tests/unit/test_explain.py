"""`megarl config`: every key is explained, values name their origin, and a wrong name leads to the right one."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import megarl
from megarl.commands.explain import main, try_here
from megarl.config.faults import ConfigError
from megarl.config.load import load_config
from megarl.config.reference import keys_of, sections_of
from megarl.config.root import COMMANDS
from megarl.config.schema import Schema
from megarl.data.tokenizer import Tokenizer
from tests.support.sentencepieces import train_sentencepiece
from tests.support.tiny import write_checkpoint
from tests.support.workspace import NUM_TOKENS

Captured = pytest.CaptureFixture[str]


def shown(capsys: Captured, *argv: str, code: int = 0) -> str:
    assert main(argv) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


@pytest.fixture
def config(tmp_path: Path) -> str:
    (path := tmp_path / "mine.yaml").write_text(yaml.safe_dump({"critic": {"optim": {"lr": 3e-5}}}))
    return str(path)


@pytest.mark.parametrize("root", COMMANDS)
def test_the_reference_has_every_key_and_section(root: type) -> None:
    schema = Schema.of(root)
    assert keys_of(root).keys() == schema.leaves.keys()
    assert sections_of(root).keys() == schema.sections
    assert all(key.text for key in keys_of(root).values())


def test_a_key_has_type_default_and_meaning(capsys: Captured) -> None:
    printed = shown(capsys, "critic.optim.lr")
    assert printed.startswith("critic.optim.lr\n  Peak learning rate")
    assert "default  1e-05" in printed
    assert "Read only if algorithm.adv_estimator is gae" in printed
    assert "  value" not in printed


def test_key_name_may_omit_leading_sections(capsys: Captured) -> None:
    printed = shown(capsys, "optim.lr")
    assert "actor_rollout_ref.actor.optim.lr\n" in printed
    assert "critic.optim.lr\n" in printed


def test_a_value_names_its_origin(capsys: Captured, config: str) -> None:
    printed = shown(capsys, "optim.lr", config, "actor_rollout_ref.actor.optim.lr=1e-4", *REQUIRED)
    assert f"value    3e-05   ({config})" in printed
    assert "value    0.0001   (command line)" in printed
    assert "value    fixed   (default)" in shown(capsys, "kl_ctrl.type", config, *REQUIRED)


def test_directory_with_equals_sign_is_a_run(capsys: Captured, tmp_path: Path) -> None:
    (tmp_path / "lr=1e-6").mkdir()
    (tmp_path / "lr=1e-6" / "config.yaml").write_text(yaml.safe_dump({"critic": {"optim": {"lr": 3e-5}}}))
    assert "value    3e-05" in shown(capsys, "critic.optim.lr", str(tmp_path / "lr=1e-6"), *REQUIRED)


REQUIRED = ("data.train_files=x.parquet", "actor_rollout_ref.model.path=org/x", "critic.model.path=org/x")


def test_a_follower_shows_its_value(capsys: Captured) -> None:
    printed = shown(capsys, "critic.ppo_epochs", "actor_rollout_ref.actor.ppo_epochs=4", *REQUIRED)
    assert "default  follows actor_rollout_ref.actor.ppo_epochs" in printed
    assert "value    4   (default)" in printed


def test_what_is_written_is_listed(capsys: Captured, config: str) -> None:
    lines = shown(capsys, config, *REQUIRED, "trainer.nnodes=1").splitlines()
    width = len("actor_rollout_ref.model.path = org/x")
    assert lines == [
        config,
        f"  {'critic.optim.lr = 3e-05':{width}}  (default 1e-05)",
        "command line",
        "  actor_rollout_ref.model.path = org/x  (required)",
        f"  {'critic.model.path = org/x':{width}}  (default '')",
        f"  {'data.train_files = x.parquet':{width}}  (required)",
        f"  {'trainer.nnodes = 1':{width}}  (the default)",
    ]


def test_secrets_are_hidden(capsys: Captured) -> None:
    printed = shown(capsys, *REQUIRED, "trainer.mlflow_tracking_uri=https://ann:Swordf1sh@host")
    assert "mlflow_tracking_uri" in printed
    assert "Swordf1sh" not in printed


def test_sections_are_listed_and_explained(capsys: Captured) -> None:
    contents = shown(capsys)
    assert "algorithm (" in contents
    section = shown(capsys, "algorithm.*")
    assert "algorithm.adv_estimator\n" in section
    assert "sections in it: algorithm.custom_estimator, algorithm.kl_ctrl" in section


@pytest.mark.parametrize(
    ("name", "meant"),
    [("adv_estimatr", "algorithm.adv_estimator"), ("trainer.nnode", "trainer.nnodes"), ("qqqq", "lists the sections")],
)
def test_a_wrong_name_leads_to_the_right_one(name: str, meant: str, capsys: Captured) -> None:
    assert meant in shown(capsys, name, code=2)


def test_the_command_that_knows_the_keys_is_found(capsys: Captured) -> None:
    assert "model.path\n" in shown(capsys, "model.path", "model.path=org/x", "data.train_files=a", "data.max_length=9")
    assert "center_rewards_coefficient" in shown(capsys, "center_rewards_coefficient")
    assert "data.response_key" in shown(capsys, "--of", "sft", "data")


def test_faults_follow_what_was_asked(capsys: Captured) -> None:
    assert "did you mean trainer.nnodes?" in shown(capsys, "optim.lr", *REQUIRED, "trainer.nnode=1", code=2)


def test_check_finds_what_the_command_would(capsys: Captured) -> None:
    printed = shown(capsys, "--check", *REQUIRED, "trainer.n_gpus_per_node=3", code=2)
    assert "no such file: x.parquet" in printed


def with_local_model(directory: Path, rows: Sequence[int]) -> list[str]:
    """Return the arguments of a GRPO run from a tiny model, whose prompts are so many times as long."""
    model = write_checkpoint(directory / "model", "llama")
    train_sentencepiece(model / "tokenizer.model", vocab_size=NUM_TOKENS, normalization_rule_name="identity")
    constant = {"data_source": "s", "reward_model": {"ground_truth": "1"}}
    table = pa.Table.from_pylist([{"prompt": "8 7 = " * count, **constant} for count in rows])
    pq.write_table(table, directory / "rows.parquet")
    (directory / "reward.py").write_text("def compute_score(**_):\n    return 1.0\n")
    return [
        *(f"data.train_files={directory}/rows.parquet", f"actor_rollout_ref.model.path={model}"),
        *("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", "data.train_batch_size=2"),
        "trainer.n_gpus_per_node=1",
        *("actor_rollout_ref.actor.ppo_mini_batch_size=2", "data.max_prompt_length=48", "data.max_response_length=8"),
        *(f"custom_reward_function.path={directory}/reward.py", f"trainer.default_local_dir={directory}/run"),
    ]


@pytest.mark.parametrize(
    ("rows", "argument", "fault"),
    [
        ([1, 3, 2], "data.max_prompt_length=48", ""),
        ([1, 2, 90], "data.max_prompt_length=48", "row 2, column prompt: the prompt has "),
        ([1, 2, 90], "data.filter_overlong_prompts=true", ""),
        ([90, 90], "data.filter_overlong_prompts=true", "every prompt is longer than data.max_prompt_length=48"),
        ([1, 2], "data.apply_chat_template=true", "has no chat template: set data.chat_template"),
    ],
)
def test_check_encodes_all_prompts_of_local_models(
    tmp_path: Path, capsys: Captured, rows: list[int], argument: str, fault: str
) -> None:
    arguments = [*with_local_model(tmp_path, rows), argument]
    printed = shown(capsys, "--check", *arguments, code=2 if fault else 0)
    assert fault in printed


def test_program_gets_the_faults_of_the_command(tmp_path: Path) -> None:
    keys = dict(word.split("=", maxsplit=1) for word in with_local_model(tmp_path, [1, 2, 90]))
    values = {key: yaml.safe_load(value) for key, value in keys.items()}
    (fault,) = megarl.check(set=values)
    assert fault.path == "data.train_files" and "row 2, column prompt: the prompt has " in fault.message
    assert megarl.check(set=values | {"data.filter_overlong_prompts": True}) == ()


def test_configurations_share_a_tokenizer(tmp_path: Path) -> None:
    arguments = with_local_model(tmp_path, [1, 2])
    tokenizers: dict[str, Tokenizer] = {}
    for word in ("actor_rollout_ref.actor.optim.lr=1", "trainer.project_name=p", "data.apply_chat_template=false"):
        try_here(load_config([*arguments, word], world_size=None), tokenizers)
    assert len(tokenizers) == 2


@pytest.mark.parametrize("word", ["Makefile", "docs", "y.txt", "no/such", "optim.lr", "none.yaml", "none.yml"])
def test_check_refuses_the_words_that_the_command_refuses(word: str, capsys: Captured) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config([word, *REQUIRED], world_size=None)
    printed = shown(capsys, "--check", word, *REQUIRED, code=2)
    assert printed == f"{refused.value}\n"
    assert f"  {word}: " in printed


def test_nothing_heavy_is_imported(config: str) -> None:
    program = (
        "import sys; from megarl.commands.explain import main; main(sys.argv[1:]); "
        "assert not {'torch', 'megatron', 'vllm', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program, "optim.lr", config], check=True)
