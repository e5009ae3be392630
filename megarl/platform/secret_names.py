"""Detection of secrets by the names of variables, keys and parameters."""

import re
from enum import IntEnum
from functools import lru_cache

_READ_CHARACTERS = 200
"""Characters that are read, from the end of a name, because the end decides."""


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
_OF_TEXT = _words(  # before `token`: the token is a piece of a text
    "a added allowed any audio avg bad batch batched bos byte cached cls completion context current decoder draft each"
    " end eos every extra first forced generated image input invalid last mask max mean min model n new next num output"
    " pad patch per prefix prev previous prompt rare reasoning response sampled sep skip special speculative start stop"
    " suffix target text the think thinking this total train unk unknown val valid video visual vocab word"
)
_QUALIFIERS = _words(  # after a secret: which of several it is, or its encoding
    "admin backup base64 b64 ci dev live main new old org primary prod production raw read ro rw sandbox secondary"
    " secret staging string test user value write"
)
_ABOUT = _words(  # after a secret: an attribute of it, which is not secret itself
    "age budget column count dir directory dispatcher enabled endpoint expires expiry field file files folder format"
    " host len length limit manager method mode name names path paths pattern policy port prefix provider regex"
    " required size suffix threshold timeout ttl type types uri url version"
)


class Secrecy(IntEnum):
    """How surely a name denotes a secret. In a text `PERHAPS` also requires a value that looks like a secret."""

    NO = 0
    PERHAPS = 1
    YES = 2


def is_secret(name: str) -> bool:
    """Return whether a name (of a key, a variable, a query parameter) may denote a secret."""
    return secrecy(name) is not Secrecy.NO


def secrecy_of_path(dotted: str) -> Secrecy:
    """Return the highest secrecy among the parts of a dotted name."""
    return max(map(secrecy, dotted[-_READ_CHARACTERS:].split(".")))


@lru_cache(maxsize=4096)
def secrecy(name: str) -> Secrecy:
    """Return the secrecy of a name, in any case and with any separators."""
    words = [word.lower() for word in _WORD.findall(name[-_READ_CHARACTERS:])]
    is_upper = name.isupper()  # as environment variables are written
    while words and (words[-1].isdigit() or (len(words[-1]) == 1 and len(words) > 1)):  # TOKEN_1, SECRET_X
        words.pop()
    if "webhook" in words:
        return Secrecy.YES if is_upper else Secrecy.PERHAPS
    if not words or words[-1] in _ABOUT:
        return Secrecy.NO
    return max(_secrecy_at(words, index, is_upper=is_upper) for index in range(len(words)))


def _secrecy_at(words: list[str], index: int, *, is_upper: bool) -> Secrecy:
    """Return the secrecy that the word at `index` gives to a name."""
    word = words[index]
    before = words[index - 1] if index else ""
    after = words[index + 1 :]
    if word.endswith(_ENDINGS):
        return Secrecy.YES
    if word in ("token", "tokens"):
        return _secrecy_of_token(word, before, after, is_upper=is_upper)
    if word in ("key", "keys"):
        return _secrecy_of_key(before, after, is_upper=is_upper)
    if not _QUALIFIERS.issuperset(after):
        return Secrecy.NO
    if word == "pwd":
        return Secrecy.YES if before else Secrecy.NO  # PWD is the working directory
    if word == "pat":
        return Secrecy.YES if is_upper and before else Secrecy.NO
    if word in ("pass", "auth", "signature", "sig", "bearer", "cookie", "cookies"):
        return Secrecy.YES if is_upper and before else Secrecy.PERHAPS
    return Secrecy.PERHAPS if (before, word) == ("connection", "string") else Secrecy.NO


def _secrecy_of_token(word: str, before: str, after: list[str], *, is_upper: bool) -> Secrecy:
    is_qualified = not {"id", "ids"} & set(after) if is_upper else _QUALIFIERS.issuperset(after)
    if before in _OF_TEXT or not is_qualified:
        return Secrecy.NO
    return Secrecy.PERHAPS if word == "tokens" or not before else Secrecy.YES


def _secrecy_of_key(before: str, after: list[str], *, is_upper: bool) -> Secrecy:
    is_qualified = {"id", *_QUALIFIERS}.issuperset(after)
    if before in _KINDS_OF_KEYS and (is_upper or is_qualified):
        return Secrecy.YES
    is_named = is_upper and before and before not in _KEYS_OF_DATA
    return Secrecy.YES if is_named and is_qualified else Secrecy.NO
