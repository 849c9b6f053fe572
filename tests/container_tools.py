"""Images, networks and containers for tests/containers.py."""
import contextlib
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "clients"))

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LIMIT = 60
# Debian's podman starts containers only within the limits that its caller has.
LIMITS = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096"]
DEVICE = ["--device", "nobounce.dev/nic=nb0"]
# What removes things, registered before they are made; the newest first.
CLEANUPS = contextlib.ExitStack()


def libraries(path):
    """The shared libraries that a program or library needs, by path."""
    listed = subprocess.run(["ldd", path], capture_output=True, text=True).stdout
    return [word for line in listed.splitlines() for word in line.split() if word.startswith("/") and os.path.exists(word)]


def docker_profile():
    """Docker's default seccomp profile, from Debian's package of its sources, if that can be had.

    The name of the file states the version of the package: 20.10.24, of Docker 20.10, in Debian 12.
    """
    inside = "usr/share/gocode/src/github.com/docker/docker/profiles/seccomp/default.json"
    cached = glob.glob(os.path.join(ROOT, ".cache", "docker-seccomp-*.json"))
    if cached or os.environ.get("NO_INSTALL", "0") not in ("", "0"):
        return max(cached, default=None)
    with tempfile.TemporaryDirectory() as folder:
        fetched = subprocess.run(["apt-get", "-qq", "-o", "APT::Sandbox::User=", "download", "golang-github-docker-docker-dev"], cwd=folder)
        packages = glob.glob(os.path.join(folder, "*.deb"))
        if fetched.returncode or not packages or subprocess.run(["dpkg-deb", "-x", packages[0], folder]).returncode:
            return None
        version = subprocess.run(["dpkg-deb", "-f", packages[0], "Version"], capture_output=True, text=True, check=True).stdout.strip()
        path = os.path.join(ROOT, ".cache", f"docker-seccomp-{version}.json")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        shutil.copy(os.path.join(folder, inside), path)
    return path


def compiled(source, to, *options):
    """A program of C."""
    subprocess.run(["cc", *options, "-x", "c", "-", "-o", to], input=source, text=True, check=True)


class Image:
    """A root file system of the machine's own programs and the libraries that they need."""

    def __init__(self, folder):
        self.folder = folder
        for name in ("proc", "sys", "dev", "tmp", "run", "etc", "var/tmp"):
            os.makedirs(os.path.join(folder, name))
        os.chmod(os.path.join(folder, "tmp"), 0o1777)
        os.chmod(folder, 0o755)

    def add(self, *programs):
        for program in programs:
            path = os.path.realpath(shutil.which(program))
            for file in [path, *libraries(path)]:
                self.copy(file)
            link = os.path.join(self.folder, "usr/bin", program)
            if not os.path.lexists(link):
                os.makedirs(os.path.dirname(link), exist_ok=True)
                os.symlink(path, link)

    def copy(self, file):
        to = self.folder + file
        if not os.path.exists(to):
            os.makedirs(os.path.dirname(to), exist_ok=True)
            shutil.copy(file, to)  # a link is followed

    def add_needs(self, folder):
        """The system's libraries that the libraries below a folder need."""
        for file in glob.glob(os.path.join(folder, "**/*.so*"), recursive=True):
            for library in libraries(file):
                if library.startswith(("/lib", "/usr/lib")):
                    self.copy(library)


class Networks:
    """Two network namespaces with a cable between them; the interface of both is eth0."""

    def __init__(self):
        self.names = [f"nobounce-test-{os.getpid()}-{end}" for end in "ab"]
        self.addresses = ["10.97.13.1", "10.97.13.2"]
        CLEANUPS.callback(self.close)
        for name in self.names:
            self.ip("netns", "add", name)
        self.ip("link", "add", "eth0", "netns", self.names[0], "type", "veth", "peer", "name", "eth0", "netns", self.names[1])
        for name, address in zip(self.names, self.addresses):
            self.ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            self.ip("-n", name, "link", "set", "lo", "up")
            self.ip("-n", name, "link", "set", "eth0", "up")
        self.set_mtu(1500)

    @staticmethod
    def ip(*words):
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=LIMIT)

    def set_mtu(self, mtu):
        for name in self.names:
            self.ip("-n", name, "link", "set", "eth0", "mtu", str(mtu))

    def received(self, end):
        """Bytes that eth0 of an end has received."""
        shown = subprocess.run(["ip", "-n", self.names[end], "-s", "-j", "link", "show", "eth0"], check=True, capture_output=True, text=True)
        return json.loads(shown.stdout)[0]["stats64"]["rx"]["bytes"]

    def option(self, end):
        return ["--network", f"ns:/run/netns/{self.names[end]}"]

    def close(self):
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


class Engine:
    """podman with a storage of its own, in a folder of the test."""

    def __init__(self, image, folder):
        self.image = image
        self.folder = folder
        CLEANUPS.callback(self.close)
        self.base = ["podman", "--root", f"{self.folder}/root", "--runroot", f"{self.folder}/run", "--runtime", "runc",
                     "--cgroup-manager", "cgroupfs", "--events-backend", "none"]
        self.count = 0

    def command(self, options, program, root=None):
        self.count += 1
        name = f"nobounce-test-{os.getpid()}-{self.count}"
        return name, [*self.base, "run", "--rm", "--name", name, *LIMITS, *options, "--rootfs", root or self.image.folder, *program]

    def run(self, options, *program, root=None):
        """Runs a container to its end."""
        _, command = self.command(options, program, root)
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)

    def start(self, options, *program):
        """Starts one; its name and its process."""
        name, command = self.command(options, program)
        return name, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def kill(self, name):
        subprocess.run([*self.base, "kill", "--signal", "KILL", name], check=True, capture_output=True, timeout=LIMIT)

    def remove_all(self):
        """A container outlives the command that started it."""
        subprocess.run([*self.base, "rm", "--all", "--force", "--time", "0"], capture_output=True, timeout=LIMIT)

    def close(self):
        self.remove_all()
        # The monitor of a container whose caller was killed.
        subprocess.run(["pkill", "--signal", "KILL", "--full", self.folder], capture_output=True)
        with open("/proc/self/mounts") as mounts:
            for at in [line.split()[1] for line in mounts]:
                if at.startswith(self.folder):
                    subprocess.run(["umount", "-l", at], capture_output=True)


def test_folder():
    """A folder for everything that the tests make, removed at the end."""
    folder = os.path.join(tempfile.gettempdir(), f"nobounce-test-{os.getpid()}")
    CLEANUPS.callback(shutil.rmtree, folder, ignore_errors=True)
    os.mkdir(folder)
    return folder


def clean_up_when_interrupted():
    """timeout(1) ends a script by SIGTERM. unittest goes on with the next test after an exception, so this ends the process."""
    def end(number, _):
        for ignored in (signal.SIGTERM, signal.SIGINT):
            signal.signal(ignored, signal.SIG_IGN)
        CLEANUPS.close()
        os._exit(128 + number)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


def until(condition, what):
    end = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(0.05)
