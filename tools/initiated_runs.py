"""GPU-initiated operations on a GPU (`gpu-check --only initiated`): the benchmark, the examples, and NCCL's kernels that put by themselves (GIN)."""

import glob
import os
import re
import shutil
import sys
import sysconfig

from nccl_runs import MPIRUN

BENCH_LIMIT, EXAMPLES_LIMIT, NCCL_LIMIT, GIN_LIMIT = 120, 200, 150, 80
RIGHT = "^all examples are right$"
# NCCL's own program: every rank is another host, on one GPU. Its last column but one is the number of wrong values.
GIN = "alltoall_perf"
GIN_ROW = re.compile(r"^\s+(\d+)\s+\d+\s+float\s+none\s+-1\s+([\d.]+)\s+[\d.]+\s+[\d.]+\s+(\d+)\s", re.M)
RANK = "export NCCL_TESTS_DEVICE=0 NCCL_HOSTID=$OMPI_COMM_WORLD_RANK; exec \"$0\" \"$@\""
RANKS = [*MPIRUN, "bash", "-c", RANK]


def programs(here, out):
    """[(name, command, seconds, what it must say)] of what runs by itself; each starts MPS."""
    bench = [os.path.join(here, "bin", "nobounce"), "bench", "--gpu-initiated", "--json", f"{out}/gpu-initiated.json", "--plot", f"{out}/gpu-initiated.svg"]
    sources, library = os.path.join(here, "sources", "initiated"), os.path.join(here, "bin", "dropin")
    examples = [sys.executable, os.path.join(sources, "run"), "--include", sources, "--library", library]
    found = [("initiated: speed", bench, BENCH_LIMIT, r"^over udp; symmetric heap: in direct"), ("initiated: examples", examples, EXAMPLES_LIMIT, RIGHT)]
    # Where NCCL's headers are: the same work by NCCL's calls from the host.
    nccl = os.path.join(sysconfig.get_paths()["purelib"], "nvidia", "nccl")
    if os.path.exists(os.path.join(nccl, "include", "nccl.h")):
        compare = [*examples, "--nccl", nccl, "--nobounce", os.path.join(here, "bin", "nobounce")]
        found.append(("initiated: against NCCL", compare, NCCL_LIMIT, RIGHT))
    return found


def gin_missing(here):
    """Why NCCL's program cannot run, or nothing."""
    if not os.path.exists(os.path.join(here, "programs", GIN)):
        return f"the bundle has no {GIN} (NCCL_TESTS=FOLDER tools/gpu-bundle)"
    return "" if shutil.which("mpirun") else "there is no mpirun here"


def library_path():
    """NCCL and CUDA of PyTorch's packages."""
    folders = glob.glob(os.path.join(sysconfig.get_paths()["purelib"], "nvidia", "*", "lib"))
    return {"LD_LIBRARY_PATH": ":".join([*folders, "/usr/local/cuda/lib64", os.environ.get("LD_LIBRARY_PATH", "")])}


def gin_runs(here):
    """[(name, command)]: by kernels over both links, and by the host over NCCL's sockets."""
    program = [os.path.join(here, "programs", GIN), "-b", "256", "-e", "16M", "-f", "16", "-n", "20", "-w", "5", "-g", "1"]
    nobounce = os.path.join(here, "bin", "nobounce")
    found = [("sockets, from the host", ["env", "NCCL_NET=Socket", "NCCL_GIN_ENABLE=0", *RANKS, *program])]
    for link in ("shm", "udp"):
        for kind in ("3", "4"):
            found.append((f"{link}, -D {kind}", [nobounce, "run", "--link", link, "--require", "direct", "--", *RANKS, *program, "-R", "2", "-D", kind]))
    return found


def gin_judge(output):
    """(what is wrong, lines to tell)"""
    rows = GIN_ROW.findall(output)
    told = ["us: " + ", ".join(f"{size} B {time}" for size, time, _ in rows)] + [line for line in output.splitlines() if line.startswith("nobounce: ")][-1:]
    if not rows or any(wrong != "0" for *_, wrong in rows):
        return "no results, or wrong values", told
    return "bytes were staged" if any("staged" in line for line in told) else "", told
