"""Names that trackers or file systems accept: different for different names, and always the same for one name.

A name that is accepted stays as it is. Every other name becomes readable as far as possible, and ends with a digest of
the name. A name that looks as if it had a digest gets another one.
"""

import re
from hashlib import blake2b

MLFLOW_LONGEST = 250  # characters of a key, a run's name or an experiment's name, in every SQL store of MLflow
WANDB_PROJECT_LONGEST = 128
FILE_LONGEST = 120
REPORTED_LONGEST = 64  # characters of the name of a number that a reward reports

_DIGEST = re.compile(r"-[0-9a-f]{12}\Z")
_UNWRITABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_NOT_MLFLOW_KEY = re.compile(r"[^\w\-. :/]", re.ASCII)
_NOT_FILE = re.compile(r"[^\w.+=,-]|^\.", re.ASCII)
_NOT_REPORTED = re.compile(r"[^\w ./:@+%-]")
_NOT_WANDB_PROJECT = re.compile(r"[/\\#?%:\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def mlflow_key(name: str) -> str:
    """Return the key of a metric, a parameter or a table: ASCII letters, digits and `_-. :/`.

    MLflow reads a key as a path, so no part of it is empty, `.`, or begins with `..`. Some stores ignore spaces at its
    end. `mean@4` becomes `mean_at_4` without a digest.
    """
    readable = name.replace("@", "_at_")
    is_reversible = readable.replace("_at_", "@") == name
    safe = "/".join(_part(part) for part in _NOT_MLFLOW_KEY.sub("_", readable).split("/"))
    is_plain = safe == readable and is_reversible and len(safe) <= MLFLOW_LONGEST and not _DIGEST.search(safe)
    return safe if is_plain else with_digest(safe, name)


def mlflow_title(name: str) -> str:
    """Return the name of a run or an experiment."""
    return _accepted(name, _UNWRITABLE, MLFLOW_LONGEST)


def wandb_project(name: str) -> str:
    """Return the name of a W&B project."""
    return _accepted(name, _NOT_WANDB_PROJECT, WANDB_PROJECT_LONGEST)


def wandb_key(name: str) -> str:
    """Return the key of a metric or a table in W&B, which keeps keys that begin with `_` for itself."""
    safe = _UNWRITABLE.sub("_", name)
    return with_digest(f"x{safe}", name) if safe.startswith("_") or not safe else _encodable(name)


def tensorboard_tag(name: str) -> str:
    """Return the tag of a metric or a table in TensorBoard."""
    return _encodable(name)


def reported_number(name: str) -> str:
    """Return the name of a number that a reward reports: letters of any script, digits and `_ ./:@+%-`."""
    return _accepted(name, _NOT_REPORTED, REPORTED_LONGEST)


def file_name(name: str) -> str:
    """Return the name of a file or a directory: ASCII letters, digits and `_.+=,-`."""
    return _accepted(name, _NOT_FILE, FILE_LONGEST)


def with_digest(readable: str, name: str, longest: int = MLFLOW_LONGEST) -> str:
    """Return the beginning of `readable` and a digest of `name`, `longest` characters at most."""
    digest = blake2b(name.encode(errors="surrogatepass"), digest_size=6).hexdigest()
    return f"{readable[: longest - len(digest) - 1]}-{digest}"


def _part(part: str) -> str:
    stripped = part.strip()
    if stripped.startswith(".."):
        return "_" + stripped.lstrip(".")
    return "_" if stripped in ("", ".") else stripped


def _accepted(name: str, forbidden: re.Pattern[str], longest: int) -> str:
    safe = forbidden.sub("_", name).strip()
    is_plain = safe == name != "" and len(safe) <= longest and not _DIGEST.search(safe)
    return safe if is_plain else with_digest(safe, name, longest)


def _encodable(name: str) -> str:
    """Return a name that UTF-8 can write, without control characters."""
    safe = _UNWRITABLE.sub("_", name)
    return safe if safe == name and not _DIGEST.search(name) else with_digest(safe, name, len(safe) + 13)
