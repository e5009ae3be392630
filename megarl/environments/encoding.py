"""Turns an observation into the tokens that follow the policy's turn. No token of an earlier turn is made again.

A conversation grows by what the chat template adds between the policy's response and its next one: the end of the
response, the messages of the environment, the start of the next response. That holds only for templates that append. A
template that also changes earlier turns (as one that removes their reasoning) would show the policy other tokens in
training and use than it has written here, and is refused.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import product
from typing import Any

from megarl.data.messages import plain_text, shown
from megarl.data.tokenizer import Tokenizer
from megarl.environments.protocol import Observation
from megarl.platform.errors import UserError

Message = dict[str, Any]
USER: Message = {"role": "user", "content": "u"}
OPENINGS: Sequence[list[Message]] = ([USER], [{"role": "system", "content": "s"}, USER])
RESPONSES = ("a", "<think>\nb\n</think>\n\na")
"""Responses of the probes; templates treat reasoning in another way than the rest."""
NUM_TURNS = 3


class Observer:
    """Encodes observations as a tokenizer encodes prompts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Encode with `tokenizer`."""
        self._tokenizer = tokenizer.of_observations()

    def encode(self, observation: Observation, *, prompt: Observation, last: int) -> list[int]:
        """Return the tokens that follow a turn of an episode with this `prompt`: a text as it is, or by the template.

        `last` is the token that ended the turn. If the template also ends responses with it, it is not repeated.

        Raises:
            UserError: the template refuses the messages or changes earlier turns.
        """
        if not self._tokenizer.templates(prompt):
            return self._tokenizer.encode(plain_text(observation), add_special_tokens=False)
        self.require_appending()
        ids = self._tokenizer.encode_rendered(self._added(as_messages(observation)))
        return ids[1:] if ids[:1] == [last] else ids

    def require_appending(self) -> None:
        """Raise UserError if the chat template changes earlier turns."""
        if self._fault:
            raise UserError(
                f"environment.name: the chat template does not only append: {self._fault}. The tokens of earlier turns "
                "are never made again, so the policy would read other tokens in use than in training: set "
                "data.chat_template to a template that leaves earlier turns as they are"
            )

    def _added(self, messages: Sequence[Message]) -> str:
        """Return the text between a response and the next one, if `messages` are between them. UserError if none."""
        before = self._tokenizer.render([USER]) + RESPONSES[0]
        after = [USER, _response(RESPONSES[0]), *messages]
        text = self._tokenizer.render(after)
        if not text.startswith(before):
            raise UserError(
                f"the chat template does not append {shown(messages)} to a conversation: it makes {self._shown(text)}"
            )
        return text[len(before) :]

    @cached_property
    def _fault(self) -> str | None:
        """Say how the template changes earlier turns of probes; None if it does not."""
        added = self._added([USER])
        for opening, response in product(OPENINGS, RESPONSES):
            try:
                text = self._tokenizer.render(opening)
            except UserError:
                if opening is OPENINGS[0]:
                    raise
                continue  # without system messages there is no more to try
            conversation = list(opening)
            for _ in range(NUM_TURNS):
                conversation += [_response(response), USER]
                text += response + added
                found = self._tokenizer.render(conversation)
                if found != text:
                    made, read = map(self._shown, (found, text))
                    return f"it makes {made} of a conversation that the policy has read as {read}"
        ids = self._tokenizer.chat(conversation)
        last = self._tokenizer.encode_rendered(added)
        if not last or ids[-len(last) :] != last:
            return "the tokens of what it adds depend on the text before"
        return None

    def _shown(self, text: str) -> str:
        return shown(self._tokenizer.without_marks(text))


def as_messages(observation: Observation) -> list[Message]:
    """Return the messages of an observation. A text is said by the user."""
    return [{"role": "user", "content": observation}] if isinstance(observation, str) else observation


def _response(text: str) -> Message:
    return {"role": "assistant", "content": text}
