"""Build the hollow device for a CUDA environment: `.venv-cuda/bin/python tests/hollow/build.py build/hollow [MORE]`.

The libraries have every function that the CUDA builds of the environment want. Those that are written out are in
`device/`; every other function succeeds, does nothing and is counted. The environment's copies of the real runtime
become links to ours, because binaries find those before the directories of LD_LIBRARY_PATH. MORE is a directory of
further packages, which may want more functions.
"""

import os
import re
import subprocess
import sys
import sysconfig
from collections import defaultdict
from importlib.metadata import requires
from pathlib import Path

SOURCES = Path(__file__).parent / "device"
PACKAGES = Path(sysconfig.get_path("purelib"))
HEADERS = PACKAGES / "nvidia/cu13/include"
WANTING = ["torch/lib/*.so", "torchvision/*.so", "torchaudio/lib/*.so", "vllm/*.so", "vllm/vllm_flash_attn/*.so"]
WANTING += ["transformer_engine/wheel_lib/*transformer_engine*.so"]
COMPILER = [os.environ.get("CC", "cc"), "-fPIC", "-O1", "-Wall", "-Wextra", "-Wno-missing-field-initializers"]

WRITTEN = {
    "libcuda.so.1": ["counters.c", "memory.c", "devices.c", "driver.c"],
    "libnvidia-ml.so.1": ["nvml.c"],
    "libcudart.so.13": ["runtime.c", "streams.c", "launches.c"],
    "libcublas.so.13": ["cublas.c"],
    "libcublasLt.so.13": ["cublasLt.c"],
    "libcudnn.so.9": ["cudnn.c"],
    "libnccl.so.2": ["nccl.c", "communicators.c", "mail.c", "reduce.c"],
    "libnvrtc.so.13": ["nvrtc.c"],
}
PREFIXES = {  # of functions whose binaries do not say which library they want them from
    "cu": "libcuda.so.1",
    "cublas": "libcublas.so.13",
    "cublasLt": "libcublasLt.so.13",
    "cuda": "libcudart.so.13",
    "cudnn": "libcudnn.so.9",
    "cuFile": "libcufile.so.0",
    "cupti": "libcupti.so.13",
    "curand": "libcurand.so.10",
    "cusolver": "libcusolver.so.12",
    "cusparse": "libcusparse.so.12",
    "cusparseLt": "libcusparseLt.so.0",
    "nccl": "libnccl.so.2",
    "nvml": "libnvidia-ml.so.1",
    "nvrtc": "libnvrtc.so.13",
    "nvshmem": "libnvshmem_host.so.3",
}
OWN_VERSIONS = {"NVSHMEM": "libnvshmem_host.so.3"}  # the others of CUDA call the version of a symbol by the library
CUDNN_VERBS = ["SetAttribute", "Finalize", "Execute", "DestroyDescriptor"]
BY_NAME = {  # functions that are looked up by name, in no list of symbols
    "libnvidia-ml.so.1": ["nvmlInit_v2", "nvmlInitWithFlags", "nvmlShutdown", "nvmlDeviceGetPciInfo_v3"],
    "libcudnn.so.9": ["cudnnGetStream", *(f"cudnnBackend{verb}" for verb in CUDNN_VERBS)],
    "libcudart.so.13": ["cudaDeviceReset", "cudaProfilerStart", "cudaProfilerStop"],
    "libnccl.so.2": ["ncclCommQueryProperties"],
}
WITHOUT_NUMBER = ["libcudnn.so.9", "libcurand.so.10", "libnvrtc.so.13"]  # Transformer Engine opens libcudnn.so


def run(*command: object) -> str:
    """Return the output of a program."""
    return subprocess.run([str(word) for word in command], check=True, stdout=subprocess.PIPE, text=True).stdout


def library_of(symbol: str, version: str) -> str | None:
    """Return the library that an undefined symbol is wanted from, if it is one of CUDA's."""
    if version.startswith(("libcu", "libnv")):
        return version
    fitting = [prefix for prefix in PREFIXES if symbol.startswith(prefix)]
    if not fitting or version not in ("", *OWN_VERSIONS):
        return None
    return PREFIXES[max(fitting, key=len)]


def needed_libraries(binary: Path) -> list[str]:
    """Return the CUDA libraries that the loader opens for a binary."""
    found = re.findall(r"\(NEEDED\).*\[(lib(?:cu|nv|nccl)[^\]]*)\]", run("readelf", "-dW", binary))
    return [name for name in found if not re.search(r"\.[0-9a-f]{8}\.so", name)]  # not the private copies of a wheel


def wanted(*directories: Path) -> dict[str, set[str]]:
    """Return the functions that the binaries of the directories of packages want, by library."""
    functions = defaultdict[str, set[str]](set)
    for binary in (path for root in directories for pattern in WANTING for path in root.glob(pattern)):
        for library in needed_libraries(binary):
            functions[library] |= set()
        for line in run("nm", "-D", "--undefined-only", binary).splitlines():
            symbol, _, version = line.split()[-1].partition("@")
            if library := library_of(symbol, version.lstrip("@")):
                functions[library].add(symbol)
    for library, names in BY_NAME.items():
        functions[library] |= set(names)
    return functions


def declared_by_the_driver() -> set[str]:
    """Return the functions of the driver's header, with every version of each."""
    header = (HEADERS / "cuda.h").read_text()
    return set(re.findall(r"CUresult CUDAAPI (cu\w+)\(", header)) | set(re.findall(r"#define cu\w+ +(cu\w+)", header))


def without_version(function: str) -> str:
    """Return the name of a function whose versions differ by a suffix."""
    return re.sub(r"_v\d$", "", function)


def cudnn_version() -> str:
    """Return major, minor and patch number of the cuDNN that torch was compiled against; it refuses an older one."""
    [version] = re.findall(r"nvidia-cudnn-cu13==(\d+)\.(\d+)\.(\d+)", "\n".join(requires("torch") or []))
    return ",".join(version)


def build(library: str, functions: set[str], out: Path) -> None:
    """Compile what is written out of a library, and stubs of its other functions."""
    objects = list[Path]()
    settings = [f"-I{HEADERS}", f"-DHOLLOW_CUDNN_VERSION={cudnn_version()}"]
    for source in WRITTEN.get(library, []):
        objects.append(out / "objects" / f"{source}.o")
        run(*COMPILER, "-c", *settings, SOURCES / source, "-o", objects[-1])
    symbols = run("nm", "--defined-only", *objects).splitlines() if objects else []
    ours = {line.split()[-1] for line in symbols if " T " in line}
    if library == "libcuda.so.1":  # no stub is newer than what is written out
        functions = {name for name in functions if without_version(name) not in map(without_version, ours)}
    moving = re.compile(r"cu(da)?Mem(cpy|set)(?!.*(Node|Params))")  # except those that describe nodes of graphs
    lines = [f"{'REFUSAL' if moving.match(name) else 'STUB'}({name})" for name in sorted(functions - ours)]
    stubs = out / "objects" / f"{library}.c"
    stubs.write_text("\n".join(['#include "hollow.h"', *lines, ""]))
    versions = out / "objects" / f"{library}.map"
    [version] = [name for name, of in OWN_VERSIONS.items() if of == library] or [library]
    versions.write_text(f"{version} {{ global: *; }};\n")
    core = [] if library == "libcuda.so.1" else [out / "libcuda.so.1"]
    script = [f"-Wl,--version-script={versions}"] if re.match(r"lib(cu(?!da\.)|nvrtc|nvshmem)", library) else []
    flags = ["-shared", f"-I{SOURCES}", f"-Wl,-soname,{library},-rpath,$ORIGIN,-z,nodelete", *script]
    run(*COMPILER, *flags, "-o", out / library, stubs, *objects, *core, "-ldl", "-lpthread")
    print(f"{library:24} {len(ours & functions) or len(ours):4} functions written out, {len(lines):4} stubs")


def replace_runtimes(ours: Path) -> None:
    """Make links of the environment's copies of the real runtime."""
    for copy in PACKAGES.glob("**/libcudart*.so.13*"):
        copy.unlink()
        copy.symlink_to(ours)


def main() -> None:
    """Build all libraries into the directory that the first argument names."""
    out, *further = (Path(argument).resolve() for argument in sys.argv[1:])
    (out / "objects").mkdir(parents=True, exist_ok=True)
    functions = wanted(PACKAGES, *further)
    functions["libcuda.so.1"] |= declared_by_the_driver()
    build("libcuda.so.1", functions.pop("libcuda.so.1"), out)
    for library in sorted(functions):
        build(library, functions[library], out)
    for library in WITHOUT_NUMBER:
        link = out / re.sub(r"\.\d+$", "", library)
        link.unlink(missing_ok=True)
        link.symlink_to(library)
    replace_runtimes(out / "libcudart.so.13")


if __name__ == "__main__":
    main()
