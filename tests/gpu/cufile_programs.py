#!/usr/bin/env python3
"""Reads files into a GPU with programs of cuFile, compares every byte, and prints the median times. A package that is missing is named.

    nobounce run --cufile -- python3 tests/gpu/cufile_programs.py FOLDER     by the drop-in libcufile
    python3 tests/gpu/cufile_programs.py FOLDER                              as the program reads without it
"""
import gc
import os
import statistics
import sys
import tempfile
import time

import numpy
import torch

SIZES = {"64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20, "256 MiB": 256 << 20}
TENSORS, ROWS = 12, 2048
ROUNDS = 15


def median_us(read):
    """The median of the calls after two that warm up, in microseconds."""
    times = []
    for _ in range(ROUNDS + 2):
        start = time.perf_counter()
        read()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:]) * 1e6


def same(found, content):
    assert bytes(found) == content.tobytes(), "other bytes than the file's"


def kvikio(folder, content):
    import cupy
    import kvikio as package

    path = os.path.join(folder, "content")
    content.tofile(path)
    for name, size in SIZES.items():
        memory = cupy.zeros(size, "u1")
        package.memory_register(memory)
        with package.CuFile(path, "r") as file:
            yield f"KvikIO {package.__version__}, {name}", median_us(lambda: file.read(memory))
        same(cupy.asnumpy(memory), content[:size])
        package.memory_deregister(memory)


def gds(folder, content):
    from torch.cuda import gds as package

    path = os.path.join(folder, "content")
    content.tofile(path)
    size = SIZES["16 MiB"]
    memory = torch.zeros(size, dtype=torch.uint8, device="cuda")
    storage = memory.untyped_storage()
    package.gds_register_buffer(storage)
    file = package.GdsFile(path, os.O_RDWR)
    yield f"torch.cuda.gds {torch.__version__}, 16 MiB", median_us(lambda: file.load_storage(storage, 0))
    same(memory.cpu().numpy(), content[:size])
    memory += 1
    file.save_storage(storage, 0)
    same(memory.cpu().numpy(), numpy.fromfile(path, "u1", size))
    package.gds_deregister_buffer(storage)


def fastsafetensors(folder, content):
    import fastsafetensors as package
    from safetensors.torch import save_file

    path = os.path.join(folder, "model.safetensors")
    tensors = {f"layer.{at}": torch.arange(at, at + ROWS * ROWS, dtype=torch.float32).reshape(ROWS, ROWS) for at in range(TENSORS)}
    save_file(tensors, path)
    times = []
    for _ in range(ROUNDS + 2):
        gc.collect()
        loader = package.SafeTensorsFileLoader(None, "cuda:0", nogds=False)
        loader.add_filenames({0: [path]})
        start = time.perf_counter()
        buffers = loader.copy_files_to_device()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
        for name, tensor in tensors.items():
            assert torch.equal(buffers.get_tensor(name).cpu(), tensor), f"{name} differs"
        buffers.close()
        loader.close()
    yield f"fastsafetensors, {os.path.getsize(path) / 1e6:.0f} MB", statistics.median(times[2:])


def main():
    content = numpy.random.default_rng(1).integers(0, 256, max(SIZES.values()), dtype="u1")
    failed = 0
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as folder:
        for program in (kvikio, gds, fastsafetensors):
            try:
                for what, took in program(folder, content):
                    print(f"{what}: {took:.0f} us", flush=True)
            except ImportError as error:
                print(f"{program.__name__}: not installed: {error}", flush=True)
            except (AssertionError, RuntimeError) as error:
                failed += 1
                print(f"{program.__name__}: failed: {str(error).splitlines()[0]}", flush=True)
    return failed


sys.exit(main())
