"""The clients: what pip installs, how two of them are started, and what they take for their own TCP."""
import os

HERE = os.path.dirname(os.path.abspath(__file__))


class Client:
    """A client whose two ends are joined by the runner."""

    is_quick = False
    # It needs an RDMA device for its own TCP, too.
    always_nb0 = False
    needs_interface = False
    # Numbers of parts of a transfer, where not all of the runner's.
    counts = None

    def __init__(self, name, packages, script, tcp, tcp_options=(), patience=(10, 10)):
        self.name, self.packages, self.script = name, packages, script
        self.tcp, self.tcp_options = tcp, list(tcp_options)
        # Seconds until it must report a dead peer: killed, stopped. None: it never does, on any adapter.
        self.patience = patience

    def command(self, python, role, options, by_tcp):
        return [python, os.path.join(HERE, self.script), role, *options, *(self.tcp_options if by_tcp else [])]


class Mpi:
    """An MPI from PyPI, whose mpiexec starts both ranks."""

    is_quick, always_nb0 = False, False
    script = "mpi_peer.py"

    # It ignores loopback addresses.
    needs_interface = False

    def __init__(self, name, packages, tcp, settings=None, launcher=(), by_nb0=(), by_tcp=()):
        self.name, self.packages, self.tcp = name, [*packages, "mpi4py", "numpy"], tcp
        # What the environment and the launcher need for nb0 and for TCP alike; and for each.
        self.settings, self.launcher, self.by_nb0, self.by_tcp = settings or {}, launcher, by_nb0, by_tcp

    def command(self, python, options, by_tcp):
        launcher = os.path.join(os.path.dirname(python), "mpiexec")
        words = [*self.launcher, *(self.by_tcp if by_tcp else self.by_nb0)]
        return [launcher, *words, "-n", "2", python, os.path.join(HERE, self.script), *options]


NIXL = Client("NIXL", ["--no-deps", "nixl-cu13"], "nixl_peer.py", {"UCX_TLS": "tcp,self"})
NIXL.is_quick = True
# It tries to connect anew to a stopped peer until its own time for a transfer is over (MC_TRANSFER_TIMEOUT, 30 s).
MOONCAKE = Client(
    "Mooncake", ["--no-deps", "mooncake-transfer-engine-non-cuda"], "mooncake_peer.py", {}, ["--protocol", "tcp"], patience=(10, 31))
# It logs an error completion and leaves its caller waiting. Its store needs an RDMA device for TCP, too. (Its libuv must be uvloop's.)
INFINISTORE = Client(
    "InfiniStore", ["--no-deps", "infinistore", "uvloop==0.21.0"], "infinistore_peer.py", {}, ["--protocol", "tcp"], patience=None)
INFINISTORE.always_nb0, INFINISTORE.counts = True, "256"  # thousands of keys stop its TCP
MPICH = Mpi("MPICH", ["mpich"], {"UCX_TLS": "tcp,self"}, {"MPIR_CVAR_NOLOCAL": "1"})
OPEN_MPI = Mpi(
    "Open MPI", ["openmpi"], {}, launcher=["--allow-run-as-root", "--bind-to", "none", "--oversubscribe"],
    by_nb0=["--mca", "pml", "ucx", "--mca", "osc", "ucx"], by_tcp=["--mca", "pml", "ob1", "--mca", "btl", "tcp,self"])
# Without I_MPI_FABRICS ranks of one machine use its own shared memory.
INTEL_MPI = Mpi("Intel MPI", ["impi-rt"], {"I_MPI_OFI_PROVIDER": "tcp"}, {"I_MPI_FABRICS": "ofi"})
INTEL_MPI.needs_interface = True
ALL = [NIXL, MOONCAKE, INFINISTORE, MPICH, OPEN_MPI, INTEL_MPI]
