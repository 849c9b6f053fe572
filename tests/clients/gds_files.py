"""NIXL's GDS plugins on the drop-in libcufile: ranges of a file into host memory and back, every byte compared.

    nobounce run --cufile -- python3 gds_files.py FOLDER [--gpu]       --gpu: memory of GPU 0, by PyTorch
"""
import os
import sys

import numpy
from nixl_cu13._api import nixl_agent, nixl_agent_config

BYTES, RANGES = 1 << 20, 16


class Host:
    kind = "DRAM"

    def __init__(self):
        self.array = numpy.zeros(BYTES, "u1")
        self.address = self.array.ctypes.data

    def set(self, content):
        self.array[:] = content

    def get(self):
        return self.array


class Gpu:
    kind = "VRAM"

    def __init__(self):
        import torch

        self.torch = torch
        self.tensor = torch.zeros(BYTES, dtype=torch.uint8, device="cuda")
        self.address = self.tensor.data_ptr()

    def set(self, content):
        self.tensor.copy_(self.torch.from_numpy(content))
        self.torch.cuda.synchronize()

    def get(self):
        return self.tensor.cpu().numpy()


def move(agent, plugin, operation, kind, pairs):
    """One transfer between ranges of memory and of a file."""
    memory, file = pairs
    request = agent.initialize_xfer(operation, agent.get_xfer_descs(memory, kind), agent.get_xfer_descs(file, "FILE"), agent.name, backends=[plugin])
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
    memory = Gpu() if "--gpu" in sys.argv else Host()
    step = BYTES // RANGES
    # The file's ranges backwards, so that offsets matter.
    pairs = ([(memory.address + at * step, step, 0) for at in range(RANGES)], [(BYTES - (at + 1) * step, step, file) for at in range(RANGES)])
    backwards = content.reshape(RANGES, step)[::-1].reshape(-1)
    for plugin in ("GDS", "GDS_MT"):
        agent = nixl_agent(plugin, nixl_agent_config(backends=[]))
        agent.create_backend(plugin)
        agent.register_memory([(0, BYTES, file, "")], "FILE", backends=[plugin])
        agent.register_memory([(memory.address, BYTES, 0, "")], memory.kind, backends=[plugin])
        memory.set(numpy.zeros(BYTES, "u1"))
        move(agent, plugin, "READ", memory.kind, pairs)
        assert (memory.get() == backwards).all(), f"{plugin}: wrong bytes were read"
        memory.set(backwards + 1)
        move(agent, plugin, "WRITE", memory.kind, pairs)
        assert (numpy.fromfile(path, "u1") == content + 1).all(), f"{plugin}: wrong bytes were written"
        content.tofile(path)
        print(f"{plugin}: {BYTES} bytes of {memory.kind} read and written by {RANGES} ranges")


main()
