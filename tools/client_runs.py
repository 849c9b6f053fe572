"""Clients from pip with GPU memory (`gpu-check --only clients`), where the bundle was made with CLIENT_PACKAGES=FILE (tools/client-packages)."""

import atexit
import os
import shutil
import sys
import tarfile
import tempfile

# All measurements of a client by its own TCP, by shared memory and by UDP.
LIMIT = 150
BYTES = 256 << 20
COUNTS = "1,1024,16384"


def command(here):
    """The runner for GPU memory; None where the bundle has no packages."""
    packed = os.path.join(here, "clients.tar.xz")
    if not os.path.exists(packed):
        return None
    folder = tempfile.mkdtemp(prefix="client-packages-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with tarfile.open(packed) as archive:
        archive.extractall(folder)
    return [sys.executable, os.path.join(here, "clients", "run"), "--gpu", "--packages", os.path.join(folder, "packages"), "--only", "nixl",
            "--bin", os.path.join(here, "bin"), "--bytes", str(BYTES), "--counts", COUNTS, "--seconds", "1"]
