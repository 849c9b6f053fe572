"""A virtual environment for each of these programs, kept below the target folder."""
import os
import subprocess
import sys

import catalogue

TARGET = os.environ.get("CARGO_TARGET_DIR", os.path.join(os.path.dirname(os.path.dirname(catalogue.HERE)), "target"))
# Seconds for pip.
INSTALL_LIMIT = 600


class Waived(Exception):
    pass


def say(line):
    print(line, flush=True)


def virtual_environment(client):
    """Its Python, after pip has installed the packages; kept for the next time."""
    folder = os.path.join(TARGET, "clients", client.home.replace(" ", "-").lower())
    python, done = os.path.join(folder, "bin", "python3"), os.path.join(folder, "installed")
    wanted = " ".join(client.packages)
    if os.path.exists(done):
        with open(done) as file:
            if file.read() == wanted:
                return python
    say(f"{client.name}: pip install {wanted}")
    commands = [[sys.executable, "-m", "venv", "--clear", folder], [python, "-m", "pip", "install", "-q", "numpy"],
                [python, "-m", "pip", "install", "-q", *client.packages]]
    for command in commands:
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_LIMIT)
        except subprocess.TimeoutExpired:
            raise Waived(f"{' '.join(command[2:5])}: still not done after {INSTALL_LIMIT} s")
        if ran.returncode != 0:
            raise Waived(f"{' '.join(command[2:5])}: {ran.stderr.strip().splitlines()[-1:]}")
    with open(done, "w") as file:
        file.write(wanted)
    return python
