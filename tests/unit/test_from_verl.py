"""The measure of launch scripts: which start as they are, which are converted, and whether a key is silent."""

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megarl.commands.convert.launch import Launched
from megarl.commands.convert.write import to_text
from megarl.config.root import Config
from megarl.config.schema import Schema
from scripts.from_verl import Figures, Script, is_loadable, measure, read_scripts, silent, silent_conversions

STARTS = """
MODEL=${MODEL:-org/model}
python3 -m verl.trainer.main_ppo --config-path=./config --config-name=ppo_megatron_trainer \\
    model_engine=megatron data.train_files="$HOME/train.parquet" data.val_files=$HOME/test.parquet \\
    data.train_batch_size=64 actor_rollout_ref.model.path="$MODEL" critic.model.path="$MODEL" \\
    actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.rollout.mode=async \\
    actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.rollout.n=4 \\
    algorithm.adv_estimator=grpo trainer.n_gpus_per_node=8 trainer.logger='["console"]'
"""
LACKS = STARTS.replace("trainer.n_gpus_per_node=8", "actor_rollout_ref.rollout.name=hf")


def script(*words: str) -> Script:
    return Script(Launched(program="verl.trainer.main_ppo", words=words, line=1, others=0, stray=()))


def test_scripts_of_a_directory_are_measured(tmp_path: Path) -> None:
    for name, text in {
        "a/starts.sh": STARTS,
        "lacks.sh": LACKS,
        "no_launch.sh": "echo data.train_files=a",
        "generates.sh": STARTS.replace("main_ppo", "main_generation"),
        "fill_in.sh": STARTS.replace("org/model", ""),
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    scripts = list(read_scripts(tmp_path))
    assert measure(scripts) == Figures(scripts=3, start=2, start_aside=3, converted=3, undecided=1, silent=0)


KEYS = sorted(Schema.of(Config).leaves)
VALUES = st.sampled_from(["1", "0.5", "true", "null", "text", "[a, b]", "async", "vllm"])


@settings(max_examples=100, suppress_health_check=list(HealthCheck), deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(KEYS)
        | st.from_regex(r"(actor_rollout_ref|trainer|reward)(\.[a-z_]{2,9}){1,3}", fullmatch=True),
        VALUES,
        min_size=1,
        max_size=6,
    )
)
def test_no_key_is_dropped_silently(written: dict[str, str]) -> None:
    one = script(*(f"{key}={value}" for key, value in written.items()))
    found = one.convert()
    assert silent(one, one.faults()) == set()
    assert silent_conversions(one, found, to_text(found, "a script")) == set()


def test_converted_script_has_defaults_of_verl() -> None:
    paths = ("data.train_files=text", "actor_rollout_ref.model.path=org/model", "critic.model.path=org/model")
    found = script(*paths).convert()
    assert not found.decisions and is_loadable(to_text(found, "a script"))
    assert found.leaves["actor_rollout_ref.actor.entropy_coeff"] == 0
    assert found.leaves["actor_rollout_ref.actor.shuffle"] is False
    assert found.leaves["algorithm.use_kl_in_reward"] is False
    assert "verl's default" in found.comments["algorithm.use_kl_in_reward"]
