"""The files of a user as modules that every process can import by name: `megarl.platform.custom_code.NAME`.

The name holds the path of the file. So a function or a class of such a file can be pickled into a process that the file
starts itself: to unpickle it, that process imports the module, which needs nothing but megarl.
"""

import linecache
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from traceback import walk_tb
from types import ModuleType

from megarl.platform.secret_names import is_secret
from megarl.platform.secrets import beginning

__path__: list[str] = []  # makes this module a package without files
_PREFIX = f"{__name__}."
_SHOWN_CHARACTERS = 100
"""Characters of a line that an error left."""


def module_name(path: Path) -> str:
    """Return the name of the module that a file is."""
    text = str(path.absolute()).encode(errors="surrogateescape")
    return _PREFIX + re.sub(rb"[^a-zA-Z0-9]", lambda match: b"_%02x" % match[0][0], text).decode()


def path_of(name: str) -> Path:
    """Return the file that a module of this package is."""
    text = re.sub(rb"_([0-9a-f]{2})", lambda match: bytes.fromhex(match[1].decode()), name.encode())
    return Path(text.decode(errors="surrogateescape"))


def place_of(error: BaseException) -> str:
    """Return ` (FILE:LINE, TEXT)` of the innermost line of a user's file that an error left, or '' if it left none.

    A line that names a secret, such as `Client(api_key='...')`, has no text.
    """
    found = walk_tb(error.__traceback__)
    frames = [(frame, line) for frame, line in found if str(frame.f_globals.get("__name__")).startswith(_PREFIX)]
    if not frames:
        return ""
    frame, line = frames[-1]
    file = frame.f_code.co_filename
    code = linecache.getline(file, line).strip()
    if not code or any(map(is_secret, re.findall(r"\w+", code))):
        return f" ({file}:{line})"
    return f" ({file}:{line}, `{beginning(code, _SHOWN_CHARACTERS)}`)"


class _Finder:
    """Finds the modules of this package for `import`, also in a process that has loaded nothing yet."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to load a module; None if it is not of this package, or its file is gone."""
        file = path_of(name.removeprefix(_PREFIX))
        if not name.startswith(_PREFIX) or not file.is_file():
            return None
        return spec_from_file_location(name, file)


sys.meta_path.append(_Finder)
