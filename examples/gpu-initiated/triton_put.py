#!/usr/bin/env python3
"""A Triton kernel that puts with a signal: it writes the eight words of a descriptor itself.

    triton_put.py RANK RANKS ADDRESS:PORT      once for each rank; LIBNOBOUNCE names the library

SPDX-License-Identifier: MIT OR Apache-2.0
"""
import ctypes
import os
import sys

import torch
import triton
import triton.language as tl

ROUNDS = 1000
BYTES = 4096


class Options(ctypes.Structure):
    """nb_options of nobounce.h."""

    _fields_ = [("rank", ctypes.c_uint32), ("ranks", ctypes.c_uint32), ("rendezvous", ctypes.c_char_p), ("gpu", ctypes.c_int), ("heap", ctypes.c_size_t),
                ("channels", ctypes.c_uint32), ("log_depth", ctypes.c_uint32), ("signals", ctypes.c_uint16), ("counters", ctypes.c_uint16),
                ("timeout_ms", ctypes.c_uint32)]


@triton.jit
def fence():
    """Earlier stores of this thread are visible to the proxy before later ones."""
    tl.inline_asm_elementwise("fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def put(channel, peer, there, here, size, signal, add):
    """The words are described in docs/reference/initiated.md: offsets are those in the symmetric heap."""
    peer, there, here, size = tl.cast(peer, tl.int64), tl.cast(there, tl.int64), tl.cast(here, tl.int64), tl.cast(size, tl.int64)
    signal, add = tl.cast(signal, tl.int64), tl.cast(add, tl.int64)
    words = channel.to(tl.pointer_type(tl.int64))
    ring, consumed, log_depth = tl.load(words + 2), tl.load(words + 4), tl.load(words + 6) & 0xFFFFFFFF
    handle = (tl.load(words + 11) & 0xFFFF) << 16
    ticket = tl.atomic_add(words + 3, 1, sem="relaxed")
    while ticket - tl.load(consumed.to(tl.pointer_type(tl.int64)), volatile=True) >= (1 << log_depth):
        pass
    fence()
    at = tl.arange(0, 8)
    word = tl.where(at == 0, (2 << 16) | (signal << 48), 0)  # operation 2: put, then add to a signal
    word = tl.where(at == 1, (peer << 1) | (size << 32), word)
    word = tl.where(at == 2, handle | (add << 32), word)
    word = tl.where(at == 3, handle | ((add >> 32) << 32), word)
    word = tl.where(at == 4, there << 1, word)
    word = tl.where(at == 5, here << 1, word)
    owner = (ticket >> log_depth) & 1
    place = (ring + (ticket & ((1 << log_depth) - 1)) * 64).to(tl.pointer_type(tl.int64))
    tl.store(place + at, (word & -2) | owner)


@triton.jit
def ping_pong(channel, heap, peer, rounds, wrong, SIZE: tl.constexpr, FIRST: tl.constexpr):
    """Both ranks put SIZE words of their round, and check those of the other."""
    signal = tl.load(channel.to(tl.pointer_type(tl.int64)) + 1).to(tl.pointer_type(tl.int64))
    status = (tl.load(channel.to(tl.pointer_type(tl.int64)) + 7) + 64 * peer).to(tl.pointer_type(tl.int64))
    at = tl.arange(0, SIZE)
    here, there = heap.to(tl.pointer_type(tl.int32)), (heap + SIZE * 4).to(tl.pointer_type(tl.int32))
    failed = 0
    for number in range(1, rounds + 1):
        if FIRST:
            tl.store(here + at, at + number)
            tl.debug_barrier()
            put(channel, peer, SIZE * 4, 0, SIZE * 4, 0, 1)
        # Not for ever: the status is not 0 when the other rank is gone.
        while (tl.load(signal, volatile=True) < number) & (tl.load(status, volatile=True) == 0):
            pass
        fence()
        failed += tl.sum((tl.load(there + at, volatile=True) != at + number).to(tl.int32))
        if not FIRST:
            tl.store(here + at, at + number)
            tl.debug_barrier()
            put(channel, peer, SIZE * 4, 0, SIZE * 4, 0, 1)
    tl.store(wrong, failed)


def main():
    rank, ranks, rendezvous = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    if ranks != 2:
        sys.exit("two ranks play ping-pong")
    library = ctypes.CDLL(os.environ.get("LIBNOBOUNCE", "libnobounce.so.1"))
    for name, result, arguments in (("nb_join", ctypes.c_void_p, [ctypes.POINTER(Options), ctypes.c_char_p, ctypes.c_size_t]),
                                    ("nb_channel", ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_uint32]), ("nb_heap", ctypes.c_void_p, [ctypes.c_void_p]),
                                    ("nb_barrier", ctypes.c_int, [ctypes.c_void_p]), ("nb_leave", None, [ctypes.c_void_p])):
        getattr(library, name).restype, getattr(library, name).argtypes = result, arguments
    torch.cuda.init()
    error = ctypes.create_string_buffer(512)
    options = Options(rank, ranks, rendezvous.encode(), 0, 1 << 20, 1, 10, 64, 64, 60000)
    world = library.nb_join(ctypes.byref(options), error, len(error))
    if not world:
        sys.exit(f"cannot join: {error.value.decode()}")
    wrong = torch.full((1,), -1, dtype=torch.int32, device="cuda")
    library.nb_barrier(world)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    ping_pong[(1,)](library.nb_channel(world, 0), library.nb_heap(world), 1 - rank, ROUNDS, wrong, SIZE=BYTES // 4, FIRST=rank == 0, num_warps=4)
    ended.record()
    torch.cuda.synchronize()
    print(f"rank {rank}: {ROUNDS} rounds of {BYTES} bytes, {wrong.item()} wrong words, {began.elapsed_time(ended) * 1000 / ROUNDS / 2:.1f} us each way with compilation")
    library.nb_barrier(world)
    library.nb_leave(world)
    sys.exit(wrong.item() != 0)


if __name__ == "__main__":
    main()
