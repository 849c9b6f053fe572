#!/usr/bin/env bash
# A program that people install with pip, unmodified on nb0 (tests/clients): NIXL, with every byte compared and a peer that dies. All of them: make test-clients.
set -uo pipefail
. "$(dirname "$0")/programs.bash"
need python3 python3-venv
build

CARGO_TARGET_DIR=$(realpath "$target") timeout --kill-after=5 900 tests/clients/run --quick --bin "$(dirname "$nobounce")"
