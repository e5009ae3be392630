"""The experts that vLLM chose for each token, in a store with the slots of the KV cache.

The keys of a token lie in a slot of the cache. The experts that were chosen while the keys were computed lie in the
same slot of the store. So a request that reads cached keys of its prompt has their routes too. If vLLM interrupts a
request and computes it again, its routes are the later ones, as its keys are. The store may also have the scores of
these experts.
"""

from typing import Any

import torch
from torch import Tensor

from megarl.batch import ROUTE_TYPES
from megarl.models.architecture import Architecture
from megarl.models.experts import expert_scores
from megarl.platform.errors import UserError
from megarl.rollout.patches import note_freed_blocks, note_router_logits

KEY = "actor_rollout_ref.rollout.routing_replay"
FIRST_RELEASE = "0.32"
"""The first release of vLLM whose routers tell their choice on every device."""


class RouteStore:
    """The routes of all slots of this rank's KV cache."""

    def __init__(self, worker: Any, architecture: Architecture, *, with_scores: bool) -> None:
        """Keep the routes of the model of a worker that has its KV cache, from now on.

        Raises:
            UserError: this release of vLLM does not tell its choice, or the KV cache has layers of different kinds.
        """
        try:
            from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer
        except ImportError:
            raise UserError(f"{KEY} needs vLLM {FIRST_RELEASE} or newer") from None
        cache = worker.model_runner.kv_cache_config
        if len(cache.kv_cache_groups) > 1:
            raise UserError(f"{KEY}: vLLM caches the layers of this model in several ways, with slots of their own")
        experts = architecture.experts
        assert experts is not None, "a model without experts has no routes"
        self._experts = experts
        self._with_scores = with_scores
        self._logits: Tensor | None = None  # of the router that computes
        self._block_size = cache.kv_cache_groups[0].kv_cache_spec.block_size
        self._blocks = dict[str, list[int]]()  # by the name of the request
        num_slots = cache.num_blocks * self._block_size + 1  # the last is that of padding, whose slot is -1
        shape = num_slots, architecture.num_layers - experts.first_dense_layers, experts.top_k * (1 + with_scores)
        dtype = torch.float32 if with_scores else ROUTE_TYPES[experts.number_bytes]
        self._routes = torch.zeros(shape, dtype=dtype, device=worker.device)
        note_freed_blocks(self._note)
        if with_scores:
            note_router_logits(self._note_logits)
        bind_routed_experts_capturer(worker.get_model(), self)

    @property
    def nothing(self) -> Tensor:
        """The routes of no place, as in `Rollouts`."""
        return self._routes[:0].cpu()

    def capture(self, layer: int, chosen: Tensor) -> None:
        """Keep the experts `[n, k]` that the router of a layer chose for the tokens of an engine step.

        Raises:
            RuntimeError: a CUDA graph is captured that does not know the slots of its tokens, or a kernel that chooses
                tells no logits.
        """
        from vllm.forward_context import get_forward_context

        slots = next(iter(get_forward_context().slot_mapping.values()), None)  # every layer has the same
        if slots is not None:
            place = layer - self._experts.first_dense_layers
            self._routes[slots[: len(chosen)], place] = self._of_tokens(chosen).to(self._routes.dtype)
        elif self._routes.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{KEY}: a CUDA graph would lose routes; write rollout.enforce_eager=true")

    def _of_tokens(self, chosen: Tensor) -> Tensor:
        """Return the routes of the tokens of an engine step in one layer: [n, k], with scores [n, 2k]."""
        if not self._with_scores:
            return chosen
        if self._logits is None:
            raise RuntimeError(f"{KEY}: vLLM's kernel tells no scores of experts; write {KEY}=engine")
        scores, self._logits = expert_scores(self._logits, self._experts), None
        return torch.cat([chosen, scores.gather(-1, chosen.long())], dim=-1)

    def forget(self) -> None:
        """Forget the requests that have ended."""
        self._blocks.clear()

    def of(self, request: str, num_places: int) -> Tensor:
        """Return the routes of the first places of a request that has just ended, as in `Rollouts`."""
        blocks = torch.tensor(self._blocks.pop(request))
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()[:num_places]
        return self._routes[slots.to(self._routes.device)].cpu()

    def _note_logits(self, logits: Tensor) -> None:
        self._logits = logits

    def _note(self, request: str, blocks: list[int]) -> None:
        self._blocks[request.partition("-")[0]] = blocks  # vLLM appends a part of its own to a name
