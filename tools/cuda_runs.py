"""UCX, Open MPI and perftest with CUDA on nb0, both ends on one GPU: what `gpu-check --only ucx`, `--only mpi` and `--only perftest` run.

They are other people's programs, built beside the project by tools/cuda-programs; CUDA_PROGRAMS names the folder, which tools/gpu-bundle takes along.
"""

import json
import os
import re
import socket
import subprocess
import time

import bounded
from gpu_plan import Company

DMABUF = ["--use_cuda=0", "--use_cuda_dmabuf"]
# Name, program and options, seconds, options of `nobounce run`, variables, what the outputs of both ends together must say.
WINDOW_IN = r"in: .*\bwindow\b"
PERFTEST = (
    ("ib_write_bw, CUDA, all sizes", ["ib_write_bw", "-F", "--use_cuda=0", "-a", "-n", "40"], [], {}, WINDOW_IN),
    ("ib_write_bw, CUDA by dma-buf, all sizes", ["ib_write_bw", "-F", *DMABUF, "-a", "-n", "40"], ["--require", "direct"], {}, WINDOW_IN),
    ("ib_write_bw, contents checked", ["ib_write_bw", "-F", "--use_cuda=0", "-s", "65536", "-n", "100", "--data_validation"], [], {}, "VALIDATION: PASSED"),
    ("ib_write_bw, dma-buf, contents checked", ["ib_write_bw", "-F", *DMABUF, "-s", "65536", "-n", "100", "--data_validation"], [], {}, "VALIDATION: PASSED"),
    ("ib_write_bw over UDP", ["ib_write_bw", "-F", *DMABUF, "-s", "1048576", "-n", "50"], ["--link", "udp"], {}, WINDOW_IN),
    ("ib_read_bw", ["ib_read_bw", "-F", *DMABUF, "-s", "65536", "-n", "100"], [], {}, WINDOW_IN),
    ("ib_send_bw", ["ib_send_bw", "-F", *DMABUF, "-s", "65536", "-n", "100"], [], {}, WINDOW_IN),
    ("ib_write_lat with immediate", ["ib_write_lat", "-F", "--use_cuda=0", "--write_with_imm", "-s", "8", "-n", "200"], [], {}, WINDOW_IN),
    ("ib_write_bw, no window", ["ib_write_bw", "-F", "--use_cuda=0", "-s", "65536", "-n", "100"], [], {"NOBOUNCE_WINDOW": "off"}, r"in: .*\bstaged\b"),
)
DEFAULTS = {"UCX_RNDV_THRESH": "auto"}
OFF, OWN = {"NOBOUNCE_WINDOW": "off"}, {"UCX_IB_GPU_DIRECT_RDMA": "no", **DEFAULTS}
# Over UDP nothing but retries that end tells of a peer that died: 8.5 s with UCX's own choice (8 times 1.07 s), about 0.6 s with these.
SOON = {"UCX_RC_TIMEOUT": "100ms", "UCX_RC_RETRY_COUNT": "3"}


def ucx(test, size, turns):
    return ["ucx_perftest", "-t", test, "-m", "cuda", "-s", str(size), "-n", str(turns), "-w", "5"]


# The shortest messages are copied by UCX through GPU memory that it has mapped (gdr_copy); from some KiB on nb0 moves them.
UCX = tuple(
    (f"{test}, {size} B", ucx(test, size, turns), [], {}, says)
    for size, turns, says in ((8, 200, "no errors"), (4096, 200, "no errors"), (65536, 100, WINDOW_IN), (1 << 20, 50, WINDOW_IN), (16 << 20, 20, WINDOW_IN))
    for test in (("tag_lat", "tag_bw") if size > 4096 else ("tag_lat",))
) + (
    ("ucp_put_lat, 8 B", ucx("ucp_put_lat", 8, 200), [], {}, WINDOW_IN),
    ("ucp_put_bw, 64 KiB", ucx("ucp_put_bw", 65536, 100), [], {}, WINDOW_IN),
    ("ucp_put_bw, 1 MiB", ucx("ucp_put_bw", 1 << 20, 50), ["--require", "direct"], {}, WINDOW_IN),
    ("ucp_get, 1 MiB", ucx("ucp_get", 1 << 20, 30), [], {}, WINDOW_IN),
    ("tag_lat over UDP, 1 MiB", ucx("tag_lat", 1 << 20, 30), ["--link", "udp"], {}, WINDOW_IN),
    ("tag_lat, 8 B, without gdr_copy", ucx("tag_lat", 8, 200), [], {"UCX_TLS": "rc,self,cuda_copy"}, "no errors"),
    ("tag_lat, 1 MiB, no window", ucx("tag_lat", 1 << 20, 30), [], OFF, r"in: .*\bstaged\b"),
    ("tag_lat, 64 KiB, UCX's defaults", ucx("tag_lat", 65536, 100), [], DEFAULTS, "no errors"),
    ("tag_lat, 1 MiB, UCX's own staging", ucx("tag_lat", 1 << 20, 30), [], OWN, "no errors"),
)
# Of this one it is asked whether the GPU's memory comes back: nobody else may take any meanwhile.
LONELY_DEATH = "a rank that dies in a collective"
# Name, program, ranks, options of `nobounce run`, variables, seconds.
MPI = (
    ("values", ["values"], 2, ["--require", "direct"], {}, 40),
    ("values, 4 ranks", ["values"], 4, [], {}, 40),
    ("values udp", ["values"], 2, ["--link", "udp"], {}, 40),
    ("values, loss 0.1 %", ["values", "messages", "collectives"], 2, ["--link", "udp", "--fault", "loss=0.001,seed=7"], {}, 40),
    ("values, no window", ["values"], 2, [], OFF, 40),
    ("speed direct", ["speed"], 2, ["--require", "direct"], {}, 50),
    ("speed, UCX's defaults", ["speed"], 2, [], DEFAULTS, 50),
    ("speed, no window", ["speed"], 2, [], OFF, 60),
    ("speed, UCX's own staging", ["speed"], 2, [], OWN, 60),
    ("a rank that dies", ["dies"], 2, ["--require", "direct"], {}, 40),
    ("a rank of 3 that dies", ["dies"], 3, [], {}, 40),
    ("a rank that dies, udp", ["dies"], 2, ["--link", "udp"], SOON, 40),
    # One that exits says goodbye, and its peers take it for one that does not answer, if they ask it for anything; mpirun ends them, as MPI has it.
    ("a rank that forks, and exits without MPI_Finalize", ["dies", str(64 << 20), "exits"], 2, ["--require", "direct"], SOON, 40),
    # On host memory of MPI's: Open MPI copies what it reduces out of the GPU first.
    ("a rank of 3 that dies in a reduction", ["dies_inside", "reduce"], 3, [], {}, 40),
    ("a rank that dies in a collective, udp", ["dies_inside", "gather"], 2, ["--link", "udp"], SOON, 40),
    (LONELY_DEATH, ["dies_inside", "gather"], 2, ["--require", "direct"], {}, 40),
)


def company(run):
    """Beside whom an MPI run may run."""
    # The one that dies runs without MPS: what the GPU was copying for it then would be a fault of all clients.
    if run[0] == LONELY_DEATH:
        return Company.ALONE
    return {"speed": Company.RANKS_ALONE, "dies": Company.ANY, "dies_inside": Company.ANY}.get(run[1][0], Company.RANKS)


def pair_company(run):
    """Beside whom a server and its client may run: those whose bytes are asked about, not their speed, beside others."""
    return Company.RANKS if any(word in run[0] for word in ("contents checked", "no window", "ib_read_bw", "ib_send_bw")) and run in PERFTEST else Company.RANKS_ALONE


def folder(bundle):
    """Where the programs are, or None."""
    places = [os.environ.get("CUDA_PROGRAMS"), os.path.join(bundle, "stack")]
    return next((os.path.abspath(place) for place in places if place and os.path.exists(os.path.join(place, "bin", "ucx_perftest"))), None)


def environment(stack):
    libraries = [os.path.join(stack, "lib"), os.path.join(stack, "lib", "ucx"), os.environ.get("LD_LIBRARY_PATH")]
    return {
        "PATH": os.path.join(stack, "bin") + ":" + os.environ.get("PATH", ""), "LD_LIBRARY_PATH": ":".join(filter(None, libraries)),
        # Both were built for another folder.
        "OPAL_PREFIX": stack, "UCX_MODULE_DIR": os.path.join(stack, "lib", "ucx"),
        # Both ends are on one machine, on one GPU: without these UCX would not use an adapter.
        "UCX_NET_DEVICES": "nb0:1", "UCX_TLS": "rc,self,cuda_copy,gdr_copy",
        # docs/guide/mpi.md says why.
        "UCX_RNDV_THRESH": "8192", "UCX_FENCE_MODE": "weak", "NOBOUNCE_LOG": "warn", "UCX_WARN_UNUSED_ENV_VARS": "n",
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50",
    }


def listens(port):
    """Whether somebody listens there, without talking to them: both programs take the first connection for their client."""
    wanted = f":{port:04X} "
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as file:
                if any(wanted in line and line.split()[3] == "0A" for line in file):
                    return True
        except OSError:
            pass
    return False


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def pair(bundle, stack, command, options, variables, limit, log):
    """(what is wrong or nothing, output of both, seconds) of a server and its client."""
    started, port = time.monotonic(), str(free_port())
    whole = [os.path.join(bundle, "bin", "nobounce"), "run", *options, "--", *command, "-p", port]
    variables = {**environment(stack), **variables}
    with open(log + ".server", "wb") as file:
        server = subprocess.Popen(whole, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=bounded.environment_with(variables),
                                  cwd=os.path.join(stack, "lib"), start_new_session=True)
    try:
        while not listens(int(port)) and server.poll() is None and time.monotonic() - started < 15:
            time.sleep(0.05)
        code, said, _ = bounded.run([*whole, "127.0.0.1"], limit, log, variables, os.path.join(stack, "lib"))
        try:
            server_code = server.wait(timeout=5 if code == 0 else 1)
        except subprocess.TimeoutExpired:
            server_code = None
    finally:
        bounded.end(server)
    with open(log + ".server", errors="replace") as file:
        said += "\n" + file.read()
    wrong = "" if code == 0 and server_code == 0 else f"exit codes {code} and {server_code} (None: stopped)"
    return wrong, said, time.monotonic() - started


def figures(said):
    """The lines that tell how fast it was, and which way the bytes took."""
    lines = [re.sub(r"\s+", " ", line.strip()) for line in said.splitlines()]
    fast = [line for line in lines if line.startswith("Final:") or re.match(r"\d+ \d+( [\d.]+){2,}$", line) or line.startswith("VALIDATION")]
    return list(dict.fromkeys(fast)), [line for line in lines if line.startswith("nobounce: ")]


def judge(wrong, said, says):
    if wrong:
        return wrong
    if not re.search(says, said):
        return f"nothing says '{says}'"
    return "the wrong way: staged" if "staged" not in says and re.search(r"(in|out): .*\bstaged\b", said) else ""


def mpi(bundle, stack, out, command, ranks, options, variables, limit):
    """(what is wrong or nothing, output, seconds) of one MPI run."""
    program = [os.path.join(stack, "programs", command[0]), *command[1:]]
    # Not bound to a core each: nb0's helper thread needs one, too.
    launch = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(ranks), "--mca", "pml", "ucx", "--mca", "osc", "ucx", "--mca", "btl", "self"]
    variables = {**environment(stack), **variables}
    if ranks > 2:
        variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(100 // ranks)
    is_death = command[0].startswith("dies")
    if is_death:
        # Nobody answers in that folder; and those who live get the time to look at their memory.
        variables["CUDA_MPS_PIPE_DIRECTORY"] = os.path.dirname(out)
        launch += ["--mca", "odls_base_sigkill_timeout", "3" if command[0] == "dies" else "2"]
    code, said, seconds = bounded.run([os.path.join(bundle, "bin", "nobounce"), "run", *options, "--", *launch, *program], limit, out, variables)
    return judge_death(code, said, ranks, "reduce" not in command, "exits" in command) if is_death else judge_ranks(code, said, variables, "--fault" in options), said, seconds


def memory_in_use():
    """MiB in use on the GPU, whoever uses them; None where nobody tells."""
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(asked, capture_output=True, text=True, timeout=20).stdout.split()[0])
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        return None


def memory_after(before):
    """(what is wrong or nothing, a line to tell): whether all is given back, for which the driver takes a moment."""
    for _ in range(20):
        after = memory_in_use()
        if before is None or after is None:
            return "nvidia-smi does not tell what is in use on the GPU", ""
        if after <= before + 64:
            break
        time.sleep(0.2)
    return f"{after - before} MiB of GPU memory are still in use" if after > before + 64 else "", f"GPU memory in use: {before} MiB before, {after} MiB after"


def bytes_in(said):
    """[(direct, staged)] of each line that tells what came in: those of values.c and dies.c, and those of speed.c."""
    return [(int(direct), int(staged)) for direct, staged in re.findall(r"(\d+) direct, (\d+) staged", said) + re.findall(r"direct (\d+) staged (\d+)$", said, re.M)]


def judge_ranks(code, said, variables, is_lossy=False):
    if code != 0 or "every byte was right" not in said:
        return f"exit code {code} (None: stopped)"
    if is_lossy and not re.search(r"^nobounce: .*\b[1-9]\d* retransmission", said, re.M):
        return "nothing was sent again, though packets were to be lost"
    direct, staged = map(sum, zip(*bytes_in(said) or [(0, 0)]))
    if not variables.get("NOBOUNCE_WINDOW") and staged:
        return f"{staged} bytes were staged"
    if not variables.get("UCX_IB_GPU_DIRECT_RDMA") and not variables.get("NOBOUNCE_WINDOW") and not direct:
        return "nothing came in through the window"
    return ""


BY_NB0 = re.compile(r"rank (\d+): good: nb0 reported the death as an error(?: after [\d.]+ s|: UCX ended it)")
BY_UCX = re.compile(r"\[[^\s:]+:(\d+) *:\w+\].*UCX +ERROR IB Async event on nb0: local work queue catastrophic error")


def told_of_it(said):
    """The ranks that were told of an error: by a request that failed, or by an event, of which UCX's log says the process."""
    rank_of = {process: rank for rank, process in re.findall(r"rank (\d+): process (\d+)", said)}
    return set(BY_NB0.findall(said)) | {rank_of[process] for process in BY_UCX.findall(said) if process in rank_of}


def judge_death(code, said, ranks, is_direct=True, exits=False):
    """The last rank died, or exited, inside a message or a collective; all others looked at their memory, into which bytes had come through the window, were told, and ended."""
    if code in (0, None) or ("exiting improperly" if exits else "signal 9") not in said:
        return f"exit code {code} (None: it did not end)"
    if not re.search(rf"it {'exits' if exits else 'dies'} with \d+ of \d+ bytes", said):
        return "it did not die inside a message or a collective"
    # Ranks, not lines: whoever looked by itself looks again when UCX ends it.
    looked, told, counts = len(set(re.findall(r"rank (\d+): good: after the death", said))), len(told_of_it(said)), bytes_in(said)
    if "FAILED" in said or looked != ranks - 1:
        return f"{looked} of {ranks - 1} others found their memory as it should be"
    if told != ranks - 1 and not exits:
        return f"{told} of {ranks - 1} others were told of an error"
    if is_direct and (not counts or any(staged or not direct for direct, staged in counts)):
        return f"not all through the window: (direct, staged) {counts}"
    return ""


ROW = re.compile(r"^(latency|bandwidth|bidirectional) device (\d+) ([\d.]+) (\S+) moved (\d+) host (\d+) direct (\d+) staged (\d+)", re.M)


def compare(said, out):
    """Lines that put the direct run beside the staged ones, and mpi.json with all of them. `said`: {name of the run: output}."""
    runs = {name: {(what, int(size)): (float(figure), unit, *map(int, ways)) for what, size, figure, unit, *ways in ROW.findall(text)} for name, text in said.items()}
    direct = runs.get("speed direct")
    if not direct:
        return []
    with open(os.path.join(out, "mpi.json"), "w") as file:
        rows = [{"run": name, "test": what, "bytes": size, "figure": row[0], "unit": row[1], "moved": row[2], "host": row[3], "direct": row[4], "staged": row[5]}
                for name, found in runs.items() for (what, size), row in found.items()]
        json.dump(rows, file, indent=1)
    lines = [f"{'MPI':14}{'bytes':>10}{'direct':>12}{'UCX default':>12}{'no window':>12}{'UCX staging':>12}        moved  of it direct"]
    for (what, size), (figure, unit, moved, _, through, _) in direct.items():
        others = [runs.get(name, {}).get((what, size), (float("nan"),))[0] for name in ("speed, UCX's defaults", "speed, no window", "speed, UCX's own staging")]
        lines.append(f"{what:14}{size:>10}{figure:>12.2f}" + "".join(f"{other:>12.2f}" for other in others) + f" {unit:5}{moved:>12}{100 * through / moved:>8.0f} %")
    return lines
