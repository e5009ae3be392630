"""Tell by its name whether a variable, a key or a parameter holds a secret."""

import re
from enum import IntEnum
from functools import lru_cache

_READ_CHARACTERS = 200
"""The end of a name decides; a giant run of letters is no name."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_ENDINGS = tuple(
    _words(
        "password passwords passwd passphrase passphrases passcode secret secrets credential credentials creds"
        " authorization apikey apikeys accesskey privatekey secretkey"
    )
)
_KINDS_OF_KEYS = _words(
    "access account admin aes anthropic api app auth aws azure client cohere comet deepseek deploy encryption fireworks"
    " gcp gemini github gitlab google groq hf hmac huggingface judge jwt license llm master mistral neptune nvidia"
    " openai openrouter pem pgp private replicate rsa s3 secret service session shared signing ssh ssl storage stripe"
    " tls together wandb xai"
)
_KEYS_OF_DATA = _words(
    "cache column data dict fn foreign group hash hot image index input join label lookup map num object output"
    " partition primary prompt public query ref reward route row shard sort target value video"
)
_OF_TEXT = _words(  # tokens that are pieces of a text
    "a added allowed any audio avg bad batch batched bos byte cached cls completion context current decoder draft each"
    " end eos every extra first forced generated image input invalid last mask max mean min model n new next num output"
    " pad patch per prefix prev previous prompt rare reasoning response sampled sep skip special speculative start stop"
    " suffix target text the think thinking this total train unk unknown val valid video visual vocab word"
)
_QUALIFIERS = _words(  # of a secret: which of several it is, and how it is written
    "admin backup base64 b64 ci dev live main new old org primary prod production raw read ro rw sandbox secondary"
    " secret staging string test user value write"
)
_ABOUT = _words(  # a secret, and not itself one
    "age budget column count dir directory dispatcher enabled endpoint expires expiry field file files folder format"
    " host len length limit manager method mode name names path paths pattern policy port prefix provider regex"
    " required size suffix threshold timeout ttl type types uri url version"
)


class Telling(IntEnum):
    """What a name says about its value. A text needs more than `PERHAPS`: a value that looks like a secret."""

    NO = 0
    PERHAPS = 1
    YES = 2


def is_secret(name: str) -> bool:
    """Tell whether what bears this name (a key, a variable, a parameter of a query) is not for everybody's eyes."""
    return telling(name) is not Telling.NO


def tells(dotted: str) -> Telling:
    """Return the most that a part of a dotted name says about what is below it."""
    return max(map(telling, dotted[-_READ_CHARACTERS:].split(".")))


@lru_cache(maxsize=4096)
def telling(name: str) -> Telling:
    """Return what a name says about its value, whatever its case and its separators are."""
    words = [word.lower() for word in _WORD.findall(name[-_READ_CHARACTERS:])]
    is_upper = name.isupper()  # as variables of an environment are written
    while words and (words[-1].isdigit() or (len(words[-1]) == 1 and len(words) > 1)):  # TOKEN_1, SECRET_X
        words.pop()
    if "webhook" in words:
        return Telling.YES if is_upper else Telling.PERHAPS
    if not words or words[-1] in _ABOUT:
        return Telling.NO
    return max(_telling_at(words, place, is_upper=is_upper) for place in range(len(words)))


def _telling_at(words: list[str], place: int, *, is_upper: bool) -> Telling:
    """Return what the word at `place` says, given the words around it."""
    word, before, after = words[place], words[place - 1] if place else "", words[place + 1 :]
    surely = Telling.YES if is_upper else Telling.PERHAPS
    if word.endswith(_ENDINGS):
        return Telling.YES
    if word in ("token", "tokens"):
        is_qualified = not {"id", "ids"} & set(after) if is_upper else _QUALIFIERS.issuperset(after)
        if before in _OF_TEXT or not is_qualified:
            return Telling.NO
        return Telling.PERHAPS if word == "tokens" or not before else Telling.YES
    if word in ("key", "keys"):
        if before in _KINDS_OF_KEYS and (is_upper or {"id", *_QUALIFIERS}.issuperset(after)):
            return Telling.YES
        is_named = is_upper and before and before not in _KEYS_OF_DATA
        return Telling.YES if is_named and {"id", *_QUALIFIERS}.issuperset(after) else Telling.NO
    if not _QUALIFIERS.issuperset(after):
        return Telling.NO
    if word == "pwd":
        return Telling.YES if before else Telling.NO  # PWD is the working directory
    if word == "pat":
        return Telling.YES if is_upper and before else Telling.NO
    if word in ("pass", "auth", "signature", "sig", "bearer", "cookie", "cookies"):
        return surely if before else Telling.PERHAPS
    return Telling.PERHAPS if (before, word) == ("connection", "string") else Telling.NO
