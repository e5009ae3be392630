"""AdamW on Megatron's (distributed) optimizer, with gradient clipping and a learning-rate schedule."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megarl.learner.config import MegatronSection, OptimSection
from megarl.learner.contributions import wait_for_slowest
from megarl.learner.lora import add_over_expert_tensor_ranks
from megarl.learner.overlap import gather_weights, reduction, sum_gradients_at_the_end
from megarl.learner.patches.cpu import megatron_platform


@dataclass(eq=False)
class Optimizer:
    """Megatron's optimizer and the schedule of its learning rate."""

    megatron: MegatronOptimizer
    schedule: OptimizerParamScheduler
    models: Sequence[DistributedDataParallel]  # the chunks whose weights it changes
    _num_passes: int = 0  # since the schedule advanced

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return float(self.megatron.param_groups[0]["lr"])

    def advance_schedule(self) -> None:
        """Set the rates of the next step; the first step already has a positive rate if there is a warm-up."""
        self.schedule.step(1)
        self._num_passes = 0

    def next_pass(self) -> str:
        """Return the name of a forward and backward pass that begins; after a resume they have the same names."""
        self._num_passes += 1
        return f"{self.schedule.num_steps}.{self._num_passes}"

    def zero_grad(self) -> None:
        """Clear the gradients of the last step."""
        self.megatron.zero_grad()

    def grad_norm(self) -> float:
        """Prepare the gradients for a step; return their norm over all ranks, before clipping."""
        self.megatron.prepare_grads()
        return float(self.megatron.get_grad_norm())

    def step(self, grad_norm: float) -> None:
        """Clip the gradients, whose finite norm `grad_norm` returned, and update the weights.

        Other ranks' weights may be on their way then, see `weights_in_flight`.
        """
        for part in _parts(self.megatron):
            parameters = part.get_parameters()
            if part.config.clip_grad > 0.0 and parameters:
                clip_grad_by_total_norm_fp32(parameters, max_norm=part.config.clip_grad, total_norm=grad_norm)
        updated = self.megatron.step_with_ready_grads()
        assert updated, "Megatron refused a finite gradient"
        gather_weights(self.models)


def make_trainable(
    models: Sequence[GPTModel], megatron: MegatronSection, optim: OptimSection, *, grad_clip: float, num_updates: int
) -> tuple[tuple[DistributedDataParallel, ...], Optimizer]:
    """Wrap the chunks of a model, so that gradients are summed over ranks with other tokens, and build its optimizer.

    `num_updates` is the number of steps of the run in which the model learns.
    """
    dtype = getattr(torch, megatron.dtype)
    with megatron_platform():
        how = reduction(use_distributed_optimizer=megatron.use_distributed_optimizer)
        wrapped = tuple(
            # The backward pass ends with the first chunk; the sums of the others are hidden as they are.
            DistributedDataParallel(model.config, how, model, disable_bucketing=number > 0)
            for number, model in enumerate(models)
        )
        models[0].config.finalize_model_grads_func = add_gradients  # the schedules read it from the first chunk
        sum_gradients_at_the_end(wrapped)
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=optim.lr,
                min_lr=_min_lr(optim),
                weight_decay=optim.weight_decay,
                adam_beta1=optim.betas[0],
                adam_beta2=optim.betas[1],
                clip_grad=grad_clip,
                params_dtype=dtype,
                bf16=dtype == torch.bfloat16,
                use_distributed_optimizer=megatron.use_distributed_optimizer,
            ),
            list(wrapped),
            use_gloo_process_groups=False,
        )
    for part in _parts(optimizer):
        _prepare(part)
    return wrapped, Optimizer(optimizer, make_schedule(optimizer, optim, num_updates), wrapped)


def torch_optimizers(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Optimizer]:
    """Return the optimizers that Megatron's optimizer wraps: one per kind of parameter."""
    return (part.optimizer for part in _parts(optimizer))


def _parts(optimizer: MegatronOptimizer) -> Iterator[MegatronOptimizer]:
    """Return the parts of Megatron's optimizer that have parameters on this rank."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return (part for part in parts if part.optimizer is not None)


def _prepare(part: MegatronOptimizer) -> None:
    """Give an optimizer its state of step 0, which it would make in its first step: Megatron saves and loads the state.

    torch's AdamW counts the steps of each parameter, those of Transformer Engine and apex the steps of a group. Torch's
    fused kernel updates a parameter in one pass, and reads the steps from the device of the parameters.
    """
    part.init_state_fn(part.optimizer, part.config)
    for group in part.optimizer.param_groups:
        if not isinstance(part.optimizer, torch.optim.AdamW):
            group["step"] = 0
            continue
        group["fused"] = True
        for parameter in group["params"]:
            part.optimizer.state[parameter]["step"] = torch.zeros((), device=parameter.device)


def add_gradients(models: list[DistributedDataParallel], num_tokens: object = None, **kwargs: object) -> None:
    """Reduce gradients as Megatron does, but do not divide by tokens: losses are contributions to a global mean."""
    wait_for_slowest(next(models[0].parameters()).device)
    finalize_model_grads(models, None, **kwargs)
    add_over_expert_tensor_ranks(models)


def make_schedule(optimizer: MegatronOptimizer, optim: OptimSection, num_updates: int) -> OptimizerParamScheduler:
    """Build the schedule of a model that takes `num_updates` updates: a warm-up, then a constant or falling rate.

    Update k of the warm-up has the share k / num_warm_up of the peak. A linear or cosine decay follows, which has
    `min_lr_ratio` of the peak in the last update, or reaches 0 one update later if that is None.
    """
    warm_up = optim.num_warm_up(num_updates)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=optim.lr,
        min_lr=_min_lr(optim),
        lr_warmup_steps=warm_up,
        lr_decay_steps=max(optim.last_decay(num_updates), warm_up + 1),
        lr_decay_style=optim.warmup_style,
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=max(1, num_updates),
        wd_incr_style="constant",
    )


def _min_lr(optim: OptimSection) -> float:
    return optim.lr * (optim.min_lr_ratio or 0.0)
