#!/usr/bin/env bash
# Builds the command and the drop-in libraries for aarch64, and tries them in an emulated machine of that kind (tests/vm/aarch64.py). It is
# not executable, so that tools/test-scripts leaves it out: `make test-aarch64` runs it.
set -uo pipefail
. "$(dirname "$0")/programs.bash"
TARGET=aarch64-unknown-linux-gnu

waive() { # waive REASON
    tools/waive aarch64 "$1"
    exit
}
for program in aarch64-linux-gnu-gcc qemu-system-aarch64; do
    command -v $program >/dev/null || waive "$program is not installed (tools/setup aarch64)"
done
[ -d "$(rustc --print target-libdir --target $TARGET)" ] || waive "Rust's standard library for aarch64 is not installed (tools/setup aarch64)"

build
# Without fat LTO, which takes minutes for each library: it is tried here, not measured.
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 CARGO_PROFILE_RELEASE_DEBUG=false
packages=(cli ibverbs rdmacm gdrapi cufile paths vmm world stub-mlx5 stub-efa)
cargo build --locked --release --target $TARGET "${packages[@]/#/-pnobounce-}" || { echo "the code does not compile for aarch64"; exit 1; }
built=$target/$TARGET/release
tools/dropin "$built" "$built/dropin" || exit 1
tests/vm/vm aarch64 "$built" | tee "$folder/client"
code=${PIPESTATUS[0]}
[ "$code" != 77 ] || waive "$(tail -n 1 "$folder/client")"
exit "$code"
