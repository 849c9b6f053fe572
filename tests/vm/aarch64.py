"""The programs and libraries for aarch64, in an emulated machine: by themselves, and with nb0 of this machine at the other end of the cable."""

import os
import subprocess

from image import AARCH64, Impossible
from machine import ADDRESS, GUEST, HERE, HOST, Machine

# Where the guest has them.
RUN = "/opt/nb/nobounce run"
SECONDS = 180
# Of the program that compares every byte.
CASES = "rc-short uc ud atomics crowd rnr"
LIBRARIES = ("libibverbs.so.1", "librdmacm.so.1", "libnobounce-paths.so", "libnobounce-vmm.so", "libmlx5.so.1", "libefa.so.1")
# A program of each operation, and its words.
PAIRS = [
    ("ib_write_bw", "-F -n 200 -s 65536"),
    ("ib_read_bw", "-F -n 200 -s 65536"),
    ("ib_send_lat", "-F -n 200 -s 64"),
    ("ib_atomic_bw", "-F -n 200"),
    ("ibv_rc_pingpong", "-g 0 -n 200"),
    ("ibv_ud_pingpong", "-g 0 -n 200"),
]


class Bench:
    def __init__(self, machine, log):
        self.machine, self.log, self.failed, self.passed, self.port = machine, log, 0, 0, 30000

    def check(self, what, is_right, *results):
        if is_right:
            self.passed += 1
            self.log(f"  {what}")
            return
        self.failed += 1
        for result in results:
            self.log(f"failed: {what}: exit code {result.code}, {result.seconds:.0f} s\n{result.output.strip()[-1500:]}")

    def alone(self, what, command, wanted):
        done = self.machine.guest(command, SECONDS)
        self.check(what, done.code == 0 and all(word in done.output for word in wanted), done)

    def pair(self, what, server, client):
        """A server and a client; each is its side, its command and the words after those for the port."""
        self.port += 1
        (side, first, first_words), (other_side, second, second_words) = server, client
        begun = self.machine.begin(side, f"{first} -p {self.port} {first_words}", SECONDS)
        results = []
        if self.machine.wait_listening(side, self.port, begun):
            results.append(self.machine.begin(other_side, f"{second} -p {self.port} {second_words}", SECONDS).wait())
            if results[0].code and not begun.ended():
                self.machine.stop_side(side)
        results.append(begun.wait())
        is_right = len(results) == 2 and not any(result.code or "FAILED" in result.output for result in results)
        self.check(what, is_right, *results)


def run(folder, scratch, built, own_peer, programs, log):
    """`programs` is the folder of what was built for aarch64: the command, and the drop-in folder."""
    dropin = os.path.join(programs, "dropin")
    files = [("nb/peer", compile_peer(scratch, dropin)), ("nb/nobounce", os.path.join(programs, "nobounce"))]
    files += [(f"nb/dropin/{name}", os.path.join(dropin, name)) for name in LIBRARIES]
    with Machine(folder, scratch, built) as machine:
        bench = Bench(machine, log)
        # The kernel's own has the port.
        machine.guest("rdma link del rxe0; rmmod rdma_rxe")
        machine.install(files)
        bench.alone("the machine is aarch64", "uname -m", ["aarch64"])
        bench.alone("version", "/opt/nb/nobounce --version", ["nobounce "])
        bench.alone("ibv_devinfo", f"{RUN} --addr 127.0.0.1 -- ibv_devinfo", ["nb0", "PORT_ACTIVE"])
        bench.alone("sysfs without the launcher", "LD_PRELOAD=/opt/nb/dropin/libnobounce-paths.so dash -c 'read guid </sys/class/infiniband/nb0/node_guid; echo $guid'", [":"])
        bench.alone("doctor", "/opt/nb/nobounce doctor; test $? -le 1", ["0 RDMA adapters"])
        for link in ("shm", "udp"):
            start = f"NOBOUNCE_LINK={link} {RUN}"
            for tool, words in PAIRS:
                server, client = f"{start} --addr 127.0.0.1 -- {tool}", f"{start} --addr 127.0.0.2 -- {tool}"
                bench.pair(f"{tool} by {link}", (GUEST, server, words), (GUEST, client, f"{words} 127.0.0.1"))
        there = f"{RUN} --addr {ADDRESS[4][GUEST]} --"
        both = [(tool, tool, tool, words, words) for tool, words in PAIRS]
        both.append(("peer", "/opt/nb/peer", own_peer, "-g 0", f"-g 0 {{}} {CASES}"))
        for name, of_guest, of_host, words, more in both:
            for server, client in ((GUEST, HOST), (HOST, GUEST)):
                commands = {GUEST: f"{there} {of_guest}", HOST: of_host}
                address = ADDRESS[4][server]
                last = more.format(address) if "{}" in more else f"{more} {address}"
                bench.pair(f"{name}, server on the {server}", (server, commands[server], words), (client, commands[client], last))
    log(f"aarch64: {bench.passed} passed, {bench.failed} failed")
    return 1 if bench.failed else 0


def compile_peer(scratch, dropin):
    """The test program that compares every byte, linked with the library under test."""
    peer = os.path.join(HERE, "peer")
    path = os.path.join(scratch, "peer-aarch64")
    sources = [os.path.join(peer, name) for name in sorted(os.listdir(peer)) if name.endswith(".c")]
    words = [f"{AARCH64.triple}-gcc", "-O1", "-o", path, *sources, f"-L{dropin}", "-l:libibverbs.so.1", "-Wl,--unresolved-symbols=ignore-in-shared-libs"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise Impossible(f"the test program cannot be compiled for aarch64: {done.stderr[-800:]}")
    return path
