#!/usr/bin/env bash
# nb0 against a Linux kernel's own RoCE in an emulated machine (tests/vm/vm, docs/reference/interop.md). Alone: the newest kernel and the cases that
# take seconds; with arguments: whatever tests/vm/vm is asked for.
set -uo pipefail
. "$(dirname "$0")/programs.bash"
build
if [ $# = 0 ]; then set -- run --quick --kernel newest; fi
tests/vm/vm "$@"
exit $?
