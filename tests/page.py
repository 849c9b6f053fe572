#!/usr/bin/env python3
"""Runs tests/page_*.py: `nobounce ui` in a browser, its server, report, metrics and top. The argument is the nobounce command.

selenium (the browser's driver) and pyte (a terminal) come from pip, cached below the target folder. Exit 77 with the reason where they
or chromium cannot be had. Names of tests may follow the command. PAGE_SHOTS names a folder for screenshots of every tab.
"""
import os
import shutil
import signal
import subprocess
import sys
import tempfile

from from_pip import ROOT, WAIVED, environment

PACKAGES = ["selenium", "pyte"]
TESTS = ["page_server", "page_views", "page_report", "page_live", "page_tools"]
# In the environment of every process of the tests.
MARK = "PAGE_TEST"


def left_behind(mark):
    """Processes of the tests that still run: [(process ID, program)]."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                is_ours = f"{MARK}={mark}".encode() in file.read().split(b"\0")
            with open(f"/proc/{name}/comm") as file:
                found += [(int(name), file.read().strip())] if is_ours else []
        except OSError:
            pass  # it ended, or belongs to another user
    return found


def main():
    for program, package in (("chromium", "chromium"), ("chromedriver", "chromium-driver")):
        if not shutil.which(program):
            print(f"waived: {program} is not installed (apt-get install {package})")
            sys.exit(WAIVED)
    python = environment("page", sys.executable, PACKAGES)
    folder = tempfile.mkdtemp(prefix="nobounce-page-")
    variables = {name: value for name, value in os.environ.items() if not name.startswith("NOBOUNCE_") or name == "NOBOUNCE_WAIVERS"}
    variables.update({MARK: folder, "PAGE_NOBOUNCE": os.path.abspath(sys.argv[1]), "TMPDIR": folder, "HOME": folder, "XDG_RUNTIME_DIR": folder,
                      "PYTHONPATH": os.path.join(ROOT, "tests"), "PYTHONDONTWRITEBYTECODE": "1", "SE_AVOID_STATS": "true"})
    # timeout(1) ends this script by SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    code = 1
    try:
        code = subprocess.run([python, "-m", "unittest", "-v", *(sys.argv[2:] or TESTS)], cwd=ROOT, env=variables).returncode
    finally:
        for process, program in left_behind(folder):
            print(f"left behind: {program} ({process})")
            os.kill(process, signal.SIGKILL)
            code = 1
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(code)


main()
