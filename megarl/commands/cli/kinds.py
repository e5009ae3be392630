"""The values that options accept, from their texts. A text that is none raises `click.BadParameter`."""

import os
import re
from pathlib import Path

import click
import yaml

from megarl.checkpoint.directory import HUGGINGFACE, MANIFEST_FILE, STEP_PREFIX, saved_steps, step_of_name
from megarl.platform.files import similar

UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

_NUMBER = r"(\d+\.?\d*(?:e[-+]?\d+)?)"
"""A number as Python writes it, such as 9, 0.25, 1.2e-05 or 2.25e+03."""


def amount(text: str) -> int:
    """Parse a number of bytes, or of bytes per second: `80GB`, `79.6GiB` or `45GB/s`."""
    match = re.fullmatch(rf"\s*{_NUMBER}\s*({'|'.join(UNITS)})(/s)?\s*", text)
    if not match or not float(match[1]):
        raise click.BadParameter(f"{text!r} is not a number with one of the units {', '.join(UNITS)}: for example 80GB")
    return int(float(match[1]) * UNITS[match[2]])


def mean_lengths(text: str) -> tuple[int, ...]:
    """Parse the mean tokens of a prompt and of a response, and perhaps the tokens of the longest response.

    They are written `256,1024` or `256,1024,4096`.
    """
    numbers = text.split(",")
    are_counts = all(number.strip().isdecimal() and int(number) for number in numbers)
    if len(numbers) not in (2, 3) or not are_counts:
        raise click.BadParameter(f"{text!r} is not PROMPT,RESPONSE[,LONGEST], numbers of tokens such as 256,1024")
    return tuple(map(int, numbers))


def peak_tflops(text: str) -> dict[int | None, float]:
    """Parse the greatest speed of products of matrices, and perhaps the speeds of narrow models.

    They are written `989.4` or `0.17,256:0.1,512:0.13`. Return the speeds by width; None is every other width.
    """
    speeds: dict[int | None, float] = {}
    for part in text.split(","):
        match = re.fullmatch(rf"\s*(?:(\d+):)?\s*{_NUMBER}\s*", part)
        has_width = bool(match and match[1])
        if not match or has_width != bool(speeds) or not float(match[2]):  # all but the first have a width
            raise click.BadParameter(
                f"{text!r} is not TFLOPS[,WIDTH:TFLOPS...], such as 989.4 or 0.17,256:0.1,512:0.13"
            )
        speeds[int(match[1]) if has_width else None] = float(match[2])
    return speeds


def engine_milliseconds(text: str) -> tuple[float, ...]:
    """Parse the cost of an engine step on the host: `9.1,0.25,0.18`."""
    return _numbers(text, 3, "STEP,LAYER,SAMPLE, three numbers of milliseconds such as 9,0.2,0.2")


def link_microseconds(text: str) -> tuple[float, ...]:
    """Parse the time of a message of no size, to a rank of the same domain and to another: `2,15`."""
    return _numbers(text, 2, "INSIDE,BETWEEN, two numbers of microseconds such as 2,15")


def _numbers(text: str, count: int, meant: str) -> tuple[float, ...]:
    match = re.fullmatch(",".join([rf"\s*{_NUMBER}\s*"] * count), text)
    if not match:
        raise click.BadParameter(f"{text!r} is not {meant}")
    return tuple(map(float, match.groups()))


def values_of_key(text: str) -> tuple[str, dict[str, str]]:
    """Parse a key and its values, the items of a YAML list: `data.seed=1,2` or `data.train_files=[a,b],"c,d"`.

    Return the key, and each value as it is written, by its text without quotes.
    """
    key, _, listed = text.lstrip("+").partition("=")
    items = f"[{listed}]"
    try:
        sequence = yaml.compose(items, yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise click.BadParameter(
            f"{text!r} has no list of values: quote a value that has a comma, a bracket or a brace"
        ) from error
    nodes = sequence.value if key and isinstance(sequence, yaml.SequenceNode) else []
    written = [items[node.start_mark.index : node.end_mark.index] for node in nodes]
    pairs = zip(nodes, written, strict=True)
    names = [node.value if isinstance(node, yaml.ScalarNode) else item for node, item in pairs]
    if not names:
        raise click.BadParameter(f"{text!r} is not KEY=VALUE,VALUE..., such as actor_rollout_ref.rollout.n=4,8")
    if len(set(names)) < len(names):
        raise click.BadParameter(f"{text!r} has a value twice")
    return key, dict(zip(names, written, strict=True))


def checkpoint(text: str) -> Path:
    """Return the directory of a checkpoint or of a run with checkpoints; fail with the checkpoints that there are."""
    path = Path(text)
    has_model = (path / HUGGINGFACE / "config.json").is_file()
    is_checkpoint = step_of_name(path.resolve().name) is not None or (path / MANIFEST_FILE).exists()
    has_checkpoint = saved_steps(path) or is_checkpoint
    if has_model and not has_checkpoint:
        raise click.BadParameter(f"{path} has no checkpoint, and {path / HUGGINGFACE} is exported already")
    if not saved_steps(path) and not has_model:
        why = "is neither a checkpoint nor a run with checkpoints" if path.is_dir() else "is no directory"
        raise click.BadParameter(f"{path} {why}{others(path) or similar(path)}")
    return path


class RunDirectory(click.Path):
    """The directory of a run."""

    def __init__(self) -> None:
        super().__init__(file_okay=False, path_type=Path)

    def convert(self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the directory; fail with the most similar one if there is none."""
        path = Path(value)
        if not path.is_dir():
            remedy = similar(path) or ": name the directory of a run (trainer.default_local_dir)"
            self.fail(f"no directory {path}{remedy}", param, ctx)
        return path


def others(path: Path) -> str:
    """Return which checkpoints there are instead of the missing one at `path`; '' if there are none."""
    found = ", ".join(f"{STEP_PREFIX}{step}" for step in sorted(saved_steps(path.parent)))
    return f"; {path.parent} has {found}" if found else ""
