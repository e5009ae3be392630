"""Hide an optional package from one library, which then works as if the package were not installed."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType


class _Hidden(MetaPathFinder):
    """Refuses a package to a library, and leaves all other imports to the other finders."""

    def __init__(self, package: str, library: str, unless: Callable[[], bool]) -> None:
        self._package = package
        self._library = library
        self._unless = unless

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Raise ModuleNotFoundError if the library imports the package."""
        if name == self._package and _importing_module().partition(".")[0] == self._library and not self._unless():
            raise ModuleNotFoundError(f"megarl hides {self._package} from {self._library}", name=name)


def hide(package: str, *, library: str, unless: Callable[[], bool] = lambda: False) -> None:
    """Hide a package from a library: both are the first part of a module's name. Other code imports the package.

    `unless` is asked when the library imports the package.
    """
    sys.meta_path.insert(0, _Hidden(package, library, unless))


def _importing_module() -> str:
    """Return the name of the module whose import statement is being executed."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("importlib."):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))
