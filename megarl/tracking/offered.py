"""The trackers that `trainer.logger` can name: those of megarl, and those that other packages offer."""

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from megarl.platform.errors import UserError

if TYPE_CHECKING:
    from megarl.tracking.jsonl import Jsonl
    from megarl.tracking.protocol import Tracker
    from megarl.tracking.run import TrackedRun

GROUP = "megarl.trackers"
"""The entry points of packages that offer a tracker: a name for `trainer.logger`, and a class or function that takes a
`TrackedRun` and its `Jsonl` and returns a `Tracker`."""
FILES = "jsonl"
CONSOLE = "console"
"""The names of the files, which every run has, and of the console, which only the loop's process has."""
BUILT_IN: Mapping[str, EntryPoint] = {
    name: EntryPoint(name, place, GROUP)
    for name, place in (
        ("mlflow", "megarl.tracking.mlflow:Mlflow"),
        ("tensorboard", "megarl.tracking.tensorboard:TensorBoard"),
        ("wandb", "megarl.tracking.wandb:Wandb"),
    )
}


def find_tracker(name: str) -> EntryPoint:
    """Return where a tracker is.

    Raises:
        UserError: neither megarl nor an installed package has it.
    """
    offered = BUILT_IN.get(name) or next(iter(entry_points(group=GROUP, name=name)), None)
    if offered is None:
        names = ", ".join((CONSOLE, FILES, *BUILT_IN))
        raise UserError(f"{name} is none of {names}, and no installed package offers it as an entry point of {GROUP}")
    return offered


def load_tracker(name: str) -> "Callable[[TrackedRun, Jsonl], Tracker]":
    """Import what opens a tracker, which may take seconds.

    Raises:
        UserError: nobody has the tracker, or it cannot be imported.
    """
    entry = find_tracker(name)
    try:
        opens: Callable[[TrackedRun, Jsonl], Tracker] = entry.load()
    except (ImportError, AttributeError) as error:
        raise UserError(f"trainer.logger: {name} ({entry.value}) cannot be imported: {error}") from error
    return opens
