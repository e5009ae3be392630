"""A notebook of the examples trains from rows and a function, as a person would run its cells."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.programs import ROOT, succeed
from tests.support.workspace import Workspace

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
RUN_CELLS = """
import json, linecache, sys
names = {"__name__": "__main__"}
for number, cell in enumerate(json.load(open(sys.argv[1]))["cells"]):
    if cell["cell_type"] == "code":
        lines, name = cell["source"], f"<cell-{number}>"
        linecache.cache[name] = (1, None, lines, name)
        exec(compile("".join(lines), name, "exec"), names)
run = names["run"]
print(json.dumps({"steps": [*map(int, run.metrics.index)], "samples": len(run.samples), "repr": repr(run)}))
"""


def test_cells_of_the_notebook_train(workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smaller = {
        "data.max_prompt_length": 120,
        "data.max_response_length": 16,
        "actor_rollout_ref.rollout.n": 2,
        "trainer.total_training_steps": 2,
        "trainer.test_freq": 1,
    }
    monkeypatch.setenv("MEGARL_MODEL", str(workspace.model))
    monkeypatch.setenv("MEGARL_KEYS", json.dumps(smaller))
    printed = succeed(sys.executable, "-c", RUN_CELLS, NOTEBOOK, timeout_s=500, cwd=tmp_path)
    found = json.loads(printed.splitlines()[-1])
    assert found["steps"][-1] == 2
    assert found["samples"] > 0
    assert "finished" in found["repr"]
    assert (tmp_path / "out" / "config.json").is_file()
    assert (tmp_path / "runs" / "boxes" / "inputs" / "reward.py").is_file()
