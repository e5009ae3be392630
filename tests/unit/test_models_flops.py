"""FLOPs by hand, and as torch counts them while transformers computes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from benchmarks.cases import MODELS
from megarl.models.architecture import read_architecture
from megarl.models.flops import UPDATE, Tokens, active_weights, forward_flops
from tests.support.programs import ROOT
from tests.support.tiny import SIZES, VARIANTS, write_checkpoint

LENGTHS = (5, 12)
OUTPUTS = sum(LENGTHS)  # transformers computes the logits of every token


def test_a_dense_model_by_hand() -> None:
    """Qwen2.5-0.5B: 896 wide, 14 heads and 2 of keys and values of 64, 4,864 in the feed-forward, 24 layers."""
    architecture = read_architecture(MODELS["qwen2.5-0.5b"])
    layer = 896 * 896 * 2 + 896 * 128 * 2 + 3 * 896 * 4864
    assert active_weights(architecture) == 24 * layer == 357_826_560
    one = forward_flops(architecture, Tokens(lengths=[3], num_outputs=2))
    pairs = 1 + 2 + 3
    assert one == 2 * 24 * layer * 3 + 24 * 14 * 2 * (64 + 64) * pairs + 2 * 896 * 151936 * 2
    value = forward_flops(architecture.with_scalar_head(), Tokens(lengths=[3], num_outputs=2))
    assert one - value == 2 * 896 * (151936 - 1) * 2


def test_linear_attention_by_hand() -> None:
    """Two key heads and four value heads of 128, 64 wide, and a convolution over four tokens; lengths do not matter."""
    config = SIZES | VARIANTS["qwen3_next"]
    few, many = (read_architecture(config | {"num_hidden_layers": n, "full_attention_interval": n}) for n in (2, 3))
    queries = keys = 2 * 128
    values = 4 * 128
    attention = 64 * (queries + keys + 2 * values + 2 * 4) + 4 * (queries + keys + values) + values * 64
    experts = 8 * 64 + 2 * 3 * 64 * 64 + 3 * 64 * 96 + 64
    memory = 3 * 4 * 128 * 128
    for lengths in ([7], [3, 4]):
        tokens = Tokens(lengths=lengths, num_outputs=1)
        assert forward_flops(many, tokens) - forward_flops(few, tokens) == 2 * 7 * (attention + experts + memory)


def test_only_chosen_experts_count() -> None:
    """Qwen3-30B-A3B is named after them: 3 of 30 billion weights, the embeddings included."""
    config = json.loads((ROOT / "configs/models/qwen3-30b-a3b/config.json").read_text())
    attention = 2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128
    layer = attention + 128 * 2048 + 8 * 3 * 2048 * 768
    active = active_weights(read_architecture(config))
    assert active == 48 * layer
    assert active + 2 * 151936 * 2048 == pytest.approx(3.3e9, rel=0.02)


@pytest.mark.parametrize(
    "variant", ["llama", "qwen3-tied", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"]
)
def test_torch_counts_the_same(tmp_path: Path, variant: str) -> None:
    write_checkpoint(tmp_path, variant)
    architecture = read_architecture(json.loads((tmp_path / "config.json").read_text()))
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **eager)
    forward = backward = 0
    for length in LENGTHS:
        ids = torch.arange(length)[None] % architecture.vocab_size
        with FlopCounterMode(display=False) as counter:
            logits = model(ids, use_cache=False).logits
        forward += counter.get_total_flops() - rotations(counter)
        with FlopCounterMode(display=False) as counter:
            logits.sum().backward()
        backward += counter.get_total_flops()
    counted = forward_flops(architecture, Masked(lengths=LENGTHS, num_outputs=OUTPUTS))
    assert forward == counted
    assert backward == (UPDATE - 1) * counted


class Masked(Tokens):
    """The tokens as eager attention reads them: it computes every token with every other, and masks."""

    def num_pairs(self, window: int | None = None) -> int:
        return sum(length * length for length in self.lengths)


def rotations(counter: FlopCounterMode) -> int:
    """Return the FLOPs of the angles of positions, which transformers computes as a product."""
    counts = counter.get_flop_counts()
    return sum(sum(by.values()) for name, by in counts.items() if name.endswith("rotary_emb"))


def test_pairs_are_those_of_causal_attention() -> None:
    tokens = Tokens(lengths=[1, 4, 7], num_outputs=0)
    assert tokens.num_tokens == 12
    for window in (None, 1, 3, 4, 6, 7, 100):
        seen = [
            (query, key)
            for length in tokens.lengths
            for query in range(length)
            for key in range(length)
            if key <= query
        ]
        assert tokens.num_pairs(window) == sum(query - key < (window or 8) for query, key in seen)


def test_layers_with_a_window_need_less(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "gemma3_text")
    architecture = read_architecture(json.loads((tmp_path / "config.json").read_text()))
    assert architecture.window == 6
    tokens = Tokens(lengths=[10], num_outputs=0)
    full = replace(architecture, window=None, windowed_layers=())
    saved = forward_flops(full, tokens) - forward_flops(architecture, tokens)
    unseen = 1 + 2 + 3 + 4  # by the tokens 7 to 10
    of_pair = 2 * 2 * architecture.num_attention_heads * architecture.head_dim
    assert saved == len(architecture.windowed_layers) * of_pair * unseen > 0
