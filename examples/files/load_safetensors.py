#!/usr/bin/env python3
"""Loads a safetensors file into a GPU with nobounce, from this machine and from a file server, beside the safetensors package.

    python examples/files/load_safetensors.py [--gigabytes 2] [--folder /var/tmp] [--device cuda] [--rounds 5]

Makes the file, compares every tensor, prints the median times, and removes the file.
"""
import argparse
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time

import nobounce
import safetensors.torch
import torch

SERVER = "import nobounce, sys; server = nobounce.FileServer(sys.argv[1], '127.0.0.1:0'); print(server.address, flush=True); sys.stdin.read()"


def make(path, size):
    torch.manual_seed(1)
    one = 64 << 20
    tensors = {f"layer.{number}.weight": torch.randint(0, 255, (one,), dtype=torch.uint8).view(torch.bfloat16).reshape(-1, 4096) for number in range(size // one)}
    safetensors.torch.save_file(tensors, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def cool(path):
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(load, path, rounds, is_cold):
    times = []
    for _ in range(rounds):
        if is_cold:
            cool(path)
        gc.collect()
        start = time.perf_counter()
        tensors = load()
        if next(iter(tensors.values())).is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        del tensors
    return statistics.median(times)


def equal(found, expected):
    # As bytes: a number that is none is not equal to itself.
    same = found.keys() == expected.keys() and all(torch.equal(found[key].view(torch.uint8), expected[key].view(torch.uint8)) for key in expected)
    assert same, "the tensors differ"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--folder", default="/var/tmp")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = os.path.join(folder, "model.safetensors")
        make(path, int(args.gigabytes * (1 << 30)))
        size = os.path.getsize(path)
        loads = {
            "safetensors": lambda: safetensors.torch.load_file(path, device=args.device),
            "nobounce": lambda: nobounce.load_safetensors(path, args.device),
        }
        expected = loads["safetensors"]()
        equal(loads["nobounce"](), expected)
        print(f"{size / 1e9:.2f} GB into {args.device}, every tensor equal; median of {args.rounds}")

        def show(name, is_cold):
            took = timed(loads[name], path, args.rounds, is_cold)
            print(f"  {'not cached' if is_cold else 'page cache':<11} {name:<22} {took:7.3f} s  {size / took / 1e9:6.2f} GB/s", flush=True)

        # A server maps the file, which keeps it in the page cache: it comes last.
        for is_cold in (False, True):
            for name in loads:
                show(name, is_cold)
        server = subprocess.Popen([sys.executable, "-c", SERVER, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            remote = f"nb://{server.stdout.readline().strip()}/model.safetensors"
            loads["nobounce, file server"] = lambda: nobounce.load_safetensors(remote, args.device)
            equal(loads["nobounce, file server"](), expected)
            del expected
            show("nobounce, file server", False)
        finally:
            server.stdin.close()
            server.wait(timeout=20)
        print("paths:", nobounce.file_stats()["read"])


main()
