"""Compare a node's need of host memory with numbers worked by hand."""

import json
from functools import cache

import pytest

from megarl.commands.plan import main
from megarl.config.load import load_config
from megarl.planning.device import H100
from megarl.planning.planner import Plan, Planner
from megarl.planning.report import show
from megarl.planning.samples import SampleMemory, sample_memory
from megarl.planning.traffic import Links
from megarl.platform.screen import Screen

GB = 10**9
LLAMA_70B, DEEPSEEK = "configs/plans/llama-3-70b_64gpu.yaml", "configs/plans/deepseek-v3_2048gpu.yaml"
MEGATRON = "actor_rollout_ref.actor.megatron"
OFFLOADED = [
    f"{section}.megatron.{part}_offload=true"
    for section in ("actor_rollout_ref.actor", "critic")
    for part in ("param", "optimizer", "grad")
]
LLAMA_8B = [
    *("data.train_files=train.parquet", "actor_rollout_ref.model.path=configs/models/llama-3-8b"),
    *("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8", "algorithm.kl_ctrl.kl_coef=0"),
    *(f"{MEGATRON}.tensor_model_parallel_size=4", "actor_rollout_ref.rollout.tensor_model_parallel_size=4"),
    "actor_rollout_ref.model.enable_gradient_checkpointing=true",
]


@cache
def plan(*argv: str, host_bytes: int | None = None) -> Plan:
    links = Links(inside=400e9, between=45e9)
    return Planner(argv, device=H100, ranks_per_node=None, links=links, host_bytes=host_bytes).plan()


def test_offloaded_memory_of_llama_3_70b_matches_arithmetic() -> None:
    """Tensor 8, data 32, with critic and reference: 59.2 GB a rank, 474 GB a node."""
    split = (f"{MEGATRON}.pipeline_model_parallel_size=1", "trainer.nnodes=32")
    parts = dict(plan(LLAMA_70B, *split, *OFFLOADED).host.parts)
    layer = (8192 + 2 * 1024) * 8192 + 8192**2 + 3 * 28672 * 8192  # queries, keys and values; output; gate, up and down
    embeddings = 128_512 * 8192 // 8  # 64 x 8 rows divide them
    actor = 80 * (layer // 8 + 2 * 8192) + 2 * embeddings + 8192
    critic = actor - embeddings + 8192  # one score instead of the vocabulary
    assert parts["actor weights"] == parts["reference weights"] == 8 * 2 * actor
    assert parts["critic weights"] == 8 * 2 * critic
    assert parts["actor optimizer"] == pytest.approx(8 * 12 * actor / 32, rel=1e-5)
    offloaded = sum(parts[f"{name}"] for name in parts if name.endswith((" weights", " optimizer")))
    assert offloaded / 8 == pytest.approx(59.2 * GB, rel=1e-3)
    assert offloaded == pytest.approx(474 * GB, rel=1e-3)
    assert not [name for name in parts if "gradients" in name]  # which Megatron frees, and does not keep
    # On each rank its part of the weights in bfloat16; float32 weights and two moments for its shard and the rest of
    # the parameters that begin or end there. The embeddings are the largest parameters.
    optimizers = parts["copies for a save"] - 8 * 2 * (actor + critic) // 32
    assert 8 * 12 * (actor + critic) / 32 < optimizers < 8 * 12 * ((actor + critic) / 32 + 2 * embeddings)


def test_shared_weights_rest_on_the_host_once() -> None:
    """Tensor 4 with adapters of rank 16: the critic adds its adapters, which a rank cuts as its weights, and a head."""
    critic = ("algorithm.adv_estimator=gae", "critic.model.path=configs/models/llama-3-8b")
    ranks = ("actor_rollout_ref.model.lora_rank=16", "critic.model.lora_rank=16")
    parts = plan(*LLAMA_8B, *critic, *ranks, *OFFLOADED).host.parts
    layer = (3 * 4096 + 6144 // 4) + (4096 // 4 + 4096) + (2 * 4096 + 28672 // 4) + (14336 // 4 + 4096)
    adapters = 32 * 16 * layer
    assert parts["critic weights"] == 8 * 2 * (adapters + 4096)
    assert parts["actor weights"] > 8 * 2 * 8e9 / 4
    # Of four ranks the weights, and of eight half of the optimizer and the rest of a matrix at its border.
    at_borders = parts["copies for a save"] - (4 * 2 + 8 * 12 / 2) * (2 * adapters + 4096)
    assert 0 <= at_borders <= 2 * 8 * 12 * 16 * 3 * 4096


def test_the_shipped_plan_of_llama_3_70b() -> None:
    parts = plan(LLAMA_70B).host.parts
    offloaded = sum(num_bytes for name, num_bytes in parts.items() if name.endswith((" weights", " optimizer")))
    assert offloaded == pytest.approx(327 * GB, rel=1e-3)


NUM_PROMPTS_OF_RANK = 2048 // 64 + 2048 // 128
"""Prompts that a rank draws or learns from, of 2,048, with 64 replicas and 128 shares."""


def phases(*overrides: str) -> list[SampleMemory]:
    return sample_memory(load_config([DEEPSEEK, *overrides], world_size=None, check_paths=False), num_shares=128)


def samples(*overrides: str) -> dict[str, dict[str, int]]:
    """Return what a rank of DeepSeek-V3 holds of samples, by phase."""
    return {memory.phase: dict(memory.parts) for memory in phases(*overrides)}


def test_samples_of_deepseek_v3() -> None:
    """2,048 prompts with 8 responses of 7,168 tokens: 64 replicas draw them, and 128 shares learn, 512 prompts at once.

    There is a reference in the loss and no critic; 256 responses of a replica fit into its 1,024 slots.
    """
    drawn, learnt = 2048 * 8 * 7168 // 64, 2048 * 8 * 7168 // 128
    always = {
        "prompts": NUM_PROMPTS_OF_RANK * 1024 * 14,
        "index of samples": 2048 * (8 * 300 + 48),
        "token table of the engine": 1024 * 8192 * 4,
    }
    assert samples() == {
        "generate": always | {"requests of the engine": drawn * (70 + 8) + 256 * (10_000 + 1024 * 53)},
        "record": always | {"drawn responses": drawn * 12, "records": drawn * 13},
        "exchange": always | {"records": drawn * 18, "messages": (drawn + learnt) * 9, "learnt tokens": learnt * 9},
        "update": always
        | {
            "records": drawn * 18,
            "learnt tokens": learnt * (9 + 3 * 4 + 4),
            "block of tokens": (1 << 17) * 64,
            "mini-batches": 2 * learnt // 4 * (9 + 6 * 4),
        },
    }
    parts = plan(DEEPSEEK).host.parts
    assert parts["requests of the engine"] == 8 * samples()["generate"]["requests of the engine"]
    assert "records" not in parts  # the phase with the requests is the fullest


def test_rank_of_large_run_holds_little() -> None:
    """8,192 responses of 32,768 tokens on 2,048 ranks."""
    longer = ("data.train_batch_size=1024", "data.max_response_length=32768")
    longer += ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=33792",)
    fullest = max(phases(*longer), key=lambda memory: memory.total)
    assert fullest.total < 1.5 * GB
    assert 8 * fullest.total < 12 * GB


def test_slots_bound_requests() -> None:
    """Of 256 responses of a replica 64 are drawn at once, before which no other has a token."""
    found = samples("actor_rollout_ref.rollout.max_num_seqs=64")["generate"]
    assert found["requests of the engine"] == 64 * 7168 * (70 + 8) + 256 * (10_000 + 1024 * 53)
    assert found["drawn responses"] == 192 * 7168 * (12 + 1)


def test_responses_without_log_probabilities_take_less() -> None:
    drawn = 2048 * 8 * 7168 // 64
    found = samples("actor_rollout_ref.rollout.calculate_log_probs=false")
    assert found["generate"]["requests of the engine"] == drawn * 70 + 256 * (10_000 + 1024 * 53)
    assert found["record"]["records"] == drawn * 9


def test_groups_that_are_chosen_are_on_every_rank() -> None:
    without = samples()["generate"]["prompts"]
    found = samples("algorithm.filter_groups={enable: true, metric: score}")["generate"]["prompts"]
    assert found - without == (2048 - NUM_PROMPTS_OF_RANK) * 1024 * 14


def test_responses_that_continue_are_held_too() -> None:
    """Half of 4,096 prompts continue, or all but one of 2,048: a token, its log-probability and its version.

    Tokens that a model learns from have versions too. Every rank has all prompts.
    """
    partial = "actor_rollout_ref.rollout.partial={enable: true, stop_when: %s}"
    correction = "algorithm.rollout_correction.rollout_is=token"
    without = samples(correction)["exchange"]
    learnt = 2048 * 8 * 7168 // 128
    for stop_when, num_in_flight in (("0.5", 2048), ("64", 2047)):
        found = samples(partial % stop_when, correction)["exchange"]
        assert found["responses that continue"] == num_in_flight * 8 * 7168 // 64 * 12
        assert found["learnt tokens"] - without["learnt tokens"] == learnt * 4
        assert found["prompts"] == (2048 + num_in_flight) * 1024 * 14


@pytest.mark.parametrize(("value", "num_bytes"), [("engine", 464), ("engine_scores", 8 * 464)])
def test_routes_are_counted_per_place_and_layer(value: str, num_bytes: int) -> None:
    """58 layers with 8 of 256 experts: 464 choices a place on 64 replicas, and a 16th of them on 128 shares."""
    found = plan(DEEPSEEK, f"actor_rollout_ref.rollout.routing_replay={value}")
    total = 2048 * 8 * (1024 + 7168) * num_bytes
    assert found.host.parts["routes"] == 8 * (total // 64 + total // (128 * 16))
    routes = found.memory.engine.num_tokens * num_bytes
    assert found.memory.fullest["generate"].parts["routes of the KV cache"] == routes > 0


def test_environment_adds_record_field_and_worker_processes() -> None:
    """A token has the reward of its turn and a weight, a rank all prompts, and 3 processes of at most 2 GB."""
    environment = ("environment.name=openenv", "environment.num_workers=3", "environment.max_memory_gb=2")
    without, found = samples(), samples(*environment)
    drawn, learnt = 2048 * 8 * 7168 // 64, 2048 * 8 * 7168 // 128
    assert found["record"]["records"] - without["record"]["records"] == drawn * 4
    assert found["update"]["learnt tokens"] - without["update"]["learnt tokens"] == learnt * (4 + 4)
    assert found["record"]["prompts"] == 2048 * 1024 * 14
    assert plan(*LLAMA_8B, *environment).host.rewards == 8 * 3 * 2 * GB


def test_per_response_reward_worker_keeps_parent_process() -> None:
    """A worker of the user's function is two processes, unless one process scores all responses."""
    limits = ("reward_model.num_workers=3", "reward_model.max_memory_gb=2")
    custom = (*limits, "custom_reward_function.path=examples/rewards/sentiment.py")
    for keys, num_processes in ((limits, 3), (custom, 6), ((*custom, "reward_model.isolation=process"), 3)):
        assert plan(*LLAMA_8B, *keys).host.rewards == 8 * num_processes * 2 * GB


def test_save_copies_spread_over_data_parallel_ranks() -> None:
    """Tensor 4 x data 2 on one node: four ranks copy weights, and eight their shard and a parameter at its border."""
    found = plan(*LLAMA_8B)
    weights, optimizer = found.memory.states["actor"].weights, found.memory.states["actor"].optimizer
    assert optimizer == 3 * weights  # half of 12 bytes a weight
    at_borders = found.host.parts["copies for a save"] - (4 * weights + 8 * optimizer)
    assert 0 <= at_borders <= 8 * 12 * 2 * 14336 * 4096 // 4  # gate and up, the largest parameter of a layer


def test_insufficient_host_memory_is_reported_with_sufficient_changes() -> None:
    offloaded = (*LLAMA_8B, f"{MEGATRON}.optimizer_offload=true")
    needed = plan(*offloaded).host
    found = plan(*offloaded, host_bytes=needed.total - 1)
    assert found.host_missing == 1
    assert (f"{MEGATRON}.optimizer_offload=false",) in [remedy.overrides for remedy in found.host_remedies]
    for remedy in found.host_remedies:
        again = plan(*offloaded, *remedy.overrides, host_bytes=needed.total - 1)
        assert again.host.total == remedy.host_bytes
        assert again.host_missing == remedy.missing == 0
        assert not again.shortfalls
    assert plan(*offloaded, host_bytes=needed.total).host_missing == 0


def test_device_remedy_states_its_host_memory_cost() -> None:
    found = plan(*LLAMA_8B, "actor_rollout_ref.rollout.gpu_memory_utilization=0.75")
    costs = {remedy.overrides: remedy.host_bytes - found.host.total for remedy in found.remedies}
    assert costs[(f"{MEGATRON}.optimizer_offload=true",)] == 8 * found.memory.states["actor"].optimizer
    assert costs[(f"{MEGATRON}.grad_offload=true",)] == 0


def test_remedy_beyond_host_memory_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    tight = (*LLAMA_8B, "actor_rollout_ref.rollout.gpu_memory_utilization=0.75")
    needed = plan(*tight).host.total
    found = plan(*tight, host_bytes=needed)
    assert found.shortfalls and not found.host_missing
    show(found, Screen())
    shown = " ".join(capsys.readouterr().out.split())
    offloaded = 8 * found.memory.states["actor"].optimizer
    lacking = f"is enough for the devices, but the host lacks {offloaded / GB:.2f} GB"
    assert f"{MEGATRON}.optimizer_offload=true {lacking}" in shown
    assert f"{MEGATRON}.grad_offload=true is enough (" in shown


def test_command_exits_with_1_for_insufficient_host_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([LLAMA_70B, "--host-memory", "500GB"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "host memory that a node needs: 58" in shown
    assert "GB short of a node's 500.00" in shown
    assert "is enough (host memory of a node: " in shown
    assert "The devices have room: " in shown
    assert main([LLAMA_70B, "--host-memory", "700GB", "--json"]) == 0
    host = json.loads(capsys.readouterr().out)["host"]
    assert host["total"] == sum(host["parts"].values())
    assert (host["memory_bytes"], host["missing"], host["remedies"]) == (700 * GB, 0, [])
    assert main([LLAMA_70B, "--host-memory", "700GB"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "are left for rewards: lower reward_model.num_workers" in shown  # 256 GB that they may take
    assert "It fits: " in shown
