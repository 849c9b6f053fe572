"""Memory that a client transfers."""


class Memory:
    """Bytes of a pattern that depends on a seed, in host or GPU memory."""

    def __init__(self, length, gpu):
        self.gpu = gpu
        if gpu:
            import torch

            self.torch, self.array = torch, torch.zeros(length // 8, dtype=torch.int64, device="cuda")
            self.address, self.kind, self.device = self.array.data_ptr(), "VRAM", torch.cuda.current_device()
        else:
            import numpy

            self.numpy, self.array = numpy, numpy.zeros(length // 8, dtype=numpy.int64)
            self.address, self.kind, self.device = self.array.ctypes.data, "DRAM", 0
        self.length = length

    def pattern(self, seed):
        if self.gpu:
            return self.torch.arange(self.length // 8, dtype=self.torch.int64, device="cuda") * 2654435761 + seed
        return self.numpy.arange(self.length // 8, dtype=self.numpy.int64) * 2654435761 + seed

    def fill(self, seed):
        self.array[:] = self.pattern(seed)
        if self.gpu:
            self.torch.cuda.synchronize()

    def holds(self, seed):
        return bool((self.array == self.pattern(seed)).all())

    def parts(self, count):
        """Descriptors in an order that leaves no two neighbours together, so that nothing can be merged."""
        size = self.length // count
        order = sorted(range(count), key=lambda at: (at % 2, at))
        return [(self.address + at * size, size, self.device) for at in order]
