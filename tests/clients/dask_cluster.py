"""Dask with `protocol="ucxx"` or `"tcp"`: a scheduler and two workers. Arrays that one worker makes are checked by the other."""
import numpy

from peer import ADDRESS, group_options, measure, say, timed

SIZE = 64 << 20


def make(seed):
    return numpy.arange(SIZE // 8, dtype=numpy.int64) * 2654435761 + seed


def first_and_last(array):
    """Enough to need the whole array on the other worker, and little work."""
    return int(array[0]), int(array[-1])


def is_right(array, seed):
    return bool((array == make(seed)).all())


def main():
    from dask.distributed import Client, LocalCluster, wait

    args = group_options("ucxx").parse_args()
    options = dict(n_workers=2, threads_per_worker=1, processes=True, protocol=args.protocol, dashboard_address=None, host=ADDRESS)
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        one, other = list(client.scheduler_info()["workers"])

        def made(seed):
            array = client.submit(make, seed, workers=[one], pure=False)
            wait(array)
            return array

        right = client.submit(is_right, made(1), 1, workers=[other], pure=False).result()

        def move():
            array = made(2)
            return timed(lambda: client.submit(first_and_last, array, workers=[other], pure=False).result())

        first = move()
        measure(move, args.seconds, operation="fetch", bytes=SIZE, first_s=first, right=right)
    say(closed=True)


if __name__ == "__main__":
    main()
