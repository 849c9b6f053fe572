"""Runs a program for a bounded time, and leaves nothing of it behind."""

import os
import signal
import subprocess
import time

# Children that run now, of all threads.
RUNNING = set()
# What every child finds in its environment; replaced as a whole, since other threads read it.
SHARED = {}


def environment_with(variables):
    return {**os.environ, **SHARED, **variables}


def end_all():
    """For the end of a program whose threads may be waiting for children."""
    for child in list(RUNNING):
        end(child)


def end(child):
    """Ends a child and everything in its group, where it is still there."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()


def run(command, limit, log, environment, folder=None):
    """(exit code or None when stopped, output, seconds). The output is kept in a file, whatever happens."""
    started = time.monotonic()
    with open(log, "wb") as file:
        # A group of its own, so that what a test started ends with it.
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, cwd=folder,
                                 env=environment_with(environment), start_new_session=True)
        RUNNING.add(child)
        code = None
        try:
            code = child.wait(timeout=max(1, limit))
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Out of time, or Ctrl-C: nothing must stay.
            if code is None:
                end(child)
            RUNNING.discard(child)
    with open(log, errors="replace") as file:
        return code, file.read(), time.monotonic() - started
