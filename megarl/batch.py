"""The records that flow through one step: `Prompts < Rollouts < Rewarded < Experience < Marked`.

A record only gains fields: each later stage is a new type that `extend` builds from the stage before, and no field is
written twice. Records live in host memory. `Scored` is a `Rewarded` with texts for people.

Shapes: `P` prompts, `B = P * n` samples (the `n` samples of prompt `p` are rows `p*n .. p*n + n - 1`),
`N` tokens of all responses together. A column with a number for each token is `[N]`: the responses lie end to end, in
the order of the samples, without padding. `rows` lays a column out as `[B, T]`, for `T` tokens of the longest response.
`M` places: the tokens of prompts and responses together, except the last of each sample, which predicts nothing.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, pairwise
from operator import attrgetter, methodcaller
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from megarl.columns import (
    block_cuts,
    counted_from,
    cut,
    flat,
    in_rows,
    int64,
    on_tokens,
    sample_sums,
    spans,
    without_ends,
)
from megarl.on_demand import OnDemand

R = TypeVar("R", bound="Prompts")
PER_TOKEN = "per token"
"""The mark of fields with a number for each token."""
ROUTE_TYPES = {1: torch.uint8, 2: torch.int16}
"""The type of routes, by the bytes that the number of an expert needs."""
PER_PLACE = "per place"
"""The mark of fields with a row for each place."""
PER_READ = "per token read"
"""The mark of fields with a number for each token that a model reads."""
ROWS: Mapping[str, Callable[["Rollouts"], Tensor]] = {
    PER_TOKEN: attrgetter("num_tokens"),
    PER_PLACE: methodcaller("num_places"),
    PER_READ: methodcaller("lengths"),
}
"""How many rows each sample has in fields with a mark."""


def int32(values: Iterable[int] = ()) -> "array[int]":
    """Return integers of 32 bits, such as token ids."""
    return array("i", values)


def float32(values: Iterable[float] = ()) -> "array[float]":
    """Return floating-point numbers of 32 bits, such as log-probabilities."""
    return array("f", values)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One row of the data set, ready for the engine."""

    index: int  # position in the data set; names the row in messages and seeds its sampling
    token_ids: Sequence[int]
    text: str  # the text that the model sees, for people
    data_source: str  # selects the rule-based reward
    ground_truth: Any
    extra_info: dict[str, Any]
    raw_prompt: Any = None  # the column as it was read, a text or messages, for models with another chat template
    prompt_id: str | None = None  # names the prompt in logs and dumps, if the data have such a column
    fault: str | None = None  # why its environment did not begin; each of its episodes fails with its first turn
    made_by: int | None = None  # the rank whose environment has made the tokens; None: they are those of the data


class StopReason(StrEnum):
    """Why an episode ended."""

    DONE = "done"  # the environment ended it
    TURNS = "turns"  # the policy had as many turns as it may
    TOKENS = "tokens"  # the next observation, or the rest of the turn, does not fit into the response
    TIMEOUT = "timeout"  # the environment took too long
    FAILED = "failed"  # the environment raised, died or answered with what is no answer


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of an episode: tokens of the policy, and how the environment judged them."""

    start: int  # place of its first token in the response
    end: int  # and after its last
    reward: float
    num_observed: int = 0  # tokens of the observation after it
    observation: str | None = None  # after it, as the environment gave it, in JSON; None: unknown, or there is none


@dataclass(frozen=True, slots=True)
class Generation:
    """One sample of one prompt, complete or as far as it is drawn."""

    replica: ClassVar[int] = -1  # of this rank: it has the tokens

    prompt: int  # its position among the given prompts
    token_ids: "array[int]"  # the stop token included
    log_probs: "array[float] | None"  # of each token, under the distribution it was drawn from; None = not requested
    truncated: bool  # reached the length limit before a stop token
    routes: Tensor | None = field(default=None, compare=False)
    """`[tokens of prompt and response - 1, L, k]` as in `Rollouts`, of the request that drew the last token.

    None: not requested, or not complete.
    """
    num_cached: int = 0  # tokens of the prompt whose keys were cached
    weight_versions: "array[int]" = field(default_factory=int32)
    """The finished steps at the sync of the weights that drew each token."""
    sample: int = 0  # its number among the samples of the prompt
    complete: bool = True  # ended by a stop token or by the length limit; an episode: by its environment or its limits
    turns: tuple[Turn, ...] = ()  # of an episode, those that are judged; the tokens between them are observations
    stop_reason: StopReason | None = None  # of a complete episode
    fault: str | None = None  # of its environment, for people

    @property
    def num_tokens(self) -> int:
        """The number of tokens, those of an environment included."""
        return len(self.token_ids)

    @property
    def num_learnt(self) -> int:
        """The number of tokens of the policy."""
        return sum(turn.end - turn.start for turn in self.turns) if self.turns else self.num_tokens

    @property
    def num_turns(self) -> int:
        """The number of turns that are judged; 0 if it is no episode."""
        return len(self.turns)

    @property
    def has_log_probs(self) -> bool:
        """Whether the engine's log-probabilities are known."""
        return self.log_probs is not None

    def as_remote(self, replica: int) -> "Sample":
        """Return this sample of `replica` as other replicas know it: without tokens, or itself if it has none."""
        if not self.token_ids and not self.complete:
            return self
        return RemoteSample(
            self.prompt,
            self.sample,
            replica=replica,
            num_tokens=self.num_tokens,
            num_learnt=self.num_learnt,
            num_turns=self.num_turns,
            has_log_probs=self.has_log_probs,
            truncated=self.truncated,
            complete=self.complete,
        )

    def of_prompt(self, place: int) -> "Generation":
        """Return this sample with another place of its prompt."""
        return replace(self, prompt=place)

    def then(self, later: "Generation") -> "Generation":
        """Return this sample with the tokens that were drawn `later`."""
        known = self.log_probs is not None and later.log_probs is not None
        return replace(
            later,
            prompt=self.prompt,
            sample=self.sample,
            token_ids=self.token_ids + later.token_ids,
            log_probs=(self.log_probs or float32()) + (later.log_probs or float32()) if known else None,
            weight_versions=self.weight_versions + later.weight_versions,
            turns=self.turns,
        )


class RemoteSample(NamedTuple):
    """A sample whose tokens the ranks of another engine replica have. The fields are those of `Generation`.

    A step has one for nearly every sample of all replicas, and a tuple is made in a quarter of the time of a dataclass.
    """

    prompt: int
    sample: int
    replica: int
    num_tokens: int
    num_learnt: int
    num_turns: int
    has_log_probs: bool
    truncated: bool
    complete: bool

    def as_remote(self, replica: int) -> "RemoteSample":
        """Return this sample itself."""
        return self

    def of_prompt(self, place: int) -> "RemoteSample":
        """Return this sample with another place of its prompt."""
        return self._replace(prompt=place)


Sample = Generation | RemoteSample


@dataclass(frozen=True, kw_only=True)
class Group:
    """A prompt and its samples, complete or as far as they are drawn."""

    prompt: Prompt
    samples: Sequence[Sample]
    started: int  # finished steps when its first token was asked for

    @classmethod
    def new(cls, prompt: Prompt, numbers: Sequence[int], *, started: int, place: int = 0) -> "Group":
        """Return a group of samples of these numbers, without tokens; `place` is the prompt's, as in `Generation`."""
        samples = (
            Generation(place, int32(), float32(), truncated=False, sample=number, complete=False) for number in numbers
        )
        return cls(prompt=prompt, samples=tuple(samples), started=started)

    @property
    def is_complete(self) -> bool:
        """Whether all samples are complete."""
        return all(sample.complete for sample in self.samples)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all samples."""
        return sum(sample.num_tokens for sample in self.samples)


class PromptList(OnDemand[Prompt]):
    """Prompts with their lengths, which no rank counts twice. Each is read when it is asked for, and kept."""

    def __init__(self, prompts: Iterable[Prompt] = (), lengths: Tensor | None = None) -> None:
        """Take prompts, and the number of tokens of each, `[P]` int64; None: they are counted."""
        known = dict(enumerate(prompts))
        self._known = known
        self._read: Callable[[int], Prompt] = known.__getitem__
        self._source_of: Callable[[int], str] = lambda place: known[place].data_source
        counts = map(len, map(attrgetter("token_ids"), known.values()))
        self.lengths = int64([*counts]) if lengths is None else lengths

    @classmethod
    def of(cls, prompts: Sequence[Prompt]) -> "PromptList":
        """Return the prompts with their lengths, the same list if it has them."""
        return prompts if isinstance(prompts, PromptList) else cls(prompts)

    @classmethod
    def read_by(cls, read: Callable[[int], Prompt], lengths: Tensor, source_of: Callable[[int], str]) -> "PromptList":
        """Return prompts of these lengths, `[P]` int64, that `read` returns by their places, and data sources."""
        found = cls(lengths=lengths)
        found._read = read
        found._source_of = source_of
        return found

    @classmethod
    def joined(cls, parts: Iterable[Sequence[Prompt]]) -> "PromptList":
        """Return the prompts of all parts, in their order. None is read."""
        lists = [*map(cls.of, parts)]
        places = [(part, place) for part in lists for place in range(len(part))]
        found = cls.read_by(
            lambda place: cls.make_item(*places[place]),
            torch.cat([part.lengths for part in lists]),
            lambda place: cls.source(*places[place]),
        )
        found._known = {
            number: part._known[place] for number, (part, place) in enumerate(places) if place in part._known
        }
        return found

    def source(self, place: int) -> str:
        """Return the data source of a prompt. The prompt is not read for it."""
        return self._source_of(place) if place not in self._known else self._known[place].data_source

    @property
    def makers(self) -> dict[int, int]:
        """The ranks that have made prompts, by the places of these prompts."""
        return {place: each.made_by for place, each in self._known.items() if each.made_by is not None}

    def __len__(self) -> int:
        return len(self.lengths)

    def make_item(self, place: int) -> Prompt:
        """Return a prompt."""
        if place not in self._known:
            self._known[place] = self._read(place)
        return self._known[place]

    def __reduce__(self) -> tuple[type["PromptList"], tuple[list[Prompt], Tensor]]:
        return PromptList, ([*self], self.lengths)


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The prompts of one step."""

    prompts: Sequence[Prompt]  # length P

    def prompt_lengths(self) -> Tensor:
        """Return the number of tokens of each prompt: `[P]` int64."""
        return PromptList.of(self.prompts).lengths

    def extend(self, record: type[R], **new_fields: Any) -> R:
        """Return a `record` with the fields of this record and `new_fields`."""
        return record(**{field.name: getattr(self, field.name) for field in fields(self)}, **new_fields)


def per_token(**settings: Any) -> Any:
    """Declare a field with a number for each token of the responses, end to end: `[N]`."""
    return field(metadata={PER_TOKEN: True}, **settings)


@dataclass(frozen=True, kw_only=True)
class Rollouts(Prompts):
    """Prompts with the responses that the engine generated."""

    groups: Tensor  # [B] int64: the sample's prompt, a position in `prompts`; equal values are neighbours
    num_tokens: Tensor  # [B] int64: tokens of the response, those of an environment included; always on the host
    responses: Tensor = per_token()  # int32 token ids, end-of-sequence token included
    mask: Tensor = per_token()
    """bool: True on the tokens of the policy, the only ones that are learnt from.

    An episode also has tokens of its environment: False here, and zero in other columns.
    """
    rollout_log_probs: Tensor | None = per_token()
    """float32: under the engine's (temperature-scaled) policy; None: unknown."""
    truncated: Tensor  # [B] bool: the response reached the length limit before a stop token
    weight_versions: Tensor | None = per_token(default=None)
    """int32 (D439): finished steps at the sync of the weights that drew the token; None: no engine drew it."""
    read_lengths: Tensor | None = None  # [B] int64: tokens in `sequences`; None: those of `prompts` and `responses`
    sequences: Tensor | None = field(default=None, metadata={PER_READ: True})
    """int32: prompt and response in a reader's own tokens, and one token more, end to end.

    None with `read_lengths`: no layer of this rank reads any.
    """
    places: Tensor | None = per_token(default=None)
    """int64: the last position in `sequences` that a reader sees before each token."""
    routes: Tensor | None = field(default=None, metadata={PER_PLACE: True})
    """`[M, L, k]` uint8, or int16 of more than 256 experts: the k experts that the engine chose in each of L layers.

    `[M, L, 2k]` float32: these experts, and then the engine's scores of them. None: the model that reads the samples
    chooses.
    """
    turn_rewards: Tensor | None = per_token(default=None)
    """float32: the reward of each turn, on its last token.

    Without an environment, this and the three below are None.
    """
    num_turns: Tensor | None = None  # [B] int64
    stop_reasons: Sequence[str] | None = None  # length B, see `StopReason`
    faults: Sequence[str | None] | None = None  # length B: what was wrong with the environment

    def __len__(self) -> int:
        return len(self.num_tokens)

    def prompt_of(self, sample: int) -> Prompt:
        """Return the prompt of a sample."""
        return self.prompts[int(self.groups[sample])]

    def rows(self, column: Tensor) -> Tensor:
        """Lay a column `[N]` out as `[B, T]`, with zeros behind each response. Keeps the gradient.

        A column of rows stays as it is.
        """
        return column if column.ndim == 2 else in_rows(column, self.num_tokens)

    def flat(self, rows: Tensor) -> Tensor:
        """Return the column `[N]` that is laid out in `rows` `[B, T]`."""
        return flat(rows, self.num_tokens)

    def blocks(self, *columns: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
        """Yield blocks of neighbouring samples: which they are, and their part of each column, a view.

        A block has at most `BLOCK` tokens or one sample. Without samples there is one block, which is empty.
        """
        for samples, tokens in self._blocks:
            yield samples, [column[tokens] for column in columns]

    @cached_property
    def _blocks(self) -> list[tuple[slice, slice]]:
        """The samples of each block, and their tokens."""
        lengths = self.num_tokens.tolist()
        ends = [0, *accumulate(lengths)]
        return [(slice(first, last), slice(ends[first], ends[last])) for first, last in pairwise(block_cuts(lengths))]

    def learnt_blocks(self, *columns: Tensor) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Yield the tokens of the policy in each block: how many each sample has, int64 `[b]`, and their columns."""
        for samples, (mask, *parts) in self.blocks(self.mask, *columns):
            counts = self.num_tokens[samples]
            if self.is_all_learnt:
                yield counts, parts
            else:
                yield sample_sums(mask, counts).to(torch.int64), [part[mask] for part in parts]

    def sums(self, column: Tensor) -> Tensor:
        """Return the sum of a column over each sample: `[B]` float64. It depends on no other sample."""
        return torch.cat([sample_sums(part, self.num_tokens[block]) for block, (part,) in self.blocks(column)])

    def num_learnt(self) -> Tensor:
        """Return the number of tokens of the policy in each sample: `[B]` int64."""
        return self.num_tokens if self.is_all_learnt else self.sums(self.mask).to(torch.int64)

    @cached_property
    def is_all_learnt(self) -> bool:
        """Whether every token is of the policy."""
        return bool(self.mask.numpy().all())  # numpy looks at many tokens at once

    def pieces(self, column: Tensor) -> tuple[Tensor, ...]:
        """Return the part of a column `[N]` that belongs to each sample: views."""
        return column.split(self.num_tokens.tolist())

    def are_all(self, samples: Tensor) -> bool:
        """Return whether the given samples (int64 indices) are all of them, in their order."""
        return torch.equal(samples, torch.arange(len(self)))

    def spans(self, samples: Tensor) -> list[slice]:
        """Return the tokens of the given samples (int64 indices `[b]`), in their order: neighbours in one slice."""
        return spans(samples, self.num_tokens)

    def tokens_of(self, samples: Tensor, column: Tensor) -> Tensor:
        """Return the part of a column `[N]` that belongs to the given samples (int64 indices `[b]`), in their order."""
        return column if self.are_all(samples) else cut(column, self.spans(samples))

    def on_tokens(self, numbers: Tensor) -> Tensor:
        """Return the column `[N]` with a number of each sample, `[B]`, on each of its tokens."""
        return on_tokens(numbers, self.num_tokens)

    def response_ids(self, sample: int) -> Tensor:
        """Return the response tokens of a sample, those of its environment included: int32."""
        end = int(self.num_tokens[: sample + 1].sum())
        return self.responses[end - int(self.num_tokens[sample]) : end]

    def tokens(self) -> Tensor:
        """Return prompt and response of each sample as a model reads them, end to end: int64.

        The last token of each predicts nothing. Tokens that no layer here reads are zeros.
        """
        if self.read_lengths is not None:
            read = torch.zeros(int(self.read_lengths.sum())) if self.sequences is None else self.sequences
            return read.to(torch.int64)
        used, places = self.groups.unique(return_inverse=True)
        prompts = [torch.tensor(self.prompts[place].token_ids, dtype=torch.int64) for place in used.tolist()]
        in_prompt = self.prompt_lengths()[self.groups]
        lengths = in_prompt + self.num_tokens
        of_prompt = counted_from(torch.zeros_like(lengths), lengths) < in_prompt.repeat_interleave(lengths)
        tokens = torch.empty(len(of_prompt), dtype=torch.int64)
        if prompts:
            tokens[of_prompt] = torch.cat([prompts[place] for place in places.tolist()])
        tokens[~of_prompt] = self.responses.to(torch.int64)
        return tokens

    def predictors(self) -> Tensor:
        """Return the position in the sample's tokens before each response token, ascending: `[N]` int64."""
        if self.places is not None:
            return self.places
        return counted_from(self.prompt_lengths()[self.groups] - 1, self.num_tokens)

    def lengths(self) -> Tensor:
        """Return the number of tokens of prompt and response together: `[B]` int64."""
        if self.read_lengths is not None:
            return self.read_lengths
        return self.prompt_lengths()[self.groups] + self.num_tokens

    def num_places(self) -> Tensor:
        """Return the number of places of each sample: `[B]` int64."""
        return self.lengths() - 1

    def select(self, samples: Tensor) -> Self:
        """Return only the given samples (int64 indices `[b]`), in that order. Prompts are kept."""
        if self.are_all(samples):
            return self
        chosen = samples.tolist()
        listed = {"stop_reasons": self.stop_reasons, "faults": self.faults}
        values: dict[str, Any] = {name: each and [each[sample] for sample in chosen] for name, each in listed.items()}
        rows = {mark: spans(samples, ROWS[mark](self)) for mark in self.marks()}
        for name, tensor, marks in self._tensors():
            values[name] = cut(tensor, rows[next(iter(marks))]) if marks else tensor[samples]
        return replace(self, **values)

    def of_prompts(self, places: Sequence[int]) -> Self:
        """Return only the prompts at `places`, ascending, with their samples."""
        number = torch.full((len(self.prompts),), -1)
        number[list(places)] = torch.arange(len(places))
        chosen = self.select((number[self.groups] >= 0).nonzero()[:, 0])
        return replace(chosen, prompts=[self.prompts[place] for place in places], groups=number[chosen.groups])

    def without_responses(self, samples: Tensor, num_tokens: Tensor | None = None) -> Self:
        """Remove the response tokens of the given samples (bool `[B]`), so that nothing learns from them.

        A model reads `num_tokens` `[B]` int64 of each response; None: those that the record has.
        """
        kept = (~samples).nonzero()[:, 0]
        columns: dict[str, Any] = {name: self.tokens_of(kept, column) for name, column in self.columns()}
        removed = (self.num_tokens if num_tokens is None else num_tokens) * samples
        if self.routes is not None and len(kept) < len(self):
            columns["routes"] = without_ends(self.routes, self.num_places(), removed)
        if self.read_lengths is not None and self.places is None:  # responses are the ends of what a model reads
            columns["read_lengths"] = self.read_lengths - removed
            if self.sequences is not None:
                columns["sequences"] = without_ends(self.sequences, self.read_lengths, removed)
        return replace(self, **columns, num_tokens=self.num_tokens * ~samples)

    def laid_out(self, move: Callable[[Tensor], Tensor]) -> Self:
        """Return the record that an objective receives: with what `move` makes of the rows `[B, T]` of each column.

        The numbers of samples stay on the host, and routes are left out.
        """
        moved: dict[str, Any] = {name: move(self.rows(column)) for name, column in self.columns()}
        return replace(self, **moved, routes=None)

    def columns(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors with a number for each token, by name."""
        return ((name, tensor) for name, tensor, marks in self._tensors() if PER_TOKEN in marks)

    def marks(self) -> set[str]:
        """Return the marks of the tensors that this record has."""
        return {mark for *_, marks in self._tensors() for mark in marks}

    def _tensors(self) -> Iterator[tuple[str, Tensor, Mapping[str, bool]]]:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Tensor):
                yield each.name, value, each.metadata


@dataclass(frozen=True, kw_only=True)
class Preferences(Rollouts):
    """Pairs of sequences to score, each with its prompt. Row `2 i` is preferred to row `2 i + 1`."""

    margins: Tensor = per_token()
    """float32: by how much the first score should exceed the second, equal in both rows; a sequence has one token."""


@dataclass(frozen=True, kw_only=True)
class Rewarded(Rollouts):
    """Rollouts with their rewards, as models learn from them."""

    scores: Tensor  # [B] float32; NaN if the reward failed


@dataclass(frozen=True, kw_only=True)
class Scored(Rewarded):
    """Rollouts with what the reward said, on the ranks that drew them; all words on the rank that reports (D443)."""

    texts: Sequence[str]  # length B: the decoded responses, without the tokens that end them
    accuracies: Tensor  # [B] float32: how right each response is: the reward's `acc`, else the score
    answers: Sequence[str | None] | None = None  # length B: the extracted answers, for majority votes; '' if none
    failures: Sequence[str | None] | None = None  # length B: why a sample has no score; None: all have scores

    def has_score(self) -> Tensor:
        """Return which samples have a score: `[B]` bool."""
        failures = self.failures or [None] * len(self)
        return torch.tensor([failure is None for failure in failures], dtype=torch.bool)

    def select(self, samples: Tensor) -> Self:
        """Return only the given samples, with their texts, answers and failures."""
        chosen = samples.tolist()
        return replace(
            super().select(samples),
            texts=[self.texts[sample] for sample in chosen],
            answers=self.answers and [self.answers[sample] for sample in chosen],
            failures=self.failures and [self.failures[sample] for sample in chosen],
        )


@dataclass(frozen=True, kw_only=True)
class Experience(Rewarded):
    """Rewarded rollouts with everything that the losses need."""

    old_log_probs: Tensor | None = per_token()
    """float32: the actor before this step's updates; None: the update computes them."""
    ref_log_probs: Tensor | None = per_token()  # float32: the reference; None: no KL is estimated from it
    values: Tensor = per_token()  # float32: the critic before this step's updates; zeros without a critic
    advantages: Tensor = per_token()  # float32
    weights: Tensor = per_token()
    """float32: factors of the advantages in the policy loss that correct for the engine's probabilities.

    Without a correction they are ones.
    """
    returns: Tensor = per_token()  # float32: the critic's target; zeros without a critic


@dataclass(frozen=True, kw_only=True)
class Marked(Experience):
    """A mini-batch for a loss that treats some of its tokens differently."""

    marked: Tensor = per_token()  # bool
