"""The episodes that this rank's environments play: turns are asked, and the ranks of an engine replica get the answers.

A turn is asked on one rank as soon as the engine has finished it. Its answer is taken when all ranks ask for it, which
the session decides by counted engine steps. So what an episode reads, and when, depends on no clock.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import TypeVar

import torch
import torch.distributed as dist

from megarl.batch import Generation, Prompt, PromptList, Prompts, StopReason, Turn, float32, int32
from megarl.data.messages import encode_prompt
from megarl.data.tokenizer import Tokenizer
from megarl.distributed.exchange import all_reduce, sum_of_ranks, together
from megarl.distributed.made_prompts import TokensElsewhere
from megarl.environments.config import EnvironmentSection
from megarl.environments.encoding import Observer
from megarl.environments.host import DONE, Host
from megarl.environments.protocol import Observation
from megarl.platform.errors import UserError
from megarl.platform.seeds import seed_of
from megarl.platform.slow_loads import reported
from megarl.rewards.collective import finish
from megarl.rewards.scoring import Decode
from megarl.sandbox.limits import WorkerLimits
from megarl.sandbox.pool import Pool, ScoringResult, failed
from megarl.sandbox.results import is_number
from megarl.sandbox.wire import pack

MAX_REPLY_BYTES = 16 << 20
"""Most bytes of a prompt or an observation as the environment's process sends it: up to 7 for a character."""
T = TypeVar("T")
Key = tuple[int, int]
"""An episode of a session: the number of its prompt, and of the sample."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An environment's answer to a turn."""

    reward: float = 0.0
    observation: Sequence[int] = ()  # tokens; none if it is `done`
    text: str | None = None  # the observation as the environment gave it, in JSON
    done: bool = False
    fault: StopReason | None = None
    detail: str | None = None  # of the fault, for people


def proceed(generation: Generation, answer: Answer, section: EnvironmentSection, *, max_tokens: int) -> Generation:
    """Return an episode after the answer to its last turn: with the observation, or complete.

    Args:
        generation: the episode up to the last turn, `truncated` if the turn reached the limit of the response.
        answer: of the environment. Only its fault matters for a turn that is `truncated`.
        section: the limits.
        max_tokens: of an episode.
    """
    start = start_of_turn(generation)
    end = len(generation.token_ids)
    num_observed = len(answer.observation)
    is_rewarded = not answer.fault and not generation.truncated
    if is_rewarded and not _is_sum_finite(generation, answer.reward):
        answer = _failed(StopReason.FAILED, "the rewards of its turns add up to more than float32 can hold")
    reward = answer.reward
    reason = answer.fault
    if reason:
        reward = section.default_score if section.on_failure == "score" else 0.0
    elif generation.truncated:
        reward = section.default_score
        reason = StopReason.TOKENS
    elif answer.done:
        reason = StopReason.DONE
    elif len(generation.turns) + 1 == section.max_turns:
        reason = StopReason.TURNS
    elif end + num_observed >= max_tokens:
        reason = StopReason.TOKENS
    if reason:
        turns = (*generation.turns, Turn(start, end, reward))
        is_cut = reason is StopReason.TOKENS
        fault = answer.detail if answer.fault else None
        return replace(generation, turns=turns, stop_reason=reason, truncated=is_cut, fault=fault, complete=True)
    turns = (*generation.turns, Turn(start, end, reward, num_observed=num_observed, observation=answer.text))
    return replace(
        generation,
        token_ids=generation.token_ids + int32(answer.observation),
        log_probs=None if generation.log_probs is None else generation.log_probs + float32([0.0]) * num_observed,
        weight_versions=generation.weight_versions + int32([0]) * num_observed,
        turns=turns,
        complete=False,
    )


def start_of_turn(generation: Generation) -> int:
    """Return the place of the first token of an episode's last turn, which has no answer yet."""
    if not generation.turns:
        return 0
    last = generation.turns[-1]
    return last.end + last.num_observed


def _is_sum_finite(generation: Generation, reward: float) -> bool:
    """Return whether the rewards of an episode can be added in float32 in any order."""
    return is_number(sum(abs(turn.reward) for turn in generation.turns) + abs(reward))


class Environments:
    """The environments of a run, in processes of this rank."""

    def __init__(
        self,
        section: EnvironmentSection,
        tokenizer: Tokenizer,
        observer: Observer,
        *,
        written: Decode,
        seed: int,
    ) -> None:
        """Check that the environment can be made; processes start with the first episodes.

        Args:
            section: names it, and has its limits.
            tokenizer: of the policy.
            observer: encodes what the environment says.
            written: returns the text of a turn.
            seed: of the run.

        Raises:
            UserError: it cannot be made; names the key.
        """
        assert section.name, "no environment is configured"
        host = Host(name=section.name, path=section.path, kwargs=section.kwargs)
        with reported("environment.path", section.path):
            host.load()  # only to find its faults before anything else starts
        limits = WorkerLimits(
            num_workers=1,
            timeout_s=section.timeout_s,
            max_memory=int(section.max_memory_gb * 1e9),
            isolation="process",  # it keeps the episode between two turns
            max_reply=MAX_REPLY_BYTES,
        )
        self.section = section
        self.tokenizer = tokenizer
        self.observer = observer
        self.written = written
        self._pools = [Pool(host, limits) for _ in range(section.num_workers)]
        self._numbers = count()
        self._seed = seed

    def open(self, prompts: Prompts, *, max_tokens: int) -> Prompts:
        """Return the prompts that the environment makes of rows, of at most `max_tokens`. Collective.

        One rank makes each of them and has its tokens; `redistribute_prompts` brings them to others. If the environment
        fails for a row, the prompt is the row's own, and has a `fault`.

        Raises:
            UserError: on all ranks alike, if the environment fails and `on_failure` is stop, or if a prompt is too
                long; names the row.
        """
        rows = prompts.prompts
        num_ranks = dist.get_world_size()
        futures = {
            place: self.submit(rows[place], next(self._numbers), [], [])
            for place in range(dist.get_rank(), len(rows), num_ranks)
        }

        def read(place: int, result: ScoringResult) -> Prompt:
            return self._opened(rows[place], result.pred, result.detail, max_tokens=max_tokens)

        opened = dict(enumerate(rows)) | finish(futures, len(rows), read)
        lengths = torch.tensor([-1 if each.made_by is None else len(each.token_ids) for each in opened.values()])
        all_reduce(lengths, dist.ReduceOp.MAX)  # -1: no rank has made it
        for place in set((lengths >= 0).nonzero()[:, 0].tolist()) - futures.keys():
            tokens = TokensElsewhere(int(lengths[place]))
            opened[place] = replace(rows[place], token_ids=tokens, text="", made_by=place % num_ranks)
        return Prompts(prompts=PromptList(opened.values()))

    def submit(
        self, prompt: Prompt, number: int, responses: Sequence[str], observations: Sequence[str]
    ) -> Future[ScoringResult]:
        """Ask for the answer to the last of the responses of episode `number`, see `Players.answer`.

        Never raises: reading the result raises the error, on all ranks together.
        """
        row = {
            "prompt": prompt.raw_prompt,
            "ground_truth": prompt.ground_truth,
            "extra_info": prompt.extra_info,
            "index": prompt.index,
            "seed": seed_of(self._seed, prompt.index),
        }
        history = {"responses": list(responses), "observations": list(observations)}
        request = {"data_source": prompt.data_source, "row": row, "episode": str(number), **history}
        try:
            return self._pools[number % len(self._pools)].submit(pack(request))
        except TypeError as error:
            return failed(UserError(f"data row {prompt.index}: {error}"))
        except Exception as error:  # another rank may already wait in a collective
            return failed(error)

    def begin(self, *, max_tokens: int, group: dist.ProcessGroup) -> "Episodes":
        """Return the means to play the episodes of a session, of at most `max_tokens`, with the ranks of `group`."""
        return Episodes(self, self._numbers, max_tokens=max_tokens, group=group)

    def _opened(self, prompt: Prompt, opening: str | None, fault: str, *, max_tokens: int) -> Prompt:
        """Return what the environment makes of a prompt. Raises UserError, see `open`."""
        if opening is None:
            detail = f"the environment does not begin: {fault}"
            if self.section.on_failure == "stop":
                raise UserError(f"data row {prompt.index}: {detail} (environment.on_failure=stop)")
            return replace(prompt, fault=detail, made_by=dist.get_rank())
        observation: Observation = json.loads(opening)
        if observation == prompt.raw_prompt:
            return prompt
        if self.tokenizer.templates(observation) != self.tokenizer.templates(prompt.raw_prompt):
            raise UserError(
                f"data row {prompt.index}: of the row's prompt and the environment's, one is a text and the other is "
                "messages: make both alike"
            )
        token_ids = encode_prompt(observation, self.tokenizer)
        if len(token_ids) > max_tokens:
            raise UserError(
                f"data row {prompt.index}: the environment's prompt has {len(token_ids)} tokens, but "
                f"data.max_prompt_length is {max_tokens}: raise it"
            )
        text = self.tokenizer.decode(token_ids)
        return replace(prompt, token_ids=int32(token_ids), text=text, made_by=dist.get_rank())


@dataclass
class _Episode:
    """An episode that this rank asks its environments about."""

    number: int
    prompt: Prompt
    responses: list[str]
    last: int = 0  # token of the last turn


class Episodes:
    """The episodes of a session that one engine replica draws."""

    def __init__(
        self, environments: Environments, numbers: "count[int]", *, max_tokens: int, group: dist.ProcessGroup
    ) -> None:
        self._environments = environments
        self._group = group
        self._numbers = numbers
        self._max_tokens = max_tokens
        self._playing = dict[Key, _Episode]()
        self._asked = dict[Key, Future[ScoringResult]]()

    @property
    def overlap(self) -> int:
        """The number of windows in which a turn waits for its answer while the engine draws others."""
        return self._environments.section.overlap

    def ask(self, prompt: Prompt, generation: Generation) -> None:
        """Ask about the last turn of an episode, on one rank. Never raises."""
        key = _key(generation)
        if prompt.fault:
            unbegun = self._asked[key] = Future[ScoringResult]()
            unbegun.set_result(ScoringResult(seconds=0.0, fault="error", detail=prompt.fault))
        elif not generation.truncated:
            try:
                self._asked[key] = self._answer_to(key, prompt, generation)
            except Exception as error:  # another rank may already wait in a collective
                self._asked[key] = failed(error)

    def _answer_to(self, key: Key, prompt: Prompt, generation: Generation) -> Future[ScoringResult]:
        observations = [turn.observation or "" for turn in generation.turns]
        if key not in self._playing:
            self._playing[key] = self._begin(prompt, generation, observations)
        episode = self._playing[key]
        turn = generation.token_ids[start_of_turn(generation) :]
        episode.responses.append(self._environments.written(turn))
        episode.last = turn[-1]
        return self._environments.submit(prompt, episode.number, episode.responses, observations)

    def answer(self, generation: Sequence[Generation]) -> list[Generation]:
        """Wait for the answers to the last turns of these episodes. Return them as `proceed` does. Collective.

        The ranks of a replica give the same episodes.
        """
        keys = [*map(_key, generation)]
        mine = {key: self._asked.pop(key) for key in keys if key in self._asked}
        num = sum_of_ranks(lambda: len(mine))
        answers = self._exchanged(finish(mine, num, self._read))
        assert len(answers) >= sum(not each.truncated for each in generation), "a turn that no rank has asked about"
        section = self._environments.section
        return [
            proceed(each, answers.get(key, Answer()), section, max_tokens=self._max_tokens)
            for key, each in zip(keys, generation, strict=True)
        ]

    def with_texts(self, generation: Sequence[Generation]) -> list[Generation]:
        """Return episodes that a later step continues, with the texts of their observations. Collective as `answer`.

        Until then only the rank that asks about an episode has these texts. In a later step it may be another rank.
        """
        known = {_key(each): [turn.observation for turn in each.turns] for each in generation}
        asked = {key: known[key] for key in known.keys() & self._playing.keys()}
        texts = known | _joined(together(lambda: asked, group=self._group))
        found = []
        for each in generation:
            turns = zip(each.turns, texts[_key(each)], strict=True)
            found.append(replace(each, turns=tuple(replace(turn, observation=text) for turn, text in turns)))
        return found

    def _exchanged(self, own: dict[Key, Answer]) -> dict[Key, Answer]:
        """Return the answers that the ranks of the replica have; those of other ranks without texts. Collective.

        Every rank of the replica gives its engine the tokens of observations, which travel as int32 (D426).
        """
        without_texts = {
            key: replace(each, observation=TokensElsewhere(len(each.observation)), text=None)
            for key, each in own.items()
        }
        answers = _joined(together(lambda: without_texts, group=self._group))
        counts = [len(each.observation) for each in answers.values()]
        tokens = torch.zeros(sum(counts), dtype=torch.int32)
        parts = dict(zip(answers, tokens.split(counts), strict=True))
        for key, each in own.items():
            parts[key].copy_(torch.tensor(each.observation))
        if len(tokens):
            all_reduce(tokens, group=self._group)  # one rank has the tokens of each observation, and the others zeros
        found = {key: replace(each, observation=int32(parts[key].tolist())) for key, each in answers.items()}
        return found | own

    def _begin(self, prompt: Prompt, generation: Generation, observations: Sequence[str]) -> _Episode:
        """Return an episode after its answered turns. An environment plays turns of earlier steps again.

        Each of these turns is a request of its own, with a time limit of its own. Nothing waits for the results: if an
        answer differs from the `observations`, or has none, the request for the next turn fails.
        """
        written = self._environments.written
        responses = [written(generation.token_ids[turn.start : turn.end]) for turn in generation.turns]
        episode = _Episode(next(self._numbers), prompt, responses)
        for num_turns in range(1, len(responses) + 1):
            self._environments.submit(prompt, episode.number, responses[:num_turns], observations[: num_turns - 1])
        return episode

    def _read(self, key: Key, result: ScoringResult) -> Answer:
        """Return the answer in a result."""
        if result.fault:
            reason = StopReason.TIMEOUT if result.fault == "timeout" else StopReason.FAILED
            return _failed(reason, result.detail)
        reward = result.numbers["score"]
        if result.pred is None:
            return Answer(reward=reward, done=bool(result.numbers[DONE]))
        episode = self._playing[key]
        limit = self._environments.section.max_observation_length
        observer = self._environments.observer
        try:
            tokens = observer.encode(json.loads(result.pred), prompt=episode.prompt.raw_prompt, last=episode.last)
        except UserError as error:
            return _failed(StopReason.FAILED, str(error))
        if len(tokens) > limit:
            detail = f"its observation has {len(tokens)} tokens, more than environment.max_observation_length={limit}"
            return _failed(StopReason.FAILED, detail)
        return Answer(reward=reward, observation=int32(tokens), text=result.pred)


def _joined(parts: Iterable[Mapping[Key, T]]) -> dict[Key, T]:
    return dict(chain.from_iterable(part.items() for part in parts))


def _key(generation: Generation) -> Key:
    return generation.prompt, generation.sample


def _failed(reason: StopReason, detail: str) -> Answer:
    return Answer(fault=reason, detail=detail)
