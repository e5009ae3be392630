"""Turns a prompt into tokens: messages by the chat template, or a text as it is."""

from collections.abc import Iterator, Mapping, Sequence
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from megarl.platform.errors import UserError
from megarl.platform.secrets import beginning, redact
from megarl.platform.terminal import visible
from megarl.sandbox.results import is_number

if TYPE_CHECKING:
    from megarl.data.tokenizer import Tokenizer  # prompts are also checked without a tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
SHOWN_CHARACTERS = 1000
"""Most characters that are shown of the beginning, and of the end, of a prompt."""
SHOWN_OF_VALUE = 200

Message = dict[str, Any]
Written = str | list[Message]
"""A prompt as a data file has it."""


def prompt_faults(prompt: object) -> Iterator[str]:
    """Yield the faults of a prompt, which must be a text or a list of messages `{role, content}`."""
    if isinstance(prompt, str):
        yield from text_faults(prompt, may_be_empty=False)
    elif not isinstance(prompt, list) or not prompt:
        yield f"{shown(prompt)} is neither a text nor a list of messages {{role, content}}"
    else:
        for number, message in enumerate(prompt):
            yield from (f"message {number}: {fault}" for fault in _message_faults(message))


def _message_faults(message: object) -> Iterator[str]:
    if not isinstance(message, dict):
        yield f"{shown(message)} is not {{role, content}}"
        return
    role = message.get("role")
    content = message.get("content")
    if role not in ROLES:
        yield f"role {shown(role)} is none of {', '.join(ROLES)}"
    if isinstance(content, str):
        yield from text_faults(content)
    elif isinstance(content, list):
        yield "the content is a list of parts, and images, audio and video are not supported: give one text"
    elif content is not None or not message.get("tool_calls"):
        yield f"content: a text is expected, not {shown(content)}"


def text_faults(text: object, *, may_be_empty: bool = True) -> Iterator[str]:
    """Yield the faults of a text."""
    if not isinstance(text, str):
        yield f"a text is expected, not {shown(text)}"
        return
    if not text and not may_be_empty:
        yield "the text is empty"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        yield f"the text has half a character (a lone surrogate) at position {error.start}: {text[error.start]!r}"


def texts_in(value: object) -> Iterator[str]:
    """Yield each text in a value of a row: itself, its items, and the names of its items."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for pair in value.items() for item in pair for text in texts_in(item))
    elif isinstance(value, list | tuple):
        yield from (text for item in value for text in texts_in(item))


def margin_faults(margin: object) -> Iterator[str]:
    """Yield the fault of the margin of a pair, which must be a number that is finite in float32."""
    if not is_number(margin):
        yield f"a finite number is expected (as float32), not {shown(margin)}"


def shown(value: object) -> str:
    """Format a value of a row for a message, cut if it is long."""
    text = beginning(repr(value), SHOWN_OF_VALUE + 1)
    return text if len(text) <= SHOWN_OF_VALUE else f"{text[:SHOWN_OF_VALUE]}..."


def content_of(message: Message) -> str:
    """Return the text of a message; '' if it only calls tools."""
    text: str = message.get("content") or ""
    return text


def plain_text(prompt: Written) -> str:
    """Return a text as it is, or the contents of messages, joined by line breaks."""
    return prompt if isinstance(prompt, str) else "\n".join(map(content_of, prompt))


def as_messages(prompt: Written, tokenizer: "Tokenizer") -> list[Message] | None:
    """Return the messages for the chat template of `tokenizer`; None if the prompt is read as a text.

    Raises:
        UserError: the prompt is neither a text nor a list of messages.
    """
    for fault in prompt_faults(prompt):
        raise UserError(fault)
    if not tokenizer.templates(prompt):
        return None
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def encode_prompt(prompt: Written, tokenizer: "Tokenizer") -> list[int]:
    """Return the ids of a text, or of messages `{role, content}`, as `tokenizer` is configured to read them.

    Raises:
        UserError: the prompt is neither, the chat template refuses it, or it has no token.
    """
    messages = as_messages(prompt, tokenizer)
    if messages is None:
        token_ids = tokenizer.encode(plain_text(prompt), add_special_tokens=True)
    else:
        token_ids = tokenizer.chat(messages)
    if not token_ids:
        raise UserError("the prompt has no token")
    return token_ids


def frame(prompt: Written, token_ids: Sequence[int], tokenizer: "Tokenizer") -> tuple[int, int]:
    """Return how many tokens of an encoded prompt begin a sequence, and how many begin the response.

    They are 1 for a beginning-of-sequence token, else 0, and the length of the template's generation prompt.
    """
    begin = int(bool(token_ids) and token_ids[0] == tokenizer.bos_token_id)
    messages = as_messages(prompt, tokenizer)
    if messages is None:
        return begin, 0
    complete = tokenizer.chat(messages, is_complete=True)
    return begin, len(token_ids) - len(commonprefix([list(token_ids), complete]))


def as_read(what: str, prompt: Written, token_ids: Sequence[int], tokenizer: "Tokenizer") -> str:
    """Describe how the model reads `what`: its text with special tokens, cut in the middle.

    Args:
        what: the name of a prompt, perhaps with its response.
        prompt: as it is in the data file.
        token_ids: of the prompt and its response.
        tokenizer: of these ids.
    """
    if tokenizer.templates(prompt):
        way = "through the chat template"
    elif isinstance(prompt, str):
        way = "a text as it is"
    elif tokenizer.has_template:
        way = "the content of its messages, because of data.apply_chat_template=false"
    else:
        way = "the content of its messages, as the tokenizer has no chat template (data.chat_template gives it one)"
    text = tokenizer.decode(token_ids, with_special_tokens=True)
    return f"{what} as the model reads it, {len(token_ids)} tokens, {way}:\n{_quoted(text)}"


def as_written(what: str, prompt: str | Sequence[Message]) -> str:
    """Describe the prompt `what` as it is in the data file, cut in the middle."""
    if not isinstance(prompt, str):
        prompt = "\n".join(f"{turn['role']}: {content_of(turn)}" for turn in prompt)
    return f"{what}:\n{_quoted(prompt)}"


def _quoted(text: str) -> str:
    text = visible(redact(text))  # before the cut: half a secret would not be recognised
    if len(text) > 2 * SHOWN_CHARACTERS:
        text = f"{text[:SHOWN_CHARACTERS]} ... {text[-SHOWN_CHARACTERS:]}"
    return "\n".join(f"  | {line}" for line in text.splitlines())
