#!/usr/bin/env python3
"""The image of `make image`: its size, its programs, its installation, and how much later containers with the device start.

    tests/image.py IMAGE NOBOUNCE

tests/image.sh gives it a mount namespace of its own, where /etc/cdi and /opt are empty.
"""
import io
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import unittest

from container_tools import CLEANUPS, DEVICE, LIMIT, LIMITS, ROOT, Engine, Image, Networks, clean_up_when_interrupted, libraries, test_folder

NOBOUNCE, ARCHIVE = os.path.abspath(sys.argv.pop(2)), os.path.abspath(sys.argv.pop(1))
NAME = "localhost/nobounce:latest"
MOST_BYTES = 15_000_000
# Starts of each kind, and how many seconds later those with the device may be.
STARTS, MOST_SECONDS = 101, 0.020
TARGET = os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target"))
# The libraries of glibc, whose parts were files of their own before 2.34.
SYSTEM = {"libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
INSTALL = ["cdi", "generate", "--install", "/opt/nobounce/lib/nobounce", "--out", "/etc/cdi/nobounce.json"]


class OfTheImage(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.addClassCleanup(CLEANUPS.close)
        folder = test_folder()
        for mounted in ("/etc/cdi", "/opt"):
            os.makedirs(mounted, exist_ok=True)
            subprocess.run(["mount", "-t", "tmpfs", "none", mounted], check=True)
        os.mkdir("/opt/nobounce")
        image = Image(os.path.join(folder, "image"))
        image.add("true", "sh", "ibv_devinfo")
        # Images have glibc as a whole: these parts are empty since 2.34, and older ones need them.
        libc = next(path for path in libraries(shutil.which("true")) if path.endswith("/libc.so.6"))
        for part in ("libpthread.so.0", "libdl.so.2"):
            image.copy(os.path.join(os.path.dirname(libc), part))
        cls.engine = Engine(image, os.path.join(folder, "podman"))
        subprocess.run([*cls.engine.base, "load", "--input", ARCHIVE], check=True, capture_output=True, timeout=LIMIT)
        cls.installed = cls.run_image(*INSTALL, options=["--volume", "/opt/nobounce:/opt/nobounce", "--volume", "/etc/cdi:/etc/cdi"])

    @classmethod
    def run_image(cls, *arguments, options=()):
        command = [*cls.engine.base, "run", "--rm", "--network", "none", *LIMITS, *options, NAME, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)

    def test_size(self):
        self.assertLess(os.path.getsize(ARCHIVE), MOST_BYTES)

    def files(self):
        """The regular files of the image: {path: content}."""
        with tarfile.open(ARCHIVE) as outer:
            blobs = {member.name: outer.extractfile(member).read() for member in outer.getmembers() if member.isfile()}

        def blob(described):
            return blobs["blobs/" + described["digest"].replace(":", "/")]
        manifest = json.loads(blob(json.loads(blobs["index.json"])["manifests"][0]))
        with tarfile.open(fileobj=io.BytesIO(blob(manifest["layers"][0]))) as layer:
            return {member.name: layer.extractfile(member).read() for member in layer.getmembers() if member.isfile()}

    def test_glibc(self):
        """Images of Rocky 8 and Ubuntu 20.04 can load the libraries: they need no function of a newer
        C library, and no other library of the system."""
        made = {name: content for name, content in self.files().items() if name.startswith("lib/nobounce/")}
        self.assertEqual(len(made), 9)
        for name, content in made.items():
            with self.subTest(name), tempfile.NamedTemporaryFile() as file:
                file.write(content)
                file.flush()
                listed = subprocess.run(["objdump", "-T", "-p", file.name], capture_output=True, text=True, check=True).stdout
                newest = max(tuple(map(int, version)) for version in re.findall(r"GLIBC_(\d+)\.(\d+)", listed))
                if newest > (2, 28) and not os.path.exists(os.path.join(TARGET, "clients/wheel/.complete")):
                    self.assertEqual(subprocess.run([os.path.join(ROOT, "tools/waive"), "image-glibc", "zig is not installed"]).returncode, 0)
                    self.skipTest("zig is not installed")
                self.assertLessEqual(newest, (2, 28))
                # A function without a version would be one that zig's C library lacks.
                undefined = re.findall(r"^\S+ (.{7}) \*UND\*\s+\S+\s+(.*)$", listed, re.M)
                self.assertEqual([what for flags, what in undefined if "w" not in flags and "GLIBC" not in what], [])
                self.assertLessEqual(set(re.findall(r"NEEDED +(\S+)", listed)), SYSTEM)

    def test_licences(self):
        """Each crate in the image is named, by cargo's own list of what `make image` builds."""
        files = self.files()
        for name in ("LICENSE-MIT", "LICENSE-APACHE"):
            with open(os.path.join(ROOT, name), "rb") as file:
                self.assertEqual(files[f"usr/share/doc/nobounce/{name}"], file.read())
        text = files["usr/share/doc/nobounce/THIRD-PARTY.txt"].decode()
        dropin = ["ibverbs", "rdmacm", "gdrapi", "cufile", "paths", "vmm", "world", "stub-mlx5", "stub-efa"]
        for names, options in ((dropin, []), (["cli", "device-plugin"], ["--no-default-features"])):
            packages = [word for name in names for word in ("-p", f"nobounce-{name}")]
            command = ["cargo", "tree", "--locked", *packages, *options, "--edges", "normal,no-proc-macro", "--prefix", "none", "--format", "{p}"]
            listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
            crates = {" ".join(line.replace(" v", " ").split()[:2]) for line in listed if line and not line.startswith("nobounce")}
            self.assertGreater(len(crates), 20)
            self.assertEqual([crate for crate in sorted(crates) if f"\n{crate} (" not in text], [])
        for name in ("Rust standard library", "GNU C Library (LGPL-2.1-or-later)", "GNU LESSER GENERAL PUBLIC LICENSE"):
            self.assertIn(name, text)

    def test_programs(self):
        self.assertRegex(self.run_image("--version").stdout, r"^nobounce \d+\.\d+\.\d+ \([0-9a-f]{12}")
        plugin = self.run_image("--version", options=["--entrypoint", "/usr/local/bin/nobounce-device-plugin"])
        self.assertRegex(plugin.stdout, r"^nobounce-device-plugin \d+\.\d+\.\d+ \([0-9a-f]{12}")

    def test_installation(self):
        self.assertEqual(self.installed.returncode, 0, self.installed)
        ran = subprocess.run([NOBOUNCE, "cdi", "check"], capture_output=True, text=True)
        self.assertEqual(ran.stdout, "/etc/cdi/nobounce.json: ok\n", ran)
        ran = self.engine.run([*DEVICE, *Networks().option(0), "--user", "1000"], "ibv_devinfo", "-d", "nb0")
        self.assertIn("PORT_ACTIVE", ran.stdout, ran)

    def test_start(self):
        times = {True: [], False: []}
        for _ in range(STARTS):  # in turns, so that a busy moment meets both
            for with_device in times:
                start = time.monotonic()
                ran = self.engine.run([*(DEVICE if with_device else []), "--network", "none"], "true")
                times[with_device].append(time.monotonic() - start)
                self.assertEqual(ran.returncode, 0, ran)
        with_device, without = (statistics.median(times[kind]) for kind in (True, False))
        quick = [statistics.quantiles(times[kind], n=10)[0] for kind in (True, False)]
        print(f"podman run true, median of {STARTS}: {with_device * 1e3:.0f} ms with the device, {without * 1e3:.0f} ms without; "
              f"first tenth {quick[0] * 1e3:.0f} ms and {quick[1] * 1e3:.0f} ms")
        # Other programs of the machine slow down most starts, and hardly the quickest ones.
        self.assertLess(quick[0] - quick[1], MOST_SECONDS)


clean_up_when_interrupted()
unittest.main(verbosity=2)
