#!/usr/bin/env bash
# A program that people install with pip, unmodified on nb0 (tests/clients): NIXL, with every byte compared and a peer that dies, and its GDS
# plugins on the drop-in libcufile. All of them: make test-clients.
set -uo pipefail
. "$(dirname "$0")/programs.bash"
need python3 python3-venv
build

CARGO_TARGET_DIR=$(realpath "$target") timeout --kill-after=5 900 tests/clients/run --quick --bin "$(dirname "$nobounce")" || exit

python=$(realpath "$target")/clients/nixl/bin/python3
runtime=$(dirname "$(find "$target/clients/nixl" -name 'libcudart.so.*' -print -quit)")
NOBOUNCE_CUDA=$(realpath "$target/debug/libfake_cuda.so") LD_LIBRARY_PATH=$(realpath "$runtime") \
    timeout --kill-after=5 120 "$nobounce" run --cufile --addr "$address" -- "$python" tests/clients/gds_files.py "$folder" 2>&1 | tee "$folder/output"
[ "${PIPESTATUS[0]}" = 0 ] || exit 1
grep -q 'cuFile read 2097152 bytes' "$folder/output" || { echo "the bytes did not go through the drop-in libcufile"; exit 1; }
