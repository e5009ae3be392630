"""Write a small project: `megarl new DIR [--task countdown|gsm8k|own] [--model PATH_OR_ID]`."""

import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

import yaml

from megarl.platform import early  # noqa: F401 - before what takes seconds to import
from megarl.commands.cli.command import parse, print_error
from megarl.commands.cli.table import NEW
from megarl.commands.new.tiny import write_model
from megarl.platform.errors import UserError
from megarl.platform.files import check_writable, write_whole
from megarl.platform.secrets import guard_output
from megarl.platform.terminal import print_message, visible

TEMPLATES = Path(__file__).with_name("templates")
ENDING = ".template"
FILES: Mapping[str, Mapping[str, str]] = {
    "countdown": {"reward.py": "reward_countdown.py", "test_reward.py": "test_reward_countdown.py"},
    "gsm8k": {"reward.py": "reward.py", "test_reward.py": "test_reward.py"},
    "own": {"reward.py": "reward.py", "test_reward.py": "test_reward.py", "rows.jsonl": "rows.jsonl"},
}
"""Task -> its files in addition to the common ones, and their templates."""
COMMON = {"config.yaml": "config.yaml", "README.md": "README.md"}
NO_GPU = """\
note: this machine has no GPU, and its CPU may take hours for a step: `megarl plan config.yaml` says how long. With \
--tiny, `megarl new` also makes a model that a CPU trains in minutes."""
TINY = {"tiny.yaml": "tiny.yaml"}
MODEL = "model"
TINY_ROW = "| `tiny.yaml`, `model/` | a small random model, and the keys that train it on a CPU |\n"
DATA = {
    "countdown": "megarl prepare countdown --template base --train 2048 --val 128 --out data",
    "gsm8k": "megarl prepare gsm8k --val 256 --out data",
    "own": "megarl prepare own rows.jsonl --prompt question --answer answer --out data",
}
"""Task -> the command that makes its data."""
_PLAIN = re.compile(r"[a-zA-Z/][\w./-]*")
PLAIN = {"countdown": "", "own": " --plain"}
"""Task that needs no network -> what its command needs if the model has no chat template."""


def main(argv: Sequence[str] = sys.argv[1:]) -> int:
    """Write the project that `argv` describes; return 1 if its directory is in use."""
    typed = parse(NEW, argv)
    try:
        paths = write_project(typed["directory"], task=typed["task"], model=typed["model"], is_tiny=typed["tiny"])
    except (UserError, OSError) as error:
        print_error(error)
        return 1
    for path in paths:
        print(visible(str(path)))
    if not typed["tiny"] and not any(Path("/dev").glob("nvidia[0-9]*")):
        print_message(NO_GPU)
    print(visible(f"next: cd {shlex.quote(str(typed['directory']))}, and see README.md"))
    return 0


def write_project(directory: Path, *, task: str, model: str, is_tiny: bool) -> list[Path]:
    """Write the files of a project, and return their paths.

    Args:
        directory: is made, and must have been missing or empty.
        task: a key of `FILES`.
        model: a directory, or an id of the Hugging Face hub.
        is_tiny: a small random model is made too, and the commands use it.

    Raises:
        UserError: the directory is not empty or cannot be written, or the task of a tiny model needs a network.
    """
    if is_tiny and task not in PLAIN:
        raise UserError(f"--tiny needs no network, but --task {task} downloads its data: take {' or '.join(PLAIN)}")
    check_writable(directory, "DIR")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory} is not empty: name a new directory")
    place = str(Path(model).resolve()) if Path(model).is_dir() else model
    name = directory.resolve().name
    values = {
        "name": name,
        "written_name": _written(name),
        "task": task,
        "written_model": _written(place),
        "origin": "a small random model" if is_tiny else f"`{place}`",
        "tokenizer": "model" if is_tiny else shlex.quote(place),
        "data": f"{DATA[task]}{PLAIN[task]}" if is_tiny else DATA[task],
        "config": "config.yaml tiny.yaml" if is_tiny else "config.yaml",
        "tiny": TINY_ROW if is_tiny else "",
    }
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for file, template in {**COMMON, **FILES[task], **(TINY if is_tiny else {})}.items():
        text = Template((TEMPLATES / f"{template}{ENDING}").read_text(encoding="utf-8")).substitute(values)
        write_whole(directory / file, text.encode())
        paths.append(directory / file)
    if is_tiny:
        print_message("starting: import of torch and transformers, which make the model")
        print(write_model(directory / MODEL), file=sys.stderr)
        paths.append(directory / MODEL)
    return paths


def _written(text: str) -> str:
    """Return a text as YAML reads it anywhere."""
    is_plain = _PLAIN.fullmatch(text) and yaml.safe_load(text) == text
    return text if is_plain else json.dumps(text, ensure_ascii=False)


if __name__ == "__main__":
    guard_output()
    sys.exit(main())
