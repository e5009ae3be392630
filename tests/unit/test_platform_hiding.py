"""A hidden package is missing for one library and present for all other code."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import ROOT

LIBRARY = "try:\n    import hidden_package\nexcept ImportError:\n    hidden_package = None\n"


def run(code: str, *, at: Path = ROOT) -> str:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PYTHONPATH": f"{at}:{ROOT}"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("import library; print(library.hidden_package)", "None"),
        ("import library.part; print(library.part.hidden_package)", "None"),
        ("import hidden_package, library; print(library.hidden_package.__name__)", "hidden_package"),
        ("import other; print(other.hidden_package.__name__)", "hidden_package"),
        ("import library, hidden_package; print(hidden_package.__name__)", "hidden_package"),
    ],
)
def test_one_library_misses_a_package(tmp_path: Path, code: str, printed: str) -> None:
    (tmp_path / "hidden_package.py").touch()
    (tmp_path / "library").mkdir()
    for name in ("library/__init__", "library/part", "other"):
        (tmp_path / f"{name}.py").write_text(LIBRARY)
    hide = "from megarl.platform.hiding import hide; hide('hidden_package', library='library'); "
    assert run(hide + code, at=tmp_path) == printed


@pytest.mark.parametrize(("unless", "printed"), [("lambda: True", "hidden_package"), ("lambda: False", "None")])
def test_the_condition_is_asked_at_the_import(tmp_path: Path, unless: str, printed: str) -> None:
    (tmp_path / "hidden_package.py").touch()
    (tmp_path / "library.py").write_text(LIBRARY)
    hide = f"from megarl.platform.hiding import hide; hide('hidden_package', library='library', unless={unless}); "
    show = "import library; print(getattr(library.hidden_package, '__name__', None))"
    assert run(hide + show, at=tmp_path) == printed


def test_rank_on_cpu_imports_no_unused_packages(tmp_path: Path) -> None:
    """Megarl's GPU stack has the kernels, whose optimizers do not run on the CPU.

    Megatron-Core asks for W&B, transformers for scikit-learn and vLLM for SciPy, whose imports cost seconds.
    """
    for package in ("transformer_engine", "apex", "amp_C"):
        (tmp_path / f"{package}.py").write_text(f"print('{package} is imported')")
    slow = {"mlflow", "pandas", "scipy", "sklearn", "wandb"}
    code = "from megarl.platform.device import decide_device; decide_device('cpu'); import sys; "
    code += "import megarl.assembly.run, megarl.learner.imported, megarl.rollout.imported; "
    assert run(f"{code}print(sorted({slow} & set(sys.modules)))", at=tmp_path) == "[]"
