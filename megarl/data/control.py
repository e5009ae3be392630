"""Control tokens come from templates alone, never from a text that spells their names.

A tokenizer reads `<|im_end|>` in any text as the token of that name. So a row, an observation or the output of a
program could end a turn and begin another. `ControlTokens` encodes such a text by a second tokenizer, which differs
from the first only in the names of its special tokens: they begin with `MARK`. To this tokenizer the names in texts are
ordinary letters, and a control token is written as `MARK` and its name.
"""

import json
import re
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as FastTokenizer

from megarl.platform.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK, *GUARDS = map(chr, range(0xFDD0, 0xFDF0))
"""Code points that Unicode reserves for the inside of programs; no text has them."""

Messages = list[dict[str, Any]]


class ControlTokens:
    """The control tokens of a tokenizer, and texts that spell their names.

    These are its special tokens, and the added tokens that its chat template writes: `<｜User｜>` begins a turn whether
    the tokenizer calls it special or not. A pair of tags, `<think>` and `</think>`, is no control token unless it is
    special, because it structures what the model itself writes.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", *, source: str, written: Sequence[str] = ()) -> None:
        """Take the tokens of a tokenizer of transformers.

        Args:
            tokenizer: a tokenizer that was loaded from `source`.
            source: its name in messages.
            written: the chat template, and texts that it makes.
        """
        self._tokenizer = tokenizer
        self._source = source
        added = {token.content for token in tokenizer.added_tokens_decoder.values()}

        def is_of_template(name: str) -> bool:
            return any(name in text for text in written) and not _is_tag(name, added)

        named = {
            token.content: number
            for number, token in tokenizer.added_tokens_decoder.items()
            if token.special or is_of_template(token.content)
        }
        named |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        # A character that the vocabulary lacks becomes the unknown token, too.
        self._ids = frozenset(named.values()) - {tokenizer.unk_token_id}
        self._ordinary = {tokenizer.unk_token}
        self.names: Sequence[str] = sorted(filter(None, named), key=lambda name: (-len(name), name))
        any_name = "|".join(map(re.escape, self.names)) or r"(?!)"
        self._name = re.compile(any_name)
        self._start = re.compile(f"(?=({any_name}))")  # also finds names that overlap
        self._marked_name = re.compile(f"{MARK}({any_name})")
        self._beginnings = frozenset(name[:cut] for name in self.names for cut in range(1, len(name)))
        self._endings = frozenset(name[cut:] for name in self.names for cut in range(1, len(name)))
        self._longest = max(map(len, self.names), default=0)
        ends = sorted({character for name in self.names for character in (name[0], name[-1])})
        self._guards = dict(zip(ends, GUARDS, strict=False))
        self._restored = str.maketrans({guard: character for character, guard in self._guards.items()})
        self._num_added = self._count(tokenizer.encode("", add_special_tokens=True))

    def first_in(self, value: object) -> str | None:
        """Return the first name of a special token in a text, or in the texts of messages; None if there is none."""
        if isinstance(value, str):
            found = self._name.search(value)
            return found[0] if found else None
        if isinstance(value, dict):
            value = [*value.keys(), *value.values()]
        parts = value if isinstance(value, list | tuple) else ()
        return next((name for part in parts if (name := self.first_in(part))), None)

    def are_spelt(self, ids: Sequence[int], *, add_special_tokens: bool) -> bool:
        """Return whether the `ids` of a text have more control tokens than the tokenizer adds."""
        return self._count(ids) > self._num_added * add_special_tokens

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text in which the names of special tokens are letters.

        Raises:
            UserError: the tokenizer has no files of `tokenizers`, or the text has `MARK` before a name.
        """
        ids: list[int] = self._renamed.encode(text, add_special_tokens=add_special_tokens).ids
        if self.are_spelt(ids, add_special_tokens=add_special_tokens):
            raise self._refusal(text)
        return ids

    def mark(self, text: str) -> str:
        """Return a text with `MARK` before each name of a special token: all of them are control tokens."""
        return self._name.sub(lambda found: MARK + found[0], text)

    def unmark(self, text: str) -> str:
        """Return a marked text without its marks."""
        return self._marked_name.sub(r"\1", text)

    def guarded(self, messages: Messages) -> Messages:
        """Return messages in which each name of a special token has a guard in place of its first character."""
        guarded: Messages = self._guarded(messages)
        return guarded

    def marked(self, messages: Messages, text: str, broken: str) -> str:
        """Return the text that a template makes of messages, with `MARK` before its own control tokens.

        Args:
            messages: of the conversation.
            text: that the template makes of them.
            broken: that the template makes of the guarded messages.

        Raises:
            UserError: the template changes a text that spells a special token.
        """
        if self._name.findall(text) == self._name.findall(broken):  # no name in the messages has become a token
            return self.mark(text)
        if broken.translate(self._restored) != text or {MARK, *GUARDS} & {*text}:
            raise self._refusal(self.first_in(messages) or "")
        return self.mark(broken).translate(self._restored)

    def encode_marked(self, marked: str) -> list[int]:
        """Return the ids of a text whose control tokens are marked. Raises UserError as `encode` does."""
        own = self._marked_name.findall(marked)
        text = self.unmark(marked)
        num_own = len(own) - sum(name in self._ordinary for name in own)
        if self._name.findall(text) == own:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
            if self._count(ids) <= num_own:
                return ids
        ids = self._renamed.encode(marked, add_special_tokens=False).ids
        if self._count(ids) != num_own:
            raise self._refusal(text)
        return ids

    def _count(self, ids: Sequence[int]) -> int:
        return sum(map(self._ids.__contains__, ids))

    def _guarded(self, value: object) -> Any:
        """Return messages in which no text has the name of a special token, or a part of it at an end."""
        if isinstance(value, str):
            return self._broken(value)
        if isinstance(value, dict):
            return {self._guarded(key): self._guarded(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self._guarded(part) for part in value]
        return value

    def _broken(self, text: str) -> str:
        """Return a text with a guard in place of a character of each name of a special token.

        Also of the beginning of a name at the end of the text, and of the end of a name at its start, since a template
        may put two texts next to each other.
        """
        places = {found.start() for found in self._start.finditer(text)} if self._name.search(text) else set[int]()
        start = len(text) - len(text.lstrip())
        stop = len(text.rstrip())
        inner = text[start:stop]
        for length in range(1, min(self._longest, len(inner)) + 1):
            if inner[-length:] in self._beginnings:
                places.add(stop - length)
            if inner[:length] in self._endings:
                places.add(start + length - 1)
        characters = list(text) if places else [text]
        for place in places:
            characters[place] = self._guards[text[place]]
        return "".join(characters)

    @cached_property
    def _renamed(self) -> FastTokenizer:
        """The tokenizer whose special tokens are called `MARK` and their name."""
        if not getattr(self._tokenizer, "is_fast", False):
            raise UserError(
                f"the text holds names of special tokens, which the tokenizer {self._source} cannot read as letters "
                "because it has no tokenizer.json: remove the names, or accept them as control tokens with "
                "data.special_tokens_in_text=allow"
            )
        content = json.loads(self._tokenizer.backend_tokenizer.to_str())
        content["truncation"] = content["padding"] = None
        names = frozenset(self.names)

        def renamed(name: object) -> object:
            return MARK + name if name in names else name

        for token in content["added_tokens"]:
            token["content"] = renamed(token["content"])
        model = content["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {renamed(piece): number for piece, number in model["vocab"].items()}
        else:
            model["vocab"] = [[renamed(piece), score] for piece, score in model["vocab"]]
        if "unk_token" in model:
            model["unk_token"] = renamed(model["unk_token"])
        if "merges" in model:
            pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
            model["merges"] = [pair for pair in pairs if not names & {*pair, "".join(pair)}]
        return FastTokenizer.from_str(json.dumps(content))

    def _refusal(self, text: str) -> UserError:
        name = self.first_in(text)
        what = f"the name of the special token {name!r}" if name else "the names of special tokens"
        return UserError(
            f"the text holds {what}, which cannot be kept apart from the control tokens of the template: remove it, "
            "or accept it as a control token with data.special_tokens_in_text=allow"
        )


def _is_tag(name: str, names: Collection[str]) -> bool:
    """Return whether a name is `<x>` or `</x>` and the names have both."""
    found = re.fullmatch(r"</?([^/<>]+)>", name)
    return found is not None and {f"<{found[1]}>", f"</{found[1]}>"} <= {*names}
