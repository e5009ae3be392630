#!/usr/bin/env bash
# Build docker/Dockerfile.cpu where no registry can be reached, and run the quickstart in the image: debootstrap makes the
# base image, buildah the rest. Needs root, debootstrap, buildah and a Debian mirror.
#
#   docker/try_cpu.sh [--sft-steps 4 --ppo-steps 2]
#
# MIRROR is the Debian mirror. BUILD_OPTIONS go to `buildah build`, for instance
# "--volume /etc/pip.conf:/etc/pip.conf:ro" if pip needs a mirror, too.
set -euo pipefail
cd "$(dirname "$0")/.."

mirror=${MIRROR:-http://deb.debian.org/debian}
root=$(mktemp -d)
export BUILDAH_ISOLATION=chroot # works inside a container
made=()
clean() {
    ((${#made[@]} == 0)) || buildah rm "${made[@]}" >/dev/null
    rm -rf --one-file-system "$root"
}
trap clean EXIT

if ! buildah inspect localhost/megarl-base >/dev/null 2>&1; then
    debootstrap --variant=minbase bookworm "$root" "$mirror"
    container=$(buildah from scratch)
    made+=("$container")
    buildah add --quiet "$container" "$root" /
    buildah run "$container" -- apt-get update
    buildah run "$container" -- apt-get install -y --no-install-recommends ca-certificates python3.11-venv
    buildah commit --quiet "$container" localhost/megarl-base
fi

read -ra options <<<"${BUILD_OPTIONS:-}"
buildah build --file docker/Dockerfile.cpu --tag localhost/megarl:cpu --build-arg BASE=localhost/megarl-base \
    --build-arg PYTHON=/usr/bin/python3.11 "${options[@]}" .

container=$(buildah from localhost/megarl:cpu)
made+=("$container")
buildah run "$container" -- .venv/bin/python scripts/quickstart.py "$@"
