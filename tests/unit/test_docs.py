"""The examples in the documentation do what the documentation says."""

import doctest
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_resharding_example():
    outcome = doctest.testfile(str(DOCS / "resharding.md"), module_relative=False)
    assert outcome.attempted > 5
    assert outcome.failed == 0
