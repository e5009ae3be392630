"""The least time of a step: by hand for one rank, and by what a split adds."""

import json
from pathlib import Path

import pytest

from benchmarks.cases import MODELS
from megarl.models.architecture import hf_shapes, read_architecture
from megarl.models.flops import Tokens, forward_flops
from megarl.planning.device import Device
from megarl.planning.machine import EngineCost, Lengths
from megarl.planning.movement import forward_bytes
from megarl.planning.planner import Plan, Planner
from megarl.planning.traffic import Links
from megarl.platform.peaks import Peaks

PEAKS = Peaks(flops_per_second=790e12, bytes_per_second=4.3e12)
NVLINK = 400e9
LENGTHS = Lengths(prompt=256, response=1024)


def plan(
    directory: Path,
    *overrides: str,
    model: str = "qwen2.5-0.5b",
    ranks_per_node: int | None = None,
    engine: EngineCost | None = None,
    lengths: Lengths | None = None,
    links: Links | None = None,
) -> Plan:
    """Plan PPO with 256 prompts of 256 tokens and responses of 1,024 on one device, or as `overrides` say."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(MODELS[model]))
    arguments = [
        *("data.train_files=prompts.parquet", "data.train_batch_size=256"),
        *("data.max_prompt_length=256", "data.max_response_length=1024"),
        *(f"actor_rollout_ref.model.path={directory}", f"critic.model.path={directory}"),
        *("actor_rollout_ref.actor.ppo_mini_batch_size=256", "trainer.n_gpus_per_node=1"),
        *("algorithm.use_kl_in_reward=true", "actor_rollout_ref.rollout.gpu_memory_utilization=0.4"),
        *overrides,
    ]
    return Planner(
        arguments,
        device=Device(name="an H200", num_bytes=141 * 10**9, peaks=PEAKS),
        ranks_per_node=ranks_per_node,
        links=links or Links(inside=NVLINK, between=45e9),
        engine=engine,
        lengths=lengths,
    ).plan()


def test_one_rank_by_hand(tmp_path: Path) -> None:
    found = plan(tmp_path)
    architecture = read_architecture(MODELS["qwen2.5-0.5b"])
    tokens = Tokens(lengths=[1280] * 256, num_outputs=256 * 1024)
    policy, value = (forward_flops(one, tokens) for one in (architecture, architecture.with_scalar_head()))
    seconds, flops = found.time.seconds, PEAKS.flops_per_second
    for reader, read in (("actor", policy), ("reference", policy), ("critic", value)):
        assert seconds[f"infer {reader}"] == pytest.approx(read / flops)
    # Twice weights and two moments in float32, the gradient once, and the bfloat16 weight.
    weights = sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in hf_shapes(architecture).values())
    optimizer = weights * (2 * 12 + 4 + 2) / PEAKS.bytes_per_second
    assert seconds["update actor"] == pytest.approx(3 * policy / flops + optimizer, rel=1e-3)
    # Each token of the responses reads the weights once, and on average the keys and values of 768 tokens.
    cached = 24 * 2 * 128 * 2 * 768 * 256
    reading = 1024 * (2 * weights + cached) / PEAKS.bytes_per_second
    prompts = forward_flops(architecture, Tokens(lengths=[256], num_outputs=1)) * 256 / flops
    assert seconds["gen"] == pytest.approx(prompts + reading, rel=1e-2)
    assert found.time.total == pytest.approx(sum(seconds.values()))
    assert found.time.flops == 6 * policy + 4 * value
    assert found.time.mfu == pytest.approx(found.time.flops / found.time.total / flops)


def test_adapters_by_hand(tmp_path: Path) -> None:
    """Qwen2.5-0.5B with adapters of rank 8 on all seven projections; the critic's weights learn."""
    rank = "actor_rollout_ref.model.lora_rank=8"
    whole, found = plan(tmp_path).time, plan(tmp_path, rank).time
    tokens, flops = 256 * 1280, PEAKS.flops_per_second
    adapters = 24 * 8 * (2 * (896 + 896) + 2 * (896 + 128) + 3 * (896 + 4864))
    weights = 24 * (2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864) * tokens + 896 * 151936 * 256 * 1024
    pairs = 24 * 14 * (64 + 64) * 256 * 1280 * 1281 // 2
    reads = 2 * (weights + pairs)
    assert whole.seconds["infer actor"] == pytest.approx(reads / flops)
    assert found.seconds["infer actor"] == pytest.approx((reads + 2 * adapters * tokens) / flops)
    # The gradient of frozen weights is left out: of their products a backward pass has one instead of two.
    update = 2 * 2 * weights + 3 * 2 * (pairs + adapters * tokens)
    optimizer = adapters * (2 * 12 + 4 + 2) / PEAKS.bytes_per_second
    assert found.seconds["update actor"] == pytest.approx(update / flops + optimizer, rel=1e-6)
    assert found.flops - whole.flops == update + 2 * adapters * tokens - 3 * reads
    same = ("infer reference", "infer critic", "update critic", "gen", "sync")
    assert [found.seconds[phase] for phase in same] == [whole.seconds[phase] for phase in same]


@pytest.mark.parametrize(("model", "seconds"), [("qwen2.5-0.5b", 4.3), ("qwen2.5-1.5b", 13.5), ("qwen2.5-3b", 26.5)])
def test_floors_of_a_step_of_ppo(tmp_path: Path, model: str, seconds: float) -> None:
    """The sizes that are measured on a GPU first; the seconds were estimated apart from this code."""
    assert plan(tmp_path, model=model).time.total == pytest.approx(seconds, rel=0.15)


MEGATRON = "actor_rollout_ref.actor.megatron"


def test_split_adds_communication_and_pipeline_idle_time(tmp_path: Path) -> None:
    four = ["trainer.n_gpus_per_node=4"]
    apart, tensor, pipeline = (
        plan(tmp_path, *four, *split).time.seconds["infer reference"]
        for split in (
            [],
            [f"{MEGATRON}.tensor_model_parallel_size=2"],
            [f"{MEGATRON}.pipeline_model_parallel_size=2"],
        )
    )
    # Two sums of hidden states in each of 24 layers; in each, a rank receives the half it lacks twice.
    states = 256 // 2 * 1280 * 896 * 2
    assert tensor - apart == pytest.approx(24 * 2 * 2 * states / 2 / NVLINK)
    micro_batches = plan(tmp_path, *four, f"{MEGATRON}.pipeline_model_parallel_size=2").workload.models[1].infers
    assert pipeline / apart == pytest.approx(1 + 1 / micro_batches.num_micro_batches)


def test_recomputation_costs_a_third_and_no_utilization(tmp_path: Path) -> None:
    plain = plan(tmp_path).time
    again = plan(tmp_path, "actor_rollout_ref.model.enable_gradient_checkpointing=true").time
    assert again.flops == plain.flops
    more = again.seconds["update actor"] - plain.seconds["update actor"]
    assert more == pytest.approx(plain.seconds["infer actor"])
    selective = plan(tmp_path, "actor_rollout_ref.model.enable_gradient_checkpointing=selective").time
    assert selective.flops == plain.flops
    of_feed_forward = 2 * 256 * 1280 * 24 * 3 * 896 * 4864 / PEAKS.flops_per_second  # Qwen2.5-0.5B
    assert selective.seconds["update actor"] - plain.seconds["update actor"] == pytest.approx(of_feed_forward)


def test_links_between_nodes_are_slower(tmp_path: Path) -> None:
    eight = ["trainer.n_gpus_per_node=8"]
    inside = plan(tmp_path, *eight).time.seconds["update actor"]
    between = plan(tmp_path, *eight, ranks_per_node=4).time.seconds["update actor"]
    states = plan(tmp_path, *eight).memory.states["actor"]
    moved = (states.gradients + states.weights) * 7 / 8
    assert between - inside == pytest.approx(moved * (1 / (4 * 45e9) - 1 / NVLINK))  # over the links of four ranks
    tensor = f"{MEGATRON}.tensor_model_parallel_size=4"
    strided = plan(tmp_path, *eight, tensor, model="llama-200m", ranks_per_node=4)
    within = plan(tmp_path, *eight, tensor, model="llama-200m")
    states = strided.memory.states["actor"]
    moved = (states.gradients + states.weights) / 2
    difference = strided.time.seconds["update actor"] - within.time.seconds["update actor"]
    assert difference == pytest.approx(moved * (1 / 45e9 - 1 / NVLINK))  # each replica of a weight is on its own node


TENSOR = "actor_rollout_ref.rollout.tensor_model_parallel_size"


@pytest.mark.parametrize(
    ("domain", "messages"),
    [(None, [2, 1]), (4, [2, 1]), (8, [3, 0]), (1, [0, 3]), (72, [3, 0])],
)
def test_sums_take_latency_of_tree_of_messages(tmp_path: Path, domain: int | None, messages: list[int]) -> None:
    """Eight ranks on two nodes. A replica of the engine is all of them."""
    slow = Links(inside=NVLINK, between=NVLINK, domain=domain, inside_latency=3e-6, between_latency=50e-6)
    arguments = ("trainer.nnodes=2", "trainer.n_gpus_per_node=4", f"{TENSOR}=8")
    found = plan(tmp_path, *arguments, model="llama-200m", links=slow).time.generation
    inside, between = messages
    assert found.latency == pytest.approx(1024 * 14 * 2 * 2 * (inside * 3e-6 + between * 50e-6))


def test_bounds_of_generation_by_hand(tmp_path: Path) -> None:
    """Llama-3-70B on 64 ranks: replicas of 16, 128 prompts with 8 responses, 1,280 tokens each at most.

    Two nodes of 8 have a replica. 80 layers have 8 key-value heads of 128 on 16 ranks, so a rank has one head.
    """
    arguments = ("trainer.nnodes=8", "trainer.n_gpus_per_node=8", f"{TENSOR}=16", "data.train_batch_size=128")
    arguments += ("actor_rollout_ref.rollout.n=8", "algorithm.adv_estimator=grpo")
    arguments += ("actor_rollout_ref.actor.ppo_mini_batch_size=128", f"{MEGATRON}.tensor_model_parallel_size=8")
    links = Links(inside=NVLINK, between=45e9, inside_latency=2e-6, between_latency=15e-6)
    path = "actor_rollout_ref.model.path=configs/models/llama-3-70b"
    found = plan(tmp_path, *arguments, path, links=links)
    engine, generation = found.memory.engine, found.time.generation
    assert engine.bytes_per_token == 80 * 2 * 128 * 2
    assert generation.wanted == generation.slots == generation.at_once == 128 * 8 * 16 // 64 == 256
    # Two sums a layer of 8,192 numbers of each of 256 samples; a rank passes 15/16 of them on twice, and the links of
    # eight ranks lead to the other node.
    of_step = 80 * 2 * 2 * 256 * 8192 * 2 * 15 / 16
    assert generation.messages == pytest.approx(1024 * of_step / (8 * 45e9))
    # Up and down a tree: three messages in a node, one between nodes.
    assert generation.latency == pytest.approx(1024 * 160 * 2 * (3 * 2e-6 + 15e-6))
    scarce = plan(tmp_path, *arguments, path, "actor_rollout_ref.rollout.gpu_memory_utilization=0.12", links=links)
    room = int(0.12 * 141e9) - scarce.memory.engine.weights - scarce.memory.engine.activations
    bound = scarce.time.generation
    assert bound.at_once == room // (80 * 2 * 128 * 2) // 1280 < bound.slots


def test_exact_kl_loss_runs_reference_in_every_epoch(tmp_path: Path) -> None:
    exact = ("actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_type=full")
    arguments = ("algorithm.use_kl_in_reward=false", "actor_rollout_ref.actor.ppo_epochs=3", *exact)
    once, found = plan(tmp_path).time.seconds, plan(tmp_path, *arguments).time.seconds
    assert found["infer reference"] == pytest.approx(3 * once["infer reference"])


def test_partial_rollouts_sample_more_responses_per_engine_step(tmp_path: Path) -> None:
    """Twice as many samples are drawn at once, so the weights are read half as often; keys are read as often."""
    partial = ("actor_rollout_ref.rollout.partial={enable: true, stop_when: 0.5}",)
    correction = "algorithm.rollout_correction.rollout_is=token"
    waiting, found = plan(tmp_path), plan(tmp_path, *partial, correction, "actor_rollout_ref.rollout.max_num_seqs=512")
    reading = 1024 * waiting.memory.engine.weights / PEAKS.bytes_per_second
    assert waiting.time.seconds["gen"] - found.time.seconds["gen"] == pytest.approx(reading / 2)


def test_cpu_pass_adds_memory_traffic_between_products(tmp_path: Path) -> None:
    architecture = read_architecture(MODELS["llama-1m"])
    # Two layers of width 256, with 4 heads and 2 groups of 64, and a feed-forward of 512.
    projections, rotations, attention = 2 * 256 + 2 * 256 + 2 * 128, 5 * (256 + 128), 4 * 256
    repeated, feed_forward, gate, norms_and_sums = 128 + 256 + 128 + 256, 2 * 256 + 3 * 512, 5 * 512, 2 * (5 + 3) * 256
    layer = projections + rotations + attention + repeated + feed_forward + gate + norms_and_sums
    moved = 4 * (10 * (2 * layer + 5 * 256) + 3 * 256) + 4 * 3 * 7 * 1024
    assert forward_bytes(architecture, Tokens(lengths=[10], num_outputs=3), dtype="float32") == moved

    on_cpu, elsewhere = (plan(tmp_path, *more, model="llama-1m").time for more in (["trainer.device=cpu"], []))
    tokens = Tokens(lengths=[1280] * 256, num_outputs=256 * 1024)
    for name, of in (("reference", architecture), ("critic", architecture.with_scalar_head())):
        seconds = forward_bytes(of, tokens, dtype="bfloat16") / PEAKS.bytes_per_second
        difference = on_cpu.seconds[f"infer {name}"] - elsewhere.seconds[f"infer {name}"]
        assert difference == pytest.approx(seconds)
    seconds = 3 * forward_bytes(architecture, tokens, dtype="bfloat16") / PEAKS.bytes_per_second
    assert on_cpu.seconds["update actor"] - elsewhere.seconds["update actor"] == pytest.approx(seconds)
    assert on_cpu.flops == elsewhere.flops


def test_engine_steps_equal_tokens_of_longest_response(tmp_path: Path) -> None:
    free, costly = (
        plan(tmp_path, engine=engine, lengths=Lengths(256, 100, 1000)).time.seconds["gen"]
        for engine in (EngineCost(), EngineCost(0.01, 0.001, 0.0001))
    )
    assert costly - free == pytest.approx(1000 * (0.01 + 24 * 0.001) + 256 * 100 * 0.0001)
    equal = plan(tmp_path, lengths=Lengths(256, 100)).time.seconds["gen"]
    weights = plan(tmp_path).memory.engine.weights
    assert free - equal == pytest.approx(900 * weights / PEAKS.bytes_per_second)
