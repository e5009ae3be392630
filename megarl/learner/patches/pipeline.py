"""Messages between pipeline stages."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from megarl.learner.patches.megatron import declare_megatron
from megarl.platform.patching import replaced

SHAPES = declare_megatron(
    "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator",
    "_communicate_shapes",
    reason="a message with the shape goes before each tensor, and the host waits for it; all stages know the shapes",
    upstream="megatron/core/pipeline_parallel/p2p_communication.py: _communicate_shapes",
    until="the schedules take the shapes of the micro-batches",
)

Shape = tuple[int, ...]


@contextmanager
def known_shapes(activations: Iterable[Shape], gradients: Iterable[Shape]) -> Iterator[None]:
    """Let this stage receive tensors of these shapes within the block, and exchange no shapes.

    Args:
        activations: of the stage before, in the order of their arrival.
        gradients: of the stage after, in the order of their arrival.
    """
    before = iter(activations)
    after = iter(gradients)

    def shapes(
        self: object, send_next: object, send_prev: object, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape | None, Shape | None]:
        return next(before) if recv_prev else None, next(after) if recv_next else None

    with replaced(SHAPES, _communicate_shapes=shapes):
        yield
    assert [*before, *after] == [], "the schedule received fewer tensors than were announced"
