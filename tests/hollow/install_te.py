"""Install Transformer Engine into a directory, its extension of torch compiled: `make test-te`. A quarter of an hour.

It stays outside `.venv-cuda`, so that learners run there without it. The compiler needs the headers of CUDA libraries
that the hollow device replaces; the wheels with these headers are downloaded, 1.3 GB.
"""

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENTS = Path(__file__).parents[2] / "requirements"
LIBRARIES = ["cublas", "cuda-cccl", "cuda-crt", "cuda-nvrtc", "cuda-runtime", "cudnn-cu13", "curand", "cusolver"]
LIBRARIES += ["cusparse", "nccl-cu13", "nvtx"]
BUILD = {  # as in docker/Dockerfile
    "NVTE_FRAMEWORK": "pytorch",
    "NVTE_PYTORCH_FORCE_BUILD": "TRUE",
    "NVTE_WITH_NCCL_EP": "0",
}


def pinned(file: str, *packages: str) -> list[str]:
    """Return the requirements `NAME==VERSION` of packages in a file of requirements."""
    lines = (REQUIREMENTS / file).read_text().splitlines()
    return [line for line in lines if line.partition("==")[0] in packages]


def pip(*arguments: object, **variables: str) -> None:
    """Run pip without what packages depend on."""
    command = [sys.executable, "-m", "pip", *map(str, arguments), "--no-deps", "--quiet"]
    subprocess.run(command, check=True, env=os.environ | variables)


def extract_headers(to: Path) -> None:
    """Write the headers of the CUDA libraries of requirements/gpu.lock to `to/include`."""
    with tempfile.TemporaryDirectory() as wheels:
        pip("download", "--dest", wheels, *pinned("gpu.lock", *(f"nvidia-{library}" for library in LIBRARIES)))
        for wheel in map(zipfile.ZipFile, Path(wheels).glob("*.whl")):
            for name in wheel.namelist():
                if header := re.fullmatch(r"nvidia/\w+/(include/.*[^/])", name):
                    file = to / header[1]
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(wheel.read(name))


def main() -> None:
    """Install into the directory that the first argument names."""
    packages = [
        *pinned("gpu.lock", "transformer-engine", "transformer-engine-cu13"),
        *pinned("gpu-source.txt", "transformer-engine-torch"),
    ]
    with tempfile.TemporaryDirectory() as name:
        cuda, tools = Path(name, "cuda"), Path(name, "tools")
        extract_headers(cuda)
        pip("install", "--target", tools, "wheel", "pybind11")
        paths = os.pathsep.join([str(tools), os.environ["PYTHONPATH"]])
        headers = os.pathsep.join([str(cuda / "include"), str(cuda / "include/cccl")])
        variables = BUILD | {"CUDA_HOME": str(cuda), "CPLUS_INCLUDE_PATH": headers, "PYTHONPATH": paths}
        # pip's cache ignores the version of torch that an extension was compiled for.
        options = ["--no-build-isolation", "--no-cache-dir", "--upgrade"]
        pip("install", "--target", sys.argv[1], *options, *packages, **variables)


if __name__ == "__main__":
    main()
