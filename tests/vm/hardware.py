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
FINE = r"^bytes verified"
# The library's tests by theme: each is a process of its own, which says what it cannot do on this device.
TESTS = ["operations::", "handshake::", "forked::", "rails::", "vanish::", "moods::", "gpu_standin_access::", "gpu_standin_operations::", "gpu_standin_late_receive::",
         "gpu_standin_slow_copies::"]
ON_RXE0 = f"NOBOUNCE_DEVICE=rxe0 NOBOUNCE_TEST_DEVICE6=rxe0@{ADDRESS[6][GUEST]}"
# A second device, rxe1, whose cable leads nowhere: it talks to itself.
SECOND = "ip addr add 10.98.0.2/24 dev eth1 2>/dev/null; ip link set eth1 up; rdma link show rxe1/1 >/dev/null 2>&1 || rdma link add rxe1 type rxe netdev eth1"
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
        files.append(("libfake_cuda.so", os.path.join(os.path.dirname(machine.nobounce), "libfake_cuda.so")))
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


# Waits until the port of a device is active and has an IPv4 address in its table.
UP = ("cd /sys/class/infiniband/{0}/ports/1; for i in $(seq 50); do grep -qs ACTIVE state && grep -qs 0000:ffff: gids/* && break; usleep 200000; done; "
      "grep -qs ACTIVE state && grep -qs 0000:ffff: gids/*")


def wait_up(bench, device):
    if bench.machine.guest(UP.format(device), 30).code:
        bench.fail(f"the port of {device} does not come up")


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
    expect(bench, "doctor --prove", "nobounce doctor --prove", r"rxe0.*moved", seconds=180)
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
        # A name is looked for anywhere in the names of tests.
        skip = "" if name.startswith("gpu") else "--skip gpu_standin"
        said = expect(bench, name, f"{ON_RXE0} RUST_BACKTRACE=0 library-tests {name} {skip} --test-threads=1", r"^test result: ok", seconds=420)
        for test, why in re.findall(r"^thread '(\S+)'.* panicked at .*\n(.*)", said, re.MULTILINE):
            bench.log(f"  {test}: {why}")
        bench.seen += [(bench.name, "guest", name, line.strip()) for line in re.findall(r"waived: .*|test result: .*", said)]
    listed = bench.machine.guest("library-tests --list --format terse", 30).output
    left_out = [test for test in re.findall(r"^(\S+): test$", listed, re.MULTILINE) if not test.startswith((*TESTS, "taken::"))]
    if left_out:
        bench.fail(f"tests that no theme has: {left_out}")


TAKEN = [
    # What is done, what is undone, what must be said.
    ("the port goes down and comes back", "ip link set eth1 down", "ip link set eth1 up; sleep 1", "down"),
    ("the device is deleted", "rdma link del rxe1", "rdma link add rxe1 type rxe netdev eth1; sleep 1", "gone"),
]


@case("a device or its port is taken away under traffic and given back: the library says so in time, and its process goes on")
def hardware_taken(bench):
    if not install(bench, tests=True):
        bench.fail("the library's tests are not built (cargo test -p nobounce --no-run)")
        return
    bench.machine.guest(SECOND, 20)
    wait_up(bench, "rxe1")
    for what, take, give, expected in TAKEN:
        if expected == "gone" and bench.machine.release.startswith("6.1"):
            # This kernel keeps a deleted device for whoever has it open, and it goes on working (interop.md): there is nothing to see.
            bench.seen.append((bench.name, "guest", what, "not on this kernel, which keeps a device that somebody has open"))
            continue
        words = f"NOBOUNCE_DEVICE=rxe1 NOBOUNCE_TEST_TAKE='{take}' NOBOUNCE_TEST_RETURN='{give}' NOBOUNCE_TEST_EXPECT={expected} RUST_BACKTRACE=0"
        said = expect(bench, what, f"{words} library-tests taken:: --nocapture", r"^test result: ok", seconds=120)
        bench.seen += [(bench.name, "guest", what, line) for line in re.findall(r"^after .*", said, re.MULTILINE)]
    bench.machine.guest("rdma link del rxe1", 20)


@case("two devices as rails: a transfer is split over them, and one that fails is named")
def hardware_rails(bench):
    install(bench)
    machine = bench.machine
    machine.guest(SECOND, 20)
    wait_up(bench, "rxe1")
    split = "nobounce bench --device rxe0,rxe1 --size 64K,1M --iters 10"
    expect(bench, "rails", split, FINE, r"^2 rails, each message split by the speed of their ports: rxe0 at .* rxe1 at", seconds=120)
    steps = [f"nobounce bench --device rxe0,rxe1 --op write --size 1M --iters 100000 >/tmp/rails 2>&1 & bench=$!", BUSY.format("rxe1"),
             "ip link set eth1 down", "start=$(cut -d. -f1 /proc/uptime)", "wait $bench; code=$?",
             "echo after $(($(cut -d. -f1 /proc/uptime) - start)) s; cat /tmp/rails; ip link set eth1 up; exit $code"]
    fails(bench, "a rail whose port goes down", "; ".join(steps), r"rail 1 \(rxe1 to 10\.98\.0\.2\) failed: .*the port of rxe1 is down", r"^after \d s$", seconds=100)
    wait_up(bench, "rxe1")
    expect(bench, "both again", split, FINE, seconds=120)
    machine.guest("rdma link del rxe1", 20)


@case("rmmod of the driver under traffic")
def hardware_rmmod(bench):
    install(bench)
    machine = bench.machine
    run = machine.begin(GUEST, "nobounce bench --op write --kind bandwidth --size 64K --iters 100000 --device rxe0", 120)
    wait_busy(bench, "rxe0")
    unload = machine.guest("rmmod rdma_rxe; code=$?; lsmod | grep rdma_rxe; exit $code", 30)
    bench.runs += 1
    bench.seen.append((bench.name, "guest", f"rmmod under traffic, exit code {unload.code}", unload.output.strip()[-400:]))
    if unload.code == 137:
        bench.fail("rmmod does not come back", (GUEST, unload))
    if unload.code == 0:
        # The kernel lets the driver go: whoever uses the device must hear of it.
        done = run.wait()
        bench.seen.append((bench.name, "guest", "the bench", done.output.strip()[-400:]))
        if done.code in (0, 137, 255) or not re.search("rxe0 is gone", done.output):
            bench.fail("the bench goes on without its driver", (GUEST, done))
    else:
        # The kernel keeps the driver for whoever has the device open: nobody must notice anything.
        if run.ended() or machine.guest(BUSY.format("rxe0") + "; [ $((now - first)) -gt 2000 ]", 40).code:
            bench.fail("a driver that was not unloaded does not work any more", (GUEST, unload))
        machine.stop_side(GUEST)
        run.wait()
        again = machine.guest("rmmod rdma_rxe", 30)
        if again.code:
            bench.fail("rmmod with nobody there", (GUEST, again))
    fails(bench, "no driver", "nobounce bench --iters 5 --device rxe0", r"shows no RDMA device|gives no list of devices|there is no RDMA device")
    machine.guest("insmod /modules/rdma_rxe.ko; rdma link add rxe0 type rxe netdev eth0", 30)
    wait_up(bench, "rxe0")
    machine.gids.clear()
    expect(bench, "the driver is there again", "nobounce bench --iters 5 --op write --kind latency --size 8 --device rxe0", FINE)


@case("what is wrong with a device, its address or its rights is said in a sentence, at once")
def hardware_refusals(bench):
    install(bench)
    short = "nobounce bench --iters 5 --op write --kind latency --size 8"
    fails(bench, "no such device", f"{short} --device mlx5_9", r"there is no RDMA device mlx5_9; there are: rxe0")
    fails(bench, "no such GID", f"NOBOUNCE_GID_INDEX=200 {short} --device rxe0", r"no entry of the GID table can be used")
    fails(bench, "an address that the device has not", f"{short} --device rxe0 --addr 10.1.2.3", r"address 10\.1\.2\.3 was asked for")
    # One that is in the table and wrong: of a network that the peer is not in. The peer hears, and its answers go nowhere. It sends nothing of its own, or it
    # could be the first to give up.
    oneway = "nobounce bench --iters 5 --op write --kind bandwidth --size 64"
    server = serve(bench, HOST, f"--addr {ADDRESS[4][HOST]}", 21004, 100)
    bench.machine.guest("ip addr add 10.55.0.1/24 dev eth0; sleep 1", 10)
    find = ("cd /sys/class/infiniband/rxe0/ports/1; index=$(for at in $(seq 0 15); do grep -qs 'ffff:0a37:0001' gids/$at && "
            "grep -qs 'RoCE v2' gid_attrs/types/$at && echo $at; done | head -1); cd /")
    for what, words in (("a GID of another network", "NOBOUNCE_GID_INDEX=$index"), ("the same by its address", "")):
        addr = "" if words else "--addr 10.55.0.1"
        fails(bench, what, f"{find}; start=$(cut -d. -f1 /proc/uptime); {words} {oneway} --device rxe0 {addr} --peer {ADDRESS[4][HOST]}:21004; code=$?; "
              "echo after $(($(cut -d. -f1 /proc/uptime) - start)) s; exit $code",
              r"GID \d+, 10\.55\.0\.1 on eth0, is not the address from which this machine sends to 10\.99\.0\.1: that is 10\.99\.0\.2", r"^after \d{1,2} s$")
    bench.machine.guest("ip addr del 10.55.0.1/24 dev eth0; sleep 1", 10)
    bench.machine.stop_side(HOST)
    server.wait()
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
    wait_up(bench, "rxe0")
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
    wait_up(bench, "rxe0")
    machine.gids.clear()
    expect(bench, "there again", "nobounce bench --iters 5 --op write --kind latency --size 8 --device rxe0", FINE)
