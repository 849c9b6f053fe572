#!/usr/bin/env python3
"""Compiles the examples of GPU-initiated operations: CUDA by nvcc, the Triton kernel by Triton. No GPU is needed.

Both come from pip (cached below the target folder); exit 77 with the reason where they cannot be installed.
"""
import os
import subprocess
import sys
import types

from from_pip import ROOT, installed

EXAMPLES = os.path.join(ROOT, "examples", "gpu-initiated")
CUDA = [f"nvidia-cuda-{part}==13.0.*" for part in ("nvcc", "crt", "runtime", "cccl")] + ["nvidia-nvvm==13.0.*"]


def compile_cuda():
    folder = os.path.join(installed("cuda", CUDA), "nvidia", "cu13")
    for program in ("nvcc", "cudafe++", "ptxas", "fatbinary"):
        os.chmod(os.path.join(folder, "bin", program), 0o755)
    os.chmod(os.path.join(folder, "nvvm", "bin", "cicc"), 0o755)
    command = [sys.executable, os.path.join(EXAMPLES, "run"), "--compile", "--only", "all_reduce", "--only", "halo", "--only", "moe", "--arch", "sm_90"]
    subprocess.run([*command, "--nvcc", os.path.join(folder, "bin", "nvcc")], check=True)


def compile_triton():
    sys.path[:0] = [installed("triton", ["triton==3.6.*"]), EXAMPLES]
    sys.dont_write_bytecode = True
    sys.modules["torch"] = types.ModuleType("torch")  # which the kernel does not need
    import triton
    import triton_put
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = {"channel": "i64", "heap": "i64", "peer": "i32", "rounds": "i32", "wrong": "*i32", "SIZE": "constexpr", "FIRST": "constexpr"}
    for first in (True, False):
        source = ASTSource(fn=triton_put.ping_pong, signature=kinds, constexprs={"SIZE": 1024, "FIRST": first})
        text = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
        assert "fence.acq_rel.sys" in text and "st.global.b64" in text, "the words of a descriptor are stored behind a fence"
    print("compiled: triton_put")


if __name__ == "__main__":
    compile_cuda()
    compile_triton()
