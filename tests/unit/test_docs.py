"""The examples in the documentation do what the documentation says."""

import doctest
import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from megarl.algorithms.config import AlgorithmSection, FilterGroupsSection
from megarl.learner.config import ActorSection, PolicyLossSection

DOCS = Path(__file__).parents[2] / "docs"


def test_the_resharding_example():
    outcome = doctest.testfile(str(DOCS / "resharding.md"), module_relative=False)
    assert outcome.attempted > 5
    assert outcome.failed == 0


def choices(section: type, key: str) -> list[str]:
    """The names that a key may have."""
    return list(get_args(get_type_hints(section)[key]))


@pytest.mark.parametrize(
    "name",
    [
        *choices(AlgorithmSection, "adv_estimator"),
        *choices(AlgorithmSection, "kl_penalty"),
        *choices(FilterGroupsSection, "metric"),
        *choices(ActorSection, "loss_agg_mode"),
        *choices(PolicyLossSection, "loss_mode"),
    ],
)
def test_every_algorithm_is_explained(name: str) -> None:
    tables = [line for line in (DOCS / "algorithms.md").read_text().splitlines() if line.startswith("|")]
    assert any(f"`{name}`" in line.split("|")[1] for line in tables)


def test_configurations_named_in_the_tables_exist() -> None:
    files = re.findall(r"`(\w+\.yaml)`", (DOCS / "algorithms.md").read_text())
    assert len(files) > 10
    assert not [file for file in files if not (DOCS.parent / "configs" / file).exists()]
