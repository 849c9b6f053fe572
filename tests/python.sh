#!/usr/bin/env bash
# The Python package, built for tests: its own tests, and mypy --strict. PYTHONS names other interpreters.
cd "$(dirname "$0")/.." || exit 2
exec timeout --kill-after=5 580 python3 tests/python_package.py ${PYTHONS:-python3}
