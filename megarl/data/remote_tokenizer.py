"""The files of a tokenizer, before any library is imported: in a directory, or at a URI."""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from megarl.platform.remote import RemoteDirectory

TEMPLATE = "chat_template.jinja"
DATA_ENDINGS = (".json", ".model", ".jinja", ".txt")
CODE_ENDING = ".py"
ENOUGH = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def is_without_tokenizer(place: Path) -> bool:
    """Return whether `place` is a local directory in which no file can be that of a tokenizer."""
    return place.is_dir() and not any(chain(place.glob("*token*"), place.glob("vocab*")))


@dataclass(frozen=True)
class RemoteTokenizer:
    """A tokenizer at a URI."""

    directory: str  # URI
    file: str | None  # the SentencePiece model in it; None: the directory is the tokenizer

    @classmethod
    def at(cls, uri: str) -> "RemoteTokenizer":
        """Parse a user's URI, without any access to it."""
        first, chain, rest = uri.partition("::")
        path, query, parameters = first.partition("?")
        parent, _, name = path.rstrip("/").rpartition("/")
        if not name.endswith(".model"):
            return cls(uri, None)
        return cls(f"{parent}{query}{parameters}{chain}{rest}", name)

    def files(self, remote: RemoteDirectory, *, with_code: bool) -> list[str]:
        """Return the needed files; Python code only if `with_code`.

        Raises:
            ValueError: the directory has no tokenizer.
        """
        names = sorted(remote.sizes)
        if self.file:
            if self.file not in names:
                raise ValueError(f"no such file: {remote / self.file}")
            return [name for name in (self.file, TEMPLATE) if name in names]
        if not set(ENOUGH) & set(names):
            raise ValueError(f"{remote} has no tokenizer: none of {', '.join(ENOUGH)} exists")
        endings = (*DATA_ENDINGS, CODE_ENDING) if with_code else DATA_ENDINGS
        return [name for name in names if name.endswith(endings) and not name.endswith(".index.json")]
