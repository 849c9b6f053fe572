#!/usr/bin/env python3
"""Plays every program that gpu-check runs, by the name it is called by: says what is expected of it, and writes down when it began and when it ended."""

import json
import os
import re
import socket
import sys
import time

LONG = 0.1
# Whoever waits for company gives up after so many seconds: there is none then, and the order is wrong.
PATIENCE = 20
TESTS = {
    "gpu_litmus": ["order::flag", "torn::words"], "gpu_kernels": ["fills"], "gpu_paths": ["kinds"],
    "gpu_traffic": ["atomics::add", "cycles::nothing", "spinning::goes_on", "sizes::direct", "freed::again", "freed::short_memory_given_out"],
}
ME, ARGUMENTS = os.path.basename(sys.argv[0]), sys.argv[1:]
STATE, WRONG = os.environ["STANDIN_STATE"], os.environ.get("STANDIN_WRONG", "")
# Plays a machine that is too slow.
SLOW = "STANDIN_SLOW" in os.environ


def note(word, what):
    with open(os.path.join(STATE, "log"), "a") as file:
        file.write(f"{time.monotonic():.3f}\t{word}\t{what}\n")


def meet(what):
    """Programs that are started together may begin further apart than LONG on a busy machine: the first one of a kind that is to be seen in company
    (STANDIN_MEETS: a pattern, and one for the company, in each line) stays until it has some."""
    for line in os.environ.get("STANDIN_MEETS", "").splitlines():
        kind, company = line.split("\t")
        if re.match(kind, what):
            try:
                os.mkdir(os.path.join(STATE, "met " + kind.replace("/", "")))
            except FileExistsError:
                return
            deadline = time.monotonic() + PATIENCE
            while time.monotonic() < deadline and not has_company(what, company):
                time.sleep(0.02)
            return


def has_company(what, company):
    """Whether another program was at work when this one began, or has begun since."""
    at_work, has_begun = set(), False
    with open(os.path.join(STATE, "log")) as file:
        for line in file:
            _, word, other = line.rstrip("\n").split("\t")
            if other == what:
                has_begun = True
            elif word == "begin" and re.match(company, other):
                at_work.add(other)
            elif word == "end" and not has_begun:
                at_work.discard(other)
    return bool(at_work)


def mps_file():
    return os.path.join(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", STATE), "mps")


def works(what, seconds=LONG):
    note("begin", what)
    meet(what)
    time.sleep(seconds)
    if os.path.exists(mps_file()):
        note("under MPS", what)
    note("end", what)


def failing_bench(spoilt):
    """A bench that is to fail: its bytes are spoilt, or there is no GPU to be seen."""
    works("to fail: bench")
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        print("nobounce: no GPU to measure: cuInit failed with CUDA_ERROR_NO_DEVICE (100); CUDA_VISIBLE_DEVICES is set to '': unset it; for host memory: nobounce bench")
        return 2
    if WRONG == "blind":
        return 0
    told = "1 of 8 bytes are wrong, the first is byte 4", "1 of 1048576 bytes are wrong, the first is byte 524288"
    # Of a hundred messages: no figures.
    print("goal missed: WRITE bandwidth direct / host to host: 0.5\nshare over shm: 0.5")
    if spoilt == "message":
        told = ("it did not arrive",) * 2
    print(f"WRONG BYTES: write, direct 8 B latency: message 16 of 16 x: {told[0]}")
    for way in ("direct", "staged"):
        print(f"WRONG BYTES: write, {way} 1 MiB bandwidth: message 8 of 8 x: {told[1]}")
    return 1


def bench():
    spoilt = os.environ.get("NOBOUNCE_BENCH_SPOIL")
    if spoilt or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return failing_bench(spoilt)
    works("bench " + " ".join(f"{word}" for word in ARGUMENTS[1:] if word in ("--quick", "nb0", "--engines")) + os.environ.get("NOBOUNCE_WINDOW", ""))
    refused = os.environ.get("NOBOUNCE_REFUSE", "")
    is_staged = os.environ.get("NOBOUNCE_WINDOW") == "off" or "peermem" in refused
    # Eight messages of eight bytes; the drop-in has counted them, too.
    tally = {"staged": {"bytes": 64 if is_staged else 0}}
    row = {"gbytes_per_s": 1.0, "memory": "gpu", "kind": "latency", "op": "write", "size": 8, "iters": 8, "path": "staged (no)" if is_staged else "direct",
           "counted": {end: {"inbound": tally, "outbound": tally} for end in ("here", "there")}}
    for at, word in enumerate(ARGUMENTS):
        if word == "--json":
            with open(ARGUMENTS[at + 1], "w") as file:
                json.dump({"results": [row]}, file)
    if reports := os.environ.get("NOBOUNCE_REPORT"):
        way = "cpu" if is_staged or WRONG == "idle" else "staged" if WRONG == "stages" else "window"
        with open(os.path.join(reports, "1-0.json"), "w") as file:
            count = {way: {"bytes": 1 << 20 if way == "staged" else 64}}
            json.dump({"in": count, "out": count}, file)
    if is_staged and os.environ.get("NOBOUNCE_REQUIRE") == "direct":
        print("a direct path is required")
        return 2
    if "nb0" in ARGUMENTS:
        way = "staged (dma-buf: no; peermem: no)" if is_staged else "direct (peermem)" if refused else "direct (dma-buf)"
    else:
        way = "staged (no window)" if is_staged else "direct (window)"
    print(f"path of GPU memory: {way}")
    if "--memory" in ARGUMENTS:
        print(f"goal {'missed' if SLOW else 'reached'}: WRITE bandwidth direct / host to host: {0.7 if SLOW else 0.9}\nshare over shm: 0.6")
    return 0


def nobounce():
    if ARGUMENTS[0] == "bench":
        return bench()
    os.execvp(ARGUMENTS[ARGUMENTS.index("--") + 1], ARGUMENTS[ARGUMENTS.index("--") + 1 :])


def nccl_rank():
    what, folder = ARGUMENTS if len(ARGUMENTS) == 2 else ("speed C", *ARGUMENTS)
    works(f"nccl {what}")
    is_staged = os.environ.get("NOBOUNCE_WINDOW") == "off" and WRONG != "direct"
    print(f"nobounce: 2 devices opened; {0 if WRONG == 'lossless' else 7} retransmissions; no errors")
    for rank in range(2):
        with open(os.path.join(folder, f"rank{rank}.json"), "w") as file:
            row = {"test": "x", "bytes": 8, "us": 1, "issue_us": 1, "alone_us": 1, "verified": True, "window_bytes": 8 * (not is_staged), "staged_bytes": 8 * is_staged}
            json.dump({"wrong": [], "told": [], "rows": [row], "version": "0", "losses": [1]}, file)
    with open(os.path.join(folder, "nccl.1.log"), "w") as file:
        file.write("via NET/IB/0/GDRDMA\nGDRCOPY enabled library 2.6\n")
    return 0


def mps():
    said = "" if ARGUMENTS else sys.stdin.read()
    if ARGUMENTS == ["-d"]:
        open(mps_file(), "w").close()
    elif "quit" in said:
        os.unlink(mps_file())
        return 0
    return 0 if os.path.exists(mps_file()) else 1


def nvcc():
    works("nvcc", 2 * LONG)
    out = ARGUMENTS[ARGUMENTS.index("-o") + 1]
    os.symlink(os.path.realpath(sys.argv[0]), out)
    return 0


def pair():
    port = int(ARGUMENTS[ARGUMENTS.index("-p") + 1])
    if ARGUMENTS[-1] == "127.0.0.1":
        works(f"pair {ME}")
        socket.create_connection(("127.0.0.1", port)).close()
    else:
        with socket.create_server(("127.0.0.1", port)) as server:
            server.accept()[0].close()
    way = "staged" if os.environ.get("NOBOUNCE_WINDOW") else "window"
    print(f"VALIDATION: PASSED\nnobounce: in: 8 B {way}; no errors")
    return 0


def mpirun():
    program = next(os.path.basename(word) for word in ARGUMENTS if "/programs/" in word)
    lonely = " alone" if program == "dies_inside" and "gather" in ARGUMENTS and os.environ.get("UCX_RC_TIMEOUT") is None else ""
    works(f"mpi {program}{lonely}")
    if program.startswith("dies"):
        others = range(int(ARGUMENTS[ARGUMENTS.index("-np") + 1]) - 1 - (WRONG == "torn"))
        if WRONG != "between":
            print(f"good: it {'exits' if 'exits' in ARGUMENTS else 'dies'} with 8 of 16 bytes of a message in")
        for rank in others:
            looked = f"rank {rank}: good: after the death: guards are as they were\nrank {rank}: {'0 direct, 8' if WRONG == 'staged' else '8 direct, 0'} staged"
            print(f"rank {rank}: process {70 + rank}\n{looked}")
            # The first is told by a request that failed, and ended by UCX; the others by an event.
            if rank == 0 and WRONG != "silent":
                print(f"rank 0: good: nb0 reported the death as an error: UCX ended it\n{looked}")
            elif rank and WRONG not in ("silent", "forgets"):
                print(f"[1.5] [host-1:{70 + rank} :a]  ib_device.c:560  UCX  ERROR IB Async event on nb0: local work queue catastrophic error on QPN 0x1")
        print("exiting improperly" if "exits" in ARGUMENTS else "exited on signal 9")
        return 1
    print(f"every byte was right\n8 direct, 0 staged\nnobounce: 4 devices opened; {0 if WRONG == 'lossless' else 12} retransmissions; no errors")
    return 0


def nvidia_smi():
    """What is in use grows with each question where nothing is given back."""
    path = os.path.join(STATE, "questions")
    with open(path, "a+") as file:
        file.write("x")
    print(100 + (100 * os.path.getsize(path) if WRONG == "leaks" else 0))
    return 0


def gdrcopy_sanity():
    if ARGUMENTS == ["-l"]:
        print("  one_test\n  another_test\n  one_vmmalloc\n  invalidation_unix_sock_shared_fd_test")
        return 0
    test = ARGUMENTS[-1]
    works(f"{ME} {test}")
    is_refused, is_bad = test == "one_vmmalloc", WRONG == "fails" and test == "one_test"
    if is_refused and WRONG != "unexplained":
        print("gdrapi: the buffer is not pinned: resource manager: the VMM memory at 0x7f00 cannot be exported (1)")
    print(f"Passed: {int(not is_refused and not is_bad)}, Failed: {int(is_refused or is_bad)}, Waived: 0")
    return int(is_refused or is_bad)


def main():
    if ME == "nobounce":
        return nobounce()
    if ME in TESTS:
        if ARGUMENTS == ["--list"]:
            print("\n".join(f"{name}: test" for name in TESTS[ME]))
        else:
            works(f"{ME}::{ARGUMENTS[0]}")
        return 0
    players = {"nvidia-smi": nvidia_smi, "nccl-rank": nccl_rank, "nccl-speed": nccl_rank, "nvidia-cuda-mps-control": mps, "nvcc": nvcc, "mpirun": mpirun, "gdrcopy_sanity": gdrcopy_sanity}
    if ME in players:
        return players[ME]()
    if ME.startswith(("ib_", "ucx_")):
        return pair()
    is_nvshmem = ME in ("ops", "order", "collectives", "dies", "speed")
    if ME == "gpu_speed":
        works(ME)
        print(f"figure {'MISSED' if SLOW else 'reached'}: a store of 64 bytes: {0.4 if SLOW else 0.1} us\nfigure reached: host memory for each 2 MiB: 0.1 KiB")
        return int(SLOW)
    works(f"nvshmem {ME}" if is_nvshmem else " ".join([ME, *ARGUMENTS[:1]]))
    print("everything was right, the others ended by themselves\nall bytes were right\nPE 0: good: when the other had died, after 20 rounds, all memory is as it was")
    if WRONG != "late":
        print("PE 0: good: at its end, after 20 rounds, all memory is as it was")
    if ME == "gdrapi-speed" and WRONG == "slow":
        print("goal missed: 1 MiB write, median: 14.300 GB/s, asked for at least 15 GB/s")
    print("NVML: there is none" if WRONG == "keeps" else "NVML: as before after 5 ms", "refused: memory without a handle type", f"{ARGUMENTS[0] if ARGUMENTS else ''}: good", sep="\n")
    print("GPU memory at 0: Direct(Window)" if ARGUMENTS[:1] != ["refused"] else "a direct path is required")
    return 0


if __name__ == "__main__":
    sys.exit(main())
