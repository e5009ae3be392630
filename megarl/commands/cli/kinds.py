"""The kinds of values that options accept."""

import re
from pathlib import Path
from typing import Any

import click

from megarl.checkpoint.directory import HUGGINGFACE, MANIFEST_FILE, STEP_PREFIX, saved_steps, step_of_name
from megarl.platform.files import similar

UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class Amount(click.ParamType[int]):
    """A number of bytes, or of bytes per second."""

    name = "amount"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse `80GB`, `79.6GiB` or `45GB/s`."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(rf"\s*([\d.]+)\s*({'|'.join(UNITS)})(/s)?\s*", value)
        if not match:
            self.fail(
                f"{value!r} is not a number with one of the units {', '.join(UNITS)}: for example 80GB", param, ctx
            )
        return int(float(match[1]) * UNITS[match[2]])


class MeanLengths(click.ParamType[tuple[int, ...]]):
    """The mean tokens of a prompt and of a response, and the tokens of the longest response."""

    name = "lengths"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Parse `256,1024` or `256,1024,4096`."""
        numbers = value.split(",")
        if len(numbers) not in (2, 3) or not all(number.strip().isdigit() and int(number) for number in numbers):
            self.fail(f"{value!r} is not PROMPT,RESPONSE[,LONGEST], numbers of tokens such as 256,1024", param, ctx)
        return tuple(map(int, numbers))


class PeakTflops(click.ParamType[dict[int | None, float]]):
    """The greatest speed of products of matrices, and the speeds of narrow models."""

    name = "tflops"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[int | None, float]:
        """Parse `989.4` or `0.17,256:0.1,512:0.13`. Return the speeds by width; None is every other width."""
        if isinstance(value, dict):
            return value
        greatest, *narrow = value.split(",")
        number = r"\s*(\d+\.?\d*(?:e-?\d+)?)\s*"
        matches = [re.fullmatch(number, greatest), *(re.fullmatch(rf"\s*(\d+):{number}", part) for part in narrow)]
        if not all(matches) or not all(float(match[match.lastindex or 1]) for match in matches if match):
            self.fail(f"{value!r} is not TFLOPS[,WIDTH:TFLOPS...], such as 989.4 or 0.17,256:0.1,512:0.13", param, ctx)
        first, *others = (match for match in matches if match)
        return {None: float(first[1]), **{int(match[1]): float(match[2]) for match in others}}


class EngineMilliseconds(click.ParamType[tuple[float, float, float]]):
    """The cost of an engine step on the host."""

    name = "milliseconds"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, float, float]:
        """Parse `9.1,0.25,0.18`."""
        match = re.fullmatch(",".join([r"\s*(\d+\.?\d*)\s*"] * 3), value)
        if not match:
            self.fail(
                f"{value!r} is not STEP,LAYER,SAMPLE, three numbers of milliseconds such as 9,0.2,0.2", param, ctx
            )
        step, layer, sample = map(float, match.groups())
        return step, layer, sample


class LinkMicroseconds(click.ParamType[tuple[float, float]]):
    """The time of a message of no size, to a rank of the same domain and to another."""

    name = "microseconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, float]:
        """Parse `2,15`."""
        match = re.fullmatch(",".join([r"\s*(\d+\.?\d*)\s*"] * 2), value)
        if not match:
            self.fail(f"{value!r} is not INSIDE,BETWEEN, two numbers of microseconds such as 2,15", param, ctx)
        inside, between = map(float, match.groups())
        return inside, between


class Checkpoint(click.ParamType[Path]):
    """The directory of a checkpoint, or of a run that has checkpoints."""

    name = "directory"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the directory; fail with the checkpoints that there are if it is neither."""
        path = Path(value)
        has_model = (path / HUGGINGFACE / "config.json").is_file()
        is_checkpoint = step_of_name(path.resolve().name) is not None or (path / MANIFEST_FILE).exists()
        if has_model and not (saved_steps(path) or is_checkpoint):
            self.fail(f"{path} has no checkpoint, and {path / HUGGINGFACE} is exported already", param, ctx)
        if not saved_steps(path) and not has_model:
            why = "is neither a checkpoint nor a run with checkpoints" if path.is_dir() else "is no directory"
            self.fail(f"{path} {why}{others(path) or similar(path)}", param, ctx)
        return path


class RunDirectory(click.Path):
    """The directory of a run."""

    def __init__(self) -> None:
        super().__init__(file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
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
