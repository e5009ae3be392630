"""The sizes and switches of a mixture of experts, and their names in a `config.json`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megarl.models.families import Family
from megarl.models.fields import MOST_EXPERTS, MOST_LAYERS, Fields, wrong
from megarl.platform.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

MOST_IN_ALL = 1_000_000
"""Limit of the experts of all layers together."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The mixture of experts that replaces the feed-forward of every layer except the first few."""

    num_experts: int
    top_k: int
    ffn_hidden_size: int  # of one expert
    shared_ffn_hidden_size: int = 0  # of all shared experts together; 0: none
    shared_gate: bool = False  # a sigmoid gate scales the output of the shared expert
    first_dense_layers: int = 0  # layers 0 to n-1 have a dense feed-forward
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize_top_k: bool = True  # the weights of the chosen experts sum to one (before `scaling`)
    scaling: float = 1.0
    num_groups: int = 1  # a token chooses `top_k_groups` groups before it chooses experts
    top_k_groups: int = 1
    router_bias: bool = False  # a bias per expert that affects the choice and not the weights

    @property
    def number_bytes(self) -> int:
        """The bytes that hold the number of an expert."""
        return 1 if self.num_experts <= 256 else 2


def expert_scores(logits: "Tensor", experts: Experts) -> "Tensor":
    """Return the scores of all experts by the logits of a router, [..., num_experts], in float32."""
    logits = logits.float()
    return logits.sigmoid() if experts.score == "sigmoid" else logits.softmax(-1)


def read_experts(config: Fields, traits: Family) -> Experts:
    """Return the experts of a family that has experts. Raises UserError if a size is missing or impossible."""
    experts = _read(config, traits)
    chosen = traits.key("num_experts_per_tok")
    if experts.top_k > experts.num_experts:
        raise wrong(chosen, experts.top_k, f"there are {experts.num_experts} experts")
    if experts.num_experts % experts.num_groups:
        raise wrong("n_group", experts.num_groups, f"must divide the {experts.num_experts} experts")
    if experts.top_k_groups > experts.num_groups:
        raise wrong("topk_group", experts.top_k_groups, f"there are {experts.num_groups} groups (n_group)")
    layers = config.size("num_hidden_layers", most=MOST_LAYERS)
    if layers * experts.num_experts > MOST_IN_ALL:
        raise UserError(f"config.json: {layers} layers of {experts.num_experts} experts are more than {MOST_IN_ALL}")
    chosen_from = experts.num_experts // experts.num_groups * experts.top_k_groups
    if experts.top_k > chosen_from:
        raise wrong(chosen, experts.top_k, f"{chosen_from} experts are in the chosen groups (topk_group)")
    return experts


def _read(config: Fields, traits: Family) -> Experts:
    family = config.values["model_type"]
    top_k = config.size(traits.key("num_experts_per_tok"), most=MOST_EXPERTS)
    score: Literal["softmax", "sigmoid"] = "sigmoid" if traits.sigmoid_router else "softmax"
    if family in ("mixtral", "gpt_oss", "minimax_m2"):
        return Experts(
            num_experts=config.size("num_local_experts", most=MOST_EXPERTS),
            top_k=top_k,
            ffn_hidden_size=config.size("intermediate_size"),
            score=score,
            router_bias=traits.sigmoid_router,
        )
    ffn_hidden_size = config.size("moe_intermediate_size")
    if family == "ernie4_5_moe":
        return Experts(
            num_experts=config.size("moe_num_experts", most=MOST_EXPERTS),
            top_k=top_k,
            ffn_hidden_size=ffn_hidden_size,
            shared_ffn_hidden_size=config.size("moe_num_shared_experts", 0, least=0, most=MOST_EXPERTS)
            * ffn_hidden_size,
            first_dense_layers=config.size("moe_layer_start_index", least=0),
            router_bias=True,
        )
    normalize_top_k = config.flag("norm_topk_prob")
    if family.startswith("qwen"):
        # transformers 5 writes the first name and reads the second.
        count = "num_local_experts" if "num_local_experts" in config else "num_experts"
        shared = config.size("shared_expert_intermediate_size", 0, least=0)
        return Experts(
            num_experts=config.size(count, most=MOST_EXPERTS),
            top_k=top_k,
            ffn_hidden_size=ffn_hidden_size,
            shared_ffn_hidden_size=shared,
            shared_gate=shared > 0,
            first_dense_layers=len(config.items("mlp_only_layers")),
            normalize_top_k=normalize_top_k,
        )
    grouped = traits.sigmoid_router or config.values["topk_method"] == "group_limited_greedy"
    return Experts(
        num_experts=config.size("n_routed_experts", most=MOST_EXPERTS),
        top_k=top_k,
        ffn_hidden_size=ffn_hidden_size,
        shared_ffn_hidden_size=config.size("n_shared_experts", 0, least=0, most=MOST_EXPERTS) * ffn_hidden_size,
        first_dense_layers=config.size("first_k_dense_replace", 0, least=0),
        score=score,
        normalize_top_k=normalize_top_k,
        scaling=config.number("routed_scaling_factor", 1.0),
        num_groups=config.size("n_group") if grouped else 1,
        top_k_groups=config.size("topk_group") if grouped else 1,
        router_bias=traits.sigmoid_router,
    )
