"""The clients: what pip installs, how two of them are started, and what they take for their own TCP."""
import os

HERE = os.path.dirname(os.path.abspath(__file__))


class Client:
    """A client whose two ends are joined by the runner."""

    is_quick = False

    def __init__(self, name, packages, script, tcp, tcp_options=(), patience=10):
        self.name, self.packages, self.script = name, packages, script
        self.tcp, self.tcp_options = tcp, list(tcp_options)
        # Seconds until it must report a stopped peer.
        self.patience = patience

    def command(self, python, role, options, by_tcp):
        return [python, os.path.join(HERE, self.script), role, *options, *(self.tcp_options if by_tcp else [])]


class Mpi:
    """An MPI from PyPI, whose mpiexec starts both ranks."""

    is_quick = False
    script = "mpi_peer.py"

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
    "Mooncake", ["--no-deps", "mooncake-transfer-engine-non-cuda"], "mooncake_peer.py", {}, ["--protocol", "tcp"], patience=31)
MPICH = Mpi("MPICH", ["mpich"], {"UCX_TLS": "tcp,self"}, {"MPIR_CVAR_NOLOCAL": "1"})
OPEN_MPI = Mpi(
    "Open MPI", ["openmpi"], {}, launcher=["--allow-run-as-root", "--bind-to", "none", "--oversubscribe"],
    by_nb0=["--mca", "pml", "ucx", "--mca", "osc", "ucx"], by_tcp=["--mca", "pml", "ob1", "--mca", "btl", "tcp,self"])
ALL = [NIXL, MOONCAKE, MPICH, OPEN_MPI]
