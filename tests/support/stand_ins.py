"""Stand-ins on the CPU for what only a machine with CUDA has, so that its consequences can be tested without one."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

META = torch.device("meta")


@contextmanager
def cuda_on_meta() -> Iterator[None]:
    """Work on CUDA within the block, without Transformer Engine: what anyone asks of CUDA is on the meta device.

    A tensor that nobody brings to CUDA stays on the host, as it would there.
    """
    from megarl.learner import factory, model, parallel
    from megarl.learner.patches import cpu

    with ExitStack() as stack:
        for module in (model, parallel):
            stack.enter_context(patch.object(module, "megatron_platform", cpu.cuda_calls_on_cpu))
        stack.enter_context(patch.object(cpu, "CPU", META))
        for module in (factory, model):
            stack.enter_context(patch.object(module, "local_device", lambda: META))
        for name in ("megarl.learner.model.on_cuda", "megarl.learner.patches.on_cuda"):
            stack.enter_context(patch(name, lambda: True))
        cpu.keep_random_state()  # a generator cannot be on the meta device
        yield


class LazyAdam(torch.optim.Optimizer):
    """Adam as Transformer Engine and apex make it: no state before the first step, and one step for each group."""

    def __init__(self, params: Any, adam_w_mode: bool = True, **defaults: Any) -> None:
        super().__init__(params, defaults)
        assert adam_w_mode

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                state["exp_avg"].lerp_(parameter.grad, 1 - first)
                state["exp_avg_sq"].lerp_(parameter.grad.square(), 1 - second)
                mean, scale = (
                    state[name] / (1 - beta ** group["step"])
                    for name, beta in (("exp_avg", first), ("exp_avg_sq", second))
                )
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(group["lr"] * mean / (scale.sqrt() + group["eps"]))


@contextmanager
def lazy_adam() -> Iterator[None]:
    """Let Megatron-Core use `LazyAdam`, as it uses the Adam of an installed apex."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    of_apex: dict[str, Any] = {"HAVE_APEX_OR_TE": True, "USING_APEX_OPTIMIZER": True, "USING_TE_OPTIMIZER": False}
    with (
        patch.multiple(optimizer, Adam=LazyAdam, USING_PYTORCH_OPTIMIZER=False),
        patch.multiple(distrib_optimizer, Adam=LazyAdam, create=True, **of_apex),
    ):
        yield


class LateStream:
    """A side stream whose copies are done when somebody waits for them, and are NaN before."""

    num_copies = 0

    def __init__(self) -> None:
        self._begun: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.fill_(torch.nan)
        self._begun.append((to, source))
        LateStream.num_copies += 1

    def join(self) -> None:
        for to, source in self._begun:
            to.copy_(source)
        self._begun.clear()


@contextmanager
def offloading() -> Iterator[None]:
    """Let learners that are made in the block offload: the place of the device is the host, with no memory to pin."""
    from megarl.learner import offload

    empty_like = torch.empty_like
    with (
        patch.multiple(offload, on_cuda=lambda: True, SideStream=LateStream),
        patch.object(torch.cuda, "empty_cache", lambda: None),
        patch.object(torch, "empty_like", lambda x, pin_memory=False, **more: empty_like(x, **more)),
    ):
        yield


@contextmanager
def overlap(*, bucket_size: int) -> Iterator[None]:
    """Let learners that are made in the block overlap collectives and computation, as on CUDA, in small buckets."""
    from megatron.core.distributed import DistributedDataParallelConfig

    from megarl.learner import overlap

    small = partial(DistributedDataParallelConfig, bucket_size=bucket_size)
    with patch.multiple(overlap, on_cuda=lambda: True, DistributedDataParallelConfig=small):
        yield


class Late:
    """The handle of a collective that does nothing before somebody waits for it."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.wait = act


@contextmanager
def late_collectives() -> Iterator[None]:
    """Let overlapped collectives take as long as they may: what reads weights, or changes gradients, too early fails.

    Weights of other ranks are NaN until somebody waits for them.
    """
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    gather, add = Group.start_param_sync, Group.start_grad_sync

    def gather_late(self: Any, force_sync: bool = False) -> None:
        assert not force_sync
        assert self.param_gather_handle is None
        for bucket in self.buckets:
            shards = bucket.param_data.chunk(self.intra_distributed_optimizer_instance_size)
            for rank, shard in enumerate(shards):
                if rank != self.intra_distributed_optimizer_instance_rank:
                    shard.fill_(torch.nan)

        def act() -> None:
            self.param_gather_handle = None
            gather(self, force_sync=True)

        self.param_gather_handle, self.param_gather_dispatched = Late(act), True

    def add_late(self: Any, force_all_reduce: bool = False) -> None:
        assert self.grad_reduce_handle is None
        sent = [bucket.grad_data.clone() for bucket in self.buckets]

        def act() -> None:
            for bucket, then in zip(self.buckets, sent, strict=True):
                torch.testing.assert_close(bucket.grad_data, then, rtol=0, atol=0, equal_nan=True)
            with patch.object(self.ddp_config, "overlap_grad_reduce", False):
                self.grad_reduce_handle = None
                add(self, force_all_reduce)

        self.grad_reduce_handle = Late(act)

    with patch.multiple(Group, start_param_sync=gather_late, start_grad_sync=add_late):
        yield
