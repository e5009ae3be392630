"""`megarl convert` of other trainers: each flag, and each key of a file, is in the result and means the same."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.commands.convert.__main__ import convert
from megarl.commands.convert.converted import Converted
from megarl.commands.convert.flags import Flags
from megarl.commands.convert.launch import find_launch
from megarl.commands.convert.write import to_text
from megarl.config.root import Config
from megarl.config.schema import Schema

OPENRLHF = "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path org/m --rollout.batch_size 64"
SLIME = "python3 train.py --hf-checkpoint org/m --rollout-batch-size 32 --num-rollout 9"
NEMO = "python examples/run_grpo.py policy.model_name=org/m grpo.num_prompts_per_step=8"
TRL = "trl grpo --model_name_or_path org/m --num_generations 4"
SWIFT = "NPROC_PER_NODE=8 megatron rlhf --rlhf_type grpo --model org/m --external_plugins a/grpo/plugin.py"
CORRECTION = "algorithm.rollout_correction.rollout_is"
REJECTION = "algorithm.rollout_correction.rollout_rs"
ADAPTED = ("model.lora_rank", "model.lora_alpha", "model.target_modules")


@pytest.mark.parametrize(
    ("command", "leaves", "decisions"),
    [
        (
            "trl grpo --model_name_or_path org/m --learning_rate 2e-6 --num_generations=4"
            " --per_device_train_batch_size 8 --beta 0.1 --bf16 --strange",
            {"model.path": "org/m", "actor.optim.lr": 2e-6, "rollout.n": 4, "actor.optim.weight_decay": 0.0},
            ("per_device_train_batch_size=8", "strange=true"),
        ),
        (
            "ray job submit -- python3 -m openrlhf.cli.train_ppo_ray --pretrain org/m --actor.adam.lr 3e-7"
            " --train.batch_size 128 --rollout.batch_size 64 --rollout.n_samples_per_prompt 8",
            {"model.path": "org/m", "actor.optim.lr": 3e-7, "rollout.n": 8, "actor.clip_ratio_c": 1e30},
            ("data.train_files",),
        ),
        (
            'A=(--hf-checkpoint org/m --rollout-batch-size 32)\npython3 train.py "${A[@]}" --num-rollout 300'
            " --use-kl-loss --n-samples-per-prompt 8 --eval-prompt-data aime x.jsonl",
            {"model.path": "org/m", "actor.use_kl_loss": True, "rollout.n": 8, "actor.entropy_coeff": 0.0},
            ("eval_prompt_data=[aime, x.jsonl]",),
        ),
        (
            "uv run python examples/run_grpo_math.py --config a.yaml policy.model_name=org/m"
            " grpo.num_generations_per_prompt=16 loss_fn.ratio_clip_max=0.28",
            {"model.path": "org/m", "rollout.n": 16, "actor.clip_ratio_high": 0.28},
            ("config=a.yaml",),
        ),
    ],
    ids=["TRL", "OpenRLHF", "slime", "NeMo-RL"],
)
def test_flags_of_other_trainers(command: str, leaves: dict[str, object], decisions: tuple[str, ...]) -> None:
    found, _ = convert(command)
    assert {key: found.leaves[f"actor_rollout_ref.{key}"] for key in leaves} == leaves
    assert set(decisions) <= found.decisions.keys()


@pytest.mark.parametrize(
    ("command", "expected", "decided", "resting"),
    [
        (f"{TRL} --use_peft", (16, 32, ["q_proj", "v_proj"]), [], []),
        (
            f"{TRL} --lora_alpha 8 --use_peft --lora_target_modules all-linear --use_dora true --lora_dropout 0.1",
            (16, 8, "all-linear"),
            ["use_dora=true"],
            [],
        ),
        (f"{TRL} --lora_r 8 --lora_dropout 0.1", (None,) * 3, [], ["lora_r=8", "lora_dropout=0.1"]),
        (f"{TRL} --lora_r 8 --use_peft false", (None,) * 3, [], ["lora_r=8"]),
        (
            f"{OPENRLHF} --ds.lora.rank 4 --ds.lora.target_modules q_proj v_proj",
            (4, None, ["q_proj", "v_proj"]),
            [],
            [],
        ),
        (f"{OPENRLHF} --lora_rank 4 --lora_dropout 0.1", (4, None, None), [], []),
        (f"{NEMO} policy.megatron_cfg.peft.enabled=true", (8, 32, None), [], []),
        (
            f"{NEMO} policy.dtensor_cfg.lora_cfg.enabled=True policy.dtensor_cfg.lora_cfg.dim=128"
            " policy.dtensor_cfg.lora_cfg.dropout=0.1 policy.megatron_cfg.peft.enabled=false"
            " policy.megatron_cfg.peft.dim=8 policy.megatron_cfg.peft.dropout=0.1",
            (128, 32, None),
            [],
            ["policy.megatron_cfg.peft.dim=8", "policy.megatron_cfg.peft.dropout=0.1"],
        ),
    ],
)
def test_adapters_of_other_trainers(
    command: str, expected: tuple[object, ...], decided: list[str], resting: list[str]
) -> None:
    found, _ = convert(command)
    assert tuple(found.leaves.get(f"actor_rollout_ref.{key}") for key in ADAPTED) == expected
    assert [one for one in found.decisions if re.search("lora|peft|dora", one)] == decided
    assert [one for one, why in found.dropped.items() if why.startswith("counts only with")] == resting
    links = [f"${{actor_rollout_ref.{key}}}" for key in ADAPTED]
    assert [found.leaves.get(f"critic.{key}") for key in ADAPTED] == (links if OPENRLHF in command else [None] * 3)


def test_file_of_another_trainer(tmp_path: Path) -> None:
    file = tmp_path / "grpo.yaml"
    file.write_text(
        "grpo: {num_prompts_per_step: 32}\npolicy: {model_name: org/m, odd: 1}\nloss_fn: {ratio_clip_c: null}\n"
    )
    found, _ = convert(str(file))
    assert found.leaves["data.train_batch_size"] == 32
    assert "policy.odd=1" in found.decisions and "loss_fn.ratio_clip_c=null" in found.dropped


@pytest.mark.parametrize(
    ("command", "leaves"),
    [
        (f"{OPENRLHF} --rollout.n_samples_per_prompt 8", {"actor.ppo_mini_batch_size": 16}),
        (f"{OPENRLHF} --train_batch_size 64 --n_samples_per_prompt 2", {"actor.ppo_mini_batch_size": 32}),
        (f"{SLIME} --n-samples-per-prompt 8 --global-batch-size 256", {"actor.ppo_mini_batch_size": 32}),
        (
            f"{SWIFT} --num_generations 8 --global_batch_size 128 --steps_per_generation 4",
            {"actor.ppo_mini_batch_size": 16, "data.train_batch_size": 64},
        ),
        (
            f"{OPENRLHF} --algo.advantage.estimator dr_grpo --actor.eps_clip_low_high 0.2 0.3",
            {
                "algorithm.adv_estimator": "grpo",
                "algorithm.norm_adv_by_std_in_grpo": False,
                "actor.clip_ratio_low": 0.2,
                "actor.clip_ratio_high": 0.3,
            },
        ),
        (f"{OPENRLHF} --algo.kl.init_coef 0.1", {"algorithm.kl_ctrl.kl_coef": 0.1}),
        (
            f"{OPENRLHF} --algo.kl.init_coef 0.1 --algo.kl.use_loss --algo.kl.estimator k2",
            {"actor.use_kl_loss": True, "actor.kl_loss_coef": 0.1, "actor.kl_loss_type": "k2"},
        ),
        (
            f"{SLIME} --adam-beta2 0.98 --lr-decay-style cosine --recompute-granularity selective",
            {
                "actor.optim.betas": [0.9, 0.98],
                "actor.optim.warmup_style": "cosine",
                "model.enable_gradient_checkpointing": "selective",
            },
        ),
        (
            f"{SLIME} --num-steps-per-rollout 4 --lr 1e-6 --min-lr 1e-7 --lr-decay-style cosine",
            {"actor.ppo_mini_batch_size": 8, "actor.optim.min_lr_ratio": 0.1},
        ),
        (
            f"{SLIME} --use-tis --tis-clip-low 0.5 --tis-clip 3"
            " --custom-tis-function-path slime.backends.megatron_utils.loss.icepop_function",
            {CORRECTION: "token", f"{CORRECTION}_threshold_lower": 0.5, f"{CORRECTION}_threshold": 3},
        ),
        (
            f"{OPENRLHF} --algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop",
            {CORRECTION: "token", f"{CORRECTION}_threshold_lower": 0.5, f"{CORRECTION}_threshold": 5.0},
        ),
        (
            f"{OPENRLHF} --algo.advantage.is_correction_enable --algo.advantage.is_correction_type seq-mask-tis"
            " --algo.advantage.is_correction_threshold 0.9 1.1",
            {
                CORRECTION: "token",
                f"{CORRECTION}_threshold": 1e30,
                REJECTION: "geometric",
                f"{REJECTION}_threshold": 1.1,
            },
        ),
        (
            f"{NEMO} loss_fn.use_importance_sampling_correction=true",
            {CORRECTION: "token", f"{CORRECTION}_threshold": 1e30},
        ),
        (
            f"{NEMO} loss_fn.use_importance_sampling_correction=true loss_fn.truncated_importance_sampling_type=tis"
            " loss_fn.truncated_importance_sampling_ratio=3 loss_fn.sequence_level_importance_ratios=true",
            {CORRECTION: "sequence", f"{CORRECTION}_threshold": 3},
        ),
        (
            f"{NEMO} loss_fn.use_importance_sampling_correction=true loss_fn.truncated_importance_sampling_type=icepop"
            " loss_fn.truncated_importance_sampling_ratio=3 loss_fn.truncated_importance_sampling_ratio_min=0.5",
            {CORRECTION: "token", f"{CORRECTION}_threshold": 3, f"{CORRECTION}_threshold_lower": 0.5},
        ),
        (
            f"{NEMO} policy.max_total_sequence_length=4096 data.max_input_seq_length=1024"
            " policy.generation.max_new_tokens=3072",
            {"data.max_prompt_length": 1024, "data.max_response_length": 3072},
        ),
        (
            f"{SLIME} --decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 5",
            {
                "actor.megatron.override_transformer_config": {
                    "num_layers_in_first_pipeline_stage": 7,
                    "num_layers_in_last_pipeline_stage": 5,
                }
            },
        ),
        (f"{TRL} --beta 0.1", {"actor.use_kl_loss": True, "actor.kl_loss_coef": 0.1}),
        (f"{TRL} --beta 0.0 --loss_type dr_grpo", {"actor.loss_agg_mode": "seq-mean-token-sum-norm"}),
        (f"{TRL} --use_peft --lora_r 4", {"model.lora_rank": 4, "model.lora_alpha": 32}),
        (
            f"{NEMO} grpo.use_dynamic_sampling=true",
            {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "score"},
        ),
        (
            f"{NEMO} policy.megatron_cfg.enabled=true policy.megatron_cfg.optimizer.lr=2 policy.optimizer.kwargs.lr=1",
            {"actor.optim.lr": 2},
        ),
        (
            f"{NEMO} policy.generation.vllm_kwargs.block_size=16 ++policy.generation.vllm_kwargs.kernel_config.a=b",
            {"rollout.engine_kwargs": {"block_size": 16, "kernel_config": {"a": "b"}}},
        ),
        (f"{SWIFT} --tuner_type lora --lora_rank 16", {"model.lora_rank": 16, "actor.optim.lr": 1e-4}),
    ],
)
def test_values_of_flags_mean_the_same(command: str, leaves: dict[str, object]) -> None:
    found, _ = convert(command)
    sections = ("actor.", "model.", "rollout.")
    keys = {key: f"actor_rollout_ref.{key}" if key.startswith(sections) else key for key in leaves}
    assert {key: found.leaves.get(keys[key]) for key in leaves} == leaves
    assert all(keys[key] in found.comments for key in leaves)


@pytest.mark.parametrize(
    ("command", "undecided"),
    [
        (f"{OPENRLHF} --train.batch_size 100 --rollout.n_samples_per_prompt 8", "train.batch_size=100"),
        (f"{OPENRLHF} --algo.dynamic_filtering_range 0.1 0.9", "algo.dynamic_filtering_range=[0.1, 0.9]"),
        (f"{OPENRLHF} --algo.advantage.is_correction_enable", "algo.advantage.is_correction_enable=true"),
        (
            f"{OPENRLHF} --algo.advantage.is_correction_enable --actor.policy_loss_type gspo"
            " --algo.advantage.is_correction_type icepop",
            "algo.advantage.is_correction_enable=true",
        ),
        (TRL.replace("grpo", "rloo") + " --beta 0.1", "rloo=true"),
        (TRL.replace("grpo", "dpo") + " --beta 0.1", "dpo=true"),
        (f"{NEMO} grpo.seed=1 stray", "stray=true"),
        (f"{SLIME} --num-steps-per-rollout 5", "num_steps_per_rollout=5"),
        (f"{SLIME} --use-tis --tis-clip-low 0.5", "tis_clip_low=0.5"),
        (f"{NEMO} grpo.seed=1 ~policy.scheduler", "~policy.scheduler=true"),
        (
            f"{NEMO} policy.max_total_sequence_length=4096 data.max_input_seq_length=1024"
            " policy.generation.max_new_tokens=4096",
            "policy.max_total_sequence_length=4096",
        ),
        (f"{NEMO} grpo.seed=1", "config=examples/configs/grpo_math_1B.yaml"),
        (f"{SLIME} --optimizer sgd", "optimizer=sgd"),
        (f"{SLIME} --attention-dropout 0.1", "attention_dropout=0.1"),
        (f"{SWIFT} --loss_type real", "loss_type=real"),
        (f"{SWIFT} --steps_per_generation 4", "steps_per_generation=4"),
        (f"{NEMO} grpo.async_grpo.enabled=true", "grpo.async_grpo.enabled=true"),
        (f"{NEMO} policy.megatron_cfg.optimizer.optimizer=sgd", "policy.megatron_cfg.optimizer.optimizer=sgd"),
    ],
)
def test_value_without_equivalent_is_decided(command: str, undecided: str) -> None:
    found, _ = convert(command)
    assert undecided in found.decisions and undecided not in found.dropped


def test_flag_without_its_switch_is_dropped() -> None:
    found, _ = convert(f"{NEMO} grpo.use_dynamic_sampling=false grpo.dynamic_sampling_max_gen_batches=3")
    assert "counts only" in found.dropped["grpo.dynamic_sampling_max_gen_batches=3"]
    found, _ = convert(f"{TRL} --lora_r 4")
    assert "counts only" in found.dropped["lora_r=4"] and "actor_rollout_ref.model.lora_rank" not in found.leaves


def test_file_is_merged_over_its_defaults(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 4}\n"
        "policy: {model_name: org/m, generation: {temperature: 0.5, val_temperature: '${.temperature}'},\n"
        "  train_global_batch_size: '${grpo.num_prompts_per_step}', sequence_packing: {tokens: '${mul:2, 3}'}}\n"
    )
    file = tmp_path / "recipe.yaml"
    file.write_text("defaults: base.yaml\ncluster: {gpus_per_node: 2}\npolicy: {generation: {temperature: 0.7}}\n")
    found, _ = convert(str(file))
    assert found.leaves["data.train_batch_size"] == 32 and found.leaves["trainer.n_gpus_per_node"] == 2
    assert found.leaves["actor_rollout_ref.rollout.val_kwargs.temperature"] == 0.7
    assert found.leaves["actor_rollout_ref.actor.ppo_mini_batch_size"] == 8
    assert "policy.sequence_packing.tokens=$(...)" in found.dropped
    (tmp_path / "base.yaml").unlink()
    file.write_text("defaults: [base.yaml, recipe.yaml]\ngrpo: {seed: 3}\n")
    found, _ = convert(str(file))
    assert found.leaves["data.seed"] == 3 and any(key.startswith("defaults=") for key in found.decisions)


def test_link_to_an_unknown_word_is_decided(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("policy: {model_name: org/m, tokenizer: {name: '${policy.model_name}'}}\n")
    script = tmp_path / "run.sh"
    script.write_text("python run_grpo.py --config a.yaml policy.model_name=$(find)/m\n")
    found, _ = convert(str(script))
    assert "data.tokenizer" not in found.leaves
    assert {"policy.model_name=$(...)/m", "policy.tokenizer.name=$(...)/m"} <= found.decisions.keys()


def test_launch_of_a_file_alone_is_found(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text("rlhf_type: grpo\nmodel: org/m\nnum_generations: 4\ntrain: {gpus: 4}\n")
    script = tmp_path / "run.sh"
    script.write_text('D="$(cd "$(dirname "$0")" && pwd)"\nmegatron rlhf --use_ray true --config "$D/grpo.yaml"\n')
    found, _ = convert(str(script))
    assert found.leaves["actor_rollout_ref.rollout.n"] == 4 and "train.gpus=4" in found.decisions
    found, _ = convert("uv run examples/run_grpo.py --config nowhere.yaml")
    assert "config=nowhere.yaml" in found.decisions


@pytest.mark.parametrize(
    "option", ["--config $(realpath ..)/examples/configs/a.yaml", "--config=examples/configs/a.yaml", ""]
)
def test_file_of_a_launch_is_read(tmp_path: Path, option: str) -> None:
    configs = tmp_path / "examples" / "configs"
    configs.mkdir(parents=True)
    for name in ("a.yaml", "grpo_math_1B.yaml"):
        (configs / name).write_text(
            "grpo: {num_prompts_per_step: 32, seed: 7}\n"
            "policy: {train_global_batch_size: '${grpo.num_prompts_per_step}'}\n"
        )
    script = tmp_path / "tests" / "functional" / "run.sh"
    script.parent.mkdir(parents=True)
    script.write_text(f"{NEMO.replace('=8', '=16')} logger.log_dir=$(pwd)/x {option}\n")
    found, _ = convert(str(script))
    assert [found.leaves[key] for key in ("data.train_batch_size", "data.seed")] == [16, 7]
    assert found.leaves["actor_rollout_ref.actor.ppo_mini_batch_size"] == 16  # the link leads to the word of the launch
    assert "its keys are in this file" in found.dropped.values()
    assert not any(key.startswith("config=") for key in found.decisions)
    assert "logger.log_dir=$(...)/x" in found.dropped


@pytest.mark.parametrize("table", Flags.tables(), ids=lambda table: table.name)
def test_tables_of_flags_name_keys_that_exist(table: Flags) -> None:
    assert table.source and table.date and table.programs
    leaves = Schema.of(Config).leaves
    changes = table.when.values()
    same = [*table.same.values(), *(key for change in changes for key in change.get("same", {}).values())]
    meanings = [meaning for cases in table.cases.values() for meaning in cases.values() if not isinstance(meaning, str)]
    changed = [
        meaning for change in changes for cases in change.get("cases", {}).values() for meaning in cases.values()
    ]
    meanings += [meaning for meaning in changed if not isinstance(meaning, str)]
    assert set(table.sections.values()) <= leaves.keys()
    sizes = [table.samples, table.quotients, *table.lengths.values()]
    sets = [table.sets, *sizes, *meanings, *(change.get("sets", {}) for change in changes)]
    assert {key.partition("[")[0] for key in same} | {key for one in sets for key in one} <= leaves.keys()
    assert {key.partition("[")[0] for key in same if "[" in key} <= table.sets.keys()
    tables = (table.same, table.cases, table.dropped, table.idle)
    flags = [flag for one in tables for flag in one]
    assert len(flags) == len(set(flags))
    counted = {flag for counts in table.samples.values() for flag in counts}
    assert set(table.older.values()) <= {*flags, *table.decide, *counted}


def flags_of(table: Flags) -> list[str]:
    """Return all flags that a table has."""
    tables = (table.same, table.cases, table.idle, table.dropped, table.decide, table.older)
    counted = [*table.samples.values(), *table.quotients.values(), *(each.values() for each in table.lengths.values())]
    found = {flag for one in (*tables, *counted) for flag in one} | {*table.lengths}
    return sorted(flag.replace("*", "x") for flag in found)


@pytest.mark.parametrize("table", Flags.tables(), ids=lambda table: table.name)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_no_flag_is_dropped_silently(table: Flags, data: st.DataObject) -> None:
    values = st.sampled_from(["1", "8", "0", "0.5", "true", "false", "null", "text", "[1, 2]", "icepop", "$X", "$(x)"])
    switches = st.sampled_from([condition.partition("=")[::2] for condition in table.when] or [("x", "1")])
    written = dict(data.draw(st.lists(switches, max_size=2)))
    written |= data.draw(st.dictionaries(st.sampled_from(flags_of(table)), values, min_size=1, max_size=6))
    words = " ".join(
        f"'--{flag}={value}'" if "$" not in value else f"--{flag}={value}" for flag, value in written.items()
    )
    program = next(iter(table.programs)).replace("*", "")
    launched = find_launch(f"python {program}{'' if program.endswith('.py') else '.py'} --a=1 --b=2 {words}")
    found = Converted()
    table.fill(found, launched.words)
    text = to_text(found, "a script")
    named = {flag for flag in written if flag in text or table.older.get(flag, flag) in text or flag in found.leaves}
    assert written.keys() - named == set()
