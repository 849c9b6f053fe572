#!/usr/bin/env bash
# The Kubernetes device plugin against a kubelet in Python (grpcio), and the manifests of kubernetes/ against the API's schema.
set -uo pipefail
. "$(dirname "$0")/programs.bash"
build

timeout --kill-after=5 300 python3 tests/device_plugin.py "$target/debug/nobounce-device-plugin" "$nobounce"
