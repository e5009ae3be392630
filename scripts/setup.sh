#!/usr/bin/env bash
# Make the Python environments of this repository. A second run without changes takes less than a second.
#
#   scripts/setup.sh            .venv: exactly requirements/cpu.lock, and megarl itself, editable
#   scripts/setup.sh packages   .venv without megarl, for the layer of an image
#   scripts/setup.sh newest     .venv-newest: .venv, overridden by requirements/newest.txt
#   scripts/setup.sh oldest     .venv-oldest: .venv, overridden by requirements/oldest.txt
#   scripts/setup.sh peers      .venv-peers: .venv, completed by requirements/peers.lock
#   scripts/setup.sh docs       .venv-docs: .venv, completed by requirements/docs.lock
#   scripts/setup.sh cuda       .venv-cuda: requirements/gpu.lock, for the hollow device (docs/hollow.md); Python 3.12
#   scripts/setup.sh cuda-newest   .venv-cuda-newest: the same, overridden by requirements/gpu-newest.txt
#
# PYTHON=/path/to/python chooses the interpreter (3.11 or 3.12).
set -euo pipefail
cd "$(dirname "$0")/.."

die() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

# step NAME REMEDY COMMAND...: run the command with its output in $log; on failure show the end of the log and the remedy.
step() {
    local name=$1 remedy=$2 started=$SECONDS
    shift 2
    printf 'setup: %-34s' "$name"
    if "$@" >"$log" 2>&1; then
        printf ' %4d s\n' $((SECONDS - started))
        return
    fi
    printf ' failed\n'
    grep -v "is ignored: it is neither" "$log" | tail -n 20 >&2
    die "step '$name' failed (above: the end of its output)." "$remedy"
}

is_supported() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
}

find_python() {
    local candidate
    if [[ -z ${PYTHON:-} && -x .venv/bin/python ]]; then # the choice of an earlier run
        PYTHON=$(.venv/bin/python -c 'import sys; print(sys._base_executable)')
    fi
    if [[ -n ${PYTHON:-} ]]; then
        is_supported "$PYTHON" || die "PYTHON=$PYTHON is not a Python 3.11 or 3.12 with the venv and ensurepip modules." \
            "Set PYTHON to such an interpreter (Debian and Ubuntu: apt-get install python3.11-venv)."
        echo "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3 python; do # 3.11 first: most test runs used it
        if is_supported "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python 3.11 or 3.12 with the venv module found (tried python3.11, python3.12, python3, python)." \
        "Install Python (Debian and Ubuntu: apt-get install python3.11-venv) or name it: make setup PYTHON=/path/to/python3.12"
}

check_tools() {
    local tool
    for tool in git make; do
        command -v $tool >/dev/null || die "'$tool' is missing. Install it (Debian and Ubuntu: apt-get install $tool)."
    done
    command -v "${CC:-cc}" >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null ||
        die "no C compiler (cc, gcc, clang or \$CC): torch and Triton compile kernels at run time." \
            "Install a compiler (Debian and Ubuntu: apt-get install build-essential)."
}

pip_install() {
    .venv/bin/python -m pip install --no-deps --disable-pip-version-check "$@"
}

# pip_setting KEY: print what pip's environment or files say of KEY, several values separated by spaces.
pip_setting() {
    .venv/bin/python -m pip config list | sed -nE "s/^(:env:|global|install)\.$1='(.*)'\$/\2/p" | head -n 1 | sed 's/\\n/ /g'
}

# uv_install PYTHON ARGUMENT...: install with uv, in seconds, from pip's sources. Variables of uv replace settings of pip.
# Like pip, and unlike uv itself, it trusts the certificates of the system.
uv_install() {
    local into=$1 links cert
    shift
    links=$(pip_setting find-links)
    cert=${SSL_CERT_FILE:-$(pip_setting cert)}
    env UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$(pip_setting index-url)}" \
        UV_INDEX="${UV_INDEX:-$(pip_setting extra-index-url)}" \
        UV_FIND_LINKS="${UV_FIND_LINKS:-${links// /,}}" \
        UV_INDEX_STRATEGY="${UV_INDEX_STRATEGY:-unsafe-best-match}" \
        UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-true}" ${cert:+"SSL_CERT_FILE=$cert"} \
        .venv/bin/uv pip install --no-deps --python "$into" "$@"
}

# The lock names PyTorch's CPU build of torch. If pip's sources lack this build, uv takes it from PyTorch's own index.
# uv sometimes crashes when it ends. A second call then finds everything installed.
install_lock() {
    pip_install "$(grep '^uv==' requirements/cpu.lock)"
    uv_install .venv/bin/python -r requirements/cpu.lock || {
        (($? > 128)) && uv_install .venv/bin/python -r requirements/cpu.lock
    } || uv_install .venv/bin/python -r requirements/cpu.lock --torch-backend cpu
}

# check_imports PYTHON [MODULE...]: import the modules, and what a training run imports. This also writes bytecode: uv
# writes none, and where PYTHONDONTWRITEBYTECODE is set, as many images of containers set it, each process would compile
# thousands of modules again.
check_imports() {
    local python=$1
    shift
    PYTHONDONTWRITEBYTECODE='' HF_HUB_OFFLINE=1 "$python" -c '
import sys
from importlib import import_module
from megarl.commands import train
for name in (*sys.argv[1:], *train.PROGRAM.imports):
    import_module(name)' "$@"
}

# fingerprint FILE...: print a number that changes with the interpreter and the files.
fingerprint() {
    { "$python" -VV && cat "$@"; } | cksum
}

# stamped FILE TEXT: whether FILE contains TEXT. A stamp is written after the last of its steps.
stamped() {
    [[ -f $1 && $(<"$1") == "$2" ]]
}

setup_packages() {
    local packages
    packages=$(fingerprint requirements/cpu.lock)
    if stamped .venv/.packages "$packages"; then
        return
    fi
    check_tools
    step "create .venv ($("$python" -V))" "Remove .venv and try again; PYTHON= chooses another interpreter." \
        "$python" -m venv --clear .venv
    step "install requirements/cpu.lock" \
        "Check the network, the proxy, the disk (9 GB) and the sources: pip config list, UV_* variables." install_lock
    echo "$packages" >.venv/.packages
}

setup_locked() {
    local project
    setup_packages
    project=$(fingerprint requirements/cpu.lock pyproject.toml)
    if stamped .venv/.project "$project"; then
        echo "setup: .venv is up to date"
        return
    fi
    step "install megarl (editable)" "Check pyproject.toml; it needs no network." \
        pip_install --no-build-isolation --no-index -e .
    step "import torch, vLLM, Megatron-Core" "Run the doctor: .venv/bin/python -m megarl doctor" \
        check_imports .venv/bin/python
    echo "$project" >.venv/.project
}

# lay_over VENV LIST [MODULE...]: make VENV, in which the packages of LIST come first on sys.path, and .venv provides all
# others, which takes seconds instead of minutes. addsitedir instead of a path makes the editable megarl visible too.
lay_over() {
    local venv=$1 list=$2 stamp site
    shift 2
    setup_locked
    stamp=$(fingerprint .venv/.project "$list")
    if stamped "$venv/.project" "$stamp"; then
        echo "setup: $venv is up to date"
        return
    fi
    step "create $venv" "Remove $venv and try again." "$python" -m venv --clear "$venv"
    step "install $list" "Check the network and pip's sources: pip config list." \
        "$venv/bin/python" -m pip install --no-deps --disable-pip-version-check --ignore-requires-python \
        -r "$list"
    site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "import site; site.addsitedir('$site')" \
        >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth"
    step "import torch, vLLM, Megatron-Core${1:+, $1}" "Remove $venv and try again." \
        check_imports "$venv/bin/python" "$@"
    echo "$stamp" >"$venv/.project"
}

# Not in .venv-cuda: NVIDIA's libraries that the hollow device stands in for, compilers that no test uses (3 GB), and
# Transformer Engine, whose extension of torch would have to be compiled.
LEFT_OUT='^nvidia-(cublas|cudnn-cu13|cufft|cufile|curand|cusolver|cusparse|cusparselt-cu13|nccl-cu13|nvshmem-cu13)=='
LEFT_OUT+='|^nvidia-(nvjitlink|nvvm|cuda-cupti|cuda-nvrtc|cuda-nvcc|cuda-cccl)==|^nccl(4py|-extensions)==|^transformer-engine'

find_python_312() {
    local candidate
    for candidate in "${PYTHON_312:-$python}" "$(readlink -f .venv-cuda/bin/python)" python3.12 \
        "$HOME"/.pyenv/versions/3.12*/bin/python3.12; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python 3.12 with the venv module found, and requirements/gpu.lock is for no other." \
        "Install it (Ubuntu: apt-get install python3.12-venv), or name it: PYTHON_312=/path/to/python3.12 make hollow"
}

# install_gpu_lists VENV LIST...: install the packages of the lists. Of a package in several lists the first line counts.
install_gpu_lists() {
    local venv=$1
    shift
    cat "$@" | awk -F== '!seen[$1]++' | grep -vE "$LEFT_OUT" >"$log.lock"
    uv_install "$venv/bin/python" -r "$log.lock" || uv_install "$venv/bin/python" -r "$log.lock"
    rm -f "$log.lock"
}

# setup_cuda VENV LIST...: make VENV with the packages of the lists.
setup_cuda() {
    local venv=$1 python_312 stamp
    shift
    setup_packages
    python_312=$(find_python_312)
    stamp=$({ "$python_312" -VV && cat "$@" pyproject.toml "$0"; } | cksum)
    if stamped "$venv/.project" "$stamp"; then
        echo "setup: $venv is up to date"
        return
    fi
    check_tools
    step "create $venv ($("$python_312" -V))" "Remove $venv and try again." "$python_312" -m venv --clear "$venv"
    step "install $1" "Check the network, the disk (9 GB) and the sources: pip config list." \
        install_gpu_lists "$venv" "$@"
    step "install megarl (editable)" "Check pyproject.toml; it needs no network." "$venv/bin/python" -m pip install \
        --no-deps --disable-pip-version-check --no-build-isolation --no-index -e .
    echo "$stamp" >"$venv/.project"
}

python=$(find_python)
log=$(mktemp)
trap 'rm -f "$log"' EXIT
exec 9<requirements/cpu.lock && flock 9 # two makes at once: the second waits and then finds nothing to do
case ${1:-} in
"") setup_locked ;;
packages) setup_packages ;;
newest) lay_over .venv-newest requirements/newest.txt ;;
oldest) lay_over .venv-oldest requirements/oldest.txt ;;
peers) lay_over .venv-peers requirements/peers.lock trl.trainer.grpo_trainer transfer_queue ;;
docs) lay_over .venv-docs requirements/docs.lock mkdocs material mkdocstrings_handlers.python ;;
cuda) setup_cuda .venv-cuda requirements/gpu.lock ;;
cuda-newest) setup_cuda .venv-cuda-newest requirements/gpu-newest.txt requirements/gpu.lock ;;
*) die "unknown argument '$1': give none, 'packages', 'newest', 'oldest', 'peers', 'docs', 'cuda' or 'cuda-newest'." ;;
esac
