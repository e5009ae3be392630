"""The samples that one replica of vLLM draws, stepped by hand: added and stopped between two engine steps.

All ranks of a replica execute the same steps in lockstep, so they must add and stop the same samples between the same
steps. Each rank decides alone: a decision follows from tokens, which are the same on all ranks of a replica, and from
counted steps, never from a clock. So no decision needs a message.

On CUDA, vLLM schedules a step while the device computes the one before it, and holds both in a queue of batches. A step
is counted when its tokens are there, and no batch stays in that queue when the requests have ended.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

from megarl.platform import progress
from megarl.batch import Generation, Group, Prompt
from megarl.rollout import patches
from megarl.rollout.requests import Request, RequestParams, failure
from megarl.rollout.routes import RouteStore
from megarl.rollout.sampling import read_output

if TYPE_CHECKING:
    from vllm import LLMEngine, RequestOutput

Finished = Callable[[Prompt, Generation], None]


@dataclass(frozen=True, kw_only=True)
class Replica:
    """This rank's part of an engine replica."""

    name: str  # in messages
    tp_rank: int
    tp_size: int
    num_slots: int  # the most samples that it draws at once; others wait
    may_compile: bool  # whether torch may compile for it


@dataclass
class _OpenSample:
    """A sample that is not finished."""

    name: str  # of the request
    number: int  # the same in each turn of an episode
    request: Request
    output: "RequestOutput | None" = None  # vLLM's last


@dataclass(eq=False)
class ReplicaQueue:
    """The samples of one replica, under one set of weights. The same on all ranks of the replica."""

    engine: "LLMEngine"  # has no other requests
    params: RequestParams  # of every request
    replica: Replica  # this rank's part of the replica
    step: int  # finished steps of the run, for messages
    weight_version: int  # of the engine's weights
    on_finished: Finished | None = None
    """Receives a prompt and its sample as soon as the sample, or its turn, is finished, on one rank of the replica."""
    routes: RouteStore | None = None  # of the engine, which samples get too; None: they get none

    def __post_init__(self) -> None:
        if self.routes:
            self.routes.forget()
        self._names = count()
        self._open = dict[str, _OpenSample]()  # by the name of the request
        self._numbers = dict[tuple[int, int], int]()  # by group and sample
        self.num_steps = 0
        self.num_running = 0  # samples that were drawn at once, summed over the steps

    def add(self, groups: Sequence[Group]) -> None:
        """Draw the incomplete samples of these groups from the next step on. UserError if a prompt is too long."""
        from vllm.inputs import tokens_input

        requests = [
            Request(group.prompt, group.started, sample)
            for group in groups
            for sample in group.samples
            if isinstance(sample, Generation) and not sample.complete
        ]
        params = [self.params.of(request) for request in requests]
        with self._using([group.prompt for group in groups]):
            for request, of_request in zip(requests, params, strict=True):
                key = (request.started.prompt, request.started.sample)
                name = str(next(self._names))
                number = self._numbers.setdefault(key, len(self._numbers))
                self.engine.add_request(name, tokens_input(request.token_ids()), of_request)
                self._open[name] = _OpenSample(name, number, request)

    def run(self, num_steps: int | None = None) -> list[Generation]:
        """Step the engine `num_steps` times, or until all samples are finished. Return those that finish, in order.

        Raises:
            RuntimeError: vLLM failed, has lost a sample, or returned another than it was asked for.
        """
        found = list[Generation]()
        last = None if num_steps is None else self.num_steps + num_steps
        with self._using(self._prompts(self._open.values())):
            while self._open and self.num_steps != last:
                self.num_steps += 1
                self.num_running += min(len(self._open), self.replica.num_slots)
                for finished in self._take_step():
                    generation = self._with_routes(self._read(finished), finished)
                    found.append(generation)
                    progress.advance()
                    if self.on_finished and finished.number % self.replica.tp_size == self.replica.tp_rank:
                        self.on_finished(finished.request.prompt, generation)
        return found

    def stop(self) -> list[Generation]:
        """Stop all samples that are not finished.

        Return them with their tokens, or without if their parameters ask for final outputs alone.
        """
        stopped = self._open
        self._open = {}
        with self._using(self._prompts(stopped.values())):
            self.engine.abort_request(list(stopped))
            if stopped:
                self.engine.step()  # in which vLLM forgets them: until then their memory is taken
                self._finish_batches()
            return [self._read(each) for each in stopped.values()]

    def waiting(self) -> list[int]:
        """Return the groups that the engine has no room for yet, in the order in which they were added.

        A group with tokens of an earlier step counts as one that has room.
        """
        from vllm.v1.request import RequestStatus

        requests = self.engine.engine_core.engine_core.scheduler.requests.values()
        waiting = {request.request_id for request in requests if request.status == RequestStatus.WAITING}
        names = {name.partition("-")[0] for name in waiting}  # vLLM appends a part of its own to a name
        running = {
            each.request.started.prompt
            for name, each in self._open.items()
            if name not in names or each.request.started.token_ids
        }
        groups = dict.fromkeys(each.request.started.prompt for each in self._open.values())
        return [group for group in groups if group not in running]

    def withdraw(self, groups: Collection[int]) -> None:
        """Give back groups that wait, if others stay. They have no memory that a step must free."""
        withdrawn = {name: each for name, each in self._open.items() if each.request.started.prompt in groups}
        with self._using(self._prompts(withdrawn.values())):
            self.engine.abort_request(list(withdrawn))
        for name in withdrawn:
            del self._open[name]

    def _take_step(self) -> list[_OpenSample]:
        """Draw the next token of every request that has room. Return the samples that are finished."""
        if not self.engine.has_unfinished_requests():
            lost = len(self._open)
            self._open = {}
            raise RuntimeError(f"it has lost {lost} of the samples that it was asked for")
        if self._batches is not None and not self._batches:
            self.engine.step()  # schedules the first step, and returns before its tokens are there
        outputs = self.engine.step()
        for output in outputs:
            self._open[output.request_id].output = output
        finished = [self._open.pop(output.request_id) for output in outputs if output.finished]
        if not self._open:
            self._finish_batches()
        return finished

    def _finish_batches(self) -> None:
        while self._batches:
            self.engine.step()

    @property
    def _batches(self) -> Sequence[object] | None:
        """The steps that are scheduled, if vLLM schedules ahead."""
        batches: Sequence[object] | None = self.engine.engine_core.engine_core.batch_queue
        return batches

    @contextmanager
    def _using(self, prompts: Sequence[Prompt]) -> Iterator[None]:
        """Let vLLM work on samples of `prompts`, and name the replica and the prompts if it fails."""
        try:
            with patches.random_state_kept(), patches.compilation(allowed=self.replica.may_compile):
                yield
        except Exception as error:
            rows = list(dict.fromkeys(prompt.index for prompt in prompts))
            raise RuntimeError(failure(error, self.replica.name, rows, step=self.step)) from error

    def _read(self, each: _OpenSample) -> Generation:
        sampled = read_output(
            each.output,
            given=each.request.token_ids(),
            where=f"for prompt {each.request.prompt.index}",
            weight_version=self.weight_version,
        )
        return each.request.started.then(sampled)

    def _with_routes(self, generation: Generation, each: _OpenSample) -> Generation:
        """Return a sample that has just ended with its routes, if these are asked for.

        Its request computed all tokens before the last: also those that earlier steps drew, or read their cached keys.
        """
        if self.routes is None:
            return generation
        num_places = len(each.request.prompt.token_ids) + generation.num_tokens - 1
        return replace(generation, routes=self.routes.of(each.name, num_places))

    @staticmethod
    def _prompts(samples: Collection[_OpenSample]) -> list[Prompt]:
        return [each.request.prompt for each in samples]
