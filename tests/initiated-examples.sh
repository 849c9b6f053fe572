#!/usr/bin/env bash
# The examples of GPU-initiated operations compile (nvcc and Triton from pip; no GPU is needed).
cd "$(dirname "$0")/.." || exit 2
exec timeout --kill-after=5 580 python3 tests/initiated_examples.py
