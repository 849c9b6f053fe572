"""NCCL over nb0 and over its own sockets, two ranks on one GPU, called by PyTorch and from C: what `gpu-check` runs of it.

Each rank is told to be another host (NCCL_HOSTID): only then does NCCL use the network between them. MPS is started for the time of the
runs where nobody has, for without it the ranks take turns on the GPU.
"""

import glob
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import bounded
from gpu_plan import Company

LOSS = "loss=0.001,seed=7"
# What is measured from C is measured so often, one network after the other: a virtual machine's CPUs are not always equally fast.
ROUNDS = 3

# Not bound to one core each, as mpirun does by itself: NCCL's threads need more than one.
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2", "--mca", "btl", "tcp,self"]
# Both ranks are on one machine: shared memory, unless told otherwise.
LINKS = {"socket": ("socket", []), "shm": ("nb0", ["--require", "direct"]), "udp": ("nb0", ["--require", "direct", "--link", "udp"])}
# NCCL's time-outs: 4 times 17 ms until the adapter gives up a peer that does not answer; by itself it takes 8 times 4.3 s (1 s before NCCL 2.23).
SOON = {"NCCL_IB_TIMEOUT": "12", "NCCL_IB_RETRY_CNT": "3"}
# Name, what the ranks do, over which network, options of `nobounce run`, variables, seconds.
RUNS = (
    *((f"speed C {link} {nth}", "speed C", *LINKS[link], {}, 60) for nth in range(1, ROUNDS + 1) for link in LINKS),
    *((f"speed {link}", "speed", *LINKS[link], {}, 60) for link in LINKS),
    ("values", "values", "nb0", ["--require", "direct"], {}, 90),
    ("training socket", "training", "socket", [], {}, 40),
    ("training", "training", "nb0", [], {}, 40),
    ("training udp", "training", "nb0", ["--link", "udp"], {}, 40),
    ("training, loss 0.1 %", "training", "nb0", ["--fault", LOSS, "--link", "udp"], {}, 40),
    ("values, loss 0.1 %", "values", "nb0", ["--fault", LOSS], {}, 120),
    ("values udp, loss 0.1 %", "values", "nb0", ["--fault", LOSS, "--link", "udp"], {}, 120),
    ("values udp", "values", "nb0", ["--require", "direct", "--link", "udp"], {}, 90),
    # With our libgdrapi: NCCL keeps what its proxy and its kernels tell each other in GPU memory, and the proxy writes it through a mapping.
    ("values, gdrapi", "values-short", "nb0", [], {"NCCL_GDRCOPY_ENABLE": "1"}, 40),
    ("torchrun", "values-short", "nb0", [], {"LAUNCHER": "torchrun"}, 40),
    ("mpirun", "values-short", "nb0", [], {"LAUNCHER": "mpirun"}, 40),
    ("graphs", "graphs", "nb0", [], {}, 40),
    ("abort", "abort", "nb0", [], {}, 40),
    ("killed", "killed", "nb0", [], SOON, 60),
    ("killed udp", "killed", "nb0", ["--link", "udp"], SOON, 60),
    # Between processes of one machine the end of the other is seen, whatever time-outs are set.
    ("killed, NCCL's own time-outs", "killed", "nb0", [], {}, 60),
    ("exits with everything open", "exits", "nb0", [], {}, 40),
    ("freed before deregistration", "freed", "nb0", [], {}, 40),
    ("workers forked after start", "forked", "nb0", [], {}, 40),
    # Without a window the copy engine must do everything, and CUDA lets it wait while a kernel is loaded for the first time.
    ("values, no window", "values-short", "nb0", ["--log", "warn"], {"NOBOUNCE_WINDOW": "off", "CUDA_MODULE_LOADING": "EAGER"}, 60),
)


def jobs(runs):
    """[(company, runs that belong together)]: training over sockets comes before what is held against it, and what is measured in turns is one job."""
    together = {kind: [run for run in runs if run[1] == kind] for kind in ("training", "speed C")}
    found = []
    for run in runs:
        what = run[1]
        group = [run]
        if what in together:
            group, together[what] = together[what], []
        # Of the rank that is killed it is asked whether the GPU's memory comes back: nobody else may take any meanwhile.
        company = {"speed": Company.RANKS_ALONE, "speed C": Company.RANKS_ALONE, "killed": Company.RANKS_ALONE, "abort": Company.DEATH, "exits": Company.DEATH}.get(what, Company.RANKS)
        if group:
            found.append((company, group))
    return found


MPS_FOLDER = "CUDA_MPS_PIPE_DIRECTORY"


def mps_control(*arguments, said="", limit=10):
    """Whether the daemon of the folder that all programs are given now did it in time, or of the folder that CUDA takes without one."""
    try:
        done = subprocess.run(["nvidia-cuda-mps-control", *arguments], input=said, stdout=subprocess.DEVNULL, text=True, timeout=limit, env=bounded.environment_with({}))
        return done.returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


class Mps:
    """MPS for the time of the run, unless it is there already or cannot be had. Its folder is a new one each time: a daemon that somebody left behind half dead answers in the usual one."""

    def __enter__(self):
        self.folder = None
        if not shutil.which("nvidia-cuda-mps-control"):
            print("gpu-check: no MPS here: the two ranks take turns on the GPU, and times mean little")
        elif not mps_control(said="get_server_list\n"):
            self.folder = tempfile.mkdtemp(prefix="nobounce-mps-")
            bounded.SHARED = {MPS_FOLDER: self.folder, "CUDA_MPS_LOG_DIRECTORY": self.folder}
            mps_control("-d")
            if not any(mps_control(said="get_server_list\n") or time.sleep(0.1) for _ in range(20)):
                print("gpu-check: MPS does not start: ranks that share the GPU will fail, or take turns", flush=True)
        return self

    def restart(self):
        """Clients that were killed may leave the server unable to take others for a while."""
        if self.folder:
            self.__exit__()
            self.__enter__()

    def __exit__(self, *_):
        if not self.folder:
            return
        if mps_control(said="quit\n", limit=15) or not mps_control(said="get_server_list\n"):
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            print(f"gpu-check: MPS does not end: a client that was killed may keep its server waiting ({MPS_FOLDER}={self.folder})", flush=True)
        bounded.SHARED = {}


class Done:
    """How a run ended: the exit code (None when stopped), what each rank left, NCCL's log, what was said, seconds."""

    def __init__(self, bundle, name, what, net, options, variables, limit, folder):
        os.makedirs(folder, exist_ok=True)
        launcher = {"torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=29488"],
                    "mpirun": [*MPIRUN, sys.executable]}.get(variables.get("LAUNCHER"), [sys.executable])
        command = [*launcher, os.path.join(bundle, "nccl-rank"), what, folder]
        if what == "speed C":
            command = [os.path.join(bundle, "programs", "nccl-speed"), folder]
            variables = {"NCCL_LIBRARY": nccl_library() or "libnccl.so.2", **variables}
        if net == "nb0":
            command = [os.path.join(bundle, "bin", "nobounce"), "run", *options, "--", *command]
        environment = {"NCCL_NET": {"nb0": "IB", "socket": "Socket"}[net], "NCCL_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "INFO",
                       "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": os.path.join(folder, "nccl.%p.log"),
                       "OMP_NUM_THREADS": "1", "NOBOUNCE_LOG": "warn", **variables}
        if "LAUNCHER" in variables:
            del environment["NCCL_NET"]  # as a user starts it: NCCL chooses by itself
        self.name, self.what, self.net, self.options = name, what, net, options
        self.is_staged = variables.get("NOBOUNCE_WINDOW") == "off"
        self.code, self.said, self.seconds = bounded.run(command, limit, os.path.join(folder, "said.txt"), environment)
        self.ranks = [read_json(os.path.join(folder, f"rank{rank}.json")) for rank in range(2)]
        self.logs = ""
        for entry in sorted(os.listdir(folder)):
            if entry.startswith("nccl.") and entry.endswith(".log"):
                with open(os.path.join(folder, entry), errors="replace") as file:
                    self.logs += file.read()

    def told(self):
        """What the ranks have to say, and the last line of `nobounce run`."""
        last = [line for line in self.said.splitlines() if line.startswith("nobounce: ") and "opened" in line]
        gdrcopy = re.findall(r"GDRCOPY enabled .*", self.logs)[:1]
        return [told for rank in self.ranks if rank for told in rank.get("told", [])] + gdrcopy + last[-1:]


def nccl_library():
    """The NCCL that came with PyTorch, or nothing."""
    found = [path for folder in sys.path for path in glob.glob(os.path.join(folder, "nvidia", "nccl", "lib", "libnccl.so.2"))]
    return found[0] if found else None


def read_json(path):
    try:
        with open(path) as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def is_gdrdma(logs):
    """Whether NCCL's log says of every connection over the network that it is GPUDirect RDMA over nb0."""
    ways = re.findall(r"via (NET/\S+)", logs)
    return bool(ways) and all(re.match(r"NET/IB/\d+/GDRDMA", way) for way in ways)


def retransmissions(said):
    """How many packets were sent again, by the last line of `nobounce run`."""
    return sum(map(int, re.findall(r"^nobounce: .*?(\d+) retransmission", said, re.M)))


def judge(done, reference):
    """What is wrong, or nothing. `reference` is the training over sockets, if there was one."""
    code, ranks, said = done.code, done.ranks, done.said
    if code is None:
        return "stopped: it did not end in time"
    if code != 0:
        words = [line for line in said.splitlines() if "Error" in line or "FAILED" in line or "nccl-rank" in line]
        return f"exit code {code}: {(words or said.splitlines() or ['nothing said'])[-1][:200]}"
    if any(rank is None for rank in ranks):
        return "a rank left no result"
    wrong = [w for rank in ranks for w in rank.get("wrong", [])]
    if wrong:
        return "; ".join(wrong[:3])
    if done.net == "nb0" and not is_gdrdma(done.logs):
        return "NCCL's log does not say NET/IB/0/GDRDMA of every connection"
    if "gdrapi" in done.name and "GDRCOPY enabled library" not in done.logs:
        return "NCCL's log does not say that GDRCopy is enabled"
    if done.net == "nb0" and done.what in ("speed", "speed C", "values", "values-short"):
        staged, window = (sum(row.get(f"{way}_bytes", 0) for rank in ranks for row in rank["rows"]) for way in ("staged", "window"))
        if (window or not staged) if done.is_staged else (staged or not window):
            return f"{staged} bytes staged, {window} through the window"
    if "--fault" in done.options and not retransmissions(said):
        return "nothing was sent again, though packets were to be lost"
    if done.net == "nb0" and done.what == "training":
        if not (reference and reference.ranks[0]):
            return "there is no training over sockets to compare with"
        ours, theirs = ranks[0]["losses"], reference.ranks[0]["losses"]
        if ours != theirs:
            return f"the losses differ from those over sockets: {ours[-1]} and {theirs[-1]} at the end"
    return ""


def speed_rows(done, caller, link):
    """The comparison over one link, as h200-nccl.json has it: the medians of all rounds."""
    names = [f"speed C {{}} {nth}" for nth in range(1, ROUNDS + 1)] if caller == "C" else ["speed {}"]
    ours, theirs = ([run for name in names if (run := done.get(name.format(net))) and None not in run.ranks] for net in (link, "socket"))
    if not ours or not theirs:
        return []
    rows = []
    for nth, row in enumerate(ours[0].ranks[0]["rows"]):
        median = lambda runs, key: round(statistics.median(run.ranks[0]["rows"][nth][key] for run in runs), 2)
        both = [rank["rows"][nth] for run in ours for rank in run.ranks]
        rows.append({
            "caller": caller, "test": row["test"], "bytes": row["bytes"], "link": link, "ours_us": median(ours, "us"), "socket_us": median(theirs, "us"),
            # Of it, what the application took to start the operations.
            "ours_issue_us": median(ours, "issue_us"), "socket_issue_us": median(theirs, "issue_us"),
            "gdrdma": all(is_gdrdma(run.logs) for run in ours), "rounds": min(len(ours), len(theirs)),
            "verified": all(one["verified"] for one in both) and all(rank["rows"][nth]["verified"] for run in theirs for rank in run.ranks),
            "window_bytes": sum(one["window_bytes"] for one in both), "staged_bytes": sum(one["staged_bytes"] for one in both),
        })
        if "alone_us" in row:  # each waited for before the next is started
            rows[-1] |= {"ours_alone_us": median(ours, "alone_us"), "socket_alone_us": median(theirs, "alone_us")}
    return rows


# What is asked for, called from C: over which link, of which operations, up to how many bytes (or of which), at most what part of the time over sockets.
GOALS = (
    ("shm", None, lambda size: size <= 64 << 10, 1.0), ("udp", None, lambda size: size <= 64 << 10, 1.0),
    ("shm", ["all_reduce"], lambda size: size == 8, 0.5), ("shm", ["all_reduce"], lambda size: size == 64 << 10, 0.5), ("shm", ["all_reduce"], lambda size: size == 1 << 20, 0.6),
    ("shm", ["all_reduce"], lambda size: size == 256 << 20, 1 / 2), ("shm", ["send/recv"], lambda size: size >= 1 << 20, 1 / 1.5),
    ("udp", None, lambda size: size > 64 << 10, 1.0), ("udp", None, lambda size: size <= 64 << 10, 0.8),
)


def goals(rows):
    """A line for each thing that is asked for: reached, or missed by which rows."""
    lines = []
    for link, operations, sizes, most in GOALS:
        found = {f"{row['test']} {row['bytes']} B": row["ours_us"] / row["socket_us"] for row in rows
                 if row["caller"] == "C" and row["link"] == link and sizes(row["bytes"]) and (operations is None or row["test"] in operations)}
        if not found:
            continue
        missed = [f"{name} {ratio:.2f}" for name, ratio in found.items() if ratio > most]
        told = ", ".join(missed) or f"{min(found.values()):.2f} to {max(found.values()):.2f}"
        of = f"{' and '.join(operations or ['all operations'])} ({', '.join(found)})" if len(found) < 3 else f"{' and '.join(operations or ['all operations'])}, {len(found)} rows"
        lines.append(f"goal {'missed' if missed else 'reached'}: {link}, {of}: at most {most:.2f} of sockets: {told}")
    return lines


def compare(done, out):
    """Writes nccl.json and NCCL's log of the comparison, and gives it in lines."""
    rows = [row for caller in ("C", "PyTorch") for link in ("shm", "udp") for row in speed_rows(done, caller, link)]
    if not rows:
        return []
    runs = [done[name] for name in ("speed shm", "speed udp", "speed C shm 1", "speed C udp 1") if name in done]
    with open(os.path.join(out, "nccl.json"), "w") as file:
        json.dump({"nccl": runs[0].ranks[0]["version"], "results": rows}, file, indent=1)
    with open(os.path.join(out, "nccl-c-runs.txt"), "w") as file:
        file.writelines(f"{name}: {row['test']} {row['bytes']} B {row['us']} us, {row['issue_us']} us to start it, {row['alone_us']} us alone\n"
                        for name, run in done.items() if run.what == "speed C" and run.ranks[0] for row in run.ranks[0]["rows"])
    with open(os.path.join(out, "nccl-log.txt"), "w") as file:
        file.write("".join(run.logs for run in runs))
    lines = [f"{'NCCL':16}{'bytes':>12}  {'caller':8}{'link':4}{'nb0 us':>12}{'socket us':>12}{'ratio':>8}  window        staged"]
    for row in rows:
        lines.append(f"{row['test']:16}{row['bytes']:>12}  {row['caller']:8}{row['link']:4}{row['ours_us']:>12.1f}{row['socket_us']:>12.1f}"
                     f"{row['ours_us'] / row['socket_us']:>8.2f}  {row['window_bytes']:<14}{row['staged_bytes']}"
                     f"{'' if row['verified'] else '  WRONG'}")
    return lines + goals(rows)


def has_torch():
    asked = [sys.executable, "-c", "import torch; assert torch.cuda.is_available()"]
    return subprocess.run(asked, capture_output=True).returncode == 0
