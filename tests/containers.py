#!/usr/bin/env python3
"""Containers with the software NIC: podman, images of the machine's own programs, the file of `nobounce cdi generate`.

The argument is the nobounce command; names of tests may follow. tests/containers.sh gives it a mount namespace of its own.
"""
import errno
import json
import os
import subprocess
import sys
import unittest

from container_tools import CLEANUPS, DEVICE, LIMIT, ROOT, Engine, Image, Networks, clean_up_when_interrupted, compiled, docker_profile, test_folder, until
from catalogue import NIXL
from environments import Waived, virtual_environment
from pair import Peer

NOBOUNCE = os.path.abspath(sys.argv.pop(1))
CLIENTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "clients")
# Prints the error of a system call that Docker's profile forbids and that of podman allows.
KEYCTL = """
#include <errno.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>
int main(void) { printf("%d\\n", syscall(SYS_keyctl, 0, -4, 0) < 0 ? errno : 0); }
"""
# A program without a C library.
EMPTY = "void _start(void) { for (;;) __builtin_trap(); }"
LOOK = "cat /sys/class/infiniband/nb0/ports/1/gids/0 && ibv_devinfo -d nb0"


def read(log):
    with open(log) as file:
        return file.read()[-2000:]


class Containers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.addClassCleanup(CLEANUPS.close)
        cls.folder = test_folder()
        os.makedirs("/etc/cdi", exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "none", "/etc/cdi"], check=True)
        cls.generate("eth0")
        cls.image = Image(os.path.join(cls.folder, "image"))
        cls.image.add("sh", "cat", "id", "ls", "sleep", "ibv_devinfo", "ib_write_bw")
        cls.networks = Networks()
        cls.engine = Engine(cls.image, os.path.join(cls.folder, "podman"))

    @staticmethod
    def generate(addr):
        subprocess.run([NOBOUNCE, "cdi", "generate", "--addr", addr, "--out", "/etc/cdi/nobounce.json"], check=True, capture_output=True)

    def setUp(self):
        self.addCleanup(self.engine.remove_all)

    def waive(self, name, reason):
        self.assertEqual(subprocess.run([os.path.join(ROOT, "tools/waive"), name, reason]).returncode, 0)
        self.skipTest(reason)

    def in_network(self, end, *options):
        return [*DEVICE, *self.networks.option(end), *options]

    def sees_device(self, *options, before=":", root=None):
        ran = self.engine.run(self.in_network(0, *options), "sh", "-c", f"{before} && {LOOK}", root=root)
        self.assertIn("0000:0000:0000:0000:0000:ffff:0a61:0d01", ran.stdout, ran)
        self.assertIn("PORT_ACTIVE", ran.stdout, ran)
        self.assertEqual(ran.stderr, "")

    def test_users(self):
        for user in ("0", "1000", "65534"):
            self.sees_device("--user", user)

    def test_read_only(self):
        self.sees_device("--user", "1000", "--read-only")
        # Neither /tmp nor /run: /dev/shm is left.
        self.sees_device("--user", "65534", "--read-only", "--read-only-tmpfs=false")

    def test_without_tmp(self):
        root = os.path.join(self.folder, "without-tmp")
        subprocess.run(["cp", "-al", self.image.folder, root], check=True)
        for name in ("tmp", "var/tmp"):
            os.rmdir(os.path.join(root, name))
        for user in ("0", "1000"):
            self.sees_device("--user", user, before="test ! -e /tmp", root=root)
        self.sees_device("--user", "65534", "--read-only", "--read-only-tmpfs=false", before="test ! -e /tmp", root=root)

    def test_seccomp(self):
        """The default profile of the engine, which all containers here have."""
        ran = self.engine.run(self.in_network(0, "--user", "1000"), "sh", "-c", f"cat /proc/self/status && {LOOK}")
        self.assertIn("\nSeccomp:\t2\n", ran.stdout, ran)
        self.assertIn("PORT_ACTIVE", ran.stdout, ran)

    def test_seccomp_of_docker(self):
        profile = docker_profile()
        if profile is None:
            self.waive("containers-docker-seccomp", "Docker's profile is not here, and its package cannot be downloaded")
        print(f"profile of Docker: {os.path.basename(profile)}")
        options = ["--security-opt", f"seccomp={profile}"]
        compiled(KEYCTL, os.path.join(self.image.folder, "keyctl"))
        forbidden = self.engine.run(options, "/keyctl")
        self.assertEqual(forbidden.stdout, f"{errno.EPERM}\n", forbidden)
        self.assertNotEqual(self.engine.run([], "/keyctl").stdout, forbidden.stdout)
        self.bandwidth(1500, *options)
        # Between processes of one container, by shared memory.
        tool = "ib_write_bw -d nb0 -n 400"
        client = f"{tool} {self.networks.addresses[0]} 2>/dev/null"
        pair = f"{tool} >/dev/null & i=0; while ! {client} && [ $i -lt 40 ]; do i=$((i + 1)); sleep 0.1; done; wait"
        ran = self.engine.run(self.in_network(0, "--user", "1000", "--env", "NOBOUNCE_LINK=shm", *options), "sh", "-c", pair)
        self.assertRegex(ran.stdout, r"65536 +400 +[\d.]+", ran)

    def test_no_capabilities(self):
        for user in ("1000", "65534"):
            self.sees_device("--user", user, "--cap-drop", "all", "--security-opt", "no-new-privileges")

    def test_user_namespace(self):
        for user in ("1000", "65534"):
            self.sees_device("--uidmap", "0:0:1", "--uidmap", "1:100000:65535", "--gidmap", "0:0:1", "--gidmap", "1:100000:65535", "--user", user)

    def test_several_devices(self):
        self.addCleanup(self.generate, "eth0")
        self.generate("eth0,lo")
        look = "cat /sys/class/infiniband/nb*/ports/1/gids/0 && ibv_devinfo"
        found = {}
        for name in ("nb0", "nb1", "all"):
            ran = self.engine.run(["--device", f"nobounce.dev/nic={name}", *self.networks.option(0)], "sh", "-c", look)
            self.assertEqual(ran.returncode, 0, ran)
            found[name] = [line for line in ran.stdout.splitlines() if line.startswith("0000:")]
            self.assertEqual(ran.stdout.count("PORT_ACTIVE"), len(found[name]))
        self.assertEqual(found["all"], found["nb0"] + found["nb1"])

    def test_beside_another_device(self):
        """As NVIDIA's file gives a GPU: its variables and mounts, and the device of ours."""
        edits = {"env": ["NVIDIA_VISIBLE_DEVICES=void"], "mounts": [{"hostPath": "/usr/share/doc", "containerPath": "/gpu", "options": ["ro", "bind"]}]}
        with open("/etc/cdi/nvidia.json", "w") as file:
            json.dump({"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [{"name": "0", "containerEdits": edits}]}, file)
        self.addCleanup(os.remove, "/etc/cdi/nvidia.json")
        self.sees_device("--device", "nvidia.com/gpu=0", before='test "$NVIDIA_VISIBLE_DEVICES" = void && test -d /gpu/podman')

    def test_variables_without_a_device_file(self):
        libraries = os.path.join(os.path.dirname(NOBOUNCE), "dropin")
        preload = "LD_PRELOAD=/opt/nb/libnobounce-paths.so:/opt/nb/libibverbs.so.1"
        options = ["--volume", f"{libraries}:/opt/nb:ro", "--env", "NOBOUNCE_ADDR=eth0", "--env", preload, "--user", "1000"]
        ran = self.engine.run([*self.networks.option(0), *options], "sh", "-c", LOOK)
        self.assertIn("PORT_ACTIVE", ran.stdout, ran)

    def test_nothing_can_be_written(self):
        ran = self.engine.run(self.in_network(0, "--read-only", "--read-only-tmpfs=false", "--tmpfs", "/dev/shm:ro"), "sh", "-c", LOOK)
        self.assertIn("programs that read /sys/class/infiniband do not find nb0", ran.stderr)
        self.assertIn("/dev/shm", ran.stderr)

    def test_without_the_device(self):
        ran = self.engine.run(self.networks.option(0), "sh", "-c", "ls /opt; ibv_devinfo")
        self.assertNotEqual(ran.returncode, 0)
        self.assertNotIn("nb0", ran.stdout + ran.stderr)

    def test_unknown_device(self):
        ran = self.engine.run(["--device", "nobounce.dev/nic=nb9"], "sh", "-c", "true")
        self.assertNotEqual(ran.returncode, 0)
        self.assertIn("nobounce.dev/nic=nb9", ran.stderr)

    def test_unknown_interface(self):
        ran = self.engine.run([*DEVICE, "--network", "none"], "ibv_devinfo")
        self.assertIn("eth0", ran.stderr, ran)
        self.assertIn("NOBOUNCE_ADDR", ran.stderr, ran)

    def test_check(self):
        def check(*words):
            return subprocess.run([NOBOUNCE, "cdi", "check", *words], capture_output=True, text=True)
        ran = check("--rootfs", self.image.folder)
        self.assertEqual((ran.returncode, ran.stdout), (0, f"/etc/cdi/nobounce.json: ok\n{self.image.folder}: ok\n"), ran)

    def test_musl(self):
        """musl's loader ends each program with the message that the guide and `cdi check` show."""
        loader = f"/lib/ld-musl-{os.uname().machine}.so.1"
        if not os.path.exists(loader):
            self.waive("containers-musl", f"{loader} is not installed (apt-get install musl)")
        musl = Image(os.path.join(self.folder, "musl"))
        musl.copy(loader)
        compiled(EMPTY, os.path.join(musl.folder, "program"), "-nostdlib", "-pie", f"-Wl,--dynamic-linker={loader}")
        ran = self.engine.run(self.in_network(0), "/program", root=musl.folder)
        message = "Error loading shared library ld-linux-x86-64.so.2"
        self.assertIn(message, ran.stderr, ran)
        ran = subprocess.run([NOBOUNCE, "cdi", "check", "--rootfs", musl.folder], capture_output=True, text=True)
        self.assertEqual(ran.returncode, 1)
        self.assertIn(f"the image uses musl ({loader[1:]})", ran.stdout)
        self.assertIn(message, ran.stdout)

    def bandwidth(self, mtu, *options):
        self.networks.set_mtu(mtu)
        before = self.networks.received(0)
        size = ["-d", "nb0", "-s", "65536", "-n", "400"]
        name, server = self.engine.start(self.in_network(0, "--user", "1000", *options), "ib_write_bw", *size)
        self.addCleanup(server.kill)
        ran = None
        for _ in range(40):  # until the server listens
            ran = self.engine.run(self.in_network(1, "--user", "1000", *options), "ib_write_bw", *size, self.networks.addresses[0])
            if ran.returncode == 0 or server.poll() is not None:
                break
        self.assertEqual(ran.returncode, 0, ran.stdout + ran.stderr)
        self.assertRegex(ran.stdout, r"65536 +400 +[\d.]+")
        self.assertEqual(server.wait(LIMIT), 0)
        server.communicate()
        self.assertGreater(self.networks.received(0) - before, 400 * 65536)
        return ran.stdout

    def test_ib_write_bw_with_frames_of_1500(self):
        self.assertIn("Mtu             : 1024[B]", self.bandwidth(1500))

    def test_ib_write_bw_with_frames_of_9000(self):
        self.assertIn("Mtu             : 4096[B]", self.bandwidth(9000))

    def traffic(self):
        """Two containers of user 1000 between which bytes move for a while: the name of the receiver, the process of the sender."""
        size = ["-d", "nb0", "-s", "65536", "-D", "30"]
        name, server = self.engine.start(self.in_network(0, "--user", "1000"), "ib_write_bw", *size)
        self.addCleanup(server.communicate)
        before = self.networks.received(0)
        for _ in range(40):  # until the server listens
            _, client = self.engine.start(self.in_network(1, "--user", "1000"), "ib_write_bw", *size, self.networks.addresses[0])
            until(lambda: client.poll() is not None or self.networks.received(0) - before > 50 << 20, "traffic")
            if client.poll() is None:
                self.addCleanup(client.communicate)
                self.addCleanup(self.engine.remove_all)
                return name, client
            client.communicate()
        self.fail("the server does not listen")

    def test_killed(self):
        """The peer of a killed container gets an error; the next pair is not disturbed."""
        name, client = self.traffic()
        self.engine.kill(name)
        text, _ = client.communicate(timeout=LIMIT)
        self.assertNotEqual(client.returncode, 0, text)
        self.assertIn("error", text)
        self.bandwidth(1500)

    def test_two_users_of_one_address(self):
        self.traffic()
        ran = self.engine.run(self.in_network(0, "--user", "2000"), "ib_write_bw", "-d", "nb0", self.networks.addresses[0])
        said = ran.stdout + ran.stderr
        self.assertNotEqual(ran.returncode, 0)
        self.assertIn("held by a program of another user (uid 1000; we are uid 2000)", said)
        self.assertIn(self.networks.addresses[0], said)

    def test_nixl(self):
        try:
            python = virtual_environment(NIXL)
        except Waived as reason:
            self.waive("containers-nixl", str(reason))
        base = subprocess.run([python, "-c", "import sys; print(sys.base_prefix)"], capture_output=True, text=True, check=True).stdout.strip()
        venv = os.path.dirname(os.path.dirname(os.path.abspath(python)))
        for folder in (venv, os.path.join(base, "lib/python3*/lib-dynload")):
            self.image.add_needs(folder)
        self.image.copy(os.path.realpath(python)) if base == "/usr" else None
        mounts = [word for folder in {base, venv, CLIENTS} for word in ("--volume", f"{folder}:{folder}:ro")]
        options = ["--interactive", "--user", "1000", "--shm-size", "256m", *mounts, "--env", "PYTHONDONTWRITEBYTECODE=1"]
        for mtu in (1500, 9000):
            with self.subTest(mtu=mtu):
                self.networks.set_mtu(mtu)
                port = self.engine.run(self.in_network(0, "--user", "1000"), "ibv_devinfo", "-d", "nb0")
                self.assertRegex(port.stdout, {1500: r"active_mtu:\s+1024 ", 9000: r"active_mtu:\s+4096 "}[mtu])
                self.nixl(python, options, mtu)
                self.nixl_listener(python, options, mtu)

    def nixl(self, python, options, mtu):
        peers, logs = [], [os.path.join(self.folder, f"{role}-{mtu}") for role in ("target", "initiator")]
        for end, role in enumerate(("target", "initiator")):
            program = [python, f"{CLIENTS}/nixl_peer.py", role, "--bytes", str(16 << 20), "--counts", "1,256", "--seconds", "0.2"]
            _, command = self.engine.command(self.in_network(end, *options), program)
            peers.append(Peer(command, dict(os.environ), logs[end]))
            self.addCleanup(peers[end].end)
        try:
            hellos = [peer.hear(LIMIT) for peer in peers]
            before = self.networks.received(0)
            peers[0].tell(**hellos[1])
            peers[1].tell(**hellos[0])
            results = [peers[1].hear(LIMIT) for _ in range(4)]
        except (TimeoutError, BrokenPipeError, TypeError) as error:
            self.fail(f"{error}: {[read(log) for log in logs]}")
        self.assertTrue(all(result and result["right"] for result in results), results)
        self.assertGreater(self.networks.received(0) - before, 32 << 20)
        for peer in peers:
            peer.end()
        self.engine.remove_all()

    def nixl_listener(self, python, options, mtu):
        """The metadata by NIXL's own listener, between the containers."""
        def start(end, role, *words):
            log = os.path.join(self.folder, f"listener-{role}-{mtu}")
            _, command = self.engine.command(self.in_network(end, *options), [python, f"{CLIENTS}/nixl_two_peers.py", role, *words])
            peer = Peer(command, dict(os.environ), log)
            self.addCleanup(peer.end)
            return peer, log
        before = self.networks.received(1)
        target, its_log = start(0, "target")
        self.assertEqual(target.hear(LIMIT), {"listening": True}, read(its_log))
        initiator, log = start(1, "initiator", "--ip", self.networks.addresses[0])
        self.assertEqual(initiator.hear(LIMIT), {"right": True, "rows": 10}, read(log))
        self.assertEqual(target.hear(LIMIT), {"done": True}, read(its_log))
        self.assertGreater(self.networks.received(1) - before, 10 << 20)


clean_up_when_interrupted()
unittest.main(verbosity=2)
