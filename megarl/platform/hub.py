"""Models, tokenizers and data sets of the Hugging Face hub."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from megarl.platform.errors import UserError

DATA = ("*.json", "*.model", "*.jinja", "*.txt")
CODE = "*.py"
CARD_FILE = "README.md"
SCHEME = "hf://"
Kind = Literal["model", "dataset"]


def small_files(*, with_code: bool) -> tuple[str, ...]:
    """Return the patterns of the files of a model or a tokenizer that hold no weights; Python code only if asked to."""
    return (*DATA, CODE) if with_code else DATA


def matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Return the names that match one of the patterns."""
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


class Address(NamedTuple):
    """The parts of `hf://[datasets/]OWNER/NAME[@REVISION][/FILE]`."""

    kind: str  # model, dataset, ...
    id: str
    revision: str | None  # None: the newest
    file: str  # '': the repository


@cache
def parse_uri(name: str) -> Address | None:
    """Return the parts of a URI of the hub; None if `name` is no such URI."""
    if not name.startswith(SCHEME):
        return None
    from huggingface_hub.errors import HfUriError
    from huggingface_hub.utils import parse_hf_uri  # type: ignore[attr-defined] # a lazy export

    try:
        uri = parse_hf_uri(name)
    except HfUriError:  # opening it reports why
        return None
    return Address(uri.type, uri.id, uri.revision, uri.path_in_repo)


def repository(name: str) -> tuple[str, str | None]:
    """Return the id and the revision that a name means; a name other than a URI of the hub is itself an id."""
    address = parse_uri(name)
    return (address.id, address.revision) if address else (name, None)


def is_hub_model(name: str) -> bool:
    """Return whether a name is `hf://OWNER/NAME[@REVISION]`, which means the same as an id of the hub."""
    address = parse_uri(name)
    return bool(address and address.kind == "model" and not address.file)


def snapshot(name: str, patterns: Sequence[str], kind: Kind = "model") -> Path:
    """Download files of a Hugging Face id or of `hf://ID[@REVISION]`, once in a process.

    A hub that cannot be reached is asked once: retries take half a minute.

    Raises:
        UserError: the hub has no such model or data set, or cannot be reached and the files are not here.
    """
    from huggingface_hub.errors import LocalEntryNotFoundError  # takes half a second, which local models save

    try:
        return _download(name, tuple(patterns), kind)
    except (OSError, ValueError) as error:
        cause = str(error)
        if isinstance(error, LocalEntryNotFoundError):  # the first line is the cause, the rest is about caches
            cause = cause.partition("\n")[0].removeprefix("Got: ")
        raise UserError(
            f"{name} is no local directory, and as a Hugging Face id it failed: {cause}\nWithout a network, "
            "download it on another machine and name its directory; what is behind a licence needs HF_TOKEN"
        ) from error


def downloaded(name: str, files: Sequence[str]) -> Path | None:
    """Return the newest snapshot of a Hugging Face id on this machine that has one of `files`. Asks no host."""
    from huggingface_hub import try_to_load_from_cache

    repo_id, revision = repository(name)
    for file in files:
        try:
            found = try_to_load_from_cache(repo_id, file, revision=revision)
        except ValueError:  # no id of the hub
            return None
        if isinstance(found, str):
            return Path(found).parent
    return None


@cache
def _download(name: str, patterns: tuple[str, ...], kind: Kind) -> Path:
    from huggingface_hub import snapshot_download

    repo_id, revision = repository(name)
    return Path(snapshot_download(repo_id, repo_type=kind, revision=revision, allow_patterns=list(patterns)))
