#!/usr/bin/env python3
"""gpu-check on a bundle of stand-ins: what measures runs alone, the rest in company, nothing under an MPS that it should not have, all rows in one table."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
STANDIN = os.path.join(HERE, "standin.py")
SCRIPTS = ("gpu-check", "bounded.py", "gpu_plan.py", "nccl_runs.py", "nvshmem_runs.py", "initiated_runs.py", "cuda_runs.py", "gdr_runs.py", "hard_runs.py", "client_runs.py")
PLAYED = (
    *(f"tests/{name}" for name in ("gpu_litmus", "gpu_kernels", "gpu_paths", "gpu_traffic")), "examples/gpu_facts", "examples/gpu_speed", "bin/nobounce", "nccl-rank",
    *(f"programs/{name}" for name in ("gpu", "transfers", "nccl-speed", "gdrapi-lives", "gdrapi-vmm", "gdrapi-deaths", "gdrapi-speed", "gdrcopy_sanity", "gdrcopy_copylat")),
    *(f"stack/bin/{name}" for name in ("ucx_perftest", "ib_write_bw", "ib_read_bw", "ib_send_bw", "ib_write_lat", "mpirun")),
    "path/nvidia-cuda-mps-control", "path/nvidia-smi", "path/nvcc",
)
# What measures, and what must be the only client of MPS.
ALONE = re.compile(r"gpu_litmus|gpu_kernels|gpu_traffic::(cycles|spinning|freed::short)|gpu_speed|gdrapi-(speed|deaths)|gdrcopy_copylat|bench(?! .*(nb0|--quick))|nccl (speed|killed)|nvshmem speed|mpi speed|mpi dies_inside alone|pair (?!ib_(read|send))")
RANKS = re.compile(r"nccl|mpi (?!dies)|pair|nvshmem (?!dies)")
# Enough of each kind; not every one of the pairs.
KINDS = [word for kind in ("gpu_", "drop-in", "gdrapi: s", "gdrapi: VMM", "gdrapi: ends", "gdrcopy", "bench", "hard", "engines", "nccl", "nvshmem", "mpi", "ucx: ucp", "perftest: ib_s") for word in ("--only", kind)]
DEATH = re.compile(r"nccl (abort|exits)")
# Who is to be seen beside whom.
MEETS = f"{RANKS.pattern}\t{RANKS.pattern}\nnvcc\t."
# What stand-ins do badly, and the rows that fail of it with what they say.
WRONG = {
    "blind": {"bench gpu: a byte is spoilt": "exit code 0", "bench gpu: a message is taken away": "exit code 0"},
    "slow": {"gdrapi: speed": "goal missed: 1 MiB write"},
    "keeps": {"gdrapi: ends pinned: killed": "does not say"},
    "fails": {"gdrcopy: sanity": "failed: one_test"},
    "unexplained": {"gdrcopy: sanity, memory without a handle type": "failed: one_vmmalloc"},
    "staged": {"mpi: a rank that dies": "not all through the window"},
    "stages": {"hard: dma-buf": "staged GPU memory that was registered"},
    "idle": {"hard: dma-buf refused, peermem": "less went directly"},
    "between": {"mpi: a rank that dies, udp": "did not die inside"},
    "torn": {"mpi: a rank of 3 that dies": "1 of 2 others found"},
    "silent": {"mpi: a rank that dies, udp": "0 of 1 others were told", "mpi: a rank that dies in a collective, udp": "0 of 1 others were told"},
    "forgets": {"mpi: a rank of 3 that dies": "1 of 2 others were told", "mpi: a rank of 3 that dies in a reduction": "1 of 2 others were told"},
    "leaks": {"mpi: a rank that dies in a collective": "of GPU memory are still in use"},
    "late": {"nvshmem: a PE that dies": "does not say /PE 0: good: at its end"},
    "lossless": {name: "nothing was sent again" for name in ("nccl: values, loss 0.1 %", "nccl: training, loss 0.1 %", "mpi: values, loss 0.1 %")},
    "direct": {"nccl: values, no window": "0 bytes staged, 16 through the window"},
}


def make_bundle(folder):
    for name in PLAYED:
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if name == "nccl-rank":  # Python is told to run it, and must find its name
            shutil.copy(STANDIN, path)
        else:
            os.symlink(STANDIN, path)
    for name in SCRIPTS:
        shutil.copy(os.path.join(ROOT, "tools", name), os.path.join(folder, name))
    for name, text in (("python/torch/__init__.py", "class cuda:\n    is_available = staticmethod(lambda: True)\n"),
                       ("python/torch/distributed/run.py", "import os, sys\nos.execv(sys.executable, [sys.executable, *sys.argv[3:]])\n"), ("python/nvidia/nvshmem/include/nvshmem.h", ""),
                       ("python/nvidia/nvshmem/lib/libnvshmem_host.so.3", ""), ("stack/lib/x", ""), *((f"sources/nvshmem/{name}.cu", "") for name in ("ops", "order", "collectives", "dies", "speed"))):
        os.makedirs(os.path.dirname(os.path.join(folder, name)), exist_ok=True)
        with open(os.path.join(folder, name), "w") as file:
            file.write(text)


def run(folder, *options, wrong="", **more):
    """`wrong`: what the stand-ins do badly. (exit code, output, rows of the table, [(begin, end, what)], what ran under MPS)"""
    state = tempfile.mkdtemp(dir=folder)
    open(os.path.join(state, "log"), "w").close()
    environment = {**os.environ, "STANDIN_STATE": state, "STANDIN_WRONG": wrong, "PYTHONPATH": os.path.join(folder, "python"), "PYTHONDONTWRITEBYTECODE": "1",
                   "PATH": os.path.join(folder, "path") + ":" + os.environ["PATH"], **more}
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_PROGRAMS", "OUT"):
        environment.pop(name, None)
    command = [sys.executable, os.path.join(folder, "gpu-check"), "--no-gpu", "--out", os.path.join(state, "out"), *options]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    open_, spans, under = {}, [], set()
    with open(os.path.join(state, "log")) as file:
        for line in file:
            when, word, what = line.rstrip("\n").split("\t")
            if word == "begin":
                open_.setdefault(what, []).append(float(when))
            elif word == "end":
                spans.append((open_[what].pop(0), float(when), what))
            else:
                under.add(what)
    with open(os.path.join(state, "out", "table.txt")) as file:
        table = file.read()
    rows = re.findall(r"^(\S.*?)  +(passed|FAILED|missed|waived|not run)", table, re.M)
    return done.returncode, done.stdout, rows, spans, under


def beside(spans):
    """Pairs that overlapped by more than the clock's grain."""
    return [(one, other) for at, one in enumerate(spans) for other in spans[at + 1 :] if min(one[1], other[1]) - max(one[0], other[0]) > 0.01]


def check(is_so, what, shown=""):
    if not is_so:
        sys.exit(f"gpu-check's order: {what}\n{shown}")


def spoilt():
    """A run that was stopped: MPS is started anew when nobody uses it, and whoever ran beside it is known."""
    sys.dont_write_bytecode = True
    sys.path.insert(0, os.path.join(ROOT, "tools"))
    import gpu_plan

    class Mps:
        restarts = []

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def restart(self):
            self.restarts.append(set(running))

    plan, running, failed = gpu_plan.Plan(lambda name, error: failed.append((name, str(error)))), set(), []

    at_once = gpu_plan.WORKERS[gpu_plan.Company.RANKS]
    together = threading.Barrier(at_once, timeout=20)

    def job(name, wait, result):
        def run():
            running.add(name)
            wait()
            running.discard(name)
            return result()

        plan.add(name, gpu_plan.Company.RANKS, run)

    def until_hurt(number):
        deadline = time.monotonic() + 20
        while number not in plan.hurt and time.monotonic() < deadline:
            time.sleep(0.01)

    job("stopped", together.wait, lambda: True)
    for nth in range(1, at_once):
        job(f"beside it {nth}", lambda nth=nth: (together.wait(), until_hurt(nth)), lambda: False)
    job("after it", lambda: None, lambda: 1 / 0)
    plan.carry_out(Mps)
    check(Mps.restarts == [set()], f"MPS was started anew beside {Mps.restarts}")
    check(plan.hurt == {nth: "stopped" for nth in range(1, at_once)}, f"hurt: {plan.hurt}")
    check(failed == [("after it", "division by zero")], f"failed: {failed}")


def main():
    spoilt()
    with tempfile.TemporaryDirectory() as folder:
        make_bundle(folder)
        code, output, rows, spans, under = run(folder, *KINDS, STANDIN_MEETS=MEETS)
        check(code == 0 and rows and all(result == "passed" for _, result in rows), f"exit code {code}", output)
        pairs = beside(spans)
        for one, other in pairs:
            names = {one[2], other[2]}
            check(not any(ALONE.match(name) for name in names), f"{' and '.join(names)} ran at the same time")
            check(not (any(DEATH.match(name) for name in names) and all(RANKS.match(name) for name in names)), f"{' and '.join(names)} shared an MPS")
        check(any(all(RANKS.match(span[2]) for span in pair) for pair in pairs), "no two runs of ranks ran at the same time")
        check(any("nvcc" in (one[2], other[2]) for one, other in pairs), "nothing ran while the compiler did")
        wrong = {what for _, _, what in spans if what != "nvcc" and bool(RANKS.match(what)) != (what in under)}
        check(not wrong, f"these had no MPS, or should have had none: {wrong}")
        count, whole = len(rows), max(end for _, end, _ in spans) - min(begin for begin, _, _ in spans)
        code, output, others, spans, _ = run(folder, "--one-by-one", "--only", "nccl: values", "--only", "gpu_", "--only", "mpi: values")
        check(code == 0, f"exit code {code} one by one", output)
        check(not beside(spans), "something ran beside something else in spite of --one-by-one")
        check([row for row in rows if row in others] == others, "the table is in another order", f"{rows}\n{others}")
        # A figure that is missed fails its row and is named; shares of the bench have a row that says so, and fails nothing.
        code, output, rows, _, _ = run(folder, "--only", "gpu_speed", "--only", "bench gpu", STANDIN_SLOW="1")
        check(code == 1 and ("gpu_speed", "FAILED") in rows and ("bench gpu", "passed") in rows and ("bench gpu: shares", "missed") in rows, f"exit code {code}", output)
        check("figure MISSED: a store of 64 bytes: 0.4 us" in output and "1 missed" in output, "what was missed is not named", output)
        # Only of the bench that measures, also where the others run alone.
        code, output, rows, _, _ = run(folder, "--one-by-one", "--only", "bench gpu", STANDIN_SLOW="1")
        check(code == 0 and output.endswith("; 1 goals missed\n"), f"exit code {code} for shares alone, or goals of rows that do not measure are counted", output)
        # A row that goes wrong is told, and so is one for which there is no time.
        os.unlink(os.path.join(folder, "programs", "gpu"))
        code, output, rows, _, _ = run(folder, "--only", "drop-in")
        check(code == 1 and ("drop-in: a C client", "FAILED") in rows and ("drop-in: host memory without CUDA", "passed") in rows, f"exit code {code}", output)
        code, output, rows, _, _ = run(folder, "--only", "gdrapi", "--seconds", "5.2")
        check(code == 1 and ("gdrapi: speed", "not run") in rows, f"exit code {code}", output)
        # Figures that were asked for, memory after a death, and tests that fail for another reason than the documented one are not passed over.
        for wrong, expected in WRONG.items():
            code, output, rows, _, _ = run(folder, *(word for name in expected for word in ("--only", name)), wrong=wrong)
            check(code == 1 and all((name, "FAILED") in rows and words in output for name, words in expected.items()), f"{wrong}: exit code {code}", output)
    print(f"{count} rows in {whole:.1f} s of stand-ins, {len(pairs)} pairs of programs at the same time")


if __name__ == "__main__":
    main()
