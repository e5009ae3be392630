"""The choice of experts, exactly as the Hugging Face models make it, and the two losses on the choice.

Megatron's own routing agrees with the Hugging Face models only for some settings: it scores a group of experts by
another sum than DeepSeek-V2, and always normalises sigmoid scores. So megarl chooses; the rest is Megatron's.

Both losses are contributions to the loss of the global batch, like every objective. For each mixture-of-experts layer,
a coefficient c adds to the loss

    c * mean over tokens of logsumexp(router logits)^2                      moe_z_loss_coeff     (ST-MoE, eq. 5)
    c * mean over micro-batches of num_experts * sum_e f_e * P_e            moe_aux_loss_coeff   (Switch, eq. 4)

f_e is the share of the choices that fell on expert e, and P_e its mean probability, both within a micro-batch; the mean
over micro-batches is weighted by tokens. So the z-loss is the same under every split of the batch. The load-balancing
loss depends on the samples that share a micro-batch: on the token budget and on the data-parallel size.

Routing replay (Ma et al. 2025, arXiv 2510.11370; called R3): if a sample has routes, its tokens go to the experts that
the engine chose. Their weights are computed from the router's own scores, with their gradients. So rounding that
differs between engine and trainer changes weights a little, and never the experts. If the routes have the engine's
scores, the weights are computed from these; gradients still reach the router's own scores.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.distributed.exchange import host_group
from megarl.learner.recomputed import PerMicroBatch
from megarl.learner.together import ExpertsTogether, compute_together, in_halves
from megarl.models.experts import Experts, expert_scores
from megarl.platform.errors import UserError

SUPPORTED = {  # field of TransformerConfig: the values that leave the model's function unchanged
    "moe_router_load_balancing_type": ("aux_loss", "none"),
    "moe_expert_capacity_factor": (None,),
    "moe_router_fusion": (False,),
    "moe_enable_routing_replay": (False,),
    "moe_input_jitter_eps": (None,),
}


def expert_settings(experts: Experts, num_layers: int) -> dict[str, object]:
    """Return the fields of Megatron's TransformerConfig that describe the experts."""
    dense = experts.first_dense_layers
    return {
        "num_moe_experts": experts.num_experts,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_layer_freq": [0] * dense + [1] * (num_layers - dense),
        "moe_router_topk": experts.top_k,
        "moe_router_score_function": "sigmoid" if experts.router_bias else experts.score,  # `Router` knows the score
        "moe_router_pre_softmax": True,  # unused, but without it Megatron refuses a single expert per token
        "moe_router_dtype": "fp32",
        "moe_router_enable_expert_bias": experts.router_bias,
        "moe_router_bias_update_rate": 0.0,  # keep the checkpoint's bias, unless a user overrides this
        "moe_shared_expert_intermediate_size": experts.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": experts.shared_gate,
    }


def check_expert_settings(config: TransformerConfig) -> None:
    """Check that `override_transformer_config` asks for nothing that `Router` does not do.

    Raises:
        UserError: a field has an unsupported value; the message names the field and its supported values.
    """
    for field, allowed in SUPPORTED.items():
        value = getattr(config, field)
        if value not in allowed:
            raise UserError(
                f"override_transformer_config.{field}={value} is not supported: tokens must go to the same experts as"
                f" in the engine, and packed rows have no sequences to balance; use {' or '.join(map(repr, allowed))}"
            )
    if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        raise UserError(
            "a mixture of experts with tensor_model_parallel_size > 1 needs sequence_parallel=true:"
            " without it, every rank would send the same tokens to the experts"
        )


class Router(TopKRouter):
    """Megatron's router with the choice of experts and the losses of this module."""

    num_tokens: int = 1  # of the global batch
    place: int = 0  # among the routers of this rank

    def __init__(self, *args: object, experts: Experts, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.experts = experts
        self.routes = PerMicroBatch()
        """As `choose_experts` takes them."""
        self.chosen: Tensor | None = None  # [N, num_experts] bool, of the last inference
        self.agreement: Tensor | float = 0.0  # [2] float64: replayed choices that are the router's own too, and all

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose the experts of each token.

        Args:
            logits: [N, 1, num_experts] float32, of this rank's tokens.
            padding_mask: [N, 1] bool, True for tokens that only pad the row; None: no token does.

        Returns:
            [N, num_experts] float32 weights, zero for experts that were not chosen; [N, num_experts] bool, the choice.
        """
        logits = logits.flatten(0, -2)
        routes = self.routes.take(is_training=self.training)
        weights, chosen = choose_experts(logits, self.experts, self.expert_bias, routes)
        self.chosen = None if self.training else chosen
        if not self.training:
            return weights, chosen
        real = torch.ones_like(logits[:, 0]) if padding_mask is None else (~padding_mask.flatten()).float()
        replayed = None if routes is None else chosen
        if torch.is_grad_enabled():
            # Adds the gradients of the losses to the gradient that the weights get from the objective.
            weights = MoEAuxLossAutoScaler.apply(weights, self._losses(logits, real, replayed) / self.num_tokens)
            if self.expert_bias is not None:  # moe_router_bias_update_rate > 0 moves the bias by this
                self.local_tokens_per_expert += real @ chosen.float()
        if self.routes.is_in_forward and replayed is not None:
            _, own = choose_experts(logits.detach(), self.experts, self.expert_bias)
            agreeing = (own & replayed).sum(-1).double() @ real.double()  # CUDA multiplies no vectors of integers
            self.agreement = self.agreement + torch.stack([agreeing, real.double().sum() * self.topk])
        return weights, chosen

    def _losses(self, logits: Tensor, real: Tensor, replayed: Tensor | None) -> Tensor:
        """Return this rank's part of both losses, times the tokens of the micro-batch.

        `real` [N] is 0 for padding. `replayed` [N, num_experts] bool is a choice that is not the router's own.
        """
        loss = logits.new_zeros(())
        coefficient = self.config.moe_z_loss_coeff
        if coefficient:
            loss = loss + coefficient * (logits.logsumexp(-1).square() * real).sum()
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if coefficient:
            counted, scores = compute_routing_scores_for_aux_loss(logits, self.topk, self.experts.score)
            counted = counted if replayed is None else replayed
            choices = reduce_from_tensor_model_parallel_region(real @ counted.float(), self.tp_cp_group)
            shares = choices / choices.sum().clamp(min=1)
            loss = loss + coefficient * len(shares) * (shares * (real @ scores)).sum()
        return loss


def choose_experts(
    logits: Tensor, experts: Experts, bias: Tensor | None, routes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return weights and choice, as `Router.routing`, for [N, num_experts] logits; `bias` affects only the choice.

    `routes` [N, k] are the chosen experts of each token; None: the scores decide. With [N, 2k] float32, the second half
    are values for the scores of these experts, whose gradients are those of the router's own scores.
    """
    scores = expert_scores(logits, experts)
    places = _best(scores.detach(), experts, bias) if routes is None else routes[:, : experts.top_k].long()
    weights = scores.gather(-1, places)
    if routes is not None and routes.shape[1] > experts.top_k:
        weights = weights + (routes[:, experts.top_k :] - weights).detach()
    if experts.normalize_top_k:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, places, True)
    return torch.zeros_like(scores).scatter(-1, places, weights * experts.scaling), chosen


def _best(scores: Tensor, experts: Experts, bias: Tensor | None) -> Tensor:
    """Return the experts of each token, [N, k] int64, by [N, num_experts] scores."""
    choice = scores if bias is None else scores + bias
    if experts.top_k_groups < experts.num_groups:
        choice = _within_best_groups(choice, experts)
    return choice.topk(experts.top_k).indices


def _within_best_groups(choice: Tensor, experts: Experts) -> Tensor:
    """Mask all groups except the best; a group scores as its two best experts (DeepSeek-V3) or its best one (V2)."""
    grouped = choice.unflatten(-1, (experts.num_groups, -1))
    best = grouped.topk(2 if experts.score == "sigmoid" else 1).values.sum(-1)
    kept = best.topk(experts.top_k_groups).indices
    outside = torch.ones_like(best, dtype=torch.bool).scatter(-1, kept, False)
    return grouped.masked_fill(outside[..., None], -torch.inf).flatten(-2)


def use_own_parts(mlp: ModuleSpec | partial, experts: Experts, *, local: bool) -> None:
    """Put `Router` into the specification of a layer's feed-forward, if it is a mixture of experts.

    `local` says that the layer has no modules of Transformer Engine: then `ExpertsTogether` is put there as well.
    """
    # A ModuleSpec in megatron-core 0.16, a partial of the module in 0.19.
    submodules = mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules
    if hasattr(submodules, "router"):
        submodules.router = partial(Router, experts=experts)
        if local:
            compute_together(submodules)


def mark_experts(module: torch.nn.Module) -> None:
    """Mark the experts' parameters, so that Megatron sums their gradients over the ranks that hold the same experts.

    Megatron itself marks them only if experts are divided among ranks; without the mark, gradients differ among the
    ranks of a tensor-parallel group that hold complete experts. The mark also gives the optimizer the same parts under
    every split. Megatron marks the biases of second projections as replicas on tensor-parallel ranks, which add their
    gradients; but these ranks have other experts, or other tokens.
    """
    for name, parameter in module.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.sequence_parallel = False  # type: ignore[attr-defined]
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


def halve_projections(chunk: GPTModel) -> None:
    """Let first projections, whose rows are those of gate and up in turn, return [gate ; up], as Megatron needs."""
    for layer in chunk.decoder.layers:
        experts = getattr(layer.mlp, "experts", None)
        if isinstance(experts, ExpertsTogether):
            experts.gate_and_up_in_turn = True
        elif experts is not None:
            experts.linear_fc1.register_forward_hook(lambda module, inputs, result: (in_halves(result[0]), result[1]))


def routers_of(chunks: Iterable[GPTModel]) -> list[Router]:
    """Return the routers of chunks of a GPTModel, in the order of their layers."""
    return [layer.mlp.router for chunk in chunks for layer in chunk.decoder.layers if hasattr(layer.mlp, "router")]


def number_routers(chunks: Sequence[GPTModel], experts: Experts | None) -> list[int]:
    """Give each router its place among those of this rank, by layer. Return their places among those of the model."""
    routers = sorted(routers_of(chunks), key=lambda each: each.layer_number)
    for place, router in enumerate(routers):
        router.place = place
    return [router.layer_number - 1 - experts.first_dense_layers for router in routers] if experts else []


def prepare_routers(chunks: Iterable[GPTModel], num_tokens: int) -> None:
    """Tell all routers the number of tokens in the global batch, before a forward and a backward pass of it."""
    for router in routers_of(chunks):
        router.num_tokens = num_tokens
        router.routes.clear()
        router.agreement = 0.0


@contextmanager
def replayed(chunk: GPTModel, routes: Tensor | None) -> Iterator[None]:
    """Let the routers of a chunk take `routes`, as in `Packed`, in the forward pass within the block."""
    if routes is not None and chunk.config.sequence_parallel:
        parts = routes.chunk(chunk.config.tensor_model_parallel_size)
        routes = parts[parallel_state.get_tensor_model_parallel_rank()]
    with ExitStack() as stack:
        for router in routers_of([chunk]):
            stack.enter_context(router.routes.set_to(None if routes is None else routes[:, router.place]))
        yield


def choices_of(chunk: GPTModel, num_tokens: int, top_k: int) -> Tensor:
    """Return the experts that a chunk's routers chose in the last inference: [N, L, k] int64.

    `num_tokens` is N, which tensor-parallel ranks share under sequence parallelism. Collective among these then.
    """
    chosen = [router.chosen for router in routers_of([chunk])]
    if not chosen:
        return torch.empty(num_tokens, 0, top_k, dtype=torch.int64, device=next(chunk.parameters()).device)
    choices = torch.stack([each.int().topk(top_k).indices for each in chosen if each is not None], dim=1)
    if chunk.config.sequence_parallel:
        choices = gather_from_sequence_parallel_region(choices)
    return choices


def router_agreement(chunks: Iterable[GPTModel]) -> float:
    """Return the share of the replayed choices since `prepare_routers` that are the routers' own. Collective."""
    counts = torch.zeros(2, dtype=torch.float64)
    for router in routers_of(chunks):
        counts += torch.as_tensor(router.agreement, device="cpu")
    dist.all_reduce(counts, group=host_group())
    agreed, replayed_choices = counts.tolist()
    return float(agreed / replayed_choices) if replayed_choices else 1.0
