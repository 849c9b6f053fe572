#!/usr/bin/env python3
"""Runs tests/device_plugin_*.py: nobounce-device-plugin, and the manifests of kubernetes/. The arguments are that program and nobounce.

grpcio is an implementation of gRPC that shares no code with the plugin's. It comes from pip, as kubernetes-validate does. Exit 77 with the
reason where they cannot be had. Names of tests may follow the programs.
"""
import os
import shutil
import signal
import subprocess
import sys
import tempfile

from from_pip import ROOT, environment

PACKAGES = ["grpcio", "grpcio-tools", "kubernetes-validate", "PyYAML"]
TESTS = ["device_plugin_calls", "device_plugin_life", "device_plugin_manifests"]
PROTO = os.path.join(ROOT, "kubernetes/device-plugin/proto")


def main():
    python = environment("device-plugin", sys.executable, PACKAGES)
    folder = tempfile.mkdtemp(prefix="nobounce-plugin-")
    # timeout(1) ends this script by SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        subprocess.run([python, "-m", "grpc_tools.protoc", f"-I{PROTO}", f"--python_out={folder}", f"--grpc_python_out={folder}",
                        "deviceplugin.proto"], check=True)
        variables = dict(os.environ, DEVICE_PLUGIN=os.path.abspath(sys.argv[1]), NOBOUNCE=os.path.abspath(sys.argv[2]), TMPDIR=folder, PYTHONDONTWRITEBYTECODE="1",
                         PYTHONPATH=os.pathsep.join([os.path.join(ROOT, "tests"), folder]))
        code = subprocess.run([python, "-m", "unittest", "-v", *(sys.argv[3:] or TESTS)], cwd=ROOT, env=variables).returncode
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(code)


main()
