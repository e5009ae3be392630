"""Imports search for no garbage, and later searches skip what they left."""

import gc
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from megarl.platform.errors import UserError
from megarl.platform.imports import import_modules

MANY_OBJECTS = """
import gc
is_searching = gc.isenabled()
kept = [[] for _ in range(1000)]
"""


@pytest.mark.parametrize("end", ["", "raise ImportError('broken')"])
def test_imported_objects_are_exempt_from_garbage_searches(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("many_objects", MANY_OBJECTS), ("last_module", end)):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="ImportError: broken") if end else nullcontext():
        import_modules(["many_objects", "last_module"])
    module = sys.modules["many_objects"]
    assert not module.is_searching
    assert gc.isenabled()
    searched = {id(one) for one in gc.get_objects()}
    assert not any(id(one) in searched for one in module.kept)


def test_module_that_fails_is_named_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_other_build.py").write_text("raise RuntimeError('operator nms does not exist')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"needs_other_build cannot .*nms does not.*build\.py:1\).*megarl doctor"):
        import_modules(["needs_other_build"])
    assert gc.isenabled()
