"""Brings prompts that one rank has made to the ranks that draw from them or learn from them."""

import pickle
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.batch import Prompt, PromptList
from megarl.distributed.exchange import begin_receiving, begin_sending

NO_RANK = -1
PromptContent = tuple[Sequence[int], str, str | None]
"""Tokens, text and fault of a prompt."""


@dataclass(frozen=True)
class TokensElsewhere(Sequence[int]):
    """The tokens of a prompt that other ranks have. This rank knows their number."""

    number: int

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, place: object) -> NoReturn:
        raise AssertionError("the tokens of this prompt are on other ranks")


def redistribute_prompts(
    prompts: Sequence[Prompt], groups: Tensor, owners: Tensor, ranks: Sequence[Sequence[int]]
) -> Sequence[Prompt]:
    """Return the prompts, with the tokens of those that the share of this rank needs. Collective.

    Tokens travel point to point, from the rank that has made them (D444). Prompts of the data cost nothing.

    Args:
        prompts: the same on every rank, except for tokens.
        groups: `[R]` int64, places in `prompts`.
        owners: `[R]` int64, the share that needs each of them.
        ranks: of each share.
    """
    makers = PromptList.of(prompts).makers
    if not makers:
        return prompts
    here = dist.get_rank()
    wanted = defaultdict[tuple[int, int], list[int]](list)  # places, by maker and receiver: messages of this rank
    for place, owner in sorted({*zip(groups.tolist(), owners.tolist(), strict=True)}):
        maker = makers.get(place, NO_RANK)
        for rank in ranks[owner]:
            if maker not in (rank, NO_RANK) and here in (rank, maker):
                wanted[maker, rank].append(place)
    sending = list[dist.Work]()
    for (_, rank), places in wanted.items():
        if rank != here:
            message = _message([prompts[place] for place in places])
            sending += [begin_sending(part, rank) for part in message]
    known = [*prompts]
    for (maker, rank), places in wanted.items():
        if rank == here:
            for place, (token_ids, text, fault) in zip(places, _received(maker), strict=True):
                known[place] = replace(known[place], token_ids=token_ids, text=text, fault=fault)
    for each in sending:
        each.wait()
    return PromptList(known)


def _message(prompts: Sequence[Prompt]) -> tuple[Tensor, Tensor]:
    """Return what only the maker of these prompts knows, as bytes, and before it their number."""
    contents = [(prompt.token_ids, prompt.text, prompt.fault) for prompt in prompts]
    content = torch.frombuffer(bytearray(pickle.dumps(contents)), dtype=torch.uint8)
    return torch.tensor([len(content)]), content


def _received(maker: int) -> list[PromptContent]:
    """Return the content of a message."""
    size = torch.zeros(1, dtype=torch.int64)
    begin_receiving(size, maker).wait()
    content = torch.empty(int(size), dtype=torch.uint8)
    begin_receiving(content, maker).wait()
    contents: list[PromptContent] = pickle.loads(content.numpy().tobytes())  # noqa: S301 - our own bytes
    return contents
