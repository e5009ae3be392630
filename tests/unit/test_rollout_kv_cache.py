"""The CPU engine's cache is as large as one generation can use, counted by hand."""

import pytest

from megarl.models.architecture import read_architecture
from megarl.rollout.config import RolloutSection
from megarl.rollout.kv_cache import check_cache_tokens, cpu_cache_bytes, cpu_cache_bytes_per_token, cpu_memory_bytes
from tests.support.tiny import SIZES, VARIANTS

MODEL = read_architecture(SIZES | VARIANTS["llama"] | {"num_key_value_heads": 4})  # two layers, heads of 32


@pytest.mark.parametrize(
    ("tp_size", "dtype", "expected"),
    [
        (1, "float32", 2 * 2 * 4 * 32 * 4),  # layers, K and V, heads, head size, bytes
        (2, "float32", 2 * 2 * 2 * 32 * 4),
        (2, "bfloat16", 2 * 2 * 2 * 32 * 2),
        (8, "float32", 2 * 2 * 1 * 32 * 4),  # a head is on two ranks
    ],
)
def test_bytes_of_a_token(tp_size: int, dtype: str, expected: int) -> None:
    section = RolloutSection(tensor_model_parallel_size=tp_size, dtype=dtype)
    assert cpu_cache_bytes_per_token(section, MODEL) == expected


def test_latent_attention_caches_padded_values_per_query_head() -> None:
    model = read_architecture(SIZES | VARIANTS["deepseek_v3"])
    section = RolloutSection(tensor_model_parallel_size=2, dtype="bfloat16")
    expected = 2 * 2 * 2 * (32 + 32) * 2  # layers, K and V, heads of this rank, nope and rope part, bytes
    assert cpu_cache_bytes_per_token(section, model) == expected


def test_linear_attention_caches_no_tokens() -> None:
    """One of two layers has linear attention: 4 matrices of 128 x 128, and 3 tokens of 1,024 channels."""
    model = read_architecture(SIZES | VARIANTS["qwen3_next"])
    section = RolloutSection(tensor_model_parallel_size=2, dtype="bfloat16")
    assert cpu_cache_bytes_per_token(section, model) == 2 * 1 * 32 * 2
    memory = (4 * 128 * 128 + 3 * 1024) // 2 * 2
    assert cpu_memory_bytes(section, model) == 3 * memory  # two blocks, and one for keys and values
    assert cpu_memory_bytes(section, MODEL) == 0


def test_cache_holds_full_sequence_blocks_and_one_more() -> None:
    blocks = 3 * 2 + 1  # 130 tokens are two blocks of 128
    assert cpu_cache_bytes(RolloutSection(), 100, num_sequences=3, max_model_len=130) == blocks * 128 * 100


def test_a_cache_stays_within_its_share_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    alone = cpu_cache_bytes(RolloutSection(), 1 << 20, num_sequences=1 << 20, max_model_len=128)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    shared = cpu_cache_bytes(RolloutSection(), 1 << 20, num_sequences=1 << 20, max_model_len=128)
    assert shared == pytest.approx(alone / 4, rel=0.2)


def test_a_sequence_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one sequence of 1000000 tokens.*gpu_memory_utilization"):
        cpu_cache_bytes(RolloutSection(), 1 << 20, num_sequences=1, max_model_len=1_000_000)


def test_a_cache_holds_one_sequence_at_least() -> None:
    check_cache_tokens(256, 256)
    with pytest.raises(ValueError, match=r"holds 128 tokens, .* may have 129: raise .*gpu_memory_utilization"):
        check_cache_tokens(128, 129)
