"""The records that flow through one step: `Prompts < Rollouts < Scored < Experience < Marked`.

A record only gains fields: each later stage is a new type that `extend` builds from the stage before, and no field is
written twice. Every record is the same on every rank and lives in host memory; only models are sharded.

Shapes: `P` prompts, `B = P * n` samples (the `n` samples of prompt `p` are rows `p*n .. p*n + n - 1`),
`T` tokens of the longest response in the record. `[B, T]` tensors hold zeros if `mask` is False: after the end of a
response and, if the response is an episode, on the tokens of its environment. `responses` alone has the latter too.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from itertools import accumulate
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

R = TypeVar("R", bound="Prompts")
S = TypeVar("S", bound="Rollouts")
ALL = slice(None)


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

    prompt: int  # its position among the given prompts
    token_ids: list[int]  # the stop token included
    log_probs: list[float] | None  # of each token, under the distribution it was drawn from; None = not requested
    truncated: bool  # reached the length limit before a stop token
    num_cached: int = 0  # tokens of the prompt whose keys were cached
    weight_versions: list[int] = field(default_factory=list)  # of each token: finished steps at the sync of the
    # weights that drew it
    sample: int = 0  # its number among the samples of the prompt
    complete: bool = True  # ended by a stop token or by the length limit; an episode: by its environment or its limits
    turns: tuple[Turn, ...] = ()  # of an episode, those that are judged; the tokens between them are observations
    stop_reason: StopReason | None = None  # of a complete episode
    fault: str | None = None  # of its environment, for people

    def then(self, later: "Generation") -> "Generation":
        """Return this sample with the tokens that were drawn `later`."""
        known = self.log_probs is not None and later.log_probs is not None
        return replace(
            later,
            prompt=self.prompt,
            sample=self.sample,
            token_ids=self.token_ids + later.token_ids,
            log_probs=(self.log_probs or []) + (later.log_probs or []) if known else None,
            weight_versions=self.weight_versions + later.weight_versions,
            turns=self.turns,
        )


@dataclass(frozen=True, kw_only=True)
class Group:
    """A prompt and its samples, complete or as far as they are drawn."""

    prompt: Prompt
    samples: tuple[Generation, ...]
    started: int  # finished steps when its first token was asked for

    @classmethod
    def new(cls, prompt: Prompt, numbers: Sequence[int], *, started: int, place: int = 0) -> "Group":
        """Return a group of samples of these numbers, without tokens; `place` is the prompt's, as in `Generation`."""
        samples = (Generation(place, [], [], truncated=False, sample=number, complete=False) for number in numbers)
        return cls(prompt=prompt, samples=tuple(samples), started=started)

    @property
    def is_complete(self) -> bool:
        """Whether all samples are complete."""
        return all(sample.complete for sample in self.samples)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all samples."""
        return sum(len(sample.token_ids) for sample in self.samples)


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The prompts of one step."""

    prompts: Sequence[Prompt]  # length P

    def extend(self, record: type[R], **new_fields: Any) -> R:
        """Return a `record` with the fields of this record and `new_fields`."""
        return record(**{field.name: getattr(self, field.name) for field in fields(self)}, **new_fields)


@dataclass(frozen=True, kw_only=True)
class Rollouts(Prompts):
    """Prompts with the responses that the engine generated."""

    groups: Tensor  # [B] int64: the sample's prompt, a position in `prompts`; equal values are neighbours
    responses: Tensor  # [B, T] int64 token ids, end-of-sequence token included
    mask: Tensor  # [B, T] bool: True on the tokens of the policy, the only ones that are learnt from
    rollout_log_probs: Tensor | None  # [B, T] float32: under the engine's (temperature-scaled) policy; None: unknown
    truncated: Tensor  # [B] bool: the response reached the length limit before a stop token
    weight_versions: Tensor | None = None  # [B, T] int32: finished steps at the sync of the weights that drew the
    # token; None: no engine drew it
    sequences: Sequence[Sequence[int]] | None = None  # length B: prompt and response in a reader's own tokens, and one
    # token more; None: the model reads the tokens of `prompts` and `responses`
    places: Tensor | None = None  # [B, T] int64: the last position in `sequences` that a reader sees before each token
    observed: Tensor | None = None  # [B, T] bool: True on tokens of the environment, which the policy only reads; None:
    # there is no environment. The four below are None too then.
    turn_rewards: Tensor | None = None  # [B, T] float32: the reward of each turn, on its last token
    num_turns: Tensor | None = None  # [B] int64
    stop_reasons: Sequence[str] | None = None  # length B, see `StopReason`
    faults: Sequence[str | None] | None = None  # length B: what was wrong with the environment

    def __len__(self) -> int:
        return self.mask.shape[0]

    def prompt_of(self, sample: int) -> Prompt:
        """Return the prompt of a sample."""
        return self.prompts[int(self.groups[sample])]

    def present(self, samples: Tensor | int | slice = ALL) -> Tensor:
        """Return which places of samples have a token, of the policy or of the environment: bool, without holes.

        `[B, T]` for all, `[b, T]` for int64 indices `[b]`, and `[T]` for one sample.
        """
        return self.mask[samples] if self.observed is None else self.mask[samples] | self.observed[samples]

    def response_ids(self, sample: int) -> list[int]:
        """Return the response tokens of a sample, those of its environment included, without padding."""
        return self.responses[sample][self.present(sample)].tolist()

    def tokens(self, samples: Tensor) -> Tensor:
        """Return prompt and response of each given sample (int64 indices `[b]`) as a model reads them, end to end.

        The last token of each predicts nothing.
        """
        if self.sequences is not None:
            chosen = [token for sample in samples.tolist() for token in self.sequences[sample]]
            return torch.tensor(chosen, dtype=torch.int64)
        used, places = self.groups[samples].unique(return_inverse=True)
        prompts = [torch.tensor(self.prompts[place].token_ids, dtype=torch.int64) for place in used.tolist()]
        present = self.present(samples)
        in_prompt = self._prompt_lengths()[samples]
        lengths = in_prompt + present.sum(-1)
        positions = torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        of_prompt = positions < in_prompt.repeat_interleave(lengths)
        tokens = torch.empty_like(positions)
        if prompts:
            tokens[of_prompt] = torch.cat([prompts[place] for place in places.tolist()])
        tokens[~of_prompt] = self.responses[samples][present]
        return tokens

    def predictors(self) -> Tensor:
        """Return the position in the sample's tokens before each response token, ascending: `[B, T]` int64."""
        if self.places is not None:
            return self.places
        return self._prompt_lengths()[:, None] + self.present().cumsum(-1) - 2

    def lengths(self) -> Tensor:
        """Return the number of tokens of prompt and response together: `[B]` int64."""
        if self.sequences is not None:
            return torch.tensor([len(sequence) for sequence in self.sequences])
        return self._prompt_lengths() + self.present().sum(-1)

    def select(self, samples: Tensor) -> Self:
        """Return only the given samples (int64 indices `[b]`), in that order. Prompts and `T` are kept."""
        listed = {"sequences": self.sequences, "stop_reasons": self.stop_reasons, "faults": self.faults}
        chosen = {name: values and [values[sample] for sample in samples.tolist()] for name, values in listed.items()}
        return self._with({name: tensor[samples] for name, tensor in self._tensors()} | chosen)

    def of_prompts(self, places: Sequence[int]) -> Self:
        """Return only the prompts at `places`, ascending, with their samples. `T` is kept."""
        number = torch.full((len(self.prompts),), -1)
        number[list(places)] = torch.arange(len(places))
        chosen = self.select((number[self.groups] >= 0).nonzero()[:, 0])
        return replace(chosen, prompts=[self.prompts[place] for place in places], groups=number[chosen.groups])

    def without_responses(self, samples: Tensor) -> Self:
        """Mask all response tokens of the given samples (bool `[B]`), so that nothing learns from them."""
        kept = ~samples[:, None]
        return self._with({name: tensor * kept for name, tensor in self._tensors() if tensor.ndim == 2})

    def moved(self, move: Callable[[Tensor], Tensor]) -> Self:
        """Return the record with what `move` makes of its tensors."""
        return self._with({name: move(tensor) for name, tensor in self._tensors()})

    def _prompt_lengths(self) -> Tensor:
        """[B] int64."""
        return torch.tensor([len(prompt.token_ids) for prompt in self.prompts])[self.groups]

    def _with(self, tensors: dict[str, Any]) -> Self:
        return replace(self, **tensors)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return ((name, value) for name, value in values if isinstance(value, Tensor))


@dataclass(frozen=True, kw_only=True)
class Preferences(Rollouts):
    """Pairs of sequences to score, each with its prompt. Row `2 i` is preferred to row `2 i + 1`."""

    margins: Tensor  # [B] float32: by how much the first score should exceed the second; equal in both rows


@dataclass(frozen=True, kw_only=True)
class Scored(Rollouts):
    """Rollouts with their rewards."""

    texts: Sequence[str]  # length B: the decoded responses, without the tokens that end them
    scores: Tensor  # [B] float32; NaN if the reward failed
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
class Experience(Scored):
    """Scored rollouts with everything that the losses need."""

    old_log_probs: Tensor | None  # [B, T] float32: the actor before this step's updates; None: the update computes them
    ref_log_probs: Tensor | None  # [B, T] float32: the reference; None: no KL is estimated from it
    values: Tensor  # [B, T] float32: the critic before this step's updates; zeros without a critic
    advantages: Tensor  # [B, T] float32
    weights: Tensor  # [B, T] float32: factors of the advantages in the policy loss that correct for the engine's
    # probabilities; ones without a correction
    returns: Tensor  # [B, T] float32: the critic's target; zeros without a critic


@dataclass(frozen=True, kw_only=True)
class Marked(Experience):
    """A mini-batch for a loss that treats some of its tokens differently."""

    marked: Tensor  # [B, T] bool


def join(parts: Sequence[S]) -> S:
    """Join the prompts and samples of all `parts`, in their order. `T` is the longest `T` of the parts."""
    width = max(part.mask.shape[1] for part in parts)
    starts = accumulate((len(part.prompts) for part in parts[:-1]), initial=0)
    numbered = [replace(part, groups=part.groups + start) for part, start in zip(parts, starts, strict=True)]
    values = {field.name: [getattr(part, field.name) for part in numbered] for field in fields(parts[0])}
    return replace(parts[0], **{name: _joined(of_parts, width) for name, of_parts in values.items()})


def _joined(values: Sequence[Any], width: int) -> Any:
    """Join the values that several records have in one field."""
    match values[0]:
        case None:
            return None
        case Tensor(ndim=2):
            return torch.cat([pad(value, (0, width - value.shape[1])) for value in values])
        case Tensor():
            return torch.cat(list(values))
        case _:
            return [item for value in values for item in value]
