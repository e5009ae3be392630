"""The tokenizer of a run, from Hugging Face files or a SentencePiece model.

The files that `save` writes encode and decode as this object does: training and every reader of the checkpoint agree.
"""

import hashlib
import logging
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from datetime import datetime
from functools import cache, cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Literal

import torch.distributed as dist
from jinja2 import TemplateError

from megarl.data.control import ControlTokens, Messages
from megarl.data.patches import spare_statistics
from megarl.data.remote_tokenizer import TEMPLATE, RemoteTokenizer, find_tokenizer, is_without_tokenizer
from megarl.data.spm import PROBES, first_difference, load_sentencepiece
from megarl.data.template import RANDOM, read_template, with_variables
from megarl.distributed.copies import local_copy
from megarl.platform.deadline import allocating_at_most, computing_at_most
from megarl.platform.errors import UserError
from megarl.platform.secrets import redact
from megarl.platform.uri import is_uri

logger = logging.getLogger(__name__)

spare_statistics()
from transformers import AutoTokenizer  # noqa: E402

TEMPLATE_SECONDS = 10.0
"""CPU time that a chat template may take for one conversation."""
TEMPLATE_BYTES = 1 << 32
"""Memory that a chat template may take for one conversation."""
REMEDY = (
    "data.tokenizer takes a directory with tokenizer.json or tokenizer.model, a SentencePiece .model file, or an id of "
    "the Hugging Face hub (default: actor_rollout_ref.model.path)"
)
_CONVERSATIONS = (["user"], ["system", "user", "assistant", "user"], ["developer", "user", "assistant", "tool", "user"])
"""The roles of the conversations that show which tokens a chat template writes."""
MOST_NAMED = 3  # tokens
HALF = "\ufffd"  # a tokenizer decodes a part of a character to this
MOST_PARTS = 16  # tokens that are read again until a character is complete; it has four bytes at most
Spelling = Literal["split", "allow", "error"]
"""Readings of the name of a special token in a text: as letters, as the token, or as an error."""


class Tokenizer:
    """Encodes and decodes text: a thin, typed wrapper of a `transformers` tokenizer."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        source: str,
        apply_chat_template: bool | None = None,
        special_tokens_in_text: Spelling = "split",
        now: datetime | None = None,
    ) -> None:
        """Wrap a tokenizer that was loaded from `source`; the other arguments are those of `load_tokenizer`."""
        if tokenizer.eos_token_id is None:
            raise UserError(f"the tokenizer {source} has no end-of-sequence token: set eos_token in its files")
        self._tokenizer = tokenizer
        self._source = source
        self.spelling: Spelling = special_tokens_in_text
        self._apply_chat_template = apply_chat_template
        self.has_template: bool = tokenizer.chat_template is not None
        if apply_chat_template and not self.has_template:
            raise UserError(
                f"data.apply_chat_template=true, but the tokenizer {source} has no chat template: set "
                "data.chat_template to a Jinja file or string, or remove data.apply_chat_template"
            )
        found = RANDOM.search(str(tokenizer.chat_template))
        if found:
            raise UserError(
                f"the chat template of {source} draws random numbers ({found[0].strip()}), so a row would have other "
                "tokens in each run and on each rank: set data.chat_template to a template that does not"
            )
        self.now = now or datetime.now().replace(microsecond=0)
        self._control = ControlTokens(tokenizer, source=source, written=self._written_by_template())
        self.eos_token_id: int = tokenizer.eos_token_id
        self.bos_token_id: int | None = tokenizer.bos_token_id
        self.pad_token_id: int | None = tokenizer.pad_token_id
        self.vocab_size: int = len(tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of `text`, with the special tokens that the tokenizer adds (often BOS) if asked to.

        The tokenizer adds no BOS to a text that begins with it.

        Raises:
            UserError: the text spells a special token, and an error was asked for or the tokenizer cannot split it.
        """
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        if self.spelling == "allow":
            return ids[1:] if add_special_tokens and ids[:2] == [self.bos_token_id] * 2 else ids
        name = self._control.first_in(text)
        if name is None and not self._control.are_spelt(ids, add_special_tokens=add_special_tokens):
            return ids
        self._refuse(name)
        return self._control.encode(text, add_special_tokens=add_special_tokens)

    def spelt_in(self, *texts: object) -> str | None:
        """Return the first name of a special token in texts or in messages; None if there is none."""
        return self._control.first_in(texts)

    def of_observations(self) -> "Tokenizer":
        """Return the tokenizer for texts of a run: it splits the names that would be errors in files."""
        if self.spelling != "error":
            return self
        tokenizer = copy(self)
        tokenizer.spelling = "split"
        return tokenizer

    def _refuse(self, name: str | None) -> None:
        if self.spelling == "error":
            raise UserError(
                f"the text holds the name of a special token{f', {name!r}' if name else ''}, and "
                "data.special_tokens_in_text is error: remove the name, or write split (letters) or allow (the token)"
            )

    def templates(self, prompt: object) -> bool:
        """Return whether a prompt goes through the chat template; if not, it is read as plain text."""
        if self._apply_chat_template is None:
            return isinstance(prompt, list) and self.has_template
        return self._apply_chat_template

    def chat(self, messages: Sequence[Mapping[str, object]], *, is_complete: bool = False) -> list[int]:
        """Return the ids of a conversation of `{role, content}` under the chat template, which must exist.

        Unless the conversation `is_complete`, the ids end with the start of the assistant's response.

        Raises:
            UserError: the template refuses the conversation, fails on it or does not end.
        """
        return self.encode_rendered(self.render(messages, is_complete=is_complete))

    def render(self, messages: Sequence[Mapping[str, object]], *, is_complete: bool = False) -> str:
        """Return the text of a conversation under the chat template, with marks at the control tokens of the template.

        `encode_rendered` encodes the text or a part of it, and `without_marks` removes the marks. Raises what `chat`
        does.
        """
        conversation = [dict(message) for message in messages]
        text = self._rendered(conversation, add_generation_prompt=not is_complete)
        if self.spelling == "allow":
            return text
        name = self._control.first_in(conversation)
        if name:
            self._refuse(name)
        guarded = self._control.guarded(conversation)
        broken = text
        if guarded != conversation:
            broken = self._rendered(guarded, add_generation_prompt=not is_complete)
        return self._control.marked(conversation, text, broken)

    def encode_rendered(self, text: str) -> list[int]:
        """Return the ids of a part of what `render` returns. Raises UserError as `encode` does."""
        if self.spelling == "allow":
            return self.encode(text, add_special_tokens=False)
        return self._control.encode_marked(text)

    def without_marks(self, text: str) -> str:
        """Return a part of what `render` returns, as a text for people."""
        return self._control.unmark(text)

    def _written_by_template(self) -> list[str]:
        """Return the chat template and what it makes of a few conversations; it may refuse some."""
        if not self.has_template:
            return []
        written = [str(self._tokenizer.chat_template)]
        for roles in _CONVERSATIONS:
            try:
                messages = [{"role": role, "content": "x"} for role in roles]
                written.append(self._rendered(messages, add_generation_prompt=True))
            except UserError as error:
                if isinstance(error.__cause__, TimeoutError):
                    break
        return written

    def _rendered(self, messages: Messages, *, add_generation_prompt: bool) -> str:
        template = f"the chat template of {self._source}"
        try:
            with computing_at_most(TEMPLATE_SECONDS), allocating_at_most(TEMPLATE_BYTES):
                text: str = self._tokenizer.apply_chat_template(
                    messages,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    strftime_now=self.now.strftime,
                )
        except TemplateError as error:
            raise UserError(f"{template} refuses the messages: {error}") from error
        except TimeoutError as error:
            raise UserError(f"{template} does not end: it was stopped after {TEMPLATE_SECONDS:g} s") from error
        except MemoryError as error:
            raise UserError(f"{template} needs more than {TEMPLATE_BYTES / 1e9:.1f} GB of memory: mend it") from error
        except Exception as error:  # a template may compute whatever it likes
            raise UserError(f"{template} fails on the messages: {type(error).__name__}: {error}") from error
        return text

    def decode(self, ids: Sequence[int], *, with_special_tokens: bool = False) -> str:
        """Return the text of `ids`, by default without special tokens."""
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=not with_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def written(self, ids: Sequence[int], *, ends: Collection[int], before: Sequence[int] = ()) -> str:
        """Return the text of a response as it is written, without padding and the tokens of `ends` at its end.

        Any other special token is a part of the text: without it, the texts around it would be joined. The text is
        what the response adds to the text of `before`.
        """
        end = len(ids)
        while end and (ids[end - 1] in ends or ids[end - 1] == self.pad_token_id):
            end -= 1
        has_special_tokens = not self._special_ids.isdisjoint(ids[:end])
        return self.decode_after(before, ids[:end], with_special_tokens=has_special_tokens)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        """The tokens that `decode` leaves out; some tokenizers list only a few of them as special."""
        added = self._tokenizer.added_tokens_decoder.items()
        return frozenset(self._tokenizer.all_special_ids) | {number for number, token in added if token.special}

    def decode_after(self, before: Sequence[int], ids: Sequence[int], *, with_special_tokens: bool = False) -> str:
        """Return the text that `ids` add to the text of `before`; decoded alone, `ids` might lose a leading space."""
        head = self.decode(before, with_special_tokens=with_special_tokens)
        text = self.decode([*before, *ids], with_special_tokens=with_special_tokens)
        if text.startswith(head):
            return text.removeprefix(head)
        return self.decode(ids, with_special_tokens=with_special_tokens)

    def reach(self, ids: Sequence[int], *, before: Sequence[int] = (), half: int) -> list[int]:
        """Return the numbers of characters in the text of the first 0, 1, ... of `ids`, which follow `before`.

        If a character takes several tokens, it counts `half` (0 or 1) until its last token. The time is linear, also
        for bytes that are no text.
        """
        starts = (place for place in range(len(before) - 1, -1, -1) if not self.decode(before[place:]).startswith(HALF))
        context = before[next(starts, 0) :]  # starts at a complete character, and fixes how the first token decodes
        ids = [*context, *ids]
        start = 0
        known = len(context)
        complete = num_open = 0  # characters of the tokens before `known`; the last of them, if it may be a part
        reached = [0]
        for end in range(known + 1, len(ids) + 1):
            text = self.decode(ids[start:end])
            is_half = text.endswith(HALF)
            if is_half and end - known < MOST_PARTS:
                reached.append(complete - num_open + half)
                continue
            complete += max(0, len(text) - len(self.decode(ids[start:known])))
            start = known
            known = end
            num_open = int(is_half)
            reached.append(complete - num_open + half * num_open)
        return reached

    def differences(self, other: "Tokenizer") -> str:
        """Describe the tokens that have another number, or none, in `other`; empty if all are the same."""
        own = self._tokenizer.get_vocab()
        theirs = other._tokenizer.get_vocab()
        differing = sorted(token for token in own if theirs.get(token) != own[token])
        if not differing:
            return ""
        named = ", ".join(f"{token!r} is {own[token]} and {theirs.get(token)}" for token in differing[:MOST_NAMED])
        return f"{len(differing)} of {len(own)} differ: {named}{' ...' if len(differing) > MOST_NAMED else ''}"

    @cached_property
    def digest(self) -> str | None:
        """A digest of all that decides on the tokens of a prompt; None if the time of the run does, too."""
        if "strftime_now" in str(self._tokenizer.chat_template):
            return None
        digest = hashlib.sha256(f"{self.spelling} {self._apply_chat_template}".encode())
        with TemporaryDirectory(prefix="megarl-tokenizer-") as name:
            self.save(name)
            for path in sorted(path for path in Path(name).rglob("*") if path.is_file()):
                digest.update(f"{path.relative_to(name)} {path.stat().st_size} ".encode() + path.read_bytes())
        return digest.hexdigest()

    def save(self, directory: str | Path) -> None:
        """Write files that `AutoTokenizer.from_pretrained` and `load_tokenizer` read."""
        self._tokenizer.save_pretrained(str(directory))


def load_tokenizer(
    path: str,
    *,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, object] = MappingProxyType({}),
    apply_chat_template: bool | None = None,
    special_tokens_in_text: Spelling = "split",
    now: datetime | None = None,
    trust_remote_code: bool = False,
) -> Tokenizer:
    """Load a tokenizer from a Hugging Face directory or id, or from a SentencePiece `.model` (or its directory).

    Args:
        path: of the tokenizer, or its URI; the call is collective if there are ranks and the URI is remote.
        chat_template: a Jinja file, or the template itself; overrides the tokenizer's own.
        chat_template_kwargs: variables that the template has, also in the files that `save` writes.
        apply_chat_template: whether prompts go through the template; None: lists of messages do, if it exists.
        special_tokens_in_text: what becomes of the name of a special token in a text that no template wrote: letters
            (split), the token (allow), or an error.
        now: the local time that the template sees; None: the present.
        trust_remote_code: run the code that comes with the tokenizer.

    Raises:
        UserError: nothing loads from `path`, `apply_chat_template` is true without a template, or the template does
            not read a variable.
    """
    place = _find(path, with_code=trust_remote_code)
    configured = any((place / name).exists() for name in ("tokenizer.json", "tokenizer_config.json"))
    if not configured and (place / "tokenizer.model").exists():
        place /= "tokenizer.model"
    if place.suffix == ".model":
        tokenizer = load_sentencepiece(place)
        template = place.with_name(TEMPLATE)
        if template.exists():
            tokenizer.chat_template = template.read_text(encoding="utf-8")
    else:
        tokenizer = _load_pretrained(place, named=path, trust_remote_code=trust_remote_code)
        if not (place / "tokenizer.json").exists() and (place / "tokenizer.model").exists():
            _compare(tokenizer, place / "tokenizer.model", named=path if is_uri(path) else str(place))
    if chat_template is not None:
        tokenizer.chat_template = read_template(chat_template)
    tokenizer.chat_template = with_variables(tokenizer.chat_template, chat_template_kwargs, source=redact(path))
    return Tokenizer(
        tokenizer,
        source=redact(path),
        apply_chat_template=apply_chat_template,
        special_tokens_in_text=special_tokens_in_text,
        now=now,
    )


def _find(path: str, *, with_code: bool) -> Path:
    """Return the local path of the tokenizer, after a download if `path` is a URI or a Hugging Face id."""
    place = find_tokenizer(path, with_code=with_code)
    if place:
        return place
    remote = RemoteTokenizer.at(path)
    kind = f"tokenizer {remote.file or ''}{' with code' * with_code}".strip()
    directory = local_copy(remote.directory, kind, partial(remote.files, with_code=with_code))
    return directory / remote.file if remote.file else directory


def _load_pretrained(place: Path, *, named: str, trust_remote_code: bool) -> Any:
    """Load the tokenizer in a directory, which the user `named`."""
    if is_without_tokenizer(place):
        raise UserError(f"{named} has no tokenizer: {REMEDY}")
    try:
        return AutoTokenizer.from_pretrained(str(place), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        if "trust_remote_code" in str(error):
            raise UserError(
                f"the tokenizer {named!r} comes with its own Python code, which was not run: read it, then set "
                "trust_remote_code=true in the section of its model (actor_rollout_ref.model.trust_remote_code), or "
                "name another tokenizer by data.tokenizer"
            ) from error
        raise UserError(f"no tokenizer loads from {named!r}: {error}\n{REMEDY}") from error


def _compare(tokenizer: Any, model: Path, *, named: str) -> None:
    """Warn if transformers converted a SentencePiece model to a tokenizer that gives other ids."""
    ids = [tokenizer.encode(text, add_special_tokens=False, verbose=False) for text in PROBES]
    found = first_difference(model, ids)
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    if found and is_first:
        _warn(
            f"the tokenizer of transformers in {redact(named)} gives other ids than its tokenizer.model: {found}. Use "
            "those that the model was trained with: for the library's ids set "
            f"data.tokenizer={redact(named).rstrip('/')}/tokenizer.model; for those of transformers keep this one, and "
            "add the tokenizer.json that its save_pretrained writes"
        )


@cache
def _warn(message: str) -> None:
    """Log a warning, once in this process."""
    logger.warning(message)
