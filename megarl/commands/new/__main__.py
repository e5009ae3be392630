"""Write a small project: `megarl new DIR [--task countdown|gsm8k|own] [--model PATH_OR_ID]`."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from megarl.platform import early  # noqa: F401 - before what takes seconds to import
from megarl.commands.cli.command import parse, print_error
from megarl.commands.cli.table import NEW
from megarl.platform.errors import UserError
from megarl.platform.files import check_writable, write_whole
from megarl.platform.secrets import guard_output
from megarl.platform.terminal import visible

TEMPLATES = Path(__file__).with_name("templates")
ENDING = ".template"
FILES: Mapping[str, Mapping[str, str]] = {
    "countdown": {"reward.py": "reward_countdown.py", "test_reward.py": "test_reward_countdown.py"},
    "gsm8k": {"reward.py": "reward.py", "test_reward.py": "test_reward.py"},
    "own": {"reward.py": "reward.py", "test_reward.py": "test_reward.py", "rows.jsonl": "rows.jsonl"},
}
"""Task -> its files in addition to the common ones, and their templates."""
COMMON = {"config.yaml": "config.yaml", "README.md": "README.md"}
DATA = {
    "countdown": "megarl prepare countdown --template base --train 2048 --val 128 --out data",
    "gsm8k": "megarl prepare gsm8k --val 256 --out data",
    "own": "megarl prepare own rows.jsonl --prompt question --answer answer --out data",
}
"""Task -> the command that makes its data."""


def main(argv: Sequence[str] = sys.argv[1:]) -> int:
    """Write the project that `argv` describes; return 1 if its directory is in use."""
    typed = parse(NEW, argv)
    try:
        paths = write_project(typed["directory"], task=typed["task"], model=typed["model"])
    except (UserError, OSError) as error:
        print_error(error)
        return 1
    for path in paths:
        print(visible(str(path)))
    print(visible(f"next: cd {shlex.quote(str(typed['directory']))}, and see README.md"))
    return 0


def write_project(directory: Path, *, task: str, model: str) -> list[Path]:
    """Write the files of a project, and return their paths.

    Args:
        directory: is made, and must have been missing or empty.
        task: a key of `FILES`.
        model: a directory, or an id of the Hugging Face hub.

    Raises:
        UserError: the directory is not empty, or cannot be made or written.
    """
    check_writable(directory, "DIR")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory} is not empty: name a new directory")
    place = str(Path(model).resolve()) if Path(model).is_dir() else model
    name = directory.resolve().name
    values = {"name": name, "task": task, "model": place, "quoted_model": shlex.quote(place), "data": DATA[task]}
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for file, template in {**COMMON, **FILES[task]}.items():
        text = Template((TEMPLATES / f"{template}{ENDING}").read_text(encoding="utf-8")).substitute(values)
        write_whole(directory / file, text.encode())
        paths.append(directory / file)
    return paths


if __name__ == "__main__":
    guard_output()
    sys.exit(main())
