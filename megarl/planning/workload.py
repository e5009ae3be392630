"""From the configuration to the models of a run: their roles, their split, and their computation in each phase."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, prod

from megarl.algorithms.config import EXACT
from megarl.config.checks import world_size
from megarl.config.root import Config
from megarl.learner.config import MegatronSection
from megarl.learner.grid import grid_of
from megarl.models.architecture import Architecture, Shapes
from megarl.models.config import Recompute
from megarl.models.grid import Grid
from megarl.models.lora import Lora, local_adapters
from megarl.models.peft import lora_of
from megarl.models.trainer import OUTPUT, parameter_shapes
from megarl.planning.activations import PhaseWork
from megarl.planning.states import FLOAT32

REWARD_MODEL = "reward model"
REFERENCE = "reference"


@dataclass(frozen=True, kw_only=True)
class TrainerModel:
    """Actor, critic, reward model, or one of the references."""

    name: str
    architecture: Architecture
    section: MegatronSection
    infers: PhaseWork
    updates: PhaseWork | None  # None: it never learns
    lora: Lora | None = None  # the adapters that learn instead of the weights
    shares_base: bool = False  # its frozen weights are the actor's
    is_start: bool = False  # a reference that is the actor without its adapters, in the same memory

    def frozen_shapes(self, grid: Grid, rank: int) -> list[Shapes]:
        """Return the shapes of the parameters of a rank except `learning_shapes`, one dict per model chunk."""
        learning = self.learning_shapes(grid, rank)
        return [
            {name: shape for name, shape in weights.items() if name not in others}
            for weights, others in zip(parameter_shapes(self.architecture, grid, rank), learning, strict=True)
        ]

    def learning_shapes(self, grid: Grid, rank: int) -> list[Shapes]:
        """Return the shapes of the parameters of a rank that an update changes, one dict per model chunk."""
        if self.lora is None:
            return parameter_shapes(self.architecture, grid, rank)
        return _adapters(self.architecture, self.lora, grid, rank)

    def merging_bytes(self, grid: Grid, rank: int) -> int:
        """Return the bytes on a rank while the largest weight and its adapter are added up: both sides in float32."""
        if self.lora is None:
            return 0
        adapters = {name: shape for chunk in self.learning_shapes(grid, rank) for name, shape in chunk.items()}
        largest = 0
        for name, shape in adapters.items():
            if name.endswith("lora_a"):
                other = adapters[f"{name.removesuffix('a')}b"]
                largest = max(largest, prod(other[-3:-1]) * shape[-1])
        return 2 * FLOAT32 * largest

    @property
    def is_reference(self) -> bool:
        """Return whether this is one of the references. Each reads a share of the samples."""
        return self.name.startswith(REFERENCE)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """All models of a run and the ranks that share them."""

    config: Config
    grid: Grid
    policy: Architecture
    models: tuple[TrainerModel, ...]

    @property
    def references(self) -> tuple[TrainerModel, ...]:
        """Return the frozen policies."""
        return tuple(model for model in self.models if model.is_reference)

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest sequence."""
        rollout = self.config.actor_rollout_ref.rollout
        return rollout.prompt_length + rollout.response_length


@cache
def _adapters(architecture: Architecture, lora: Lora, grid: Grid, rank: int) -> list[Shapes]:
    """Return the shapes of the adapters on a rank and of a scalar head, one dict per model chunk."""
    chunks = []
    for weights in parameter_shapes(architecture, grid, rank):
        head = {OUTPUT: weights[OUTPUT]} if architecture.scalar_head and OUTPUT in weights else {}
        chunks.append(local_adapters(architecture, lora, weights, cut=grid.cut(rank)) | head)
    return chunks


def workload_of(
    config: Config,
    *,
    policy: Architecture,
    critic: Architecture | None,
    reward_model: Architecture | None = None,
    teachers: Mapping[str | None, Architecture] | None = None,
) -> Workload:
    """Return the models of a run of `config`; `critic` is the critic of adv_estimator=gae.

    `teachers` are the references by data source, as in `Config.teachers`. Without one for None, the reference of all
    other data sources is as large as the policy.
    """
    grid = grid_of(config.actor_rollout_ref.actor.megatron, world_size(config.trainer))
    models = (
        *_policies(config, grid, policy, {None: policy, **(teachers or {})}),
        *_critics(config, grid, critic),
        *_reward_models(config, grid, reward_model),
    )
    return Workload(config=config, grid=grid, policy=policy, models=models)


def _policies(
    config: Config, grid: Grid, architecture: Architecture, references: Mapping[str | None, Architecture]
) -> Iterator[TrainerModel]:
    policy = config.actor_rollout_ref
    actor = policy.actor
    ref = policy.ref
    recompute = _recomputes(policy.model.enable_gradient_checkpointing, actor.megatron)
    infers = _work(config, grid, policy.rollout.log_prob_micro_batch_size or actor.ppo_micro_batch_size)
    updates = _work(
        config, grid, actor.ppo_micro_batch_size, num_prompts=actor.ppo_mini_batch_size, recompute=recompute
    )
    if config.num_supervised:
        pairs = _work(config, grid, actor.ppo_micro_batch_size, num_samples=config.num_supervised)
        updates = replace(
            updates,
            num_tokens=max(updates.num_tokens, pairs.num_tokens),
            num_micro_batches=updates.num_micro_batches + pairs.num_micro_batches,
        )
    lora = lora_of(policy.model, architecture)
    yield TrainerModel(
        name="actor",
        architecture=architecture,
        section=actor.megatron,
        lora=lora,
        infers=replace(infers, exact_kl=config.kl_of_reward in EXACT),
        updates=replace(updates, exact_kl=config.kl_of_loss in EXACT),
    )
    if config.has_reference:
        if config.kl_of_reward not in EXACT:  # it reads the micro-batches of the actor for an exact divergence
            max_sequences = ref.log_prob_micro_batch_size or actor.ppo_micro_batch_size
            infers = _work(config, grid, max_sequences, max_tokens=ref.log_prob_max_token_len_per_gpu)
        for source, reference in references.items():
            name = REFERENCE if source is None else f"{REFERENCE} of {source}"
            yield TrainerModel(
                name=name,
                architecture=reference,
                section=ref.megatron,
                infers=infers,
                updates=None,
                is_start=lora is not None and source not in config.teachers,
            )


def _critics(config: Config, grid: Grid, architecture: Architecture | None) -> Iterator[TrainerModel]:
    critic = config.critic
    if architecture is not None:
        yield TrainerModel(
            name="critic",
            architecture=architecture.with_scalar_head(),
            section=critic.megatron,
            lora=lora_of(critic.model, architecture),
            shares_base=config.critic_shares_base,
            infers=_work(config, grid, critic.forward_micro_batch_size or critic.ppo_micro_batch_size, role="value"),
            updates=_work(
                config,
                grid,
                critic.ppo_micro_batch_size,
                num_prompts=critic.ppo_mini_batch_size,
                recompute=_recomputes(critic.model.enable_gradient_checkpointing, critic.megatron),
                role="value",
            ),
        )


def _reward_models(config: Config, grid: Grid, architecture: Architecture | None) -> Iterator[TrainerModel]:
    if architecture is not None:
        yield TrainerModel(
            name=REWARD_MODEL,
            architecture=architecture,
            section=config.reward_model.megatron,
            infers=_work(config, grid, config.reward_model.micro_batch_size, role="value"),
            updates=None,
        )


def _work(
    config: Config,
    grid: Grid,
    max_sequences: int | None,
    *,
    num_prompts: int | None = None,
    num_samples: int | None = None,
    max_tokens: int | None = None,
    recompute: Recompute = False,
    role: str = "policy",
) -> PhaseWork:
    """Return the micro-batches of `num_samples` sequences, all of the greatest length.

    By default, these are the samples of `num_prompts` prompts, and `num_prompts` is all prompts of a step.

    The token budget is per rank; the ranks of a context-parallel group add their budgets.
    """
    policy = config.actor_rollout_ref
    longest = policy.rollout.prompt_length + policy.rollout.response_length
    num_samples = num_samples or (num_prompts or config.data.train_batch_size) * policy.rollout.n
    share = ceil(num_samples / grid.dp)
    has_budget = policy.actor.use_dynamic_bsz or max_sequences is None
    budget = (max_tokens or policy.actor.ppo_max_token_len_per_gpu) * grid.cp
    num_tokens, num_micro_batches = micro_batches(
        grid,
        num_sequences=share,
        longest=longest,
        max_sequences=max_sequences,
        max_tokens=budget if has_budget else None,
    )
    return PhaseWork(num_tokens=num_tokens, num_micro_batches=num_micro_batches, role=role, recompute=recompute)


def micro_batches(
    grid: Grid, *, num_sequences: int, longest: int, max_sequences: int | None, max_tokens: int | None
) -> tuple[int, int]:
    """Return the tokens of a micro-batch on a rank, and the number of micro-batches of a share of `num_sequences`.

    All sequences have the length `longest`. `max_tokens` are those of a context-parallel group; None: no limit.
    """
    bounds = [num_sequences * longest]
    if max_tokens is not None:
        bounds.append(max_tokens)
    if max_sequences is not None:
        bounds.append(max_sequences * longest)
    num_tokens = min(bounds)
    round_size = grid.pp if grid.vpp > 1 else 1  # the interleaved schedule has complete rounds
    number = ceil(ceil(num_sequences / max(1, num_tokens // longest)) / round_size) * round_size
    return ceil(num_tokens / grid.cp), number


def _recomputes(enabled: Recompute, section: MegatronSection) -> Recompute:
    """Return what is computed again; Megatron's own fields override the section."""
    fields = section.override_transformer_config
    if "recompute_granularity" not in fields:
        return enabled
    modules = fields.get("recompute_modules", ["mlp"] if enabled == "selective" else [])
    selective: Recompute = "selective" if "mlp" in modules else False
    return {"full": True, "selective": selective}.get(fields["recompute_granularity"], False)
