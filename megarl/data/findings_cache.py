"""Findings about data files, kept in the cache directory until a file or the code that inspects it changes."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from megarl.data.uri import locate
from megarl.platform.cache import cache_directory
from megarl.platform.versions import versions

_CODE = ("rewards", "data")
_LIBRARIES = ("transformers", "tokenizers", "jinja2", "math-verify", "latex2sympy2_extended", "sympy", "reasoning-gym")


def digest_of(files: Sequence[str], question: object) -> str:
    """Return a name for the answer to a question, a value of JSON, about data files as they are now.

    Raises UserError if a data file cannot be read.
    """
    prints = [[name, *locate(name).fingerprint()] for name in files]
    asked = json.dumps([prints, question, versions(*_LIBRARIES), _code()])
    return hashlib.sha256(asked.encode()).hexdigest()[:32]


def place_of(files: Sequence[str], question: object) -> Path:
    """Return the file that keeps the answer to a question about data files. Raises as `digest_of` does."""
    return cache_directory() / "rows" / f"{digest_of(files, question)}.json"


def read(place: Path) -> Any:
    """Return a kept answer; None if there is none or its file is damaged."""
    try:
        return json.loads(place.read_bytes())
    except (OSError, ValueError):
        return None


def write(place: Path, answer: Mapping[str, object]) -> None:
    """Keep an answer. If nothing can be written, the next run inspects the files again."""
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        part = place.with_suffix(f".{uuid4().hex}")
        part.write_text(json.dumps(answer), encoding="utf-8")
        part.replace(place)


def _code() -> str:
    """Return a digest of the modules that decide what is found."""
    digest = hashlib.sha256()
    for package in _CODE:
        for path in sorted((Path(__file__).parents[1] / package).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
