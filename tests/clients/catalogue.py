"""The clients: what pip installs, how they are started, and what they take for their own TCP."""
import os

HERE = os.path.dirname(os.path.abspath(__file__))


class Client:
    """What all have in common."""

    is_quick = False
    # It needs an RDMA device for its own TCP, too.
    always_nb0 = False
    # It ignores loopback addresses.
    needs_interface = False
    # It moves GPU memory and no other; its own TCP does, too.
    gpu_only, tcp_moves_gpu = False, True
    # Its package for GPU memory, and the packages besides; None where it is not tried with such memory.
    gpu_packages = None

    def __init__(self, name, packages, script, tcp, settings=None):
        self.name, self.packages, self.script = name, packages, os.path.join(HERE, script)
        # Clients with the same packages share a virtual environment. The version of this one is noted.
        self.home, self.package = name, next(word for word in packages if not word.startswith("-")).split("==")[0]
        # Variables of the environment: for its own TCP, and for both.
        self.tcp, self.settings = tcp, settings or {}

    def prepare(self, folder):
        """What else is to be done after pip has filled this folder; more variables."""
        return {}


class Pair(Client):
    """A client whose two ends are joined by the runner."""

    # Numbers of parts of a transfer, where not all of the runner's.
    counts = None

    def __init__(self, name, packages, script, tcp, tcp_options=(), patience=(10, 10), settings=None):
        super().__init__(name, packages, script, tcp, settings)
        self.tcp_options = list(tcp_options)
        # Seconds until it must report a dead peer: killed, stopped. None: it never does, on any adapter.
        self.patience = patience

    def command(self, python, role, options, by_tcp):
        return [python, self.script, role, *options, *(self.tcp_options if by_tcp else [])]


class Group(Client):
    """A client that starts its processes itself."""

    # Measurements that it reports.
    rows = 1

    def command(self, python, options, by_tcp):
        return [python, self.script, *options, *(["--protocol", "tcp"] if by_tcp else [])]


class Mpi(Group):
    """An MPI from PyPI, whose mpiexec starts both ranks."""

    rows = 5

    def __init__(self, name, packages, tcp, settings=None, launcher=(), by_nb0=(), by_tcp=()):
        super().__init__(name, [*packages, "mpi4py", "numpy"], "mpi_peer.py", tcp, settings)
        # What the launcher needs for nb0 and for TCP alike; and for each.
        self.launcher, self.by_nb0, self.by_tcp = launcher, by_nb0, by_tcp

    def command(self, python, options, by_tcp):
        launcher = os.path.join(os.path.dirname(python), "mpiexec")
        words = [*self.launcher, *(self.by_tcp if by_tcp else self.by_nb0)]
        return [launcher, *words, "-n", "2", python, self.script, *options]


def use_ucx_of_mpich(folder):
    """UCXX's own UCX has no InfiniBand; that of MPICH has, under names that UCXX does not look for."""
    source, links = os.path.join(folder, "lib", "mpich"), os.path.join(folder, "ucx")
    for place in (".", "ucx"):
        os.makedirs(os.path.join(links, place), exist_ok=True)
        for name in filter(lambda name: name.startswith("libuc"), os.listdir(os.path.join(source, place))):
            for link in (name, name.removesuffix(".0")):
                path = os.path.join(links, place, link)
                if not os.path.lexists(path):
                    os.symlink(os.path.join(source, place, name), path)
    return {"RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY": "true", "LD_LIBRARY_PATH": links}


# Its GDS plugins, which gds_files.py tries, need CUDA's runtime library.
NIXL = Pair("NIXL", ["--no-deps", "nixl-cu13", "nvidia-cuda-runtime"], "nixl_peer.py", {"UCX_TLS": "tcp,self"})
NIXL.is_quick, NIXL.gpu_packages = True, ["nixl-cu13"]
# It tries to connect anew to a stopped peer until its own time for a transfer is over (MC_TRANSFER_TIMEOUT, 30 s).
MOONCAKE = Pair(
    "Mooncake", ["--no-deps", "mooncake-transfer-engine-non-cuda"], "mooncake_peer.py", {}, ["--protocol", "tcp"], patience=(10, 31))
MOONCAKE.gpu_packages = ["mooncake-transfer-engine-cuda13"]
# Its CUDA runtime is older than PyTorch's. It has no TCP of its own for pairs.
UCCL = Pair("UCCL", ["--no-deps", "uccl", "nvidia-cuda-runtime-cu12"], "uccl_peer.py", {}, settings={"UCCL_SOCKET_IFNAME": "lo"})
UCCL.gpu_only, UCCL.tcp_moves_gpu, UCCL.gpu_packages = True, False, UCCL.packages[1:]
STORE = Group("Mooncake store", MOONCAKE.packages, "mooncake_store.py", {})
STORE.home, STORE.rows = MOONCAKE.home, 2
# It logs an error completion and leaves its caller waiting. Its store needs an RDMA device for TCP, too. (Its libuv must be uvloop's.)
INFINISTORE = Pair(
    "InfiniStore", ["--no-deps", "infinistore", "uvloop==0.21.0"], "infinistore_peer.py", {}, ["--protocol", "tcp"], patience=None)
INFINISTORE.always_nb0, INFINISTORE.counts = True, "256"  # thousands of keys stop its TCP
INFINISTORE.tcp_moves_gpu, INFINISTORE.gpu_packages = False, INFINISTORE.packages[1:]
UCXX = Pair("UCXX", ["ucxx-cu12", "distributed-ucxx-cu12", "mpich"], "ucxx_peer.py", {"UCX_TLS": "tcp,self"})
DASK = Group("Dask", UCXX.packages, "dask_cluster.py", {})
DASK.home, DASK.package = UCXX.home, "distributed"
UCXX.prepare = DASK.prepare = use_ucx_of_mpich
# Of some gigabytes.
TENSORPIPE = Group("TensorPipe", ["torch", "ray", "nixl"], "torch_rpc.py", {})
TENSORPIPE.rows = 2
RAY = Group("Ray", TENSORPIPE.packages, "ray_actors.py", {"UCX_TLS": "tcp,self"})
RAY.home, RAY.package = TENSORPIPE.home, "ray"
MPICH = Mpi("MPICH", ["mpich"], {"UCX_TLS": "tcp,self"}, {"MPIR_CVAR_NOLOCAL": "1"})
OPEN_MPI = Mpi(
    "Open MPI", ["openmpi"], {}, launcher=["--allow-run-as-root", "--bind-to", "none", "--oversubscribe"],
    by_nb0=["--mca", "pml", "ucx", "--mca", "osc", "ucx"], by_tcp=["--mca", "pml", "ob1", "--mca", "btl", "tcp,self"])
# Without I_MPI_FABRICS ranks of one machine use its own shared memory.
INTEL_MPI = Mpi("Intel MPI", ["impi-rt"], {"I_MPI_OFI_PROVIDER": "tcp"}, {"I_MPI_FABRICS": "ofi"})
INTEL_MPI.needs_interface = True
ALL = [NIXL, MOONCAKE, UCCL, STORE, INFINISTORE, UCXX, DASK, TENSORPIPE, RAY, MPICH, OPEN_MPI, INTEL_MPI]
