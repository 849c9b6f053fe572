"""Two ranks of MPI: messages from 8 B to 16 MiB back and forth, one-sided puts, every byte compared. Started by mpiexec."""
import time

from peer import group_options, say


def main():
    args = group_options().parse_args()
    import numpy
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank, other = world.rank, 1 - world.rank
    for size in (8, 64 << 10, 1 << 20, 16 << 20):
        here = (numpy.arange(size, dtype=numpy.int64) * 7 + rank).astype(numpy.uint8)
        expected = (numpy.arange(size, dtype=numpy.int64) * 7 + other).astype(numpy.uint8)
        there = numpy.zeros(size, dtype=numpy.uint8)
        rounds, seconds = 0, 0.0
        while True:
            there[:] = 0
            world.Barrier()
            begin = time.perf_counter()
            for _ in range(10):
                if rank == 0:
                    world.Send(here, other)
                    world.Recv(there, other)
                else:
                    world.Recv(there, other)
                    world.Send(here, other)
            seconds += time.perf_counter() - begin
            rounds += 10
            if world.bcast(seconds > args.seconds, 0):
                break
        right = world.allreduce(bool((there == expected).all()), MPI.LAND)
        if rank == 0:
            say(operation="SEND", bytes=size, right=right, gb_s=2 * size * rounds / seconds / 1e9, us=seconds / rounds / 2 * 1e6)
    window = numpy.zeros(1 << 20, dtype=numpy.uint8)
    shared = MPI.Win.Create(window, comm=world)
    here = (numpy.arange(1 << 20, dtype=numpy.int64) * 3 + rank).astype(numpy.uint8)
    expected = (numpy.arange(1 << 20, dtype=numpy.int64) * 3 + other).astype(numpy.uint8)
    shared.Fence()
    shared.Put(here, other)
    shared.Fence()
    right = world.allreduce(bool((window == expected).all()), MPI.LAND)
    shared.Free()
    if rank == 0:
        say(operation="PUT", bytes=1 << 20, right=right)


main()
