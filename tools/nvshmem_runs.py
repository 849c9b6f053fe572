"""NVSHMEM over its IBRC transport and nb0, PEs on one GPU: what `gpu-check --only nvshmem` compiles and runs.

The library, its headers and its transports are those of PyTorch's packages, the compiler is the machine's nvcc.
"""

import collections
import concurrent.futures
import glob
import importlib.util
import os
import re
import shutil
import threading

import bounded
from gpu_plan import Company

COMPILE_LIMIT = 150
# Name, program, PEs, options of `nobounce run`, all that it must say (regular expressions), seconds.
RIGHT = ("everything was right",)
# The one that lives has looked at its memory when the other had died, and again when NVSHMEM ended it.
AFTER = ("PE 0: good: when the other had died, .*all memory is as it was", "PE 0: good: at its end, .*all memory is as it was", "the others ended by themselves")
RUNS = (
    ("ops", "ops", 2, [], RIGHT, 40),
    ("order", "order", 2, [], RIGHT, 60),
    ("order udp", "order", 2, ["--link", "udp"], RIGHT, 60),
    ("order, 4 PEs", "order", 4, [], RIGHT, 60),
    ("collectives", "collectives", 2, [], RIGHT, 60),
    ("collectives udp", "collectives", 2, ["--link", "udp"], RIGHT, 60),
    ("collectives, 4 PEs", "collectives", 4, [], RIGHT, 80),
    ("speed", "speed", 2, [], RIGHT, 60),
    ("speed udp", "speed", 2, ["--link", "udp"], RIGHT, 60),
    ("a PE that dies", "dies", 2, [], AFTER, 100),
    ("ops after it", "ops", 2, [], RIGHT, 40),
)


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


def company(run):
    """The one that dies runs without MPS (dies.cu says why), and what is to run after it runs last. What measures runs alone."""
    name, program = run[:2]
    return Company.ANY if program == "dies" else Company.RANKS_ALONE if "after" in name or program == "speed" else Company.RANKS


class Compiled:
    """The programs, compiled all at the same time from now on: {program: (exit code, output, seconds)}. What is in OUT/programs already, and newer, is taken."""

    def __init__(self, sources, out, wanted):
        os.makedirs(os.path.join(out, "programs"), exist_ok=True)
        self.sources, self.out, self.wanted, self.done = sources, out, wanted, {}
        self.thread = threading.Thread(target=self.compile, daemon=True)
        self.thread.start()

    def programs(self):
        self.thread.join()
        return self.done

    def compile(self):
        with concurrent.futures.ThreadPoolExecutor() as pool:
            self.done = dict(zip(self.wanted, pool.map(self.compile_one, self.wanted)))

    def compile_one(self, name):
        source, program = os.path.join(self.sources, "nvshmem", f"{name}.cu"), os.path.join(self.out, "programs", name)
        if os.path.exists(program) and os.path.getmtime(program) > os.path.getmtime(source):
            return 0, "", 0.0
        where = folder()
        host = sorted(name for name in os.listdir(os.path.join(where, "lib")) if name.startswith("libnvshmem_host.so"))[-1]
        # Nothing that runs meanwhile is to wait for it.
        command = ["nice", "-n", "10", nvcc(), "-rdc=true", "-arch=native", "-split-compile=0", "-o", program, source,
                   "-I", os.path.join(where, "include"), "-L", os.path.join(where, "lib"), "-lnvshmem_device", "-Xlinker", f"-l:{host}", "-lcuda", "-ldl"]
        return bounded.run(command, COMPILE_LIMIT, os.path.join(self.out, f"nvcc-{name}.txt"), {})


def judge(code, output, says):
    """What is wrong, or nothing."""
    if code != 0:
        return f"exit code {code} (None: stopped)"
    return next((f"does not say /{one}/" for one in says if not re.search(one, output)), "")


def refusals(said):
    """What NVSHMEM says where it ends a program: the words that come most often, for every thread of a kernel says them, and all are mixed."""
    found = re.findall(r"Assertion `0 && (\"[^`]*\")` failed|(RMA/AMO verb \d+ not implemented|\w+ not implemented over[\w ]*)|(Called NVSHMEM API not supported[\w ()]*)|(ibv_poll_cq failed, status: \d+)", said)
    return [words for words, _ in collections.Counter("".join(one) for one in found).most_common(2)]


def run_program(bundle, out, name, program, pes, options, limit):
    """(exit code, output, seconds, what NVSHMEM's log says of GDRCopy, and what NVSHMEM says it does not do)"""
    here = os.path.join(out, re.sub(r"[^\w.]+", "-", name))
    os.makedirs(here, exist_ok=True)
    library = os.path.join(folder(), "lib")
    environment = {
        "LD_LIBRARY_PATH": ":".join(filter(None, (library, os.environ.get("LD_LIBRARY_PATH")))),
        # PEs on one GPU would otherwise reach each other's memory without a network.
        "NVSHMEM_DISABLE_P2P": "1", "NVSHMEM_REMOTE_TRANSPORT": "ibrc", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // pes),
        "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo", "NVSHMEM_SYMMETRIC_SIZE": "64M", "NVSHMEM_DEBUG": "INFO",
        "NVSHMEM_DEBUG_FILE": os.path.join(here, "nvshmem.%p.log"), "NOBOUNCE_LOG": "warn",
    }
    command = [os.path.join(bundle, "bin", "nobounce"), "run", *options, "--", os.path.join(out, "programs", program), here, str(pes)]
    if program == "dies":
        # No MPS (dies.cu says why): nobody answers in that folder.
        environment["CUDA_MPS_PIPE_DIRECTORY"] = here
    code, output, seconds = bounded.run(command, limit, os.path.join(here, "said.txt"), environment)
    refused = refusals(output)
    # With NVSHMEM_DEBUG its modules talk on standard output, too, and at length: "/path/file.cpp:function:line: ...", now and then with a word of ours in it.
    ours = re.compile(r"good: |counted: |FAILED|nvshmem: |nobounce: ")
    output = "\n".join(line for line in output.splitlines() if ours.search(line) or line.strip() and not re.search(r"/\S+\.(cpp|h|cuh)[: ,\]]|Assertion|` failed\.", line))
    logs = [open(path, errors="replace").read() for path in glob.glob(os.path.join(here, "nvshmem.*.log"))]
    return code, output, seconds, sorted({line for log in logs for line in re.findall(r"GDR.*", log)})[:2] + [f"NVSHMEM says: {line}" for line in refused]
