"""The loop's nouns, made of learners, engine and reward: who acts, who judges, who samples."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from torch import Tensor

from megarl.algorithms.losses import PolicyOutputs
from megarl.batch import Experience, Prompt, Prompts, Rollouts
from megarl.data.translation import Translation
from megarl.distributed import watchdog
from megarl.learner.batching import Budget
from megarl.learner.learner import Learner, LossTerm, Objective
from megarl.reshard.executor import Destination, Reshard
from megarl.rollout.answers import as_rollouts
from megarl.rollout.config import RolloutSection
from megarl.rollout.engine import RolloutEngine
from megarl.rollout.sampling import GREEDY, Sampling
from megarl.sync.selfcheck import SelfCheck
from megarl.tracking.timers import Timers
from megarl.training.minibatches import minibatches
from megarl.training.skips import Skips

Outputs = TypeVar("Outputs", PolicyOutputs, Tensor)
R = TypeVar("R", bound=Rollouts)


@dataclass(frozen=True, kw_only=True)
class Updates:
    """How a model learns from the experience of one iteration."""

    objective: Objective
    budget: Budget
    num_prompts: int  # per mini-batch
    num_epochs: int
    shuffle: bool
    seed: int
    prepare: Callable[[Experience], Experience] | None = None  # what a whole mini-batch needs before it is divided
    against: Learner | None = None  # whose exact divergence is in the objective
    extra_terms: Callable[[int], Iterable[LossTerm]] | None = None  # of the losses of a step's mini-batches
    skips: Skips | None = None  # what becomes of mini-batches that cannot be learnt from; None: nothing is said of them


@dataclass(frozen=True, kw_only=True)
class Model(Generic[Outputs]):
    """Actor, reference or critic: a learner with the budgets and the objective of its role."""

    name: str
    learner: Learner
    budget: Budget
    updates: Updates | None = None  # None: it never learns
    against: Learner | None = None  # from whom `infer` reports the exact divergence
    translate: Translation | None = None  # None: it reads the tokens that the policy writes

    def infer(self, batch: Rollouts) -> Outputs:
        """What the model says about the response tokens, [B, T] float32."""
        batch, budget = self._as_read(batch, self.budget)
        outputs: Outputs = self.learner.infer(batch, budget, against=self.against)
        return outputs

    def update(self, experience: Experience, *, step: int) -> dict[str, float]:
        """Learn from the experience of iteration `step`; the learner's own metrics come back as `NAME/grad_norm` ...

        Raises:
            ValueError: on all ranks alike, where too many updates in a row had to be skipped.
        """
        updates = self.updates
        assert updates is not None, f"the {self.name} does not learn"
        experience, budget = self._as_read(experience, updates.budget)
        batches: Iterator[Experience] = minibatches(
            experience,
            num_prompts=updates.num_prompts,
            num_epochs=updates.num_epochs,
            shuffle=updates.shuffle,
            seed=updates.seed + step,
        )
        if updates.prepare:
            batches = map(updates.prepare, batches)
        extra_terms = updates.extra_terms(step) if updates.extra_terms else None
        metrics = self.learner.update(
            batches,
            updates.objective,
            budget,
            against=updates.against,
            extra_terms=extra_terms,
            on_minibatch=updates.skips.of_step(step + 1) if updates.skips else None,
        )
        return {key if "/" in key else f"{self.name}/{key}": value for key, value in metrics.items()}

    def _as_read(self, batch: R, budget: Budget) -> tuple[R, Budget]:
        """The batch in the model's tokens, of which a sequence may have more than those the budget was checked for."""
        if self.translate is None:
            return batch, budget
        batch = self.translate(batch)
        longest = -(-int(batch.lengths().max()) // self.learner.mesh.cp_size)
        return batch, replace(budget, max_tokens=max(budget.max_tokens, longest))


@dataclass(frozen=True, kw_only=True)
class EngineSampler:
    """The engine replicas together: each answers a share of the prompts, and every rank learns all answers."""

    engine: RolloutEngine
    actor: Learner
    reshard: Reshard
    section: RolloutSection
    check: SelfCheck
    finished: Callable[[Prompt, Sequence[int]], None]  # told of each answer as soon as it is there, on one rank

    @contextmanager
    def awake(self, timers: Timers, *, step: int) -> Iterator[dict[str, float]]:
        """Bring the actor's weights into the engine, and its memory back afterwards; both checked where that is due.

        A check has an awakening of its own, for the trainer has its say once the engine sleeps: one that fails stops
        the run before there is a sample.

        Raises:
            ValueError: on all ranks alike, where other weights arrived, or the engine computes with other ones.
            RuntimeError: likewise, where keys of older weights were left.
        """
        due, metrics = self.check.is_due(step), dict[str, float]()

        def sync(destination: Destination) -> None:
            with timers("sync"), self.actor.weights() as tensors:
                self.reshard.run(tensors, destination, check=due)

        if due:
            with timers("sync_check"):
                with self.engine.awake(sync, version=step):
                    answers = self.check.ask(step=step)
                metrics = self.check.compare(answers)
        with self.engine.awake(sync, version=step):
            yield metrics

    def generate(self, prompts: Prompts, *, step: int, batch: int = 0) -> Rollouts:
        """Draw the training samples of a step; in a later `batch` of it those numbers of a prompt that come next."""
        return self._rollouts(prompts, self.section, step=step, first_sample=batch * self.section.n)

    def greedy(self, prompts: Prompts, *, step: int) -> Rollouts:
        """The likeliest token every time, one response to each prompt."""
        return self._rollouts(prompts, GREEDY, step=step)

    def validate(self, prompts: Prompts, *, step: int) -> Rollouts:
        """Draw samples as `val_kwargs` say."""
        return self._rollouts(prompts, self.section.val_kwargs, step=step)

    def _rollouts(self, prompts: Prompts, sampling: Sampling, *, step: int, first_sample: int = 0) -> Rollouts:
        num_replicas = self.engine.num_replicas
        shares = [range(replica, len(prompts.prompts), num_replicas) for replica in range(num_replicas)]
        mine = [prompts.prompts[place] for place in shares[self.engine.replica]]
        watchdog.note(rows=[prompt.index for prompt in mine])

        answers = self.engine.on_all_ranks(
            lambda: self.engine.generate(
                mine,
                sampling,
                max_tokens=self.section.response_length,
                step=step,
                first_sample=first_sample,
                finished=lambda answer: self.finished(mine[answer.prompt], answer.token_ids),
            )
        )
        placed = [
            (share[generation.prompt], generation)
            for share, generations in zip(shares, answers, strict=True)
            for generation in generations
        ]
        placed.sort(key=lambda pair: pair[0])  # stable: the samples of a prompt keep their order
        places, generations = [place for place, _ in placed], [generation for _, generation in placed]
        return as_rollouts(prompts, places, generations, n=sampling.n)
