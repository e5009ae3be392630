"""How tokens choose their experts, exactly as the Hugging Face models do it, and the two losses on that choice.

Megatron's own routing agrees with theirs only for some settings (it scores a group of experts by another sum than
DeepSeek-V2, and always normalises sigmoid scores), so the choice is ours and the rest is Megatron's.

Both losses are contributions to the loss of the global batch, like every objective here: a coefficient c adds to the
loss of each mixture-of-experts layer

    c * mean over tokens of logsumexp(router logits)^2                      moe_z_loss_coeff     (ST-MoE, eq. 5)
    c * mean over micro-batches of num_experts * sum_e f_e * P_e            moe_aux_loss_coeff   (Switch, eq. 4)

with f_e the share of the choices that fell on expert e and P_e its mean probability, both within a micro-batch, and the
mean over micro-batches weighted by their tokens. So the z-loss is the same under every split of the batch, and the
load-balancing loss depends on which samples share a micro-batch: on the token budget and on the data-parallel size.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megarl.models.experts import Experts

UNSUPPORTED = {  # field of TransformerConfig: the values that keep the model's function what it is
    "moe_router_load_balancing_type": ("aux_loss", "none"),
    "moe_expert_capacity_factor": (None,),
    "moe_router_fusion": (False,),
    "moe_enable_routing_replay": (False,),
    "moe_input_jitter_eps": (None,),
}


def expert_settings(experts: Experts, num_layers: int) -> dict[str, Any]:
    """The fields of Megatron's TransformerConfig that describe the experts."""
    dense = experts.first_dense_layers
    return {
        "num_moe_experts": experts.num_experts,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_layer_freq": [0] * dense + [1] * (num_layers - dense),
        "moe_router_topk": experts.top_k,
        "moe_router_score_function": experts.score,
        "moe_router_pre_softmax": True,  # unused, but without it Megatron refuses a single expert per token
        "moe_router_dtype": "fp32",
        "moe_router_enable_expert_bias": experts.router_bias,
        "moe_router_bias_update_rate": 0.0,  # the bias is the checkpoint's until somebody asks for more
        "moe_shared_expert_intermediate_size": experts.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": experts.shared_gate,
    }


def check_expert_settings(config: Any) -> None:
    """Refuse what `override_transformer_config` may say of the router and this one does not do.

    Raises:
        ValueError: names the field and the values it may have.
    """
    for field, allowed in UNSUPPORTED.items():
        if (value := getattr(config, field)) not in allowed:
            raise ValueError(
                f"override_transformer_config.{field}={value}: a token goes where the engine would send it,"
                f" and packed rows have no sequences to balance; use {' or '.join(map(repr, allowed))}"
            )
    if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        raise ValueError(
            "a mixture of experts with tensor_model_parallel_size > 1 needs sequence_parallel=true:"
            " otherwise every rank would send the same tokens to the experts"
        )


class Router(TopKRouter):
    """Megatron's router with our choice of experts and our scale of its losses."""

    num_tokens: int = 1  # of the global batch

    def __init__(self, *args: Any, experts: Experts, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.experts = experts

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weight of each expert for each token, and which of them were chosen.

        Args:
            logits: [N, 1, num_experts] float32, of this rank's tokens.
            padding_mask: [N, 1] bool, True where a token only fills up the row; None: nowhere.

        Returns:
            [N, num_experts] float32, zero where an expert was not chosen, and [N, num_experts] bool.
        """
        logits = logits.flatten(0, -2)
        weights, chosen = choose_experts(logits, self.experts, self.expert_bias)
        if self.training and torch.is_grad_enabled():
            real = torch.ones_like(logits[:, 0]) if padding_mask is None else (~padding_mask.flatten()).float()
            # The gradient of the weights will be the objective's and those of the losses.
            weights = MoEAuxLossAutoScaler.apply(weights, self._losses(logits, real) / self.num_tokens)
            if self.expert_bias is not None:  # what moe_router_bias_update_rate > 0 moves the bias by
                self.local_tokens_per_expert += real @ chosen.float()
        return weights, chosen

    def _losses(self, logits: Tensor, real: Tensor) -> Tensor:
        """This rank's part of both losses, times the tokens of the micro-batch; `real` [N] is 0 for filling tokens."""
        loss = logits.new_zeros(())
        if coefficient := self.config.moe_z_loss_coeff:
            loss = loss + coefficient * (logits.logsumexp(-1).square() * real).sum()
        if coefficient := self.get_aux_loss_coeff("aux_loss"):
            counted, scores = compute_routing_scores_for_aux_loss(logits, self.topk, self.score_function)
            choices = reduce_from_tensor_model_parallel_region(real @ counted.float(), self.tp_cp_group)
            shares = choices / choices.sum().clamp(min=1)
            loss = loss + coefficient * len(shares) * (shares * (real @ scores)).sum()
        return loss


def choose_experts(logits: Tensor, experts: Experts, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """What `Router.routing` returns, for [N, num_experts] float32 logits; `bias` takes part in the choice alone."""
    scores = logits.sigmoid() if experts.score == "sigmoid" else logits.softmax(-1)
    choice = scores.detach() if bias is None else scores.detach() + bias
    if experts.top_k_groups < experts.num_groups:
        choice = _within_best_groups(choice, experts)
    places = choice.topk(experts.top_k).indices
    weights = scores.gather(-1, places)
    if experts.normalize_top_k:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, places, True)
    return torch.zeros_like(scores).scatter(-1, places, weights * experts.scaling), chosen


def _within_best_groups(choice: Tensor, experts: Experts) -> Tensor:
    """Minus infinity outside the best groups: by their two best experts (DeepSeek-V3), or their best one (V2)."""
    grouped = choice.unflatten(-1, (experts.num_groups, -1))
    best = grouped.topk(2 if experts.score == "sigmoid" else 1).values.sum(-1)
    kept = best.topk(experts.top_k_groups).indices
    outside = torch.ones_like(best, dtype=torch.bool).scatter(-1, kept, False)
    return grouped.masked_fill(outside[..., None], -torch.inf).flatten(-2)


def use_router(mlp: Any, experts: Experts) -> None:
    """Put `Router` into the specification of a layer's feed-forward, where that is a mixture of experts."""
    # A ModuleSpec in megatron-core 0.16, a partial of the module in 0.19.
    submodules = mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules
    if hasattr(submodules, "router"):
        submodules.router = partial(Router, experts=experts)


def mark_experts(module: torch.nn.Module) -> None:
    """Have the gradients of experts summed over the ranks that hold the same ones.

    Megatron does so only where experts are divided among ranks, and leaves them different on the ranks of a
    tensor-parallel group that hold whole experts. Always doing so keeps the optimizer's parts the same in all splits.
    """
    for name, parameter in module.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]


def share_batch_size(modules: Iterable[torch.nn.Module], num_tokens: int) -> None:
    """Tell all routers of `modules` how many tokens the global batch has, before gradients of it are computed."""
    for module in modules:
        for part in module.modules():
            if isinstance(part, Router):
                part.num_tokens = num_tokens
