"""Tensors between actors of Ray. Needs ray and torch."""
import os
import subprocess
import sys

import pytest

pytest.importorskip("ray")
pytest.importorskip("torch")


def test_actors_read_tensors_of_each_other():
    example = os.path.join(os.path.dirname(__file__), "..", "..", "examples", "kv", "ray_actors.py")
    ran = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0 and ran.stdout.count(": right") == 5, ran
