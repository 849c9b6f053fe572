"""A running test machine: QEMU with a Debian kernel and its rdma_rxe, at the other end of a network cable from this process.

The guest is 10.99.0.2 and fd99::2 with the device rxe0; the host's end of the cable is 10.99.0.1 and fd99::1, and programs there run
on nb0 by `nobounce run`. Commands for the guest go by TCP to its port 7 (see `init`), each with a limit in seconds.
"""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tarfile
import threading
import time

from image import Archive, Impossible, architecture

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
GUEST, HOST = "guest", "host"
ADDRESS = {4: {GUEST: "10.99.0.2", HOST: "10.99.0.1"}, 6: {GUEST: "fd99::2", HOST: "fd99::1"}}
# Path MTU 4096 and the headers of RoCEv2 over IPv6 fit.
MTU = 4300
BOOT_SECONDS = 120


def other(side):
    return HOST if side == GUEST else GUEST


class Result:
    """What a command printed, how it ended (137: it was stopped at its limit), and how long it took."""

    def __init__(self, code, output, seconds):
        self.code, self.output, self.seconds = code, output, seconds


class Command:
    """A command under way on one of the two sides. `wait` gives its Result, and always returns soon after the limit."""

    def __init__(self, work):
        self.result = None
        self.thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self.thread.start()

    def _run(self, work):
        started = time.monotonic()
        try:
            code, output = work()
        except OSError as error:
            code, output = 255, f"the machine does not answer: {error}"
        self.result = Result(code, output, time.monotonic() - started)

    def ended(self):
        return self.result is not None

    def wait(self):
        self.thread.join()
        return self.result


class Machine:
    """One guest, from `boot` to `stop`. Use it with `with`."""

    def __init__(self, folder, scratch, nobounce, files=(), mtu=MTU):
        self.folder, self.scratch, self.nobounce, self.mtu = folder, scratch, nobounce, mtu
        self.release = open(os.path.join(folder, "release")).read()
        self.guest_is = architecture(os.path.basename(folder))
        self.files = files
        self.qemu = self.capture = self.capture_path = None
        self.console = os.path.join(scratch, "console")
        self.children = set()
        self.disturbed = None
        self.port = 20000
        self.gids = {}

    def __enter__(self):
        self.boot()
        return self

    def __exit__(self, *_):
        self.stop()

    # The guest's life.

    def boot(self, shell=False):
        cable(self.mtu)
        initrd = os.path.join(self.scratch, "initrd.cpio")
        with open(initrd, "wb") as out, open(os.path.join(self.folder, "initrd.cpio"), "rb") as base:
            shutil.copyfileobj(base, out)
            out.write(self.overlay().bytes())
        serial = ["-chardev", "stdio,id=console,signal=off"] if shell else ["-chardev", f"file,id=console,path={self.console}"]
        words = f"console={self.guest_is.console} panic=-1 quiet mitigations=off vm.mtu={self.mtu}" + (" vm.shell=1" if shell else "")
        command = (
            [self.guest_is.program, *self.guest_is.words, "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", "640"]
            + ["-display", "none", "-nodefaults", "-no-reboot", "-serial", "chardev:console", *serial]
            + ["-kernel", os.path.join(self.folder, "vmlinux"), "-initrd", initrd, "-append", words]
            + ["-netdev", "tap,id=n0,ifname=tap0,script=no,downscript=no,vhost=off", "-device", "virtio-net-pci,netdev=n0,romfile="]
            # A second interface, eth1, whose cable leads nowhere: for cases that need another device, or take one away.
            + ["-netdev", "hubport,id=n1,hubid=1", "-device", "virtio-net-pci,netdev=n1,romfile="]
        )
        self.qemu = subprocess.Popen(command, stdin=None if shell else subprocess.DEVNULL, stderr=None if shell else subprocess.PIPE)
        if not shell:
            self.wait_ready()

    def overlay(self):
        """What changes from run to run, unpacked over the image."""
        archive = Archive()
        archive.file("init", open(os.path.join(HERE, "init"), "rb").read(), 0o755)
        for path in self.files:
            archive.file("opt/" + os.path.basename(path), open(path, "rb").read(), 0o755)
        return archive

    def wait_ready(self):
        deadline = time.monotonic() + BOOT_SECONDS
        while time.monotonic() < deadline:
            text = open(self.console, errors="replace").read() if os.path.exists(self.console) else ""
            if re.search(r"READY .* s", text):
                break
            if self.qemu.poll() is not None:
                raise Impossible(f"QEMU ended with {self.qemu.returncode}: {self.qemu.stderr.read().decode(errors='replace')[-500:]} {text[-500:]}")
            time.sleep(0.1)
        else:
            raise RuntimeError(f"the guest was not ready after {BOOT_SECONDS} s; its console ends: {text[-800:]}")
        while time.monotonic() < deadline:
            if self.guest("rdma link show rxe0/1", 10).code == 0:
                return
            time.sleep(0.2)
        raise RuntimeError("the guest has no rxe0: " + open(self.console, errors="replace").read()[-800:])

    def reboot(self):
        """A fresh guest at the same cable."""
        self.kill()
        self.gids.clear()
        shutil.move(self.console, self.console + ".before")
        self.boot()

    def received(self):
        """Packets that came out of the guest since the cable was laid."""
        return int(re.search(r"tap0:\s*\d+\s+(\d+)", open("/proc/self/net/dev").read()).group(1))

    def kill(self):
        """The plug is pulled."""
        if self.qemu and self.qemu.poll() is None:
            self.qemu.kill()
            self.qemu.wait()

    def stop(self):
        self.stop_capture()
        for child in list(self.children):
            end(child)
        self.kill()

    # Commands on the two sides.

    def begin(self, side, command, seconds=30, family=4, options=()):
        """Starts a command in the guest, or on the host's nb0; `options` are those of `nobounce run`."""
        if side == GUEST:
            return Command(lambda: ask_guest(command, seconds))
        run = [self.nobounce, "run", "--addr", ADDRESS[family][HOST], *options, "--"]
        return self.begin_bare(run + shlex.split(command), seconds)

    def begin_bare(self, words, seconds=30):
        """Starts a command on the host as it is."""

        def work():
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
            self.children.add(process)
            try:
                output = process.communicate(timeout=seconds)[0]
                return process.returncode, output.decode(errors="replace")
            except subprocess.TimeoutExpired:
                end(process)
                return 137, process.communicate()[0].decode(errors="replace")
            finally:
                self.children.discard(process)

        return Command(work)

    def guest(self, command, seconds=30):
        return self.begin(GUEST, command, seconds).wait()

    def host(self, command, seconds=30, **more):
        return self.begin(HOST, command, seconds, **more).wait()

    def pair(self, server_side, server, client, seconds=60, family=4, options=(), listens=True):
        """A server on one side and its client on the other, both Results in this order.

        In both commands {gid} becomes the side's GID index, {port} a fresh port, {server} the server's address and {client} the
        client's. Unless the server does not listen on a TCP port, the client starts when somebody listens on {port}.
        """
        client_side = other(server_side)
        self.port += 1
        names = {"port": self.port, "server": ADDRESS[family][server_side], "client": ADDRESS[family][client_side]}
        first = self.begin(server_side, server.format(gid=self.gid(server_side, family), **names), seconds, family, options)
        if not listens:
            time.sleep(1)
        if listens and not self.wait_listening(server_side, self.port, first):
            return first.wait(), Result(255, "the server does not listen", 0)
        second = self.begin(client_side, client.format(gid=self.gid(client_side, family), **names), seconds, family, options).wait()
        if second.code != 0 and not first.ended():
            self.stop_side(server_side)
        return first.wait(), second

    def install(self, files):
        """Puts programs into the guest that only one case needs: `files` are pairs of a path there, below /opt, and one here."""
        with socket.create_server((ADDRESS[4][HOST], 0)) as server:
            server.settimeout(60)
            fetch = self.begin(GUEST, f"nc {ADDRESS[4][HOST]} {server.getsockname()[1]} | tar x -C /opt", 60)
            with server.accept()[0] as stream, stream.makefile("wb") as out, tarfile.open(fileobj=out, mode="w|") as archive:
                for name, path in files:
                    archive.add(os.path.realpath(path), name)
        done = fetch.wait()
        if done.code:
            raise RuntimeError(f"the guest did not take the programs: {done.output}")

    def stop_side(self, side):
        """Ends the commands under way on a side, politely: a server whose client has failed waits for ever."""
        if side == GUEST:
            self.guest("for tool in $(ls /opt) ib_write_bw ib_write_lat ib_read_bw ib_read_lat ib_send_bw ib_send_lat ib_atomic_bw ib_atomic_lat"
                       " ibv_rc_pingpong ibv_uc_pingpong ibv_ud_pingpong ibv_srq_pingpong rping ucmatose udaddy rdma_server mckey fi_pingpong; do killall -q $tool; done; true", 10)
        else:
            for process in list(self.children):
                end(process)

    def wait_listening(self, side, port, command):
        test = f"grep -qi ':{port:04x} 0*:0000 0A' /proc/net/tcp /proc/net/tcp6"
        if side == GUEST:
            done = self.guest(f"for i in $(seq 200); do {test} && exit 0; usleep 50000; done; exit 1", 20)
            return done.code == 0
        for _ in range(400):
            if subprocess.run(["sh", "-c", test]).returncode == 0:
                return True
            if command.ended():
                return False
            time.sleep(0.05)
        return False

    def gid(self, side, family=4):
        """The index of a side's GID: the host's device has one, the guest's one for each address."""
        if side == HOST:
            return 0
        if family not in self.gids:
            wanted = "0000:0000:0000:0000:0000:ffff:0a63:0002" if family == 4 else "fd99:0000:0000:0000:0000:0000:0000:0002"
            found = self.guest(f"grep -l {wanted} /sys/class/infiniband/rxe0/ports/1/gids/* 2>/dev/null", 20).output
            match = re.search(r"gids/(\d+)", found)
            if not match:
                raise RuntimeError(f"rxe0 has no GID {wanted}: {found}")
            self.gids[family] = int(match.group(1))
        return self.gids[family]

    # What happens to packets on the way.

    def disturb(self, what):
        """Disturbs the RoCE packets that leave the guest, as tc's netem says it ("loss 2%"); None ends it. TCP stays undisturbed."""
        self.guest("tc qdisc del dev eth0 root 2>/dev/null; true", 10)
        self.disturbed = what
        if what:
            steps = [
                "tc qdisc add dev eth0 root handle 1: prio bands 3 priomap 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0",
                f"tc qdisc add dev eth0 parent 1:3 handle 30: netem {what}",
                "tc filter add dev eth0 parent 1: protocol ip u32 match ip dport 4791 0xffff match ip protocol 17 0xff flowid 1:3",
                "tc filter add dev eth0 parent 1: protocol ipv6 u32 match ip6 dport 4791 0xffff match ip6 protocol 17 0xff flowid 1:3",
            ]
            done = self.guest(" && ".join(steps), 20)
            if done.code:
                raise RuntimeError(f"the guest's network cannot be disturbed by '{what}': {done.output}")

    def start_capture(self, path):
        """Records the RoCE packets on the cable, both directions, until stop_capture."""
        command = ["tcpdump", "-i", "tap0", "-s", "0", "-B", "16384", "--immediate-mode", "-U", "-Z", "root", "-w", path, "udp", "port", "4791"]
        self.capture_path = path
        self.capture = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(100):
            if os.path.exists(path):
                return
            time.sleep(0.05)

    def stop_capture(self):
        if self.capture:
            self.capture.terminate()
            self.capture.wait()
            self.capture = None


def cable(mtu):
    """The host's end of the cable, in the network namespace that this process has for itself."""
    steps = f"""link set lo up; tuntap add tap0 mode tap; link set tap0 mtu {mtu}; addr add 10.99.0.1/24 dev tap0;
        -6 addr add fd99::1/64 dev tap0 nodad; link set tap0 up"""
    # That of a guest before.
    subprocess.run(["ip", "link", "del", "tap0"], timeout=10, stderr=subprocess.DEVNULL)
    for step in steps.split(";"):
        subprocess.run(["ip", *step.split()], check=True, timeout=10)


def ask_guest(command, seconds):
    """Runs one command in the guest; the answer is what it prints, and a last line with its exit code."""
    with socket.create_connection((ADDRESS[4][GUEST], 7), timeout=seconds + 15) as stream:
        stream.sendall(f"{seconds} {command}\n".encode())
        parts = []
        while part := stream.recv(65536):
            parts.append(part)
    text = b"".join(parts).decode(errors="replace")
    output, _, code = text.rpartition("\nEXIT ")
    if not code.strip().isdigit():
        return 255, text + "\nthe guest broke off"
    return int(code), output


def end(process):
    """Ends a command with all it started: SIGTERM, and SIGKILL two seconds later."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(2)
        except subprocess.TimeoutExpired:
            pass
