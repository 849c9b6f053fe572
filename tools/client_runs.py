"""Clients from pip with GPU memory (`gpu-check --only clients`), where the bundle was made with CLIENT_PACKAGES=FILE (tools/client-packages)."""

import atexit
import glob
import os
import shutil
import sys
import tarfile
import tempfile

# Seconds for all measurements of a client by its own TCP, by shared memory and by UDP.
LIMIT = 150
BYTES = 256 << 20
COUNTS = "1,1024,16384"
# Clients, and how their packages are called.
PACKAGES = {"NIXL": "nixl_cu13", "Mooncake": "mooncake_transfer_engine_cuda13", "UCCL": "uccl", "InfiniStore": "infinistore"}


def commands(here):
    """The runner for GPU memory by the client's name; those that the bundle has."""
    packed = os.path.join(here, "clients.tar.xz")
    if not os.path.exists(packed):
        return {}
    folder = tempfile.mkdtemp(prefix="client-packages-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with tarfile.open(packed) as archive:
        archive.extractall(folder)
    common = [sys.executable, os.path.join(here, "clients", "run"), "--gpu", "--packages", os.path.join(folder, "packages"),
              "--bin", os.path.join(here, "bin"), "--bytes", str(BYTES), "--counts", COUNTS, "--seconds", "1"]
    names = [name for name, package in PACKAGES.items() if glob.glob(os.path.join(folder, "packages", f"{package}-*.dist-info"))]
    return {name: [*common, "--only", name] for name in names}
