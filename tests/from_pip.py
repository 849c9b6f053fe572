"""Packages from pip for one test, cached below the target folder."""
import json
import os
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WAIVED = 77


def _folder(name):
    return os.path.join(os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target")), "clients", name)


def _cached(folder, commands):
    """Runs the commands once; ends the test as waived where one of them fails."""
    done = os.path.join(folder, ".complete")
    wanted = json.dumps(commands)
    if os.path.exists(done):
        with open(done) as file:
            if file.read() == wanted:
                return
    shutil.rmtree(folder, ignore_errors=True)
    for command in commands:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if ran.returncode != 0:
            print(f"waived: {' '.join(command[1:6])}: {(ran.stderr + ran.stdout).strip().splitlines()[-1:]}")
            sys.exit(WAIVED)
    with open(done, "w") as file:
        file.write(wanted)


def installed(name, packages):
    """A folder with the packages, without their dependencies."""
    folder = _folder(name)
    _cached(folder, [[sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, *packages]])
    return folder


def environment(name, python, packages):
    """The interpreter of a virtual environment with the packages."""
    folder = _folder(name)
    mine = os.path.join(folder, "bin", "python")
    _cached(folder, [[python, "-m", "venv", folder], [mine, "-m", "pip", "install", "-q", *packages]])
    return mine
