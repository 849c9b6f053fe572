#!/usr/bin/env bash
# tests/image.sh IMAGE NOBOUNCE: what `make image` has written, in podman (tests/image.py). `make test-image` builds both.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
PATH=$PATH:/usr/sbin:/sbin

for program in podman runc unshare ibv_devinfo; do
    command -v "$program" >/dev/null || exec tools/waive image "$program is not installed"
done
[ "$(id -u)" = 0 ] || exec tools/waive image "mounts and /etc/cdi need root"

timeout --kill-after=30 400 unshare -m python3 tests/image.py "$1" "$2"
