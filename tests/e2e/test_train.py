"""The main job from its command line: trained, stopped, resumed, exported and evaluated, under every launcher.

Launches cost time, so each serves several tests.
"""

import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from megarl.checkpoint.state import State
from megarl.commands import chat, evaluate, export, train
from megarl.data.order import Position
from megarl.platform.safe_names import mlflow_key
from megarl.rollout.config import SyncSection
from megarl.rollout.limits import Limits
from megarl.section import flatten
from megarl.tracking.jsonl import read_jsonl
from tests.support.forked import run_forked, run_job
from tests.support.outcomes import metrics_of, mlflow_runs, samples_in, wandb_history
from tests.support.programs import ROOT, succeed
from tests.support.tiny import write_checkpoint
from tests.support.workspace import MAX_RESPONSE_LENGTH, Workspace, ppo_arguments, train_arguments

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", 2, sys.executable, "-m")
LAUNCH_S = 300
PARITY_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    digits = sum(character.isdigit() for character in solution_str)
    assert (data_source, ground_truth) == ("default", None)
    return {"score": digits / 10, "acc": digits % 2 if extra_info["target"] % 3 else 0}
"""


@pytest.fixture(scope="module")
def small_run(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run TinyZero's script on its kind of data with a small Pythia; return the run directory and what it printed."""
    root = tmp_path_factory.mktemp("small")
    model = write_checkpoint(root / "pythia", "gpt_neox")
    shutil.copy(workspace.model / "tokenizer.model", model)
    data = root / "data"
    data.mkdir()
    for source, name in ((workspace.train, "train"), (workspace.val, "test")):
        table = pq.read_table(source)
        messages = [[{"role": "user", "content": text}] for text in table["prompt"].to_pylist()]
        place = table.column_names.index("prompt")
        pq.write_table(table.set_column(place, "prompt", pa.array(messages)), data / f"{name}.parquet")
    output = succeed(
        "env",
        *(f"PYTHON={sys.executable}", f"BASE_MODEL={model}", f"DATA_DIR={data}"),
        *("N_GPUS=2", "ROLLOUT_TP_SIZE=2", "EXPERIMENT_NAME=countdown"),
        *("bash", ROOT / "scripts" / "train_tiny_zero.sh"),
        "data.train_batch_size=24",
        "data.val_batch_size=8",
        "data.max_prompt_length=64",
        "data.filter_overlong_prompts=true",
        f"data.max_response_length={MAX_RESPONSE_LENGTH}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=12",
        "actor_rollout_ref.actor.ppo_micro_batch_size=4",
        "actor_rollout_ref.rollout.val_kwargs={n: 2, do_sample: true, temperature: 1.0}",
        "trainer.logger=['wandb','console','mlflow']",
        "trainer.save_freq=2",
        "trainer.save_huggingface=true",
        "trainer.async_save=true",
        "trainer.test_freq=2",
        "trainer.total_epochs=1",
        timeout_s=LAUNCH_S,
        cwd=root,
    )
    return root / "checkpoints" / "TinyZero" / "countdown", output


def test_the_small_script_trains_validates_and_saves(small_run: tuple[Path, str]) -> None:
    run_dir, output = small_run
    assert "step 1/2  reward" in output
    assert len(re.findall(r"^step 2/2  reward .*  validation countdown", output, re.MULTILINE)) == 1
    assert len(re.findall(r"^step 2/2 ", output, re.MULTILINE)) == 1
    assert f"evaluate    megarl evaluate {Path('checkpoints', 'TinyZero', 'countdown')}" in output
    assert "actor mini-batches" in output  # how a batch is divided
    assert "data/prompts at step 0" in output  # how many prompts there are, and how many were too long
    assert "Traceback" not in output

    assert (run_dir / "latest_checkpointed_iteration.txt").read_text() == "2"
    checkpoint = run_dir / "global_step_2"
    state = State.read(checkpoint)
    assert (state.step, state.kl_coef, state.position) == (2, 0.001, Position(epoch=1))
    for part in ("actor/.metadata", "critic/.metadata", "random_states.pt"):
        assert (checkpoint / part).is_file(), part
    assert AutoTokenizer.from_pretrained(checkpoint / "huggingface").eos_token_id == 2
    policy = AutoModelForCausalLM.from_pretrained(checkpoint / "huggingface")
    critic = AutoModelForSequenceClassification.from_pretrained(checkpoint / "huggingface_critic")
    assert policy.gpt_neox.final_layer_norm.weight.shape == critic.gpt_neox.final_layer_norm.weight.shape
    assert critic.score.weight.abs().max() > 0
    sealed = json.loads((checkpoint / "manifest.json").read_text())
    assert {"huggingface/model.safetensors", "huggingface_critic/model.safetensors"} < sealed.keys()


def test_the_small_script_is_in_mlflow(small_run: tuple[Path, str]) -> None:
    run_dir, _ = small_run
    client, [run] = mlflow_runs(run_dir, "TinyZero")
    assert (run.info.run_name, run.info.status) == ("countdown", "FINISHED")
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert run.data.params == {mlflow_key(key): str(value) for key, value in flatten(config)}
    assert run.data.params["actor_rollout_ref.rollout.response_length"] == str(MAX_RESPONSE_LENGTH)  # resolved
    for name in ("critic/score/mean", "actor/pg_loss", "critic/vf_loss", "actor/entropy", "timing_s/gen"):
        assert [metric.step for metric in client.get_metric_history(run.info.run_id, name)] == [1, 2], name
    [score] = client.get_metric_history(run.info.run_id, "val/test_score/countdown/bare")
    assert score.step == 2
    mean, best = (run.data.metrics[f"val/countdown/bare/{name}"] for name in ("mean_at_2", "best_at_2/mean"))
    assert best >= mean == score.value
    assert mean <= run.data.metrics["val/countdown/bare/maj_at_2"] <= best  # one of two different answers is drawn
    bfloat16 = Limits.of(SyncSection(), "bfloat16")
    assert 0.0 < run.data.metrics["training/rollout_mismatch"] < bfloat16.mismatch_stop / 8
    assert run.data.metrics["sync/check_probs_diff_mean"] < bfloat16.probs_stop / 8
    tables = [file.path for file in client.list_artifacts(run.info.run_id, "val")]
    assert tables == ["val/generations.json"]


def test_small_script_reads_text_prompts_unchanged(small_run: tuple[Path, str], workspace: Workspace) -> None:
    _, output = small_run
    assert "the content of its messages, as the tokenizer has no chat template" in output
    shown = output.partition("as the model reads it")[2]
    assert any(text in shown for text in pq.read_table(workspace.train)["prompt"].to_pylist())


def test_small_script_logs_to_wandb_offline(small_run: tuple[Path, str]) -> None:
    run_dir, _ = small_run
    steps = {row["_step"]: row for row in wandb_history(run_dir)}
    assert {1, 2} <= steps.keys()
    assert all("critic/score/mean" in steps[step] for step in (1, 2))


@pytest.fixture(scope="module")
def resumed_run(
    workspace: Workspace, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[int, dict[str, Any]]]:
    """Run two steps, damage the second save, resume to step 3; return directory and metrics before the resume."""
    run_dir = tmp_path_factory.mktemp("ppo") / "run"
    arguments = [*ppo_arguments(workspace, run_dir), "trainer.logger=[jsonl,mlflow]", "trainer.profile_steps=[3]"]
    log = run_dir.parent / "train"
    run_job(2, train.main, *arguments, "trainer.total_training_steps=2", log=log, timeout_s=LAUNCH_S)
    before = metrics_of(run_dir)
    (run_dir / "global_step_2").rename(run_dir / ".global_step_2.part")
    shutil.rmtree(run_dir / ".global_step_2.part" / "critic")
    (run_dir / "latest_checkpointed_iteration.txt").write_text("1")
    run_job(2, train.main, *arguments, "trainer.total_training_steps=3", log=log, timeout_s=LAUNCH_S)
    return run_dir, before


def test_ppo_over_a_pipeline(resumed_run: tuple[Path, dict[int, dict[str, Any]]]) -> None:
    _, steps = resumed_run
    assert list(steps) == [0, 1, 2]
    assert "actor/lr" not in steps[1]  # only the critic learns
    assert steps[2]["actor/lr"] == steps[1]["critic/lr"] == 1e-3
    assert steps[2]["reward/error_rate"] == steps[2]["reward/timeout_rate"] == 0.0
    # without divergence the controller goes down by 0.2 * 8 samples / 100
    assert [steps[step]["actor/reward_kl_penalty_coeff"] for step in (1, 2)] == pytest.approx([0.1, 0.0984])
    assert steps[2]["actor/pg_clipfrac"] > 0.0  # the second epoch is off-policy
    assert steps[2]["actor/ptx_loss"] > 1.0
    assert max(steps[step]["training/rollout_probs_diff_max"] for step in (1, 2)) < 1e-5


def test_crashed_run_resumes_exactly(resumed_run: tuple[Path, dict[int, dict[str, Any]]]) -> None:
    run_dir, before = resumed_run
    after = metrics_of(run_dir)
    assert list(after) == [0, 1, 2, 3]
    validation = "val/test_score/countdown/bare"
    assert validation in after[3]
    assert validation in before[2]  # there it was the last step
    for step in (0, 1, 2):
        expected = {name: value for name, value in before[step].items() if step == 0 or not name.startswith("val/")}
        assert after[step] == expected, f"step {step}"
    assert after[3]["actor/reward_kl_penalty"] != 0.0  # the actor of step 2 is not the one of step 0
    assert after[3]["training/rollout_probs_diff_max"] < 1e-5
    assert [path.name for path in sorted(run_dir.glob("global_step_*"))] == [f"global_step_{n}" for n in (1, 2, 3)]
    assert not list(run_dir.glob(".global_step_*"))
    assert sorted(path.name for path in (run_dir / "profile").iterdir()) == [
        f"step_3_rank_{rank}.json.gz" for rank in range(2)
    ]

    client, [run] = mlflow_runs(run_dir, "megarl_examples")
    assert run.info.status == "FINISHED"
    assert {metric.step for metric in client.get_metric_history(run.info.run_id, "critic/vf_loss")} == {1, 2, 3}


def test_replay_of_saved_samples_gives_bitwise_equal_update(
    workspace: Workspace, resumed_run: tuple[Path, dict[int, dict[str, Any]]], tmp_path: Path
) -> None:
    run_dir, _ = resumed_run
    samples = run_dir / "samples"
    names = [f"step_{n}.parquet" for n in (1, 2, 3)] + [f"val_step_{n}.parquet" for n in (0, 2, 3)]
    assert sorted(path.name for path in samples.iterdir()) == names
    kept, original = samples_in(samples / "step_3.parquet"), metrics_of(run_dir)
    assert sum(kept["score"].to_pylist()) / 8 == pytest.approx(original[3]["critic/score/mean"])
    shown = [row["response"] for row in read_jsonl(run_dir / "val_generations.jsonl") if row["step"] == 3]
    assert samples_in(samples / "val_step_3.parquet")["response"].to_pylist() == shown

    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    arguments = [*ppo_arguments(workspace, run_dir), "trainer.total_training_steps=3", "trainer.resume_mode=disable"]
    run_job(2, train.main, *arguments, "--replay", samples, log=tmp_path / "replay", timeout_s=LAUNCH_S)
    again = metrics_of(run_dir / "replay")
    assert list(again) == [1, 2, 3]
    for step, metrics in again.items():
        not_learning = ("val/", "reward/", "archive/", "rollout/", "training/rollout_mismatch")  # no engine, no gate
        expected = {name: value for name, value in original[step].items() if not name.startswith(not_learning)}
        expected["reward/masked_rate"] = original[step]["reward/masked_rate"]
        assert metrics == expected, f"step {step}"
    after = {path: path.stat().st_mtime_ns for path in before if path != run_dir}
    assert after.items() <= before.items()  # the run and its samples are untouched


@pytest.fixture(scope="module")
def exported(resumed_run: tuple[Path, dict[int, dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported")
    printed = run_job(1, export.main, resumed_run[0], out / "model", log=out / "export", timeout_s=LAUNCH_S)
    assert f"from {resumed_run[0] / 'global_step_3'}; README.md describes the model" in printed
    assert f"megarl chat {shlex.quote(str(out / 'model'))}" in printed
    return out / "model"


def test_exported_actor_changed_and_matches_engine_responses(
    workspace: Workspace, resumed_run: tuple[Path, dict[int, dict[str, Any]]], exported: Path
) -> None:
    actor = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    start = AutoModelForCausalLM.from_pretrained(workspace.model, dtype=torch.float32).state_dict()
    assert actor.state_dict().keys() == start.keys()
    assert all(not torch.equal(tensor, start[name]) for name, tensor in actor.state_dict().items())

    tokenizer = AutoTokenizer.from_pretrained(exported)
    rows = [row for row in read_jsonl(resumed_run[0] / "val_generations.jsonl") if row["step"] == 3]
    prompts = pq.read_table(workspace.val)["prompt"].to_pylist()
    assert len(rows) == len(prompts)
    for row, prompt in zip(rows, prompts, strict=True):
        limits = {"max_new_tokens": MAX_RESPONSE_LENGTH, "eos_token_id": 2, "pad_token_id": 0}
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        response = actor.generate(ids, do_sample=False, **limits)[0, ids.shape[1] :].tolist()
        last = max((number for number, token in enumerate(response, 1) if token not in (2, 0)), default=0)
        assert row["response"] == tokenizer.decode(response[:last])


def test_the_exported_model_has_a_card(
    workspace: Workspace, resumed_run: tuple[Path, dict[int, dict[str, Any]]], exported: Path
) -> None:
    card = (exported / "README.md").read_text()
    way = f"Reinforcement learning (`adv_estimator: gae`); the reward is that of `{workspace.reward}`."
    assert f"` for 3 steps. {way}\n" in card
    history = metrics_of(resumed_run[0])
    score = "val/test_score/countdown/bare"
    assert f"| validation, countdown/bare | {history[0][score]:.4g} | {history[3][score]:.4g} |" in card


def test_chat_continues_a_text_as_transformers_do(workspace: Workspace, exported: Path, tmp_path: Path) -> None:
    prompt = pq.read_table(workspace.val)["prompt"].to_pylist()[0]
    options = ["--prompt", prompt, "--temperature", "0", "--max-tokens", str(MAX_RESPONSE_LENGTH)]
    log = tmp_path / "chat.txt"
    assert run_forked(chat.main, [str(exported), *options], log=log, timeout_s=LAUNCH_S) == 0
    tokenizer = AutoTokenizer.from_pretrained(exported)
    actor = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    inputs = tokenizer(prompt, return_tensors="pt")["input_ids"]
    output = actor.generate(inputs, do_sample=False, max_new_tokens=MAX_RESPONSE_LENGTH, eos_token_id=2, pad_token_id=0)
    expected = tokenizer.decode(output[0, inputs.shape[1] :], skip_special_tokens=True)
    assert expected.strip()
    assert expected.strip() in log.read_text()


def evaluate_for_a_program(argv: list[str]) -> None:
    """Evaluate, and drop what goes to standard error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    evaluate.main(argv)


def test_evaluate_scores_checkpoint_under_different_split(
    resumed_run: tuple[Path, dict[int, dict[str, Any]]], tmp_path: Path
) -> None:
    run_dir, _ = resumed_run
    output = run_job(
        *(2, evaluate_for_a_program, run_dir),
        *(
            f"{model}.megatron.{size}"
            for model in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic", "reward_model")
            for size in ("pipeline_model_parallel_size=1", "tensor_model_parallel_size=2")
        ),
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        log=tmp_path / "evaluate",
        timeout_s=LAUNCH_S,
    )
    [line] = output.splitlines()
    score = metrics_of(run_dir)[3]["val/test_score/countdown/bare"]
    found = json.loads(line)
    assert (found["step"], found["val/test_score/countdown/bare"]) == (3, pytest.approx(score))


def test_val_only_prints_scores_and_changes_no_record(
    resumed_run: tuple[Path, dict[int, dict[str, Any]]], tmp_path: Path
) -> None:
    run_dir, _ = resumed_run

    def records() -> dict[Path, bytes]:
        """Return the contents of all files but the job's log."""
        files = (path for path in run_dir.rglob("*") if path.is_file() and path.parent.name != "log")
        return {path: path.read_bytes() for path in files}

    before = records()
    configuration = [str(run_dir / "config.yaml"), f"trainer.default_local_dir={run_dir}"]
    output = run_job(2, train.main, *configuration, "trainer.val_only=true", log=tmp_path / "val", timeout_s=LAUNCH_S)
    assert f"validation countdown/bare {metrics_of(run_dir)[3]['val/test_score/countdown/bare']:g}" in output
    assert records() == before


@pytest.mark.long
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is missing (apt: openmpi-bin)")
def test_open_mpi_runs_grpo_with_two_engines(workspace: Workspace, tmp_path: Path) -> None:
    succeed(
        *(*MPIRUN, "megarl.commands.train", *train_arguments(workspace, tmp_path)),
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",  # one update per step: the first has no divergence yet
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.kl_loss_type=full",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
        "actor_rollout_ref.rollout.n=2",
        "algorithm.adv_estimator=grpo",
        "trainer.val_before_train=false",
        "trainer.total_training_steps=2",
        timeout_s=LAUNCH_S,
    )
    first, second = metrics_of(tmp_path).values()
    assert first["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert second["actor/kl_loss"] > 1e-6
    assert not {"critic/vf_loss", "actor/reward_kl_penalty"} & first.keys()
    assert max(step["training/rollout_probs_diff_max"] for step in (first, second)) < 1e-5


def test_dynamic_sampling_and_remax_sample_extra_responses(workspace: Workspace, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(PARITY_REWARD)
    prompts = tmp_path / "prompts.jsonl"  # messages for a tokenizer without a template; no data for a rule
    with prompts.open("w") as file:
        for row in pq.read_table(workspace.train).to_pylist():
            target = {"target": row["reward_model"]["ground_truth"]["target"]}
            chat = [{"role": "user", "content": row["prompt"]}]
            file.write(json.dumps({"prompt": chat, "extra_info": json.dumps(target)}) + "\n")
    run_dir = tmp_path / "run"
    output = run_job(
        *(2, train.main, *train_arguments(workspace, run_dir)),
        f"data.train_files={prompts}",
        "data.val_files=null",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
        "actor_rollout_ref.actor.policy_loss.loss_mode=gpg",
        "actor_rollout_ref.rollout.n=4",
        f"custom_reward_function.path={reward}",
        "algorithm.adv_estimator=remax",
        "algorithm.use_kl_in_reward=false",
        "algorithm.filter_groups.enable=true",
        "trainer.val_before_train=false",
        "trainer.save_freq=1",
        "trainer.total_training_steps=2",
        log=tmp_path / "train",
        timeout_s=LAUNCH_S,
    )
    assert output.count("the first prompt as the model reads it") == 1
    assert "the content of its messages, as the tokenizer has no chat template" in output
    num_batches = 0
    for step, metrics in metrics_of(run_dir).items():
        counts = {name: metrics[f"train/num_groups_{name}"] for name in ("kept", "alike", "surplus")}
        assert counts["kept"] == 8
        judged, batches = sum(counts.values()), metrics["train/num_gen_batches"]
        assert judged > 8 * (batches - 1)  # of the last batch only as many as were needed
        assert metrics["train/num_gen_batches"] > 1  # the responses to a third of the problems always score alike
        of = {name: (metrics[f"critic/{name}/min"], metrics[f"critic/{name}/max"]) for name in ("score", "baselines")}
        assert 0.0 <= of["baselines"][0] <= of["baselines"][1]
        assert metrics["critic/advantages/max"] <= of["score"][1] - of["baselines"][0] + 1e-6
        assert metrics["critic/advantages/min"] >= of["score"][0] - of["baselines"][1] - 1e-6
        assert metrics["training/rollout_probs_diff_max"] < 1e-5  # also of what was sampled in a later batch
        num_batches += int(metrics["train/num_gen_batches"])
        epoch, batch = divmod(num_batches, 6)  # of 8 prompts in the 48
        state = json.loads((run_dir / f"global_step_{step}" / "state.json").read_text())
        assert state["position"] == {"epoch": epoch, "offset": 8 * batch}


def test_larger_teacher_of_data_source_is_evaluated_exactly(workspace: Workspace, tmp_path: Path) -> None:
    teacher = write_checkpoint(tmp_path / "teacher", "llama", seed=5, hidden_size=128, num_hidden_layers=4)
    shutil.copy(workspace.model / "tokenizer.model", teacher)
    [source] = {*pq.read_table(workspace.train)["data_source"].to_pylist()}
    run_job(
        2,
        train.main,
        *train_arguments(workspace, tmp_path / "run"),
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
        f"actor_rollout_ref.ref.teachers={{{source}: {teacher}}}",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.kl_loss_type=full_js",
        "actor_rollout_ref.actor.kl_loss_coef=1.0",
        "algorithm.adv_estimator=none",
        "actor_rollout_ref.rollout.n=2",
        "trainer.total_training_steps=3",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        log=tmp_path / "log",
        timeout_s=LAUNCH_S,
    )
    metrics = metrics_of(tmp_path / "run")
    divergences = [metrics[step]["actor/kl_loss"] for step in (1, 2, 3)]
    assert divergences[0] > 0.01, "the actor starts far from a teacher"
    assert divergences[-1] < divergences[0]
