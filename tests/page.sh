#!/usr/bin/env bash
# The page of `nobounce ui` in Debian's chromium, and report, metrics and top, with real traffic beside them.
set -uo pipefail
. "$(dirname "$0")/programs.bash"
build

timeout --kill-after=5 300 python3 tests/page.py "$nobounce"
