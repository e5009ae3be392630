"""Kept samples, as a process that is alone reads them."""

from pathlib import Path

from torch import Tensor

from megarl.batch import Scored
from megarl.distributed.sharded import Shares
from megarl.samples.reading import read_samples


def read_all(path: Path) -> tuple[Scored, Tensor | None]:
    """Return the record and the baselines of all samples."""
    samples, baselines = read_samples(path, Shares())
    return samples.share, baselines
