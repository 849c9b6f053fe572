#!/usr/bin/env bash
# The device code of GPU-initiated operations compiles (NVRTC from pip; no GPU is needed).
cd "$(dirname "$0")/.." || exit 2
exec timeout --kill-after=5 900 python3 tests/device_header.py
