"""Random configurations of every family, and random splits of their models over ranks."""

from typing import Any

from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms.losses import Totals
from megarl.batch import Experience
from megarl.models.families import FAMILIES
from tests.support.tiny import VARIANTS

PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
EXPERT_PARALLEL = "expert_model_parallel_size"
OF_EXPERTS = {EXPERT_PARALLEL: 2, "expert_tensor_parallel_size": 1}
VARIANT_OF = {changes["model_type"]: variant for variant, changes in reversed(VARIANTS.items())}


@st.composite
def sizes(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """Draw the fields of a small model's config.json that two ranks can share in every way."""
    traits = FAMILIES[family]
    heads = draw(st.sampled_from([2, 4]))
    head_dim = draw(st.sampled_from([16, 32]))
    layers = draw(st.sampled_from([2, 4]))
    own_keys = traits.latent or traits.fused_qkv
    found = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if own_keys else 2,
        "head_dim": 32 if traits.latent else head_dim,
        "hidden_size": heads * head_dim if traits.fused_qkv else draw(st.sampled_from([32, 64, 80])),
        "intermediate_size": draw(st.sampled_from([48, 96])),
        "vocab_size": draw(st.integers(211, 300)),
        traits.key("rms_norm_eps"): traits.norm_eps or draw(st.sampled_from([1e-6, 1e-3])),
        "tie_word_embeddings": traits.can_tie and draw(st.booleans()),
    }
    if traits.rotates_by_layer:
        found["no_rope_layers"] = draw(st.lists(st.integers(0, 1), min_size=layers, max_size=layers))
    if traits.windows == "all layers":
        found["sliding_window"] = draw(st.sampled_from([None, 3, 300]))
    elif traits.windows == "some layers":
        kinds = st.sampled_from(["full_attention", "sliding_attention"])
        found["layer_types"] = draw(st.lists(kinds, min_size=layers, max_size=layers))
        found["sliding_window"] = draw(st.sampled_from([3, 300]))
    if traits.linear_sections:
        kinds = st.lists(st.sampled_from(["full_attention", "linear_attention"]), min_size=layers, max_size=layers)
        found["layer_types"] = draw(kinds.filter(lambda kinds: len(set(kinds)) == 2))
        found["linear_num_key_heads"] = 4  # four ranks may share them
        found["linear_num_value_heads"] = found["linear_num_key_heads"] * draw(st.integers(1, 3))
        found |= {f"linear_{part}_head_dim": draw(st.sampled_from([8, 16])) for part in ("key", "value")}
        found["linear_conv_kernel_dim"] = draw(st.integers(2, 4))
    if traits.parallel_residual:
        found["use_parallel_residual"] = draw(st.booleans())
    return found


@st.composite
def splits(draw: st.DrawFn, family: str) -> tuple[int, dict[str, int]]:
    """Draw a split over at most four ranks; return their number and the fields of a MegatronSection."""
    first, second = draw(st.permutations(PARALLEL))[:2]
    split = {first: 2, second: draw(st.integers(1, 2))}
    if FAMILIES[family].experts:
        split |= OF_EXPERTS
    shared = split.get(PARALLEL[0], 1) * split.get(PARALLEL[2], 1)
    pipeline = split.get(PARALLEL[1], 1)
    return max(shared, split.get(EXPERT_PARALLEL, 1)) * pipeline, split


def likelihood(outputs: Any, micro: Experience, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
    """An objective whose gradient reaches every parameter."""
    loss = -outputs.log_probs.sum()
    return loss, {"loss": loss.detach()}
