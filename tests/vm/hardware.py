"""Cases of `nic/hard`: the nobounce library and bench on the guest's rxe0 as on any NIC of the system's, against itself and against the
host's nb0; and what becomes of them when the device, its port, its address or its rights go."""

import glob
import os
import re
import subprocess
import time

from adapters import expect
from cases import case
from machine import ADDRESS, GUEST, HOST

BENCH = "nobounce bench --iters 10 --op write,read,send --kind latency,bandwidth --size 1,64K"
FINE = r"^every byte verified"
# Tests of the library that hold on any device, by the beginning of their names.
TESTS = ["operations::write_and_read_back", "operations::nothing_at_all", "operations::sends_meet", "operations::a_send_waits", "operations::atomics",
         "operations::two_peers", "handshake::"]
# These are about the software NIC: its limits, and devices at addresses of their own.
SKIPPED = "--skip gpu_standin --skip options_out_of_range --skip the_families_must_match"
# The command as a user without rights; the device's counters tell when it is at work.
NOBODY = "start-stop-daemon -S -c nobody:nogroup -x /opt/nobounce --"


def install(bench, tests=False):
    """The command, and the library's tests, in the guest, without what only debuggers read."""
    machine = bench.machine
    folder = os.path.join(machine.scratch, "hard")
    os.makedirs(folder, exist_ok=True)
    files = [("nobounce", machine.nobounce)]
    if tests:
        found = glob.glob(os.path.join(os.path.dirname(machine.nobounce), "deps", "library-*"))
        found = [path for path in found if os.access(path, os.X_OK) and not path.endswith(".d")]
        if not found:
            return False
        files.append(("library-tests", max(found, key=os.path.getmtime)))
    for name, path in files:
        subprocess.run(["strip", "-o", os.path.join(folder, name), path], check=True, timeout=60)
    machine.install([(name, os.path.join(folder, name)) for name, _ in files])
    return True


def fails(bench, what, command, *patterns, seconds=60):
    """Runs a command in the guest, which must fail in time and say what fits every pattern."""
    done = bench.machine.guest(command, seconds)
    bench.runs += 1
    bench.seen.append((bench.name, "guest", what, done.output.strip()[-600:]))
    missing = [pattern for pattern in patterns if not re.search(pattern, done.output, re.MULTILINE)]
    if done.code in (0, 137, 255) or missing:
        bench.fail(f"{what}: {'it does not say ' + repr(missing[0]) if missing else f'it ends with {done.code}'}", ("guest", done))


# Waits until a device has sent some thousand packets; an emulated machine takes its time.
BUSY = ("first=$(cat /sys/class/infiniband/{0}/ports/1/hw_counters/sent_pkts); now=$first; for i in $(seq 150); do [ $((now - first)) -gt 2000 ] && break; "
        "usleep 200000; now=$(cat /sys/class/infiniband/{0}/ports/1/hw_counters/sent_pkts); done")


def wait_busy(bench, device):
    if bench.machine.guest(BUSY.format(device) + "; [ $((now - first)) -gt 2000 ]", 40).code:
        bench.fail(f"{device} does not get to work")


def serve(bench, side, words, port, seconds=120):
    """A bench that serves, and is waited for until it listens."""
    machine = bench.machine
    listen = f"bench --listen {ADDRESS[4][side]}:{port} {words}"
    if side == GUEST:
        server = machine.begin(GUEST, f"nobounce {listen}", seconds)
    else:
        server = machine.begin_bare([machine.nobounce, *listen.split()], seconds)
    if not machine.wait_listening(side, port, server):
        bench.fail(f"the bench on the {side} does not listen", (side, server.wait()))
    return server


@case("the bench through nic/hard: rxe0 with itself, and with the host's nb0 in both directions", quick=True)
def hardware(bench):
    install(bench)
    machine = bench.machine
    expect(bench, "doctor --prove", "nobounce doctor --prove", r"rxe0.*moved", seconds=60)
    expect(bench, "--explain-device", "nobounce bench --explain-device --device rxe0", r"^used: rxe0", r"RoCE, 10\.99\.0\.2 \(GID", r"used: an IPv4 address")
    expect(bench, "rxe0 with itself", f"{BENCH} --device rxe0", FINE, r"device rxe0 port 1: RoCE", seconds=240)
    expect(bench, "atomics", "nobounce bench --iters 25 --op atomic --device rxe0", FINE, seconds=120)
    # Hardware asks, software serves; then the other way round.
    server = serve(bench, HOST, f"--addr {ADDRESS[4][HOST]}", 21001, 300)
    expect(bench, "rxe0 asks nb0", f"{BENCH} --device rxe0 --peer {ADDRESS[4][HOST]}:21001", FINE, seconds=240)
    machine.stop_side(HOST)
    server.wait()
    server = serve(bench, GUEST, "--device rxe0", 21002, 300)
    words = BENCH.split()[1:]
    done = machine.begin_bare([machine.nobounce, *words, "--addr", ADDRESS[4][HOST], "--peer", f"{ADDRESS[4][GUEST]}:21002"], 240).wait()
    bench.runs += 1
    if done.code or not re.search(FINE, done.output, re.MULTILINE):
        bench.fail("nb0 asks rxe0", (HOST, done))
    machine.stop_side(GUEST)
    server.wait()


@case("the library's own tests on rxe0")
def hardware_library(bench):
    if not install(bench, tests=True):
        bench.fail("the library's tests are not built (cargo test -p nobounce --no-run)")
        return
    for name in TESTS:
        expect(bench, name, f"NOBOUNCE_DEVICE=rxe0 library-tests {name} --test-threads=1 {SKIPPED}", r"^test result: ok", seconds=180)


@case("what is wrong with a device, its address or its rights is said in a sentence, at once")
def hardware_refusals(bench):
    install(bench)
    short = "nobounce bench --iters 5 --op write --kind latency --size 8"
    fails(bench, "no such device", f"{short} --device mlx5_9", r"there is no RDMA device mlx5_9; there are: rxe0")
    fails(bench, "no such GID", f"NOBOUNCE_GID_INDEX=200 {short} --device rxe0", r"no entry of the GID table can be used")
    fails(bench, "an address that the device has not", f"{short} --device rxe0 --addr 10.1.2.3", r"address 10\.1\.2\.3 was asked for")
    fails(bench, "no such libibverbs", f"NOBOUNCE_VERBS=/nowhere/libibverbs.so.1 {short} --device rxe0", r"/nowhere/libibverbs\.so\.1 cannot be loaded")
    bench.machine.guest("mkdir -p /etc; echo nobody:x:65534:65534::/:/bin/sh >>/etc/passwd; echo nogroup:x:65534: >>/etc/group", 10)
    rights = "chmod 600 /dev/infiniband/uverbs0; "
    fails(bench, "no right to open", f"{rights}{NOBODY} {short[9:]} --device rxe0; code=$?; chmod 666 /dev/infiniband/uverbs0; exit $code",
          r"rxe0 cannot be opened: .*", r"/dev/infiniband/uverbs0 does not let this user in")
    fails(bench, "memlock of 64 KiB", f"ulimit -l 64; chmod 666 /dev/infiniband/uverbs0; {NOBODY} bench --iters 5 --op write --kind bandwidth --size 1M --device rxe0",
          r"may lock 64 KiB of memory")
    # Nothing of that stays.
    expect(bench, "it works afterwards", f"{short} --device rxe0", FINE)


@case("the port goes down and comes back under a bench on rxe0: it fails in time and says so, and the next one works")
def hardware_port(bench):
    install(bench)
    machine = bench.machine
    server = serve(bench, HOST, f"--addr {ADDRESS[4][HOST]}", 21003, 200)
    short = "nobounce bench --iters 5 --op write --kind latency --size 8 --device rxe0"
    # All in one command: while the port is down, so is the cable that commands come by.
    steps = [
        f"nobounce bench --op write --kind bandwidth --size 64K --iters 200000 --device rxe0 --peer {ADDRESS[4][HOST]}:21003 >/tmp/long 2>&1 & bench=$!",
        f"{BUSY.format('rxe0')}; ip link set eth0 down; start=$(cut -d. -f1 /proc/uptime)",
        f"{short} >/tmp/short 2>&1; echo exit $? >>/tmp/short",
        "wait $bench; echo exit $? after $(($(cut -d. -f1 /proc/uptime) - start)) s >>/tmp/long",
        f"ip link set eth0 up; ip -6 addr add {ADDRESS[6][GUEST]}/64 dev eth0 nodad 2>/dev/null; sleep 2",
        "echo LONG; cat /tmp/long; echo SHORT; cat /tmp/short",
    ]
    done = machine.guest(" ; ".join(steps), 100)
    bench.runs += 2
    bench.seen.append((bench.name, "guest", "port down", done.output.strip()[-1500:]))
    long, _, short_said = done.output.partition("SHORT")
    ended = re.search(r"^exit 2 after (\d+) s", long, re.MULTILINE)
    if not ended or int(ended.group(1)) > 45 or not re.search("port of rxe0 is down", long):
        bench.fail("a bench whose port goes down", (GUEST, done))
    if not re.search(r"rxe0 has no active port|no entry of the GID table", short_said):
        bench.fail("a device that is opened while its port is down", (GUEST, done))
    machine.stop_side(HOST)
    server.wait()
    machine.gids.clear()
    expect(bench, "up again", short, FINE)


@case("rxe0 goes away under a bench: it ends in time with a sentence, and one without any device says so")
def hardware_gone(bench):
    install(bench)
    machine = bench.machine
    run = machine.begin(GUEST, "nobounce bench --op write --kind bandwidth --size 64K --iters 100000 --device rxe0", 90)
    wait_busy(bench, "rxe0")
    started = time.monotonic()
    gone = machine.begin(GUEST, "rdma link del rxe0", 60)
    done = run.wait() if not machine.release.startswith("6.1") else None
    bench.runs += 1
    if done is None:
        # This kernel lets a device go when nobody has it open any more (interop.md): there is nothing to see from inside.
        machine.stop_side(GUEST)
        done = run.wait()
    elif done.code in (0, 137, 255) or time.monotonic() - started > 60:
        bench.fail("the bench goes on without its device", (GUEST, done))
    bench.seen.append((bench.name, "guest", "device gone", done.output.strip()[-600:]))
    gone.wait()
    fails(bench, "no device at all", "nobounce bench --iters 5 --device rxe0", r"shows no RDMA device|gives no list of devices|there is no RDMA device")
    machine.guest("rdma link add rxe0 type rxe netdev eth0", 20)
    time.sleep(1)
    machine.gids.clear()
    expect(bench, "there again", "nobounce bench --iters 5 --op write --kind latency --size 8 --device rxe0", FINE)
