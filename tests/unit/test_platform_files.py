from pathlib import Path

import pytest

from megarl.platform.files import inside


@pytest.mark.parametrize("name", ["a", "a/b.c", "..a/b..", "a/./b", ".metadata", "a b"])
def test_names_below_a_directory_are_taken(name: str) -> None:
    assert inside(Path("/run"), name) == Path("/run") / name


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a/../b", "a/..", "/etc/passwd", "//a", "a\0b"])
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no file below /run"):
        inside(Path("/run"), name)
