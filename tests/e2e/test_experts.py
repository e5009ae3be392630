"""Models with experts train and sample end to end, with complete experts or slices of experts on each rank."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from megarl.commands import export, train
from megarl.tracking.jsonl import read_jsonl
from tests.support.forked import run_job
from tests.support.tiny import write_checkpoint
from tests.support.workspace import Workspace, train_arguments

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ROUTER_LOSSES = "moe_router_load_balancing_type: aux_loss, moe_aux_loss_coeff: 0.01, moe_z_loss_coeff: 0.001"
RUNS = {
    "qwen3_moe": [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.megatron.expert_model_parallel_size=2",
        f"actor_rollout_ref.actor.megatron.override_transformer_config={{{ROUTER_LOSSES}}}",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.rollout.routing_replay=engine_scores",
    ],
    "mixtral": [
        "critic.model.path={model}",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
        "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=2",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.routing_replay=recompute",
    ],
}


@pytest.mark.parametrize("variant", RUNS)
def test_experts_train_and_sample(variant: str, workspace: Workspace, tmp_path: Path):
    model = write_checkpoint(tmp_path / "model", variant)
    tokenizer = "tokenizer.model"
    (model / tokenizer).write_bytes((workspace.model / tokenizer).read_bytes())
    run_dir, exported = tmp_path / "run", tmp_path / "exported"
    arguments = [
        *train_arguments(workspace, run_dir),
        f"actor_rollout_ref.model.path={model}",
        *(argument.format(model=model) if "{model}" in argument else argument for argument in RUNS[variant]),
        "actor_rollout_ref.rollout.sync.check_every=1",
        "trainer.total_training_steps=2",
        "trainer.save_freq=2",
        "trainer.test_freq=2",
    ]
    run_job(2, train.main, *arguments, log=tmp_path / "train", timeout_s=400)
    steps = [line for line in read_jsonl(run_dir / "metrics.jsonl") if "actor/grad_norm" in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["training/rollout_probs_diff_max"] < 1e-4 for line in steps)
    assert all(0.9 < line["actor/router_agreement"] <= 1.0 for line in steps)
    run_job(1, export.main, run_dir, exported, log=tmp_path / "export", timeout_s=200)
    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (model, exported))
    assert before.keys() == after.keys()
    experts = [name for name in before if ".experts." in name]
    assert experts
    assert all(not before[name].equal(after[name]) for name in experts)
