"""From files and arguments to a configuration: merging, links, types, and every fault at once."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megarl.config.faults import ConfigError
from megarl.config.layers import override
from megarl.config.load import load_config, load_reward_train_config, load_sft_config, to_dict, to_yaml
from megarl.config.root import Config
from tests.support.programs import ROOT

MINIMAL = ("data.train_files=train.parquet", "actor_rollout_ref.model.path=org/policy", "critic.model.path=org/critic")


def load(*argv: str) -> Config:
    return load_config([*MINIMAL, *argv], world_size=None, check_paths=False)


def faults(*argv: str) -> dict[str, str]:
    """Return the message of every fault by its key."""
    with pytest.raises(ConfigError) as caught:
        load(*argv)
    return {fault.path: fault.message for fault in caught.value.faults}


def write(path: Path, tree: object) -> str:
    path.write_text(yaml.safe_dump(tree))
    return str(path)


def test_arguments_override_files_and_later_files_override_earlier(tmp_path: Path) -> None:
    first = write(tmp_path / "first.yaml", {"data": {"seed": 10, "train_batch_size": 256, "val_batch_size": 7}})
    second = write(tmp_path / "second.yml", {"data": {"seed": 20, "train_batch_size": 512}})
    config = load("data.seed=30", first, second)
    assert (config.data.seed, config.data.train_batch_size, config.data.val_batch_size) == (30, 512, 7)


@pytest.mark.parametrize("place", ["{}/lr=1e-6/config.yaml", "./lr=1e-6/config.yaml", "lr=1e-6/config.yaml"])
def test_a_path_may_have_an_equals_sign(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lr=1e-6").mkdir()
    write(Path("lr=1e-6", "config.yaml"), {"data": {"seed": 10}})
    assert load("data.val_batch_size=7", place.format(tmp_path)).data.seed == 10
    assert faults("runs/lr=1e-6/none.yaml") == {"runs/lr=1e-6/none.yaml": "no such file"}


@settings(max_examples=20)
@example("${data.seed}")
@example("1e-6")
@example("a: b")
@given(st.text(st.characters(exclude_categories=["C", "Z"], include_characters=" "), min_size=1))
def test_any_text_can_be_an_argument(text: str) -> None:
    assert load(override("trainer.project_name", text)).trainer.project_name == text


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("actor_rollout_ref.actor.optim.lr=1e-6", "actor_rollout_ref.actor.optim.lr", 1e-6),
        ("actor_rollout_ref.actor.optim.lr=3", "actor_rollout_ref.actor.optim.lr", 3.0),
        ("+trainer.save_freq=5", "trainer.save_freq", 5),
        ("trainer.val_before_train=False", "trainer.val_before_train", False),
        ("trainer.default_hdfs_dir=null", "trainer.default_hdfs_dir", None),
        ("trainer.logger=['console','mlflow']", "trainer.logger", ["console", "mlflow"]),
        ("trainer.logger=[console,tracking]", "trainer.logger", ["console", "mlflow"]),
        ("trainer.logger=jsonl", "trainer.logger", ["jsonl"]),
        ("trainer.logger=['wandb']", "trainer.logger", ["wandb"]),
        ("trainer.logger=[console,wandb]", "trainer.logger", ["console", "wandb"]),
        ("trainer.experiment_name=2024", "trainer.experiment_name", "2024"),
        ("trainer.experiment_name=run #3", "trainer.experiment_name", "run #3"),
        ("trainer.experiment_name=#3", "trainer.experiment_name", "#3"),
        ("trainer.experiment_name='run' # 3", "trainer.experiment_name", "run"),
        ("trainer.on_end=\ncd a\n  ls  # all\n", "trainer.on_end", "cd a\n  ls  # all"),
        ("trainer.logger=[console, # first\njsonl]", "trainer.logger", ["console", "jsonl"]),
        ("data.val_files=\n- a.parquet\n- b.parquet", "data.val_files", ["a.parquet", "b.parquet"]),
        ("trainer.default_hdfs_dir=null # none", "trainer.default_hdfs_dir", None),
        ("trainer.total_epochs=2 # two", "trainer.total_epochs", 2),
        ("data.train_files=[a.parquet,b.parquet]", "data.train_files", ["a.parquet", "b.parquet"]),
        ("data.train_files=hdfs://host/a=b.parquet", "data.train_files", "hdfs://host/a=b.parquet"),
        (
            "actor_rollout_ref.model.override_config.num_hidden_layers=4",
            "actor_rollout_ref.model.override_config",
            {"num_hidden_layers": 4},
        ),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps=-1", "actor_rollout_ref.actor.optim.lr_warmup_steps", None),
    ],
)
def test_shell_values_have_expected_value_and_type(argument: str, key: str, value: object) -> None:
    found: object = load(argument)
    for name in key.split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


def test_a_tilde_is_the_home_directory() -> None:
    config = load("data.train_files=~/train.parquet", "data.val_files=[~/val.parquet]")
    assert config.data.train_files == str(Path.home() / "train.parquet")
    assert config.data.val_files == [str(Path.home() / "val.parquet")]


def test_some_keys_follow_others_until_they_are_set() -> None:
    config = load(
        "data.max_prompt_length=100",
        "data.max_response_length=50",
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        "actor_rollout_ref.actor.ppo_epochs=3",
        "actor_rollout_ref.actor.megatron.param_offload=true",
        "actor_rollout_ref.actor.megatron.dtype=float32",
        "critic.megatron.dtype=bfloat16",
        "critic.ppo_epochs=1",
        "trainer.project_name=countdown",
    )
    rollout, ref = config.actor_rollout_ref.rollout, config.actor_rollout_ref.ref
    assert (rollout.prompt_length, rollout.response_length) == (100, 50)
    assert (config.critic.ppo_mini_batch_size, config.critic.ppo_epochs) == (64, 1)
    assert ref.megatron == config.actor_rollout_ref.actor.megatron
    assert (config.critic.megatron.param_offload, config.critic.megatron.dtype) == (True, "bfloat16")
    assert config.trainer.default_local_dir == "checkpoints/countdown/run"


def test_interpolations_of_the_user_reach_defaults_too(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", {"data": {"val_batch_size": "${data.train_batch_size}"}})
    whole_section = "actor_rollout_ref.ref.megatron=${critic.megatron}"
    config = load(file, whole_section, "actor_rollout_ref.ref.megatron.dtype=float32", "critic.megatron.seed=9")
    assert config.data.val_batch_size == 1024
    assert config.actor_rollout_ref.ref.megatron == replace(config.critic.megatron, dtype="float32")
    assert config.critic.megatron.seed == 9


@pytest.mark.parametrize(("use_kl_loss", "in_reward"), [("true", False), ("false", True)])
def test_kl_is_in_reward_unless_in_loss(use_kl_loss: str, in_reward: bool) -> None:
    assert load(f"actor_rollout_ref.actor.use_kl_loss={use_kl_loss}").algorithm.use_kl_in_reward is in_reward
    kept = load(f"actor_rollout_ref.actor.use_kl_loss={use_kl_loss}", "algorithm.use_kl_in_reward=true")
    assert kept.algorithm.use_kl_in_reward is True


@settings(max_examples=8)
@example(lr=1.0, name="1e-6", betas=(0.5, 0.5), layers=1)
@example(lr=1.0, name="${data.seed} \\${x}", betas=(0.5, 0.5), layers=1)
@given(
    lr=st.floats(min_value=1e-12, max_value=10.0),
    name=st.text(st.characters(categories=["L", "N"], include_characters=" :-#${}\\"), min_size=1),
    betas=st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)),
    layers=st.integers(1, 99),
)
def test_the_resolved_configuration_loads_as_itself(
    tmp_path_factory: pytest.TempPathFactory, lr: float, name: str, betas: tuple[float, float], layers: int
) -> None:
    tree = {
        "trainer": {"project_name": name.replace("${", "\\${")},
        "actor_rollout_ref": {
            "actor": {"optim": {"lr": lr, "betas": list(betas)}},
            "model": {"override_config": {"num_hidden_layers": layers}},
        },
    }
    written = tmp_path_factory.mktemp("config") / "in.yaml"
    written.write_text(json.dumps(tree, ensure_ascii=False))
    config = load(str(written))
    assert config.actor_rollout_ref.actor.optim.lr == lr
    assert config.trainer.project_name == name
    resolved = tmp_path_factory.mktemp("config") / "resolved.yaml"
    resolved.write_text(to_yaml(config))
    again = load_config([str(resolved)], world_size=None, check_paths=False)
    assert again == config
    assert to_dict(again) == to_dict(config)


def test_saved_configuration_masks_secrets_and_states_it(tmp_path: Path) -> None:
    secrets = (
        "trainer.mlflow_tracking_uri=http://ann:Swordf1sh@host:5000",
        "data.val_files=[a.parquet,'https://host/b.parquet?X-Amz-Signature=Swordf1sh']",
        "actor_rollout_ref.rollout.engine_kwargs.hf_token=Swordf1sh",
    )
    config = load(*secrets)
    assert config.trainer.mlflow_tracking_uri == "http://ann:Swordf1sh@host:5000"
    kept = to_yaml(config)
    assert "Swordf1sh" not in kept + str(to_dict(config))
    assert kept.startswith("# *** replaces a secret") and "http://***@host:5000" in kept
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(kept)
    assert load_config([str(resolved), *secrets], world_size=None, check_paths=False) == config
    assert not to_yaml(load()).startswith("#")


def test_faults_show_no_secrets() -> None:
    with pytest.raises(ConfigError) as caught:
        load("trainer.save_freq=token=Swordf1sh", "data.trian_files=x", "trainer.logger=http://ann:Swordf1sh@host")
    assert "trainer.logger" in str(caught.value) and "Swordf1sh" not in str(caught.value)


def test_all_faults_come_at_once_with_their_place(tmp_path: Path) -> None:
    file = write(
        tmp_path / "bad.yaml",
        {"data": {"train_bach_size": 8}, "actor_rollout_ref": {"rollout": {"temperature": "hot", "top_k": 0}}},
    )
    with pytest.raises(ConfigError) as caught:
        load(file, "trainer.nnodes=two", "actor_rollout_ref.actor.optim.betas=[0.9]", "algorithm.adv_estimator=grpo")
    assert str(caught.value).splitlines() == [
        "6 faults in the configuration:",
        "  actor_rollout_ref.actor.optim.betas [command line]: item 2 is missing, not [0.9]",
        "  actor_rollout_ref.rollout.n: algorithm.adv_estimator=grpo compares the responses to one prompt: "
        "write n=2 or more (5 is usual), or for single responses adv_estimator=reinforce_plus_plus",
        f"  actor_rollout_ref.rollout.temperature [{file}]: should be a valid number, not 'hot'",
        f"  actor_rollout_ref.rollout.top_k [{file}]: must be -1 (all tokens) or at least 1, not 0",
        f"  data.train_bach_size [{file}]: unknown key: did you mean data.train_batch_size?",
        "  trainer.nnodes [command line]: should be a valid integer, not 'two'",
    ]


def test_what_has_no_value_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([], world_size=None)
    assert [fault.path for fault in caught.value.faults] == ["actor_rollout_ref.model.path", "data.train_files"]
    assert "add data.train_files=..." in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("data.train_batch_size", "abc", "should be a valid integer, not 'abc'"),
        ("data.train_batch_size", "0", "should be greater than 0, not 0"),
        ("data.shuffle", "maybe", "should be a valid boolean, not 'maybe'"),
        ("data.truncation", "up", "should be 'error', 'left', 'right' or 'middle', not 'up'"),
        ("data.train_files", "[a,3]", "3 should be a valid string"),
        ("trainer.save_freq", "2.5", "should be a valid integer, not 2.5"),
        ("actor_rollout_ref.rollout.top_p", "1.5", "should be less than or equal to 1, not 1.5"),
        ("actor_rollout_ref.actor.clip_ratio", "-0.1", "should be greater than or equal to 0"),
        ("actor_rollout_ref.actor.optim.lr", "nan", "should be a finite number"),
        ("actor_rollout_ref.model.override_config", "5", "should be a valid dictionary"),
        ("critic", "5", "is a section with keys of its own"),
        ("critic", "${data.seed}", "is a section with keys of its own"),
        ("data.seed", "${nope}", "cannot be resolved"),
        ("algorithm.adv_estimator", "vtrace", "should be 'gae', 'grpo', 'rloo'"),
    ],
)
def test_wrong_values_are_named_with_what_is_allowed(key: str, value: str, message: str) -> None:
    found = faults(f"{key}={value}")
    assert list(found) == [key]
    assert message in found[key]


def test_fault_of_key_is_not_repeated_for_followers() -> None:
    assert list(faults("actor_rollout_ref.actor.megatron.dtype=fp8")) == ["actor_rollout_ref.actor.megatron.dtype"]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("nothere.yaml", "no such file"),
        ("--help", "neither a YAML file nor a.b.c=value"),
        ("--check", "write megarl config --check CONFIG.yaml"),
        ("--dry-run", "write megarl config --check CONFIG.yaml"),
        ("data.seed=[1,", "not valid YAML"),
        ("~data.seed=1", "cannot be removed"),
    ],
)
def test_arguments_that_cannot_be_read_are_faults(argument: str, message: str) -> None:
    assert message in faults(argument)[argument.partition("=")[0]]


def test_missing_file_is_only_fault_and_nearest_named(tmp_path: Path) -> None:
    (tmp_path / "grpo_gsm8k.yaml").touch()
    (tmp_path / "ppo_stories.yaml").touch()
    typed = str(tmp_path / "grpo_gsm8k.yml")
    with pytest.raises(ConfigError) as caught:
        load_config([typed, "trainer.n_gpus_per_node=3"], world_size=None)
    (fault,) = caught.value.faults
    assert fault.path == typed
    assert fault.message == f"no such file: did you mean {tmp_path / 'grpo_gsm8k.yaml'}?"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{hf_token: Sword fish", "expected ',' or '}'"),
        ("{hf_token: Sword\n  [fish", "(line 2, column "),
        ("!Sword fish", "could not determine a constructor for the tag '***' (line 1, column 1)"),
        ("[" * 3000 + "]" * 3000, "maximum recursion depth exceeded"),
        ("${Swordfish", "a link is neither ${a.b.c} nor ${oc.env:NAME} (line 1, column 1)"),
    ],
)
def test_value_with_invalid_yaml_is_not_shown(value: str, message: str, tmp_path: Path) -> None:
    key = "+actor_rollout_ref.rollout.engine_kwargs"
    file = tmp_path / "broken.yaml"
    file.write_text(f"a: {value}\n")
    for arguments in ([f"{key}={value}"], [str(file)]):
        with pytest.raises(ConfigError) as caught:
            load(*arguments)
        assert "Sword" not in str(caught.value)
    assert message in faults(f"{key}={value}")[key]


@pytest.mark.parametrize(
    ("text", "message"), [("a: [1", "not valid YAML"), ("- 1", "keys and values"), ("a: ${x", "not valid YAML")]
)
def test_files_that_cannot_be_read_are_faults(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    assert message in faults(str(file))[str(file)]


def test_an_empty_section_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "empty.yaml"
    file.write_text("data:\ncritic: {}\n")
    assert load(str(file)) == load("trainer.experiment_name=empty")


@pytest.mark.parametrize(
    ("files", "keys", "name"),
    [
        ((), (), "run"),
        (("boxes.yaml",), (), "boxes"),
        (("my boxes.yaml", "small.yml"), (), "my boxes-small"),
        (("boxes.yaml",), ("trainer.experiment_name=one",), "one"),
        (("boxes.yaml",), ("trainer.experiment_name=${config_name}-2",), "boxes-2"),
    ],
)
def test_name_left_out_is_that_of_the_files(
    files: tuple[str, ...], keys: tuple[str, ...], name: str, tmp_path: Path
) -> None:
    for file in files:
        (tmp_path / file).write_text("trainer: {project_name: all}\n")
    config = load(*(str(tmp_path / file) for file in files), *keys)
    assert config.trainer.experiment_name == name
    assert config.trainer.default_local_dir == f"checkpoints/{config.trainer.project_name}/{name}"
    again = tmp_path / "config.yaml"
    again.write_text(to_yaml(config))
    assert load(str(again)) == config


def test_root_keys_for_anchors_are_no_keys(tmp_path: Path) -> None:
    file = tmp_path / "anchors.yaml"
    file.write_text(
        "x-optim: &optim {lr: 1e-4}\nx-few: &few 8\n"
        "actor_rollout_ref: {actor: {optim: {<<: *optim}, ppo_mini_batch_size: *few}}\n"
    )
    config = load(str(file))
    assert config.actor_rollout_ref.actor.optim.lr == 1e-4
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 8
    (tmp_path / "wrong.yaml").write_text("data: {x-few: 8}\n")
    with pytest.raises(ConfigError, match="data.x-few"):
        load(str(tmp_path / "wrong.yaml"))


def test_supervised_runs_share_the_machinery(tmp_path: Path) -> None:
    argv = ["data.train_files=a.parquet", "model.path=org/base"]
    config = load_sft_config(
        [*argv, "data.micro_batch_size_per_gpu=4", "trainer.experiment_name=warmup"], world_size=None, check_paths=False
    )
    assert config.data.micro_batch_size == 4
    assert config.trainer.default_local_dir == "checkpoints/megarl_examples/warmup"
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(to_yaml(config))
    assert load_sft_config([str(resolved)], world_size=None, check_paths=False) == config
    with pytest.raises(ConfigError, match=r"data.max_lenth.*did you mean data.max_length\?"):
        load_sft_config([*argv, "data.max_lenth=4"], world_size=None, check_paths=False)


def test_a_configuration_is_checked_without_torch() -> None:
    code = "import sys, megarl.config.load, megarl.config.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("loader", "name", "expected"),
    [
        (load_config, "quickstart_sft", "is a file for megarl sft, as it has `model`"),
        (load_config, "reward_tinystories", "is a file for megarl train-reward, as it has `model`"),
        (load_sft_config, "quickstart_ppo", "is a file for megarl train, as it has `actor_rollout_ref`"),
        (load_reward_train_config, "grpo_gsm8k", "is a file for megarl train, as it has `actor_rollout_ref`"),
    ],
)
def test_a_file_of_another_command_is_named(loader: Callable[..., object], name: str, expected: str) -> None:
    file = str(ROOT / "configs" / f"{name}.yaml")
    with pytest.raises(ConfigError) as caught:
        loader([file, "data.nonsense=1"], world_size=None)
    (fault,) = caught.value.faults
    assert fault.path == file
    assert fault.message.startswith(expected)


def test_a_short_file_gets_a_hint(tmp_path: Path) -> None:
    short = write(tmp_path / "short.yaml", {"data": {"max_length": 64}})
    assert "did you mean" in faults(short)["data.max_length"]
