"""Brings samples to the ranks that learn from them: point to point, with sizes that every rank knows from the index.

One rank of each old share sends. One rank of each new share receives, and passes on along trees what the others of its
share need. So a token crosses once from the ranks that drew it to the ranks that learn from it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.batch import PER_PLACE, PER_READ, PER_TOKEN, Rollouts
from megarl.columns import Integers, reduced, spans_of_choices
from megarl.distributed.exchange import begin_receiving, begin_sending
from megarl.distributed.made_prompts import redistribute_prompts
from megarl.distributed.runs import Runs
from megarl.distributed.sharded import Index, Need, Sharded, Shares

R = TypeVar("R", bound=Rollouts)


def redistribute(samples: Sharded[Rollouts], record: type[R], runs: Runs, shares: Shares) -> Sharded[R]:
    """Bring every sample to the ranks of its new share, and its tokens to those that need them. Collective.

    Args:
        samples: `B` samples, as they are spread now.
        record: the fields that travel. Only tensors do, and no routes; other fields are None afterwards.
        runs: the new share of each sample.
        shares: the new shares.
    """
    prompts = redistribute_prompts(samples.index.prompts, runs.groups, runs.owners, shares.ranks)
    samples = replace(samples, index=replace(samples.index, prompts=prompts), share=replace(samples.share, routes=None))
    layout = _Layout.of(samples.share, record)
    needed = runs.places(shares.here)
    sending = _send(samples, layout, runs, shares)
    if shares.reports or samples.shares.number == 1:
        share = _receive(samples, layout, needed)
    first, *others = shares.ranks[shares.here]
    for need in Need if samples.shares.number > 1 else ():
        ranks = [first, *(rank for rank in others if shares.need(rank) is need)]
        if len(ranks) == 1 or shares.rank not in ranks:
            continue
        part = layout.part(need)
        message = part.messages([needed], samples.index.num_tokens)
        content = message.blank()
        if shares.reports:
            part.pack(share, [torch.arange(len(needed))], out=content)
        pass_on(content, ranks, shares.rank)
        if not shares.reports:
            share = part.unpack(content, samples.index, message, np.arange(len(needed)))
    share = layout.reduced(share, shares.need(shares.rank))
    for each in sending:
        each.wait()
    return Sharded(index=replace(samples.index, runs=runs), share=share, shares=shares)


class _Column(NamedTuple):
    """A tensor of a record."""

    name: str
    dtype: torch.dtype
    is_per_token: bool  # False: it has one number for each sample


@dataclass(frozen=True)
class _Messages:
    """Messages with samples, end to end. Each has one column after the other."""

    places: Tensor  # [b] int64: the samples of one message after the other
    sizes: Sequence[int]  # length m: the number of samples of each message
    num_tokens: Tensor  # [b] int64: of the samples
    starts: Integers  # [m, c + 1]: the first byte of each column of each message, and the end of the message

    @classmethod
    def of(cls, columns: Sequence[_Column], places: Tensor, sizes: Sequence[int], num_tokens: Tensor) -> "_Messages":
        """Lay out messages with these columns."""
        counts = np.stack([sizes, reduced(np.add, num_tokens, torch.tensor(sizes)).numpy()])
        num_bytes = np.stack([each.dtype.itemsize * counts[int(each.is_per_token)] for each in columns], axis=-1)
        ends = num_bytes.cumsum().reshape(num_bytes.shape)
        return cls(places, sizes, num_tokens, np.concatenate((ends - num_bytes, ends[:, -1:]), axis=-1))

    def blank(self) -> Tensor:
        """Return a tensor for the bytes of all messages: uint8, not filled."""
        return torch.empty(int(self.starts[-1, -1]), dtype=torch.uint8)

    def split(self, content: Tensor) -> tuple[Tensor, ...]:
        """Return the bytes of each message: views."""
        return content.tensor_split(self.starts[:-1, -1].tolist())


@dataclass(frozen=True)
class _Layout(Generic[R]):
    """The tensors of a record as they lie in a message: those with the widest numbers first."""

    record: type[R]
    columns: Sequence[_Column]

    @classmethod
    def of(cls, example: Rollouts, record: type[R]) -> "_Layout[R]":
        """Return the layout of the tensors that the example has."""
        found = []
        for field in fields(record):
            value = getattr(example, field.name)
            known = field.name in ("groups", "num_tokens", "read_lengths") or {PER_PLACE, PER_READ} & {*field.metadata}
            if isinstance(value, Tensor) and not known:
                found.append(_Column(field.name, value.dtype, PER_TOKEN in field.metadata))
        return cls(record, sorted(found, key=lambda column: -column.dtype.itemsize))

    def part(self, need: Need) -> "_Layout[R]":
        """Return the layout of what travels to a rank with this need: always the numbers of samples."""
        chosen = [
            column
            for column in self.columns
            if need is Need.ALL or not column.is_per_token or (need is Need.READ and column.name == "responses")
        ]
        return replace(self, columns=chosen)

    def reduced(self, share: R, need: Need) -> R:
        """Return a share without the tokens that a rank with this need does not use."""
        if need is Need.ALL:
            return share
        values: dict[str, Any] = {
            name: torch.empty(0, dtype=dtype) for name, dtype, per_token in self.columns if per_token
        }
        values["num_tokens"] = torch.zeros_like(share.num_tokens)
        values["read_lengths"] = share.lengths()
        values["sequences"] = share.tokens().to(torch.int32) if need is Need.READ else None
        return replace(share, **values)

    def messages(self, choices: Sequence[Tensor], num_tokens: Tensor) -> _Messages:
        """Lay out a message for each choice of samples, int64 indices into `num_tokens`."""
        places = torch.cat(list(choices))
        return _Messages.of(self.columns, places, [*map(len, choices)], num_tokens[places])

    def pack(self, share: Rollouts, choices: Sequence[Tensor], out: Tensor) -> None:
        """Fill `out` with a message for each choice of samples (int64 indices `[b]`) of a share, end to end.

        Each token is copied once.
        """
        chosen = torch.cat(list(choices))
        columns = []
        for name, dtype, is_per_token in self.columns:
            column = getattr(share, name) if is_per_token else getattr(share, name)[chosen]
            columns.append((column.contiguous().view(torch.uint8).numpy(), dtype.itemsize, is_per_token))
        pieces = []
        first = 0
        for choice, tokens in zip(choices, spans_of_choices(choices, share.num_tokens), strict=True):
            places = [slice(first, first + len(choice))]
            first += len(choice)
            for column, width, is_per_token in columns:
                spans = tokens if is_per_token else places
                pieces += [column[span.start * width : span.stop * width] for span in spans]
        if pieces:
            np.concatenate(pieces, out=out.numpy())

    def unpack(self, content: Tensor, index: Index, messages: _Messages, order: Integers) -> R:
        """Return a record of the samples of messages. Each token is copied at most once.

        Args:
            content: uint8, the bytes of the messages.
            index: of all samples; `messages` have places in it.
            messages: the layout of the bytes.
            order: `[b]`, the samples of the record, by their places in `messages`.
        """
        counts = messages.num_tokens.numpy()
        numbers = np.arange(len(messages.sizes)).repeat(messages.sizes)
        firsts = (np.cumsum(messages.sizes) - messages.sizes)[numbers]  # of the message of each sample
        tokens_before = counts.cumsum() - counts
        starts = messages.starts[numbers]
        tensors = {}
        for place, (name, dtype, is_per_token) in enumerate(self.columns):
            width = dtype.itemsize
            before = tokens_before - tokens_before[firsts] if is_per_token else np.arange(len(counts)) - firsts
            lengths = width * (counts if is_per_token else np.ones_like(counts))
            begins = starts[:, place] + width * before
            tensors[name] = _joined(content, begins[order], lengths[order]).view(dtype)
        return self._of_tensors(tensors, index, messages.places[torch.from_numpy(order)])

    def keep(self, samples: Sharded[Rollouts], places: Tensor) -> R:
        """Return the record of samples of this rank at the given places (int64 `[b]`) among all."""
        share = samples.share.select(samples.own(places))
        tensors = {column.name: getattr(share, column.name) for column in self.columns}
        return self._of_tensors(tensors, samples.index, places)

    def _of_tensors(self, tensors: Mapping[str, Tensor], index: Index, places: Tensor) -> R:
        """Return the record of the samples at the given places (int64 `[b]`), with these columns."""
        values: dict[str, Any] = {
            **{field.name: None for field in fields(self.record)},
            **tensors,
            "prompts": index.prompts,
            "groups": index.runs.groups_of(places),
            "num_tokens": index.num_tokens[places],
        }
        return self.record(**values)


def _joined(content: Tensor, begins: Integers, lengths: Integers) -> Tensor:
    """Return the bytes of samples, in their order. Neighbours are copied together; a single piece is a view."""
    ends = begins + lengths
    is_first = np.ones(len(begins), dtype=bool)
    is_first[1:] = begins[1:] != ends[:-1]
    firsts = np.flatnonzero(is_first)
    if len(firsts) < 2:
        first = int(begins.min(initial=len(content)))
        return content[first : first + int(lengths.sum())]
    lasts = np.append(firsts[1:], len(begins)) - 1
    numbers = content.numpy()
    pieces = [numbers[begin:end] for begin, end in zip(begins[firsts].tolist(), ends[lasts].tolist(), strict=True)]
    return torch.from_numpy(np.concatenate(pieces))


def _send(samples: Sharded[Rollouts], layout: _Layout[R], runs: Runs, shares: Shares) -> list[dist.Work]:
    """Begin to send the samples of this rank's old share to the first rank of each new share that has none of them."""
    old = samples.shares
    choices = {
        shares.ranks[share][0]: local
        for share, local in (by_share(runs.owners_of(samples.mine)) if old.reports else ())
        if shares.ranks[share][0] not in old.ranks[old.here]
    }
    if not choices:
        return []
    messages = layout.messages([*choices.values()], samples.share.num_tokens)
    content = messages.blank()
    layout.pack(samples.share, [*choices.values()], out=content)
    return [begin_sending(part, target) for target, part in zip(choices, messages.split(content), strict=True)]


def _receive(samples: Sharded[Rollouts], layout: _Layout[R], needed: Tensor) -> R:
    """Return the record of the samples of this rank's new share, at the places `needed` (int64 `[b]`) among all."""
    index = samples.index
    old = samples.shares
    by_source = dict(by_share(index.runs.owners_of(needed)))
    if by_source.keys() <= {old.here}:
        return layout.keep(samples, needed)
    messages = layout.messages([needed[chosen] for chosen in by_source.values()], index.num_tokens)
    content = messages.blank()
    parts = dict(zip(by_source, messages.split(content), strict=True))
    coming = [begin_receiving(part, old.ranks[source][0]) for source, part in parts.items() if source != old.here]
    if old.here in parts:
        layout.pack(samples.share, [samples.own(needed[by_source[old.here]])], out=parts[old.here])
    for transfer in coming:
        transfer.wait()
    return layout.unpack(content, index, messages, torch.cat([*by_source.values()]).numpy().argsort())


def by_share(owners: Tensor) -> list[tuple[int, Tensor]]:
    """Return the shares among `owners`, int64 `[b]`, ascending, each with its places, int64 and ascending.

    The cost depends on the given samples alone, and not on the number of shares.
    """
    found, counts = owners.unique(return_counts=True)
    places = owners.argsort(stable=True).split(counts.tolist())
    return list(zip(found.tolist(), places, strict=True))


def pass_on(content: Tensor, ranks: Sequence[int], rank: int) -> None:
    """Bring bytes from the first of these ranks to the others: number `i` gets them from `i` less its first bit.

    `rank` is this rank.
    """
    place = ranks.index(rank)
    if not len(content):
        return
    if place:
        source = place - (1 << (place.bit_length() - 1))
        begin_receiving(content, ranks[source]).wait()
    targets = [place + (1 << bit) for bit in range(place.bit_length(), len(ranks).bit_length())]
    sending = [begin_sending(content, ranks[target]) for target in targets if target < len(ranks)]
    for each in sending:
        each.wait()
