#!/usr/bin/env bash
# tools/gpu-check needs a GPU; the order in which it runs things does not.
exec timeout 300 python3 "$(dirname "$0")/gpu-check/order.py"
