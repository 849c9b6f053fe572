#!/usr/bin/env python3
"""Compiles the device code of GPU-initiated operations with NVRTC, for every generation of GPUs that it supports. No GPU is needed.

NVRTC comes from pip (cached below the target folder); exit 77 with the reason where it cannot be installed.
"""
import ctypes
import glob
import os
import sys

from from_pip import ROOT, installed

HEADER = os.path.join(ROOT, "crates/initiated/include/nobounce.cuh")
# Volta lacks nothing that the header uses, but CUDA 13 does not compile for it any more.
ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100")
KERNEL = b"""
#include "nobounce.cuh"
using namespace nobounce;

extern "C" __global__ void every_operation(Channel *channel, u32 rank, u64 rounds, u8 *there, u8 *here) {
    for (u64 round = 1; round <= rounds; round++) {
        put(channel, rank, there, here, 1ull << 32, signal(0, 1), counter(1));
        if (wait_signal(channel, rank, 0, round) != Status::ok)
            return;
    }
    put_value(channel, rank, (float *)there, 1.5f, signal(1, 2));
    put_value(channel, rank, (u64 *)there, 1ull);
    get(channel, rank, here, there, 100, counter(2));
    if (wait_counter(channel, 2, 1) != Status::ok || flush(channel, rank) != Status::ok || has_failed(channel, rank))
        return;
    reset_counter(channel, 2);
    add(channel, rank, (u64 *)there, 4);
    signal_add(channel, rank, 3, 1);
    barrier(channel, 4, 1);
    put_warp(channel, rank, there, here, 64);
    put_block(channel, rank, there, here, 64);
    wait_signal_block(channel, rank, 0, read_signal(channel, 1) + read_counter(channel, 1));
}
"""


def nvrtc():
    folder = installed("nvrtc", ["nvidia-cuda-nvrtc"])
    return ctypes.CDLL(sorted(glob.glob(os.path.join(folder, "nvidia/**/libnvrtc.so.*"), recursive=True))[0])


def compiled(library, architecture, header):
    """The log of a failed compilation, or None."""
    program = ctypes.c_void_p()
    names, headers = (ctypes.c_char_p * 1)(b"nobounce.cuh"), (ctypes.c_char_p * 1)(header)
    if library.nvrtcCreateProgram(ctypes.byref(program), KERNEL, b"every_operation.cu", 1, headers, names) != 0:
        return "nvrtcCreateProgram failed"
    options = (ctypes.c_char_p * 2)(f"--gpu-architecture={architecture}".encode(), b"--std=c++17")
    if library.nvrtcCompileProgram(program, 2, options) == 0:
        return None
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    return log.value.decode()


def main():
    with open(HEADER, "rb") as file:
        header = file.read()
    library = nvrtc()
    failed = 0
    for architecture in ARCHITECTURES:
        log = compiled(library, architecture, header)
        print(f"{architecture}: {'compiled' if log is None else log}")
        failed += log is not None
    if compiled(library, ARCHITECTURES[-1], header.replace(b"wait_counter(", b"wait_nothing(", 1)) is None:
        print("a wrong header compiled, too")
        failed += 1
    sys.exit(1 if failed else 0)


main()
