"""The samples that one replica draws: added, stepped and stopped as records, whatever the engine calls them."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

from megarl.platform import progress
from megarl.batch import Generation, Group, Prompt
from megarl.rollout.requests import Asked, Terms
from megarl.rollout.sampling import read_output
from megarl.rollout.stepping import Stepper


class Drawing:
    """The samples of one replica, under one set of weights. The same on all ranks of the replica."""

    def __init__(
        self,
        stepper: Stepper,
        terms: Terms,
        *,
        around: Callable[[Sequence[Prompt]], AbstractContextManager[Any]],
        weight_version: int,
        num_slots: int,
        finished: Callable[[int, Prompt, Generation], None],
    ) -> None:
        """Draw with the engine of `stepper`, which has no other requests.

        Args:
            stepper: steps the engine.
            terms: of every sample.
            around: wraps every use of the engine, given the prompts that it works on.
            weight_version: of the engine's weights.
            num_slots: the most samples that the engine draws at once; others wait.
            finished: receives the number of each sample, its prompt and its tokens, as soon as the sample, or its
                turn, is finished.
        """
        self._stepper, self._terms, self._around, self._finished = stepper, terms, around, finished
        self._version, self._num_slots = weight_version, num_slots
        self._open = dict[str, tuple[int, Asked]]()  # by the name of the request: the number of the sample, the sample
        self._numbers = dict[tuple[int, int], int]()  # of each sample: the same in each of its turns
        self.num_steps = 0
        self.num_running = 0  # samples that were drawn at once, summed over the steps

    def add(self, groups: Sequence[Group]) -> None:
        """Draw the incomplete samples of these groups from the next step on. UserError if a prompt is too long."""
        asked = [
            Asked(group.prompt, group.begun, sample)
            for group in groups
            for sample in group.samples
            if not sample.complete
        ]
        params = [self._terms.params(each) for each in asked]
        with self._around([group.prompt for group in groups]):
            for each, of_request in zip(asked, params, strict=True):
                number = self._numbers.setdefault((each.begun.prompt, each.begun.sample), len(self._numbers))
                self._open[self._stepper.add(each.token_ids(), of_request)] = (number, each)

    def run(self, num_steps: int | None = None) -> list[Generation]:
        """Step the engine `num_steps` times, or until all samples are finished. Return those that finish, in order."""
        found, last = list[Generation](), None if num_steps is None else self.num_steps + num_steps
        with self._around([asked.prompt for _, asked in self._open.values()]):
            while self._open and self.num_steps != last:
                self.num_steps += 1
                self.num_running += min(len(self._open), self._num_slots)
                for output in self._stepper.step():
                    number, asked = self._open.pop(output.request_id)
                    found.append(generation := self._read(asked, output))
                    progress.advance()
                    self._finished(number, asked.prompt, generation)
        return found

    def stop(self) -> list[Generation]:
        """Stop all samples that are not finished, and return them as far as they are drawn."""
        stopped, self._open = self._open, {}
        with self._around([asked.prompt for _, asked in stopped.values()]):
            outputs = self._stepper.stop()
            return [self._read(asked, outputs[name]) for name, (_, asked) in stopped.items()]

    def waiting(self) -> list[int]:
        """Return the groups that the engine has no room for yet: none of their samples is being drawn."""
        waiting = set(self._stepper.waiting())
        running = {asked.begun.prompt for name, (_, asked) in self._open.items() if name not in waiting}
        groups = dict.fromkeys(asked.begun.prompt for _, asked in self._open.values())
        return [number for number in groups if number not in running]

    def withdraw(self, groups: Collection[int]) -> None:
        """Give back groups that wait, if others stay."""
        withdrawn = {name: asked for name, (_, asked) in self._open.items() if asked.begun.prompt in groups}
        with self._around([asked.prompt for asked in withdrawn.values()]):
            self._stepper.withdraw(withdrawn.keys())
        for name in withdrawn:
            del self._open[name]

    def _read(self, asked: Asked, output: Any) -> Generation:
        drawn = read_output(
            output,
            given=asked.token_ids(),
            where=f"for prompt {asked.prompt.index}",
            weight_version=self._version,
        )
        return asked.begun.then(drawn)
