#!/bin/bash
# Build the fake device base from a local image that holds the real trees.
# Usage: tests/image/fake_device_base/build.sh [<image with the trees>] [<tag>]
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
from="${1:-strata-base:0.23.0-cpu}"
tag="${2:-strata-fake-base:0.23.0-a3}"
if ! docker image inspect "${from}" > /dev/null 2>&1; then
    echo "E-BASE: no local image ${from}" >&2
    echo "  next:     build it first: make base (or name another image: $0 <image>)" >&2
    exit 2
fi
docker buildx build --load --build-context "rootfs=docker-image://${from}" --tag "${tag}" "${here}"
echo "built ${tag}: try  make image VERSION=0.23.0 BASE=${tag}"
