"""Cases of the connection manager: programs that find each other by address and port, ours over librdmacm, the guest's over the kernel's."""

import re
import time

import forge
from cases import case
from machine import ADDRESS, GUEST, HOST, other

PORT_SPACES = {"tcp": 0x0106, "udp": 0x0111}
# Programs of our own, in tests/cm.
OWN = ("ucx-listener", "often", "behaviour")


def offered(machine, side, port, command, space="tcp"):
    """Waits until a server listens on a port of the connection manager."""
    name = f"{PORT_SPACES[space] << 16 | port:x}"
    for _ in range(100):
        if command.ended():
            return False
        if side == HOST and re.search(rf"@nobounce/service/[^/]*/{name}$", open("/proc/self/net/unix").read(), re.MULTILINE):
            return True
        if side == GUEST and re.search(rf"LISTEN.*:{port}\b", machine.guest("rdma resource show cm_id", 10).output):
            return True
        time.sleep(0.1)
    return False


def by_address(bench, server, client, family=4, options=(), seconds=60, space="tcp", codes=(0, 0), port=None, known=None):
    """A server and a client on either side. {server} is the address, {port} the port, {device} the side's device, {often} and the like its
    program of our own; `codes` are how they must end. `known` is what a program of the guest's may say when it ends otherwise."""
    machine = bench.machine
    own = {GUEST: {"device": "rxe0"} | {name: name for name in OWN}, HOST: {"device": "nb0"} | {name: bench.programs.get(name) for name in OWN}}
    for side in (GUEST, HOST):
        machine.port += 1
        names = {"server": ADDRESS[family][side], "port": port or machine.port}
        first = machine.begin(side, server.format(**names, **own[side]), seconds, family, options)
        where = f"{client.split()[0].strip('{}')}, server {'in the guest' if side == GUEST else 'on the host'}"
        bench.runs += 1
        if not offered(machine, side, names["port"], first, space):
            machine.stop_side(side)
            bench.fail(f"{where}: the server does not listen", ("server", first.wait()))
            continue
        second = machine.begin(other(side), client.format(**names, **own[other(side)]), seconds, family, options).wait()
        if second.code and not first.ended():
            machine.stop_side(side)
        first = first.wait()
        guests = first if side == GUEST else second
        if guests.code and known and re.search(known, guests.output):
            bench.seen.append((bench.name, "both", where, "the guest's program ends with: " + re.search(known, guests.output).group(0)))
            guests.code = 0
        if (first.code, second.code) != codes:
            bench.fail(where, ("server", first), ("client", second))


@case("the connection manager: rping with data check, both as client and as server", quick=True)
def connections(bench):
    by_address(bench, "rping -s -a {server} -p {port} -V -C 10 -S 2000", "rping -c -a {server} -p {port} -V -C 10 -S 2000")


@case("the connection manager: ucmatose, udaddy, rdma_client, perftest -R, IPv6")
def connections_more(bench):
    by_address(bench, "ucmatose -b {server} -p {port} -c 8 -C 10 -S 3000", "ucmatose -s {server} -p {port} -c 8 -C 10 -S 3000")
    # It always takes this port.
    by_address(bench, "udaddy -b {server} -c 4 -C 5 -S 500", "udaddy -s {server} -c 4 -C 5 -S 500", space="udp", port=7174)
    by_address(bench, "rdma_server -s {server} -p {port}", "rdma_client -s {server} -p {port}")
    for tool in ("ib_send_bw -s 65536", "ib_write_bw -s 65536", "ib_read_bw -s 65536", "ib_atomic_bw", "ib_send_lat -C", "ib_write_lat -C"):
        by_address(bench, tool + " -R -F -n 20 -p {port}", tool + " -R -F -n 20 -p {port} {server}")
    by_address(bench, "rping -s -a {server} -p {port} -V -C 10", "rping -c -a {server} -p {port} -V -C 10", family=6)


def has_joined(machine, side):
    """Whether a receiver of 239.77.0.3 is there: our socket's membership, the filter of the kernel's adapter."""
    if side == HOST:
        return "03004DEF" in open("/proc/self/net/igmp").read()
    return "33:33:ef:4d:00:03" in machine.guest("ip maddr show", 10).output.lower()


@case("multicast: mckey, a receiver on either side, and one on both")
def multicast(bench):
    machine, group = bench.machine, "239.77.0.3"
    words = "mckey -m " + group + " -b {address} -S 1000 -C "
    # The kernel looks for a route before it binds.
    machine.guest("ip route add 224.0.0.0/4 dev eth0", 10)
    # mckey does not wait for its requests, and the kernel drops those that it has not begun when their queue pair is destroyed: of the guest's
    # ten, at least one arrives.
    count = {HOST: " 10", GUEST: " 1"}
    for sender, receivers in ((HOST, (GUEST,)), (GUEST, (HOST,)), (HOST, (GUEST, HOST))):
        listening = {}
        for side in receivers:
            listening[side] = machine.begin(side, words.format(address=ADDRESS[4][side]) + count[sender], 60)
            for _ in range(200):
                if listening[side].ended() or has_joined(machine, side):
                    break
                time.sleep(0.1)
        sent = machine.begin(sender, words.format(address=ADDRESS[4][sender]) + "10 -s", 60).wait()
        if sent.code:
            [machine.stop_side(side) for side in receivers]
        for side, receiver in listening.items():
            bench.runs += 1
            heard = receiver.wait()
            if sent.code or heard.code or "data transfers complete" not in heard.output:
                bench.fail(f"multicast from the {sender} to the {side}", ("sender", sent), ("receiver", heard))


@case("the connection manager when 10 % of our messages and 5 % of the kernel's are lost")
def connections_lost(bench):
    bench.machine.disturb("loss 5%")
    try:
        for _ in range(3):
            by_address(bench, "ucmatose -b {server} -p {port} -c 8 -C 2", "ucmatose -s {server} -p {port} -c 8 -C 2",
                       options=("--fault", "loss=0.1,seed=7"), seconds=120)
    finally:
        bench.machine.disturb(None)


@case("the connection manager: UCX's rdmacm module, and libfabric's verbs provider")
def connections_of_libraries(bench):
    if "ucx-listener" in bench.programs:
        # When the queue pair ends, Linux 7.2 raises "last WQE reached" more than once, and UCX 1.13 ends itself over the second (docs/reference/interop.md).
        # The best transport would be TCP where this is not said.
        words = "env UCX_NET_DEVICES={device}:1 UCX_TLS=rc_verbs,ud_verbs UCX_SOCKADDR_TLS_PRIORITY=rdmacm {ucx-listener} {server} {port}"
        by_address(bench, words, words + " 20", known="Assertion `wait_ctx->cb_id == [^']*' failed")
    else:
        bench.log("tests/cm/ucx-listener.c cannot be compiled here (apt-get install libucx-dev): UCX is left out")
    # Its two ends shake hands over TCP first.
    words = "fi_pingpong -p verbs -e msg -c -I 10"
    for side in (GUEST, HOST):
        results = bench.machine.pair(side, words + " -B {port}", words + " -P {port} {server}")
        if "failed to connect: Connection refused" in results[1].output:
            # That was TCP, before anything of ours: seen once on a machine with 20 processes for each processor.
            results = bench.machine.pair(side, words + " -B {port}", words + " -P {port} {server}")
        bench.check(words, side, results)


@case("UCX 1.13 ends itself where its connection ends, without any of ours: both sides in the guest", odd=True)
def kernel_last_wqe(bench):
    address = ADDRESS[4][GUEST]
    words = f"env UCX_NET_DEVICES=rxe0:1 UCX_TLS=rc_verbs,ud_verbs UCX_SOCKADDR_TLS_PRIORITY=rdmacm ucx-listener {address} 18515"
    for _ in range(5):
        server = bench.machine.begin(GUEST, words, 60)
        offered(bench.machine, GUEST, 18515, server)
        client = bench.machine.begin(GUEST, words + " 20", 60).wait()
        server = server.wait()
        bench.runs += 1
        for name, done in (("server", server), ("client", client)):
            said = re.search(r"Assertion .* failed|rounds right", done.output)
            bench.log(f"{name}: exit code {done.code}, {said.group(0) if said else 'nothing of interest said'}")


@case("a thousand connections one after the other, each ended; refusals with private data; all private data checked")
def connections_often(bench):
    if "often" not in bench.programs:
        return bench.log("tests/cm/often.c cannot be compiled here (apt-get install librdmacm-dev): left out")
    before = resources(bench)
    by_address(bench, "{often} {server} {port}", "{often} {server} {port} 1000", seconds=240)
    # The last of them may still be remembered.
    for _ in range(60):
        if resources(bench) == before:
            return
        time.sleep(0.5)
    bench.fail(f"the guest's kernel had {before} connections and queue pairs before, and has {resources(bench)} now")


@case("connections one after the other over IPv6, which Linux 7.2 was seen not to survive (docs/reference/interop.md)", odd=True)
def kernel_panic(bench):
    by_address(bench, "{often} {server} {port}", "{often} {server} {port} 300", family=6, seconds=120)


def resources(bench):
    """How many identifiers and queue pairs of programs the guest's kernel has."""
    text = bench.machine.guest("rdma resource show cm_id; rdma resource show qp", 10).output
    return len([line for line in text.splitlines() if " pid " in line])


@case("what programs meet at the edges of librdmacm: the kernel's in the guest answers as ours does")
def connections_edges(bench):
    if "behaviour" not in bench.programs:
        return bench.log("tests/cm/behaviour.c cannot be compiled here (apt-get install librdmacm-dev): left out")
    for side, words in ((GUEST, f"behaviour {ADDRESS[4][GUEST]} kernel"), (HOST, f"{bench.programs['behaviour']} {ADDRESS[4][HOST]}")):
        done = bench.machine.begin(side, words, 120).wait()
        bench.runs += 1
        if done.code or "all right" not in done.output:
            bench.fail(f"behaviour, {side}", (side, done))


@case("messages of earlier connections come again, as they were and damaged, while a connection stands")
def connections_forged(bench):
    forge.run(bench, offered)


def stream(bench, server_side, server, client, seconds=120):
    """A server and a client that do not come to an end, once they are under way."""
    machine = bench.machine
    machine.port += 1
    names = {"server": ADDRESS[4][server_side], "port": machine.port}
    server = machine.begin(server_side, server.format(**names), seconds)
    offered(machine, server_side, machine.port, server)
    before = machine.received()
    client = machine.begin(other(server_side), client.format(**names), seconds)
    for _ in range(600):
        if machine.received() > before + 100 or client.ended():
            break
        time.sleep(0.05)
    return server, client


def must_end(bench, what, command, started):
    """A program whose other side is gone ends by itself, long before its limit: it is told of the end of its connection, or of failed requests."""
    done = command.wait()
    bench.runs += 1
    seconds = time.monotonic() - started
    bench.seen.append((bench.name, "both", what, f"exit code {done.code} after {seconds:.1f} s"))
    told = re.search(r"(?i)disconnect event|fail|error", done.output)
    if done.code == 137 or seconds > 90 or not told:
        bench.fail(f"{what}: exit code {done.code} after {seconds:.0f} s", ("program", done))


@case("connections by address when the guest's device is taken away, and when the guest is killed; it comes back, and connects again")
def connections_killed(bench):
    machine = bench.machine
    server, client = stream(bench, GUEST, "rping -s -a {server} -p {port} -V", "rping -c -a {server} -p {port} -V -C 1000000")
    started = time.monotonic()
    removal = machine.begin(GUEST, "rdma link del rxe0", 60)
    must_end(bench, "rping to a device that is taken away", client, started)
    machine.stop_side(GUEST)
    server.wait()
    if removal.wait().code:
        bench.fail("rdma link del fails", ("guest", removal.wait()))
    # A fresh guest: its queue pairs have the same numbers each time.
    machine.reboot()
    stays, client = stream(bench, HOST, "rping -s -P -a {server} -p {port} -V", "rping -c -a {server} -p {port} -V -C 1000000")
    # Nobody waits for what runs in a guest that is gone.
    machine.kill()
    machine.stop_capture()
    machine.reboot()
    again, refused = None, 0
    for _ in range(3):
        again = machine.begin(GUEST, f"rping -c -v -a {ADDRESS[4][HOST]} -p {machine.port} -V -C 10", 60).wait()
        bench.runs += 1
        if again.code == 0:
            break
        # The standard's number of a stale connection: ours ends it, and takes the next request.
        if not re.search(r"REJECTED, error 10", again.output):
            break
        refused += 1
    bench.seen.append((bench.name, "rxe", "rping after the guest was killed", f"{refused} times refused as stale, then exit code {again.code}"))
    machine.stop_side(HOST)
    if again.code:
        bench.fail("the guest that came back cannot connect", ("client", again), ("server", stays.wait()))
    stays.wait()
    # One that has always something under way: whoever only waits for the other side hears nothing, and learns nothing.
    words = "ib_write_bw -R -F -s 1000 -n 5000000 -p {port}"
    server, client = stream(bench, GUEST, words, words + " {server}")
    machine.kill()
    must_end(bench, "ib_write_bw -R to a guest that was killed", client, time.monotonic())
    machine.reboot()
    by_address(bench, "rping -s -a {server} -p {port} -V -C 10", "rping -c -a {server} -p {port} -V -C 10")


@case("256 and 1000 connections at once, and a port that nobody listens on")
def connections_many(bench):
    for count in (256, 1000):
        by_address(bench, f"ucmatose -b {{server}} -p {{port}} -c {count} -C 0", f"ucmatose -s {{server}} -p {{port}} -c {count} -C 0", seconds=120)
    machine = bench.machine
    for side in (GUEST, HOST):
        # Somebody is there, at another port: a host without any process of ours cannot answer.
        machine.port += 1
        there = machine.begin(other(side), f"rping -s -a {ADDRESS[4][other(side)]} -p {machine.port}", 60)
        offered(machine, other(side), machine.port, there)
        client = machine.begin(side, f"rping -c -v -a {ADDRESS[4][other(side)]} -p 9", 30).wait()
        machine.stop_side(other(side))
        there.wait()
        bench.runs += 1
        # "Invalid service", by the standard's number.
        if client.code == 0 or not re.search(r"REJECTED, error 8", client.output):
            bench.fail(f"a port that nobody listens on, client {side}", ("client", client))
