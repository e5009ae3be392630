"""The memory model against numbers worked by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from megarl.config.load import load_config
from megarl.learner.config import MegatronSection
from megarl.learner.dropout import TokenDropout
from megarl.learner.grid import grid_of
from megarl.models.architecture import Architecture, read_architecture
from megarl.models.grid import Grid
from megarl.models.trainer import parameter_shapes
from megarl.planning.activations import PhaseWork, chunks_in_flight, head_bytes, layer_bytes, training_bytes
from megarl.planning.adapter_dropout import HASH_BYTES, MASK_BYTES
from megarl.planning.engine import cache_bytes_per_token, engine_memory
from megarl.planning.memory import Moment, RankMemory, fullest_rank, rank_memory
from megarl.planning.states import States, frozen_states, trained_states
from megarl.planning.workload import Workload, workload_of
from megarl.platform.errors import UserError
from megarl.rollout.config import RolloutSection
from tests.support.allocations import allocations

MODELS = Path(__file__).parents[2] / "configs" / "models"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GB = 10**9

# Llama-3-8B, tensor 4 x pipeline 2. A layer: 6144 x 4096 / 4 of queries, keys and values, 4096 x 4096 / 4 of their
# projection, 28672 x 4096 / 4 of gate and up, 4096 x 14336 / 4 of down, and two norms; 16 of them on a stage, with a
# quarter of 128,256 embeddings (64 x 4 divides them) and on the last the final norm.
LLAMA_LAYER = 6_291_456 + 4_194_304 + 29_360_128 + 14_680_064 + 2 * 4_096
LLAMA_FIRST_STAGE = 16 * LLAMA_LAYER + 32_064 * 4_096
# Its adapters of rank 16: for each of Megatron's four matrices of a layer, the columns of an A for each projection in
# it, and the rows of their B together.
LLAMA_ADAPTERS = 16 * 16 * ((3 * 4_096 + 1_536) + (1_024 + 4_096) + (2 * 4_096 + 7_168) + (3_584 + 4_096))
LLAMA_SPLIT = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2}


def architecture(name: str) -> Architecture:
    return read_architecture(json.loads((MODELS / name / "config.json").read_text()))


def llama_states(num_ranks: int, rank: int, **settings: Any) -> States:
    section = MegatronSection(**LLAMA_SPLIT, **settings)
    grid = grid_of(section, num_ranks)
    return trained_states(parameter_shapes(architecture("llama-3-8b"), grid, rank), section, grid)


def test_weights_of_llama_3_8b() -> None:
    section = MegatronSection(**LLAMA_SPLIT)
    grid = grid_of(section, 8)
    for rank, numel in ((0, LLAMA_FIRST_STAGE), (3, LLAMA_FIRST_STAGE), (4, LLAMA_FIRST_STAGE + 4_096)):
        shapes = parameter_shapes(architecture("llama-3-8b"), grid, rank)
        assert frozen_states(shapes, section) == States(weights=2 * numel)


def test_trained_model_has_float32_gradients_moments_and_weights() -> None:
    n = LLAMA_FIRST_STAGE
    assert llama_states(8, 0) == States(weights=2 * n, gradients=4 * n, optimizer=12 * n)
    assert llama_states(8, 0, dtype="float32") == States(weights=4 * n, gradients=4 * n, optimizer=8 * n)
    assert llama_states(32, 0) == States(weights=2 * n, gradients=4 * n, optimizer=3 * n)
    assert llama_states(32, 0, use_distributed_optimizer=False) == llama_states(8, 0)


def test_buffers_are_padded_to_whole_shares() -> None:
    section = MegatronSection()
    shapes = {"a": (3,), "b": (70,), "c": (5,)}  # laid down from the back: 0..5, 64..134, 192..195; then up to 3 x 128
    states = trained_states([shapes], section, Grid(num_ranks=3))
    assert states == States(weights=2 * 384, gradients=4 * 384, optimizer=12 * 128)


def test_expert_optimizer_is_sharded_over_fewer_ranks() -> None:
    section = MegatronSection(expert_model_parallel_size=4)
    grid = grid_of(section, 8)  # 8 ranks share the dense optimizer, 2 that of each expert
    shapes = {"mlp.router.weight": (1024,), "mlp.experts.local_experts.0.linear_fc1.weight": (2048,)}
    assert trained_states([shapes], section, grid).optimizer == 12 * (1024 // 8 + 2048 // 2)


def test_a_layer_keeps_what_korthikanti_counts() -> None:
    """With f = 8/3 h and as many key-value heads as query heads: 34 bytes s b h less the two dropout masks."""
    model = replace(architecture("llama-3-8b"), num_key_value_heads=32, ffn_hidden_size=4096 * 8 // 3)
    normaliser = 4 * 32  # of the flash kernel, in place of the 5 a s / h of the attention matrix
    kept = layer_bytes(model, MegatronSection(), layer=0, num_tokens=100)
    assert kept == pytest.approx(100 * (32 * 4096 + normaliser), rel=1e-4)

    split = MegatronSection(tensor_model_parallel_size=8)
    assert layer_bytes(model, split, layer=0, num_tokens=100) == pytest.approx(kept / 8, rel=1e-4)
    whole_norms = replace(split, sequence_parallel=False)
    assert layer_bytes(model, whole_norms, layer=0, num_tokens=100) == pytest.approx(
        100 * (2 * 4 * 4096 + (2 * 12 * 4096 + normaliser) / 8), rel=1e-4
    )


def test_expert_layers_copy_tokens_for_each_chosen_expert() -> None:
    model = architecture("qwen3-30b-a3b")
    assert model.experts is not None
    hidden, attention = 4 * 2048, 2 * (32 + 4) * 128 + (32 + 4) * 128
    chosen = 8 * (2048 + 3 * 768)
    assert layer_bytes(model, MegatronSection(), layer=0, num_tokens=10) == 10 * (
        2 * (hidden + attention + chosen) + 4 * 32
    )


def test_recomputation_keeps_the_inputs_of_layers() -> None:
    model, section = architecture("llama-3-8b"), MegatronSection(pipeline_model_parallel_size=2)
    grid = grid_of(section, 2)
    work = PhaseWork(num_tokens=1000, num_micro_batches=8, role="policy", recompute=False)
    layer = layer_bytes(model, section, layer=0, num_tokens=1000)
    # The first of two stages has two micro-batches on their way, each with 16 layers, and the gradients of one layer.
    assert training_bytes(model, section, grid, stage=0, work=work) == 2 * 16 * layer + layer
    again = replace(work, recompute=True)
    assert training_bytes(model, section, grid, stage=0, work=again) == 2 * 16 * 1000 * 4096 * 2 + 2 * layer
    inside = 1000 * 3 * 14336 * 2  # gate, up and their product
    selective = replace(work, recompute="selective")
    assert training_bytes(model, section, grid, stage=0, work=selective) == 2 * 16 * (layer - inside) + layer + inside


@pytest.mark.parametrize(
    ("vpp", "stage", "num_micro_batches", "expected"),
    [(1, 0, 8, 4), (1, 3, 8, 1), (1, 0, 2, 2), (2, 0, 8, 11), (2, 3, 8, 5), (2, 0, 4, 8)],
)
def test_micro_batches_on_their_way(vpp: int, stage: int, num_micro_batches: int, expected: int) -> None:
    grid = Grid(num_ranks=4, pp=4, vpp=vpp)
    assert chunks_in_flight(grid, stage=stage, num_micro_batches=num_micro_batches) == expected


def test_head_processes_chunks_of_its_vocabulary_slice() -> None:
    model, section = architecture("llama-3-8b"), MegatronSection(tensor_model_parallel_size=4)
    work = PhaseWork(num_tokens=4096, num_micro_batches=1, role="policy", recompute=False)
    rows, states = 128_256 // 4, 4096 * 4096 * 2
    assert head_bytes(model, section, work=work, training=False) == 2 * states + 1024 * rows * 4 * 4
    kept, rest = 4096 * rows * 4, 1024 * rows * 4 * 5  # 525 MB of log-probabilities are less than 512 MiB
    assert head_bytes(model, section, work=work, training=True) == 3 * states + kept + rest + rows * 4096 * 4
    more = replace(work, num_tokens=2 * 4096)
    assert head_bytes(model, section, work=more, training=True) == 6 * states + rest + rows * 4096 * 4
    assert head_bytes(model, section, work=replace(work, role="value"), training=False) == 2 * states
    exact = replace(work, exact_kl=True)  # the logits and states of two models
    assert head_bytes(model, section, work=exact, training=False) == 3 * states + 1024 * rows * 4 * 5
    assert head_bytes(model, section, work=exact, training=True) == 5 * states + kept + rest + rows * 4096 * 4


def test_the_cache_gets_what_the_engines_share_leaves() -> None:
    model = architecture("llama-3-8b")
    section = RolloutSection(gpu_memory_utilization=0.5, tensor_model_parallel_size=4)
    engine = engine_memory(model, section, weights=4 * GB, device_bytes=80 * GB)
    assert engine.bytes_per_token == 32 * 2 * (8 // 4) * 128 * 2
    assert engine.kv_cache == 40 * GB - 4 * GB - engine.activations
    assert engine.num_tokens == engine.kv_cache // engine.bytes_per_token
    assert engine.shortfall(1000) == 0
    assert engine_memory(model, section, weights=40 * GB, device_bytes=80 * GB).shortfall(1000) == (
        engine.activations + 1000 * engine.bytes_per_token
    )


def test_rank_keeps_one_kv_head_and_all_latents() -> None:
    sixteen = RolloutSection(tensor_model_parallel_size=16)
    assert cache_bytes_per_token(architecture("llama-3-8b"), sixteen) == 32 * 2 * 128 * 2
    assert cache_bytes_per_token(architecture("deepseek-v3"), sixteen) == 61 * (512 + 64) * 2


def test_linear_attention_keeps_memories_instead_of_tokens() -> None:
    """Qwen3-Next on two ranks: 12 of 48 layers have keys and values, 36 have 32 matrices and a convolution's tokens."""
    model = read_architecture(CONFIG_MAPPING["qwen3_next"]().to_dict())
    two = RolloutSection(tensor_model_parallel_size=2, max_num_seqs=10)
    assert cache_bytes_per_token(model, two) == 12 * 2 * 256 * 2
    memory = 36 * (32 * 128 * 128 + 3 * (2 * 2048 + 4096)) * 2 // 2
    engine = engine_memory(model, two, weights=0, device_bytes=80 << 30)
    assert engine.memories == 10 * memory
    assert engine.kv_cache == engine.budget - engine.activations - engine.memories
    linear, full = (layer_bytes(model, MegatronSection(), layer=layer, num_tokens=64) for layer in (0, 3))
    projected = 2 * 2048 + 2 * 4096 + 2 * 32  # queries, keys, values, gates, strengths and decays
    tokens = projected + (2 * 2048 + 4096) + 2 * 4096 + 2 * 4096
    gated = 2 * (16 + 2) * 256 + (16 + 2) * 256 + 2 * 16 * 256
    assert linear - full == 2 * (64 * (tokens - gated) + 32 * 128 * 128) - 64 * 4 * 16


def workload(*argv: str, model: str = "llama-3-8b") -> Workload:
    path = MODELS / model
    config = load_config(
        [
            "data.train_files=train.parquet",
            f"actor_rollout_ref.model.path={path}",
            f"critic.model.path={path}",
            f"{ACTOR}.megatron.tensor_model_parallel_size=4",
            f"{ACTOR}.megatron.pipeline_model_parallel_size=2",
            f"{ROLLOUT}.tensor_model_parallel_size=4",
            *argv,
        ],
        world_size=None,
        check_paths=False,
    )
    reward_model = architecture(model).with_scalar_head() if config.reward_model.enable else None
    teachers = {source: architecture(model) for source in config.teachers}
    return workload_of(
        config, policy=architecture(model), critic=architecture(model), reward_model=reward_model, teachers=teachers
    )


def memory(*argv: str) -> RankMemory:
    return fullest_rank(workload(*argv), device_bytes=80 * GB, bucket_bytes=0)


def test_models_at_rest_keep_what_is_not_offloaded() -> None:
    n = LLAMA_FIRST_STAGE  # the first stage has more micro-batches on their way
    resting = {"weights": 2 * n, "gradients": 4 * n, "optimizer": 12 * n}
    parts = memory().fullest["generate"].parts
    assert {part: parts[f"actor {part}"] for part in resting} == resting
    assert parts["reference weights"] == resting["weights"]
    assert parts["engine weights"] + parts["engine activations"] + parts["KV cache"] == 40 * GB

    offloaded = memory(*(f"{ACTOR}.megatron.{part}_offload=true" for part in ("param", "grad", "optimizer")))
    assert offloaded.fullest["generate"].total == 40 * GB
    update = offloaded.fullest["update"].parts  # the engine sleeps, the others rest, the one at work is complete
    assert {part: update[f"actor {part}"] for part in resting} == resting
    assert update["critic weights"] == update["reference weights"] == 0
    assert "KV cache" not in update


def test_adapters_learn_on_one_copy_of_weights() -> None:
    n, base = LLAMA_ADAPTERS, LLAMA_FIRST_STAGE
    ranks = ("actor_rollout_ref.model.lora_rank=16", "critic.model.lora_rank=16")
    found = moments(0, *ranks)
    resting = {"weights": 2 * n, "gradients": 4 * n, "optimizer": 12 * n}
    parts = found["update", "actor"].parts
    assert {part: parts[f"critic {part}"] for part in resting} == resting
    assert {part: parts[f"actor {part}"] for part in resting} == resting | {"weights": 2 * (base + n)}
    assert found["sync", "engine"].parts["merged weight"] == 2 * 4 * 7_168 * 4_096  # gate and up, both sides in float32
    reads = found["infer", "reference"].parts
    assert reads["actor weights"] == 2 * (base + n) and "reference weights" not in reads

    apart = moments(0, *ranks, "critic.model.override_config={rope_theta: 1.0}")["update", "actor"].parts
    assert apart["critic weights"] == 2 * (base + n)


def test_adapters_of_nothing_are_not_planned() -> None:
    with pytest.raises(UserError, match="gate selects no projection of the model"):
        workload("actor_rollout_ref.model={lora_rank: 16, target_modules: [gate]}")


@pytest.mark.parametrize(
    ("recompute", "kept"), [("false", 16 * 6_656), ("selective", 16 * 2_048 + 4_608), ("true", 6_656)]
)
def test_dropout_of_adapters_keeps_masks_and_inputs(recompute: str, kept: int) -> None:
    """A token of Llama-3-8B has 4,096 inputs each of qkv and fc1, on four ranks, and 1,024 and 3,584 of proj and fc2.

    A mask has a byte, and an input two. Hashes of the widest input are four integers. Two micro-batches are on their
    way.
    """
    adapters = "actor_rollout_ref.model={path: %s, lora_rank: 16, enable_gradient_checkpointing: %s, lora_dropout: %s}"
    without, found = (
        moments(0, adapters % (MODELS / "llama-3-8b", recompute, rate))["update", "actor"] for rate in (0.0, 0.1)
    )
    at_once = kept if recompute == "true" else 2 * kept - (4_608 if recompute == "selective" else 0)
    num_tokens = workload().models[0].updates.num_tokens  # type: ignore[union-attr]
    assert found.total - without.total == num_tokens * (3 * at_once + 16 * 3_584)


def test_dropout_takes_planned_bytes() -> None:
    num_tokens, num_columns = 2048, 512
    dropout = TokenDropout(0.1, "layer", torch.arange(num_columns, dtype=torch.int32), tp_rank=0, tp_size=1)
    hidden = torch.ones(num_tokens, num_columns, dtype=torch.bfloat16, requires_grad=True)
    matrix = torch.ones(num_columns, 8, dtype=torch.bfloat16, requires_grad=True)

    def low() -> Tensor:
        with dropout.keys.set_to(torch.arange(num_tokens, dtype=torch.int32)):
            return dropout(hidden, is_training=True) @ matrix

    with allocations():
        low()  # torch imports modules
    with allocations() as found:
        made = low()
        found.note()
        assert found.present - made.nbytes == pytest.approx(hidden.numel() * (MASK_BYTES + 2), rel=0.05)
    assert found.peak == pytest.approx(hidden.numel() * HASH_BYTES, rel=0.1)


def test_a_reward_model_answers_and_never_learns() -> None:
    enabled = ("reward_model.enable=true", "reward_model.model.path=org/reward-model")
    without, found = memory(), memory(*enabled)
    weights = found.states["reward model"].weights
    assert (found.states["reward model"].gradients, found.states["reward model"].optimizer) == (0, 0)
    assert weights == pytest.approx(2 * LLAMA_FIRST_STAGE, rel=0.01)
    assert found.fullest["update"].total == without.fullest["update"].total + weights
    [scoring] = [moment for moment in found.moments if moment.worker == "reward model"]
    assert scoring.phase == "infer"
    assert scoring.parts["reward model activations"] > 0
    assert "KV cache" not in scoring.parts

    offloaded = memory(*enabled, "reward_model.megatron.param_offload=true")
    assert offloaded.fullest["update"].total == without.fullest["update"].total
    filtering = memory(
        *enabled, "algorithm.filter_groups.enable=true", "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2"
    )
    [scoring] = [moment for moment in filtering.moments if moment.worker == "reward model"]
    assert scoring.parts["KV cache"] > 0  # the engine generates more after the samples are scored


def test_engine_without_sleep_keeps_its_device_memory() -> None:
    asleep, awake = memory(), memory(f"{ROLLOUT}.free_cache_engine=false")
    assert awake.fullest["update"].total == asleep.fullest["update"].total + 40 * GB


def moments(stage: int, *argv: str) -> dict[tuple[str, str], Moment]:
    """Those of a rank of the stage, by phase and worker."""
    load = workload(*argv)
    engine = engine_memory(load.policy, load.config.actor_rollout_ref.rollout, weights=0, device_bytes=80 * GB)
    found = rank_memory(load, stage, engine, bucket_bytes=0).moments
    return {(moment.phase, moment.worker): moment for moment in found}


def test_exact_kl_reference_reads_mini_batches_beside_actor() -> None:
    full = (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=full")
    n, head = LLAMA_FIRST_STAGE + 4_096, 32_064 * 4_096
    resting = moments(1, *full)
    reads, learns = resting["update", "reference"].parts, resting["update", "actor"].parts
    assert reads["reference weights"] == learns["reference weights"] == 2 * n
    assert reads["actor optimizer"] == 12 * n
    assert 0 < reads["reference activations"] < learns["actor activations"]
    assert ("update", "reference") not in moments(1, f"{ACTOR}.use_kl_loss=true")

    offloaded = (*full, "actor_rollout_ref.ref.megatron.param_offload=true")
    for stage, kept in ((0, 0), (1, 2 * head)):
        parts = moments(stage, *offloaded)["update", "actor"].parts
        assert parts["reference weights"] == kept  # its slice of the vocabulary, on the stage with the head
    in_reward = ("algorithm.kl_penalty=full", "actor_rollout_ref.ref.megatron.param_offload=true")
    assert moments(1, *in_reward)["infer", "actor"].parts["reference weights"] == 2 * head


def test_sync_holds_actor_and_engine_weights_and_buckets() -> None:
    found = fullest_rank(workload(f"{ACTOR}.megatron.param_offload=true"), device_bytes=80 * GB, bucket_bytes=GB)
    parts = found.fullest["sync"].parts
    assert parts["actor weights"] == found.states["actor"].weights
    assert parts["critic weights"] == 0
    assert parts["engine weights"] == pytest.approx(2 * 8_030_261_248 / 4, rel=1e-3)
    assert parts["sync buckets"] == 4 * GB


def test_micro_batches_are_bounded_by_budget_and_samples() -> None:
    def updates(*argv: str) -> PhaseWork | None:
        return workload("trainer.n_gpus_per_node=16", *argv).models[0].updates

    work = updates(f"{ACTOR}.ppo_mini_batch_size=256")  # 128 samples of 1024 tokens on each of 2 data-parallel ranks
    assert work is not None
    assert (work.num_tokens, work.num_micro_batches) == (16_384, 8)
    work = updates(f"{ACTOR}.ppo_mini_batch_size=16")
    assert work is not None
    assert (work.num_tokens, work.num_micro_batches) == (8 * 1024, 1)
    work = updates(f"{ACTOR}.megatron.context_parallel_size=2", f"{ACTOR}.ppo_mini_batch_size=64")
    assert work is not None  # one data-parallel group of 2 x 16,384 tokens
    assert (work.num_tokens, work.num_micro_batches) == (16_384, 2)


def test_supervised_pairs_are_micro_batches_of_the_update() -> None:
    mixed = (f"{ACTOR}.ppo_mini_batch_size=16", f"{ACTOR}.ptx_files=pairs.parquet", f"{ACTOR}.ptx_coef=0.1")
    for argv, tokens, number in (((), 8 * 1024, 2), ((f"{ACTOR}.ptx_batch_size=64",), 16_384, 1 + 2)):
        work = workload("trainer.n_gpus_per_node=16", *mixed, *argv).models[0].updates
        assert work is not None
        assert (work.num_tokens, work.num_micro_batches) == (tokens, number)


def test_each_teacher_has_its_place() -> None:
    full = (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=full_js")
    alone, both = moments(1, *full), moments(1, *full, "actor_rollout_ref.ref.teachers={math: org/teacher}")
    before, now = alone["update", "actor"].parts, both["update", "actor"].parts
    assert now == {**before} | {"reference of math weights": before["reference weights"]}
    reads = both["update", "reference of math"].parts
    assert reads["reference of math activations"] == alone["update", "reference"].parts["reference activations"]
