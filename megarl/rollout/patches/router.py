"""The choice of experts: by a sigmoid or a bias, which vLLM's CPU build reads within groups alone, and its logits."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megarl.platform.patching import replace
from megarl.rollout.patches.releases import declare_vllm

ROUTER = declare_vllm(
    "vllm.model_executor.layers.fused_moe.router.cpu_router:CPURouter",
    "_compute_routing",
    reason="among all experts, the CPU build fails at a sigmoid (MiniMax-M2) and ignores a bias (ERNIE 4.5)",
    upstream="vllm/model_executor/layers/fused_moe/router/cpu_router.py: CPURouter._compute_routing",
    until="the CPU build chooses by a sigmoid and by a bias without groups",
)

SELECTION = declare_vllm(
    "vllm.model_executor.layers.fused_moe.router.base_router:BaseRouter",
    "_select_experts",
    reason="the trainer may take the scores of the experts that the engine chose, and vLLM tells only the experts",
    upstream="vllm/model_executor/layers/fused_moe/router/base_router.py: BaseRouter._select_experts",
    until="vLLM tells its choice together with the scores",
)


def note_router_logits(note: Callable[[Tensor], None]) -> None:
    """Call `note` with the logits `[n, num_experts]` of a router before it tells its choice."""
    original = SELECTION.original("_select_experts")

    def select_experts(
        router: object, hidden_states: Tensor, router_logits: Tensor, *args: object, **kwargs: object
    ) -> object:
        note(router_logits)
        return original(router, hidden_states, router_logits, *args, **kwargs)

    replace(SELECTION, _select_experts=select_experts)


def choose_without_groups() -> None:
    """Take all experts for one group, if a sigmoid or a bias affects their choice and there are no groups."""
    if not ROUTER.is_present:  # releases before 0.32
        return
    original = ROUTER.original("_compute_routing")

    def compute_routing(router: Any, *args: object, **kwargs: object) -> object:
        has_bias = router.scoring_func == "softmax" and router.e_score_correction_bias is not None
        if (router.scoring_func == "sigmoid" or has_bias) and not router.use_grouped_topk:
            router.use_grouped_topk = True
            router.num_expert_group = router.topk_group = 1
        return original(router, *args, **kwargs)

    replace(ROUTER, _compute_routing=compute_routing)
