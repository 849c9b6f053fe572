#!/usr/bin/env bash
# Containers with the software NIC, by the file of `nobounce cdi generate`: other people's programs in images without any file of ours.
set -uo pipefail
. "$(dirname "$0")/programs.bash"
need podman podman
need runc runc
need unshare util-linux
need ip iproute2
[ "$(id -u)" = 0 ] || { echo "network namespaces and /etc/cdi need root"; exit 77; }
build

# A mount namespace: the files in /etc/cdi are seen by these containers only.
CARGO_TARGET_DIR=$(realpath "$target") timeout --kill-after=5 400 unshare -m python3 tests/containers.py "$nobounce"
