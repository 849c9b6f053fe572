"""The test machine's disk: a kernel of Debian's and an initramfs with Debian's RDMA tools, made from packages.

Nothing is installed and no privilege is needed: packages are downloaded with apt's own archive and keys into the cache folder and
unpacked there. The user land is that of this machine's release, so that a program compiled here runs there.
"""

import glob
import lzma
import os
import re
import shutil
import subprocess

# Which release a kernel is taken from; None is the release of this machine.
KERNELS = {"oldest": None, "newest": "sid", "aarch64": None}
# Kernels of this machine's architecture: the cases run with both.
BOTH = ["oldest", "newest"]

PACKAGES = ["ibverbs-utils", "ibverbs-providers", "perftest", "rdmacm-utils", "libucx0", "libfabric1", "libfabric-bin", "iproute2", "dash", "busybox-static"]
COMMANDS = """dash ip rdma tc ibv_devices ibv_devinfo ibv_rc_pingpong ibv_uc_pingpong ibv_ud_pingpong ibv_srq_pingpong ibv_asyncwatch
    ib_write_bw ib_write_lat ib_read_bw ib_read_lat ib_send_bw ib_send_lat ib_atomic_bw ib_atomic_lat
    rping ucmatose udaddy udpong rdma_client rdma_server rdma_xclient rdma_xserver cmtime mckey rstream riostream fi_pingpong busybox""".split()
# Loaded by name: UCX by the programs that tests compile on the host, its transports by UCX.
LIBRARIES = ["libucp.so.0", "ucx/libuct_ib.so.0", "ucx/libuct_rdmacm.so.0"]
# In the order in which they are loaded; a name that this kernel has built in, or does not know, is no failure here.
MODULES = """virtio_pci virtio_net crc32_generic crc32_pclmul crc32c_generic ib_uverbs ib_umad rdma_ucm rdma_rxe
    sch_prio sch_netem cls_u32 act_gact""".split()
# Changed with whatever changes the content, so that an image from before is made anew.
VERSION = "5"


class Architecture:
    """What a guest of an architecture is made from: Debian's name of it, the folder of its libraries, its loader, QEMU's words for the machine."""

    def __init__(self, debian, triple, loader, program, words, console):
        self.debian, self.triple, self.loader = debian, triple, loader
        self.program, self.words, self.console = program, words, console


X86_64 = Architecture("amd64", "x86_64-linux-gnu", "lib64", "qemu-system-x86_64", ["-M", "q35"], "ttyS0")
AARCH64 = Architecture("arm64", "aarch64-linux-gnu", "lib", "qemu-system-aarch64", ["-M", "virt"], "ttyAMA0")


def architecture(which):
    return AARCH64 if which == "aarch64" else X86_64


class Impossible(Exception):
    """This machine cannot make an image; the text says why."""


def run(command, **options):
    """Runs a command and returns what it printed; a failure shows its own words."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, **options)
    if done.returncode:
        raise Impossible(f"'{' '.join(command)[:200]}' failed: {done.stderr.strip()[-500:]}")
    return done.stdout


def image(cache, which, log):
    """The folder with `vmlinux`, `initrd.cpio` and `release` of the kernel `which`, made if it is not there yet."""
    cache = os.path.abspath(cache)
    folder = os.path.join(cache, which)
    stamp = os.path.join(folder, "version")
    if os.path.exists(stamp) and open(stamp).read() == VERSION:
        return folder
    if os.environ.get("NO_INSTALL", "0") not in ("", "0"):
        raise Impossible("NO_INSTALL is set, and the image of the machine has not been made yet (tests/vm/vm image)")
    for command in ("apt-get", "apt-cache", "dpkg-deb", "readelf"):
        if not shutil.which(command):
            raise Impossible(f"{command} is not installed: the machine is made from Debian's packages")
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    log(f"making the machine with the {which} kernel: packages are downloaded once, about 150 MB")
    guest = architecture(which)
    kernel_root, user_root = os.path.join(folder, "kernel"), os.path.join(folder, "user")
    packages = os.path.join(cache, "packages")
    apt = Apt(os.path.join(cache, "apt", f"own-{guest.debian}"), None, guest)
    apt.unpack(apt.user_packages(), packages, user_root)
    if KERNELS[which]:
        apt = Apt(os.path.join(cache, "apt", KERNELS[which]), KERNELS[which], guest)
    apt.unpack(apt.kernel_packages(), packages, kernel_root)

    release, modules = unpack_kernel(kernel_root, os.path.join(folder, "vmlinux"))
    archive = Archive()
    add_user_land(archive, user_root, guest)
    add_modules(archive, modules)
    with open(os.path.join(folder, "initrd.cpio"), "wb") as out:
        out.write(archive.bytes())
    with open(os.path.join(folder, "release"), "w") as out:
        out.write(release)
    shutil.rmtree(kernel_root)
    shutil.rmtree(user_root)
    with open(stamp, "w") as out:
        out.write(VERSION)
    log(f"made: Linux {release}")
    return folder


class Apt:
    """apt for one release of Debian's (None: this machine's), with lists of its own. The machine's configuration is read for the archive's
    address and left alone."""

    def __init__(self, folder, suite, guest):
        self.guest = guest
        for name in ("sources", "lists/partial", "cache/archives/partial"):
            os.makedirs(os.path.join(folder, name), exist_ok=True)
        targets = run(["apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME) $(ORIGIN) $(COMPONENT)"]).split("\n")
        known = [line.split() for line in targets if len(line.split()) >= 4]
        archives = {(uri, name) for uri, name, origin, component in known if origin == "Debian" and component == "main"}
        main = [(uri, name) for uri, name in archives if "-" not in name]
        if not main:
            raise Impossible("apt knows no archive of Debian's here, which the kernels are taken from")
        keys = next(iter(glob.glob("/usr/share/keyrings/debian-archive-keyring.*")), None)
        suites = [(main[0][0], suite)] if suite else sorted(archives)
        with open(os.path.join(folder, "sources", "machine.sources"), "w") as out:
            for uri, name in suites:
                out.write(f"Types: deb\nURIs: {uri}\nSuites: {name}\nComponents: main\n" + (f"Signed-By: {keys}\n" if keys else "") + "\n")
        settings = {
            "APT::Architecture": guest.debian,
            "APT::Architectures": guest.debian,
            "Dir::Etc::sourcelist": "/dev/null",
            "Dir::Etc::sourceparts": os.path.join(folder, "sources"),
            "Dir::State::lists": os.path.join(folder, "lists"),
            "Dir::Cache": os.path.join(folder, "cache"),
            "APT::Sandbox::User": "",
            "Acquire::Languages": "none",
            "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled": "false",
        }
        self.options = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
        run(["apt-get", "-qq", *self.options, "update"])

    def depends(self, package):
        """The names that a package depends on."""
        text = run(["apt-cache", *self.options, "show", "--no-all-versions", package])
        line = re.search(r"^Depends: (.*)$", text, re.MULTILINE)
        return [re.sub(r" *[(:].*", "", word).strip() for word in re.split(r"[,|]", line.group(1))] if line else []

    def kernel_packages(self):
        """The newest kernel of the release: one package, or one with two that hold the kernel and its modules."""
        image_name = next(name for name in self.depends(f"linux-image-{self.guest.debian}") if name.startswith("linux-image-"))
        parts = [name for name in self.depends(image_name) if re.match(r"linux-(binary|modules)-", name)]
        return [image_name, *parts]

    def user_packages(self):
        """Our packages and the libraries they stand on."""
        leave_out = [f"--no-{kind}" for kind in ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")]
        lines = run(["apt-cache", *self.options, "depends", "--recurse", *leave_out, *PACKAGES]).split("\n")
        libraries = {line for line in lines if re.match(r"z?lib[a-z0-9.+-]+$", line)}
        return sorted(libraries | set(PACKAGES))

    def unpack(self, packages, folder, root):
        """Downloads packages into `folder`, unless they are there, and unpacks them below `root`."""
        os.makedirs(folder, exist_ok=True)
        uris = run(["apt-get", "-qq", *self.options, "--print-uris", "download", *packages])
        names = re.findall(r"^'[^']*' (\S+\.deb)", uris, re.MULTILINE)
        if not all(os.path.exists(os.path.join(folder, name)) for name in names):
            run(["apt-get", "-qq", *self.options, "download", *packages], cwd=folder)
        for name in names:
            run(["dpkg-deb", "-x", os.path.join(folder, name), root])


def unpack_kernel(root, out):
    """Writes the uncompressed kernel, which starts several seconds earlier than one that unpacks itself under emulation."""
    found = glob.glob(f"{root}/boot/vmlinuz-*") + glob.glob(f"{root}/usr/lib/modules/*/vmlinuz")
    modules = glob.glob(f"{root}/lib/modules/*") + glob.glob(f"{root}/usr/lib/modules/*")
    if not found or not modules:
        raise Impossible("the kernel's package holds no kernel or no modules where they are expected")
    data = open(found[0], "rb").read()
    if data[0x38:0x3C] == b"ARM\x64":
        shutil.copy(found[0], out)
        return os.path.basename(modules[0]), modules[0]
    for magic, tool in ((b"\xfd7zXZ\0", ["xz", "-dc", "--single-stream"]), (b"\x28\xb5\x2f\xfd", ["zstd", "-dc"])):
        for match in re.finditer(re.escape(magic), data):
            if not shutil.which(tool[0]):
                raise Impossible(f"{tool[0]} is not installed, and the kernel is packed with it")
            # The tool complains about what follows the packed kernel; that it is an ELF file is what counts.
            plain = subprocess.run(tool, input=data[match.start() :], capture_output=True, timeout=120).stdout
            if plain.startswith(b"\x7fELF"):
                with open(out, "wb") as file:
                    file.write(plain)
                return os.path.basename(modules[0]), modules[0]
    raise Impossible(f"no packed kernel found in {os.path.basename(found[0])}")


def add_user_land(archive, root, guest):
    """The commands, the shared libraries they need, the drivers of libibverbs, and busybox for the rest."""

    def find(name, folders):
        paths = [os.path.join(root, folder, name) for folder in folders]
        # Debian makes a link to this one when its package is installed, and we install nothing.
        paths += glob.glob(f"{root}/usr/lib/libpsm1/{name}.*")
        return next((os.path.realpath(path) for path in paths if os.path.exists(path)), None)

    def needed(path):
        return re.findall(r"\(NEEDED\).*\[(.*)\]", run(["readelf", "-d", path]))

    wanted = []
    for command in COMMANDS:
        path = find(command, ["bin", "sbin", "usr/bin", "usr/sbin"])
        if path:
            archive.file(f"bin/{command}", open(path, "rb").read(), 0o755)
            wanted.append(path)
    triple = guest.triple
    libraries = [f"lib/{triple}", f"usr/lib/{triple}"]
    for path in glob.glob(f"{root}/usr/lib/{triple}/libibverbs/lib*rxe-*.so") + glob.glob(f"{root}/usr/lib/{triple}/libibverbs/libsiw-*.so"):
        archive.file(f"usr/lib/{triple}/libibverbs/" + os.path.basename(path), open(path, "rb").read(), 0o755)
        wanted.append(path)
    for name in LIBRARIES:
        path = find(name, libraries)
        if path:
            archive.file(f"lib/{triple}/{name}", open(path, "rb").read(), 0o755)
            wanted.append(path)
    # Threads that end or are cancelled load it by its name.
    unwinder = find("libgcc_s.so.1", libraries)
    if unwinder:
        archive.file(f"lib/{triple}/libgcc_s.so.1", open(unwinder, "rb").read(), 0o755)
    archive.file("etc/libibverbs.d/rxe.driver", b"driver rxe\n")
    done = set()
    while wanted:
        for name in needed(wanted.pop()):
            path = find(name, libraries)
            if name in done or not path:
                continue
            done.add(name)
            archive.file(f"lib/{triple}/{name}", open(path, "rb").read(), 0o755)
            if name.startswith("ld-linux"):
                # Programs name it by this path; libraries in a namespace of their own look for it beside the others.
                archive.link(f"{guest.loader}/{name}", f"../lib/{triple}/{name}")
            wanted.append(path)
    busybox = os.path.join(root, "bin/busybox")
    if not os.path.exists(busybox):
        busybox = os.path.join(root, "usr/bin/busybox")
    # One of another architecture does not run here: `init` has it make its links.
    for applet in run([busybox, "--list"]).split() if guest is X86_64 else []:
        if applet not in COMMANDS and applet not in ("sh", "ash", "init"):
            archive.link(f"bin/{applet}", "busybox")
    archive.link("bin/sh", "dash")
    archive.file("etc/passwd", b"root:x:0:0:root:/:/bin/sh\n")
    archive.file("etc/group", b"root:x:0:\n")
    archive.file("etc/hosts", b"127.0.0.1 localhost\n10.99.0.1 host\n10.99.0.2 guest\n")
    archive.file("etc/nsswitch.conf", b"hosts: files\n")
    for folder in ("dev", "proc", "sys", "tmp", "run", "opt"):
        archive.folder(folder)


def add_modules(archive, folder):
    """The modules and what they depend on, in an order in which a plain insmod takes them."""
    paths = {}
    for path in glob.glob(f"{folder}/kernel/**/*.ko*", recursive=True):
        paths[re.sub(r"\.ko.*", "", os.path.basename(path)).replace("-", "_")] = path
    order = []

    def add(name):
        if name not in paths or name in order:
            return
        data = read_module(paths[name])
        depends = re.search(rb"\0depends=([^\0]*)\0", data)
        for other in (depends.group(1).decode().split(",") if depends else []):
            add(other.replace("-", "_"))
        order.append(name)
        archive.file(f"modules/{name}.ko", data)

    for name in MODULES:
        add(name)
    if "rdma_rxe" not in order:
        raise Impossible("this kernel's package has no module rdma_rxe")
    archive.file("modules/order", "\n".join(order).encode() + b"\n")


def read_module(path):
    if path.endswith(".xz"):
        return lzma.open(path).read()
    if path.endswith(".zst"):
        return subprocess.run(["zstd", "-qdc", path], capture_output=True, check=True, timeout=60).stdout
    return open(path, "rb").read()


class Archive:
    """A newc cpio archive, the form the kernel unpacks. Written by hand: it needs no tool, and nobody has to be root."""

    def __init__(self):
        self.parts = []
        self.folders = set()
        self.count = 0

    def entry(self, name, mode, data):
        self.count += 1
        fields = [self.count, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0]
        head = b"070701" + b"".join(b"%08x" % field for field in fields) + name.encode() + b"\0"
        self.parts += [head + b"\0" * (-len(head) % 4), data + b"\0" * (-len(data) % 4)]

    def folder(self, name):
        if name and name not in self.folders:
            self.folder(os.path.dirname(name))
            self.folders.add(name)
            self.entry(name, 0o040755, b"")

    def file(self, name, data, mode=0o644):
        self.folder(os.path.dirname(name))
        self.entry(name, 0o100000 | mode, data)

    def link(self, name, target):
        self.folder(os.path.dirname(name))
        self.entry(name, 0o120777, target.encode())

    def bytes(self):
        self.entry("TRAILER!!!", 0, b"")
        return b"".join(self.parts)
