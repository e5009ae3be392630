"""Messages between pipeline stages."""

from typing import Any

import torch

from megarl.learner.patches.megatron import declare_megatron
from megarl.platform.patching import replace

SHAPES = declare_megatron(
    "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator",
    "_communicate_shapes",
    reason="shapes do not follow the order of the tensors; with two virtual stages ranks take one message for another",
    upstream="https://github.com/NVIDIA/Megatron-LM/issues/5100",
    until="`_communicate_shapes` sends through `_p2p_ops`, as the tensors",
)


def exchange_shapes_in_order() -> None:
    """Send shapes the way of the tensors.

    In a virtual pipeline of two stages each rank is both before and after the other. The tensors travel in two groups,
    one for each direction. Their shapes travel in one batch, so a rank can take the first message of the other for the
    reply to its own first request.
    """
    communicate = SHAPES.original("_communicate_shapes")

    def exchange(self: Any, send_next: Any, send_prev: Any, recv_prev: bool, recv_next: bool) -> tuple[Any, Any]:
        if self.virtual_pipeline_model_parallel_size is None:
            return communicate(self, send_next, send_prev, recv_prev, recv_next)
        from megatron.core.pipeline_parallel import p2p_communication

        def shape(tensor: Any) -> Any:
            return None if tensor is None else torch.tensor(tensor.shape, device=torch.cuda.current_device())

        def room(is_needed: bool) -> Any:
            return torch.zeros(3, dtype=torch.int64, device=torch.cuda.current_device()) if is_needed else None

        found_prev, found_next = room(recv_prev), room(recv_next)
        requests = p2p_communication._p2p_ops(
            tensor_send_next=shape(send_next),
            tensor_send_prev=shape(send_prev),
            tensor_recv_prev=found_prev,
            tensor_recv_next=found_next,
            group=self.pp_group,
            prev_pipeline_rank=self.prev_rank,
            next_pipeline_rank=self.next_rank,
        )
        for request in requests.values():
            request.wait()
        return found_prev.tolist() if recv_prev else None, found_next.tolist() if recv_next else None

    replace(SHAPES, _communicate_shapes=exchange)
