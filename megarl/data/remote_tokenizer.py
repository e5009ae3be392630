"""The files of a tokenizer, before any library is imported: in a directory, on the Hugging Face hub, or at a URI."""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from megarl.platform.errors import UserError
from megarl.platform.hub import is_hub_model, matching, small_files, snapshot
from megarl.platform.remote import RemoteDirectory, split_uri
from megarl.platform.uri import local_path

TEMPLATE = "chat_template.jinja"
ENOUGH = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def is_without_tokenizer(place: Path) -> bool:
    """Return whether `place` is a local directory in which no file can be that of a tokenizer."""
    return place.is_dir() and not any(chain(place.glob("*token*"), place.glob("vocab*")))


def find_tokenizer(path: str, *, with_code: bool) -> Path | None:
    """Return the local directory or file of a tokenizer, of a Hugging Face id after a download; None for a remote URI.

    Raises:
        UserError: there is no such file or directory, or the hub does not give the files.
    """
    place = local_path(path)
    if place is None or place.exists():
        return place
    is_file = place.suffix == ".model"
    is_path = is_file or path.startswith(("/", ".", "~")) or path.count("/") > 1
    if is_path and not is_hub_model(path):
        raise UserError(f"no such file{'' if is_file else ' or directory'}: {place}")
    return snapshot(path, small_files(with_code=with_code))


@dataclass(frozen=True)
class RemoteTokenizer:
    """A tokenizer at a URI."""

    directory: str  # URI
    file: str | None  # the SentencePiece model in it; None: the directory is the tokenizer

    @classmethod
    def at(cls, uri: str) -> "RemoteTokenizer":
        """Parse a user's URI, without any access to it."""
        parent, name = split_uri(uri)
        return cls(parent, name) if name.endswith(".model") else cls(uri, None)

    def files(self, remote: RemoteDirectory, *, with_code: bool) -> list[str]:
        """Return the needed files; Python code only if `with_code`.

        Raises:
            UserError: the directory has no tokenizer.
        """
        names = sorted(remote.sizes)
        if self.file:
            if self.file not in names:
                raise UserError(f"no such file: {remote / self.file}")
            return [name for name in (self.file, TEMPLATE) if name in names]
        if not set(ENOUGH) & set(names):
            raise UserError(f"{remote} has no tokenizer: none of {', '.join(ENOUGH)} exists")
        small = matching(names, small_files(with_code=with_code))
        return [name for name in small if not name.endswith(".index.json")]
