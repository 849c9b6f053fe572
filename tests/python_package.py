#!/usr/bin/env python3
"""Builds the compiled part of the Python package for tests, and runs python/tests and the example with each interpreter that is named.

pytest, numpy, uvloop and mypy come from pip (cached below the target folder); exit 77 with the reason where they cannot be installed.
"""
import os
import shutil
import subprocess
import sys

from from_pip import ROOT, environment

TARGET = os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target"))
PACKAGES = ["pytest", "numpy", "uvloop", "mypy", "safetensors"]


def built():
    """The folder with the package."""
    subprocess.run(["cargo", "build", "--locked", "-q", "-p", "nobounce-python", "-p", "nobounce-fake-cuda"], cwd=ROOT, check=True)
    folder = os.path.join(TARGET, "python")
    package = os.path.join(folder, "nobounce")
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(os.path.join(ROOT, "python", "nobounce"), package, ignore=shutil.ignore_patterns("*.so", "_bin", "__pycache__"))
    shutil.copy(os.path.join(TARGET, "debug", "lib_nobounce.so"), os.path.join(package, "_nobounce.abi3.so"))
    return folder


def version_of(python):
    return subprocess.run([python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True, check=True).stdout.strip()


def main():
    folder = built()
    for name in sys.argv[1:]:
        version = version_of(name)
        python = environment(f"python{version}", name, PACKAGES)
        print(f"Python {version}:", flush=True)
        variables = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        subprocess.run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", os.path.join(ROOT, "python", "tests")], env=variables, check=True)
        for arguments in ([], ["--ranks", "2"], ["--kill"]):
            example = [python, os.path.join(ROOT, "examples", "kv", "prefill_decode.py"), *arguments]
            subprocess.run(example, env=variables, check=True, timeout=120)
        strict = [python, "-m", "mypy", "--strict", "--config-file", os.path.join(ROOT, "python", "pyproject.toml"), "--cache-dir", os.path.join(folder, "mypy"), os.path.join(folder, "nobounce")]
        subprocess.run(strict, cwd=folder, check=True)


main()
