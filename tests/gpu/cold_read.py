#!/usr/bin/env python3
"""Reads of a file that is not in the page cache, into the GPU, beside what fio reads into host memory: in turns, GB/s.

    python3 tests/gpu/cold_read.py FOLDER [FIO]
"""
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import nobounce
import numpy
import torch

ROUNDS = 7
FIO = {
    "fio, 4 jobs, pread": ["--ioengine=psync", "--numjobs=4", "--size=25%", "--offset_increment=25%"],
    "fio, 8 jobs, pread": ["--ioengine=psync", "--numjobs=8", "--size=12%", "--offset_increment=12%"],
    "fio, libaio, depth 32": ["--ioengine=libaio", "--iodepth=32"],
    "fio, io_uring, depth 32": ["--ioengine=io_uring", "--iodepth=32"],
}


def cool(path):
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def by_fio(program, path, words):
    command = [program, "--name=read", f"--filename={path}", "--rw=read", "--bs=1M", "--direct=1", "--group_reporting", "--output-format=json", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return None
    return json.loads(done.stdout[done.stdout.index("{"):])["jobs"][0]["read"]["bw_bytes"] / 1e9


def by_nobounce(path, memory):
    start = time.perf_counter()
    report = nobounce.read_file(memory, path)
    return report.nbytes / (time.perf_counter() - start) / 1e9, report


def main():
    folder, program = sys.argv[1], (sys.argv[2:] or ["fio"])[0]
    for size in (512 << 20, 2 << 30):
        with tempfile.TemporaryDirectory(dir=folder) as place:
            path = os.path.join(place, "content")
            content = numpy.random.default_rng(1).integers(0, 256, size, dtype="u1")
            with open(path, "wb") as file:
                content.tofile(file)
                os.fsync(file.fileno())
            memory = torch.zeros(size, dtype=torch.uint8, device="cuda")
            found = {}
            for _ in range(ROUNDS):
                gc.collect()
                cool(path)
                speed, report = by_nobounce(path, memory)
                found.setdefault("nobounce", []).append(speed)
                for name, words in FIO.items():
                    cool(path)
                    found.setdefault(name, []).append(by_fio(program, path, words))
            assert (memory.cpu().numpy() == content).all(), "other bytes than the file's"
            print(f"{size >> 20} MiB; {report}")
            ours = statistics.median(found["nobounce"])
            for name, speeds in found.items():
                if None in speeds:
                    print(f"  {name}: failed")
                    continue
                pairs = statistics.median(a / b for a, b in zip(found["nobounce"], speeds))
                print(f"  {name}: {statistics.median(speeds):.2f} ({min(speeds):.2f} to {max(speeds):.2f}); nobounce has {ours / statistics.median(speeds):.2f}, in pairs {pairs:.2f}", flush=True)


main()
