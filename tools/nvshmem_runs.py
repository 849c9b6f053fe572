"""NVSHMEM over its IBRC transport and nb0, two PEs on one GPU: what `gpu-check --only nvshmem` compiles and runs.

The library, its headers and its transports are those of PyTorch's packages, the compiler is the machine's nvcc.
"""

import importlib.util
import os
import shutil

import bounded

COMPILE_LIMIT, RUN_LIMIT = 100, 60


def folder():
    """Where NVSHMEM is, or None."""
    try:
        found = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:
        return None
    places = list(found.submodule_search_locations or []) if found else []
    return next((place for place in places if os.path.exists(os.path.join(place, "include", "nvshmem.h"))), None)


def nvcc():
    return shutil.which("nvcc") or next((path for path in ("/usr/local/cuda/bin/nvcc",) if os.path.exists(path)), None)


def missing():
    """Why it cannot run here, or nothing."""
    if not nvcc():
        return "there is no nvcc here"
    if not folder():
        return "this Python has no nvidia.nvshmem with headers"
    return ""


def compile_program(bundle, out):
    """(exit code, output, seconds, program)"""
    where, program = folder(), os.path.join(out, "ops")
    host = sorted(name for name in os.listdir(os.path.join(where, "lib")) if name.startswith("libnvshmem_host.so"))[-1]
    command = [nvcc(), "-rdc=true", "-arch=native", "-o", program, os.path.join(bundle, "programs", "nvshmem-ops.cu"),
               "-I", os.path.join(where, "include"), "-L", os.path.join(where, "lib"), "-lnvshmem_device", "-Xlinker", f"-l:{host}", "-lcuda"]
    return (*bounded.run(command, COMPILE_LIMIT, os.path.join(out, "nvcc.txt"), {}), program)


def run_program(bundle, out, program, limit):
    """(exit code, output, seconds)"""
    library = os.path.join(folder(), "lib")
    environment = {
        "LD_LIBRARY_PATH": ":".join(filter(None, (library, os.environ.get("LD_LIBRARY_PATH")))),
        # Two PEs on one GPU would otherwise reach each other's memory without a network.
        "NVSHMEM_DISABLE_P2P": "1", "NVSHMEM_REMOTE_TRANSPORT": "ibrc", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50",
        "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo", "NVSHMEM_SYMMETRIC_SIZE": "64M", "NVSHMEM_DEBUG": "INFO",
        "NVSHMEM_DEBUG_FILE": os.path.join(out, "nvshmem.%p.log"), "NOBOUNCE_LOG": "warn",
    }
    for stale in ("uid", "uid.ready"):
        if os.path.exists(os.path.join(out, stale)):
            os.remove(os.path.join(out, stale))
    command = [os.path.join(bundle, "bin", "nobounce"), "run", "--", program, out]
    return bounded.run(command, min(limit, RUN_LIMIT), os.path.join(out, "said.txt"), environment)
