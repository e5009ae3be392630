"""A language model behind an endpoint of OpenAI's form that judges responses: `reward_model.judge`.

A request that fails is sent again while the time of the response lasts. The last line of a reply is the verdict. The
pattern must match all of it, and its group must be one number in the range; otherwise the response has no score.
"""

import asyncio
import hashlib
import json
import logging
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from uuid import uuid4

from megarl.platform.files import WriteError, explained, write_whole
from megarl.rewards.config import JudgeSection
from megarl.rewards.http import PassingError, Server, ServerError
from megarl.sandbox.results import show

logger = logging.getLogger(__name__)

KEY = "reward_model.judge"
_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_MINUS = "\N{MINUS SIGN}"
_LONGEST_VERDICT = 512
"""Characters of a line that may be a verdict; the time of a pattern may grow with the square of them."""
_THOUGHTS = "think|thinking|thoughts?|reasoning|reflection|scratchpad|analysis"
_START_OF_THOUGHTS = re.compile(rf"(?i)<(?:{_THOUGHTS})>|\[think\]|<\|begin_of_(?:{_THOUGHTS})\|>|◁think▷")
_END_OF_THOUGHTS = re.compile(rf"(?i)</(?:{_THOUGHTS})>|\[/think\]|<\|end_of_(?:{_THOUGHTS})\|>|◁/think▷")


class VerdictError(Exception):
    """A response that the judge gave no score, with the reason."""


class Judge(JudgeSection):
    """Asks for the verdict on a response, as configured."""

    async def __call__(self, **arguments: object) -> float:
        """Return the score of a response. Raises VerdictError if there is none after all attempts."""
        try:
            question = self.template.format(**arguments)
        except (LookupError, AttributeError, ValueError, TypeError) as error:
            raise VerdictError(f"{KEY}.template does not fit the row: {type(error).__name__}: {error}") from None
        body = {
            "temperature": 0.0,
            **self.request,
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
        }
        kept = self._cache_file(body)
        reply = await asyncio.to_thread(_read, kept) if kept else None
        if reply is not None:
            return self.verdict_in(reply)
        try:
            reply = await self._server.patiently(lambda: self._attempt(body))
        except ServerError as error:
            raise VerdictError(str(error)) from None
        verdict = self.verdict_in(reply)
        if kept:
            try:
                await asyncio.to_thread(_write_cache, kept, reply)
            except WriteError as error:
                logger.warning("a verdict counts, and is not kept: %s", error)
        return verdict

    def verdict_in(self, reply: str) -> float:
        """Return the number in the last line of a reply that is not empty.

        Raises VerdictError if the line is long or anything but a verdict, or the number is not from `lowest` to
        `highest`.
        """
        lines = _without_thoughts(reply).strip().splitlines()
        last = lines[-1].strip() if lines else ""
        verdict = re.fullmatch(self.pattern, last) if len(last) <= _LONGEST_VERDICT else None
        text = (verdict[1] or "").replace(_MINUS, "-") if verdict else ""
        if not _NUMBER.fullmatch(text):
            raise VerdictError(
                f"the last line of the judge's reply is no verdict with one number, as {KEY}.pattern describes it: "
                f"{show(reply)}"
            )
        number = float(text)
        if not self.lowest <= number <= self.highest:
            raise VerdictError(f"the judge's {number:g} is not from {self.lowest:g} to {self.highest:g}: {show(reply)}")
        return number

    async def _attempt(self, body: Mapping[str, object]) -> str:
        """Return the text of the reply to one request. Raises what `Server.post` does."""
        reply = await self._server.post(f"{(self.url or '').rstrip('/')}/chat/completions", body)
        try:
            choice = reply["choices"][0]
            content = choice["message"]["content"]
            is_cut = choice.get("finish_reason") == "length"
        except (LookupError, TypeError, AttributeError):
            raise PassingError(f"the reply is no chat completion: {show(json.dumps(reply))}") from None
        if not isinstance(content, str):
            raise PassingError(f"the reply has no text: {show(json.dumps(reply))}")
        if is_cut:
            raise VerdictError(f"the judge's reply is cut: raise max_tokens in {KEY}.request: {show(content)}")
        return content

    @cached_property
    def _server(self) -> Server:
        return Server(
            name="the judge",
            key=KEY,
            attempt_s=self.attempt_s,
            num_attempts=self.num_attempts,
            api_key_variable=self.api_key_variable,
        )

    def _cache_file(self, body: Mapping[str, object]) -> Path | None:
        """Return the file that holds, or will hold, the reply to a request; None without a cache."""
        if self.cache is None:
            return None
        digest = hashlib.sha256(json.dumps([self.url, body], sort_keys=True).encode()).hexdigest()
        return Path(self.cache).expanduser() / digest[:2] / f"{digest}.json"


def _without_thoughts(reply: str) -> str:
    """Return the text after the last end of thoughts; nothing if thoughts begin in it, since they do not end."""
    text = _END_OF_THOUGHTS.split(reply)[-1]
    return "" if _START_OF_THOUGHTS.search(text) else text


def _read(path: Path) -> str | None:
    """Return a kept reply; None if there is none or its file is damaged."""
    try:
        reply = json.loads(path.read_bytes())["reply"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return reply if isinstance(reply, str) else None


def _write_cache(path: Path, reply: str) -> None:
    """Write a reply, complete or not at all, also if other processes write the same."""
    with explained(f"{KEY}.cache={path.parent.parent}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_suffix(f".{uuid4().hex}")
        write_whole(own, json.dumps({"reply": reply}).encode())
        own.replace(path)
