"""NIXL's GDS plugins on the drop-in libcufile: ranges of a file into host memory and back, every byte compared.

    nobounce run --cufile -- python3 gds_files.py FOLDER
"""
import os
import sys

import numpy
from nixl_cu13._api import nixl_agent, nixl_agent_config

BYTES, RANGES = 1 << 20, 16


def move(agent, plugin, operation, pairs):
    """One transfer between ranges of memory and of a file."""
    memory, file = pairs
    request = agent.initialize_xfer(operation, agent.get_xfer_descs(memory, "DRAM"), agent.get_xfer_descs(file, "FILE"), agent.name, backends=[plugin])
    state = agent.transfer(request)
    while state not in ("DONE", "ERR"):
        state = agent.check_xfer_state(request)
    agent.release_xfer_handle(request)
    assert state == "DONE", f"{plugin} {operation}: {state}"


def main():
    path = os.path.join(sys.argv[1], "gds")
    content = numpy.random.default_rng(1).integers(0, 256, BYTES, dtype="u1")
    content.tofile(path)
    file = os.open(path, os.O_RDWR)
    memory = numpy.zeros(BYTES, "u1")
    step = BYTES // RANGES
    # The file's ranges backwards, so that offsets matter.
    pairs = ([(memory.ctypes.data + at * step, step, 0) for at in range(RANGES)], [(BYTES - (at + 1) * step, step, file) for at in range(RANGES)])
    backwards = content.reshape(RANGES, step)[::-1].reshape(-1)
    for plugin in ("GDS", "GDS_MT"):
        agent = nixl_agent(plugin, nixl_agent_config(backends=[]))
        agent.create_backend(plugin)
        agent.register_memory([(0, BYTES, file, "")], "FILE", backends=[plugin])
        agent.register_memory([(memory.ctypes.data, BYTES, 0, "")], "DRAM", backends=[plugin])
        memory[:] = 0
        move(agent, plugin, "READ", pairs)
        assert (memory == backwards).all(), f"{plugin}: wrong bytes were read"
        memory += 1
        move(agent, plugin, "WRITE", pairs)
        assert (numpy.fromfile(path, "u1") == content + 1).all(), f"{plugin}: wrong bytes were written"
        content.tofile(path)
        print(f"{plugin}: {BYTES} bytes read and written by {RANGES} ranges")


main()
