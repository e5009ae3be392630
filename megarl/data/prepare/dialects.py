"""Conversations as other data sets write them, read as messages `{role, content}`."""

from collections.abc import Mapping

SPEAKERS: Mapping[object, str] = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""Who speaks in ShareGPT's files and their relatives -> role. Names that are missing are roles themselves."""


def as_usual(value: object) -> object:
    """Return ShareGPT's turns `{from, value}` as messages `{role, content}`, and any other value as it is."""
    if not isinstance(value, list) or not all(
        isinstance(turn, dict) and turn.keys() >= {"from", "value"} for turn in value
    ):
        return value
    return [{"role": SPEAKERS.get(turn["from"], turn["from"]), "content": turn["value"]} for turn in value]


def as_text(value: object) -> object:
    """Return the text of an answer that is one message of the assistant, as TRL's completions are; else the value."""
    match as_usual(value):
        case [{"role": "assistant", "content": str(text)}]:
            return text
    return value
