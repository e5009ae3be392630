"""The measured cases: a model shape, cut one way by the trainer and another way by the engine.

A layout is written `TRAINER-ENGINE`, with the sizes of each side. `tp2pp2-tp2` is a trainer of four ranks (TP 2, PP 2)
that fills two engine replicas of TP 2; `dp2-dp2` are two unsharded trainers and two unsharded engines.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megarl.platform.errors import UserError

SIDE = re.compile(r"(?:tp(?P<tp>[1-9]\d*))?(?:pp(?P<pp>[1-9]\d*))?(?:dp(?P<dp>[1-9]\d*))?")
LENGTHS = ("equal", "ragged", "long-tail")
LAYOUTS = ("tp2-tp2", "tp1pp2-tp2", "tp2-tp1", "dp2-dp2", "tp2pp2-tp2")

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 151936, "rope_theta": 1e6}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "rope_theta": 1e6}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "tie_word_embeddings": False,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "bos_token_id": 1}
COMMON |= {"eos_token_id": 2, "initializer_range": 0.02, "attention_dropout": 0.0}


def _sizes(vocab: int, hidden: int, ffn: int, layers: int, heads: int, key_value_heads: int) -> dict[str, int]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": 64 if hidden < 3584 else 128,
    }


WIDE_HEADS = {"head_dim": 128}
MANY_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
OF_30B = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
# Sizes of Qwen's models are those of their published config.json.
MODELS: Mapping[str, dict[str, Any]] = {
    "llama-1m": COMMON | LLAMA | _sizes(1024, 256, 512, 2, 4, 2),
    "llama-3m": COMMON | LLAMA | _sizes(2048, 256, 704, 3, 4, 2),
    "llama-100m": COMMON | LLAMA | _sizes(16384, 768, 2048, 12, 12, 4),
    "llama-200m": COMMON | LLAMA | _sizes(16384, 1024, 2816, 14, 16, 4),
    "qwen3-moe-1m": COMMON | QWEN3_MOE | _sizes(1024, 128, 256, 2, 4, 2) | {"moe_intermediate_size": 64},
    "qwen3-moe-7m": COMMON | QWEN3_MOE | _sizes(1024, 128, 256, 2, 4, 2) | MANY_EXPERTS,
    "qwen3-moe-100m": COMMON | QWEN3_MOE | _sizes(16384, 512, 1024, 6, 8, 4) | {"moe_intermediate_size": 512},
    "qwen2.5-0.5b": COMMON | QWEN2 | _sizes(151936, 896, 4864, 24, 14, 2) | {"tie_word_embeddings": True},
    "qwen2.5-1.5b": COMMON | QWEN2 | _sizes(151936, 1536, 8960, 28, 12, 2) | WIDE_HEADS | {"tie_word_embeddings": True},
    "qwen2.5-3b": COMMON | QWEN2 | _sizes(151936, 2048, 11008, 36, 16, 2) | WIDE_HEADS | {"tie_word_embeddings": True},
    "qwen3-4b": COMMON | QWEN3 | _sizes(151936, 2560, 9728, 36, 32, 8) | WIDE_HEADS | {"tie_word_embeddings": True},
    "qwen3-8b": COMMON | QWEN3 | _sizes(151936, 4096, 12288, 36, 32, 8) | {"tie_word_embeddings": False},
    "qwen3-30b-a3b": COMMON | QWEN3_MOE | _sizes(151936, 2048, 6144, 48, 32, 4) | WIDE_HEADS | OF_30B,
    "qwen2.5-7b": COMMON | QWEN2 | _sizes(152064, 3584, 18944, 28, 28, 4) | {"tie_word_embeddings": False},
}
DEFAULT_MODELS = {"cpu": ("llama-100m", "qwen3-moe-100m"), "cuda": ("qwen2.5-0.5b", "qwen2.5-7b")}


@dataclass(frozen=True, kw_only=True)
class Split:
    """The numbers of a layout."""

    tp: int
    pp: int
    num_ranks: int
    engine_tp: int

    @classmethod
    def read(cls, layout: str) -> "Split":
        """Parse `TRAINER-ENGINE`.

        Raises:
            UserError: the text is no layout, or the engine's ranks do not divide the trainer's.
        """
        sides = [SIDE.fullmatch(side) for side in layout.split("-")]
        if len(sides) != 2 or not all(sides) or "" in layout.split("-"):
            raise UserError(f"--layout {layout}: write TRAINER-ENGINE, as in {', '.join(LAYOUTS)}")
        trainer, engine = ({key: int(size or 1) for key, size in side.groupdict().items()} for side in sides if side)
        num_ranks = trainer["tp"] * trainer["pp"] * trainer["dp"]
        if engine["pp"] > 1 or num_ranks % (engine["tp"] * engine["dp"]):
            raise UserError(
                f"--layout {layout}: the trainer has {num_ranks} ranks; the engine needs a tp that divides them, and "
                "has no pp"
            )
        return cls(tp=trainer["tp"], pp=trainer["pp"], num_ranks=num_ranks, engine_tp=engine["tp"])


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement."""

    model: str
    layout: str
    device: Literal["cpu", "cuda"]
    dtype: Literal["bfloat16", "float32"]
    repeats: int
    bucket_megabytes: int
    sleeps: bool = False  # the engine returns its memory between two syncs
