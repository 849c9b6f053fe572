"""Packages from pip for one test, cached below the target folder."""
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WAIVED = 77


def installed(name, packages):
    """The folder that holds the packages; ends the test as waived where pip cannot install them."""
    folder = os.path.join(os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target")), "clients", name)
    done = os.path.join(folder, ".complete")
    if not os.path.exists(done):
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, *packages]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if ran.returncode != 0:
            print(f"waived: pip install {packages[0]}: {ran.stderr.strip().splitlines()[-1:]}")
            sys.exit(WAIVED)
        with open(done, "w"):
            pass
    return folder
