// Kernels of the tests on a GPU. All arguments are 64-bit words; with a channel of 0 they do nothing.
#include "../../include/nobounce.cuh"

using namespace nobounce;

namespace {

__device__ inline u64 mix(u64 rank, u64 round, u64 at) { return (rank + 1) * 0x9e3779b97f4a7c15ull + round * 0xbf58476d1ce4e5b9ull + at; }

} // namespace

// One block. Both ranks put `bytes` with a signal, and check all of what the other put when they see its signal.
// result[0]: failed waits; result[1]: wrong words; result[2]: rounds.
extern "C" __global__ void exchange(Channel *channel, u64 peer, u64 rounds, u64 bytes, u64 *result) {
    if (channel == nullptr)
        return;
    u64 words = bytes / 8, *source = (u64 *)channel->heap, *target = source + words;
    for (u64 round = 1; round <= rounds; round++) {
        for (u64 at = threadIdx.x; at < words; at += blockDim.x)
            source[at] = mix(channel->rank, round, at);
        put_block(channel, (u32)peer, target, source, bytes, signal(0, 1), counter(0));
        bool failed = wait_signal_block(channel, (u32)peer, 0, round) != Status::ok;
        for (u64 at = threadIdx.x; at < words; at += blockDim.x)
            if (target[at] != mix(peer, round, at))
                atomicAdd(&result[1], 1ull);
        __syncthreads();
        // The next put may come now, and the source may change.
        if (threadIdx.x == 0) {
            signal_add(channel, (u32)peer, 1, 1);
            failed |= wait_signal(channel, (u32)peer, 1, round) != Status::ok;
            failed |= wait_counter(channel, 0, round) != Status::ok;
        }
        if (__syncthreads_or(failed)) {
            if (threadIdx.x == 0)
                result[0]++;
            return;
        }
        if (threadIdx.x == 0)
            result[2] = round;
    }
}

// One thread. Every operation once; result[0] is a bit for each that went wrong.
extern "C" __global__ void operations(Channel *channel, u64 peer, u64 *result) {
    if (channel == nullptr)
        return;
    // Both ranks write into the first page of the other, and read it back behind it.
    u8 *there = channel->heap, *here = channel->heap + 4096;
    u64 wrong = 0;
    u32 to = (u32)peer;
    put_value(channel, to, (u64 *)there, 0x0102030405060708ull);
    put_value(channel, to, (u32 *)(there + 8), 0x11121314u);
    put_value(channel, to, (u16 *)(there + 12), (u16)0x2122);
    put_value(channel, to, there + 14, (u8)0x31, signal(2, 3), counter(1));
    if (wait_counter(channel, 1, 1) != Status::ok)
        wrong |= 1;
    add(channel, to, (u64 *)(there + 16), 5);
    add(channel, to, (u64 *)(there + 16), 7);
    if (flush(channel, to) != Status::ok)
        wrong |= 2;
    get(channel, to, here, there, 24, counter(2));
    if (wait_counter(channel, 2, 1) != Status::ok)
        wrong |= 4;
    u64 words[3];
    for (int at = 0; at < 3; at++)
        words[at] = *(volatile u64 *)(here + 8 * at);
    if (words[0] != 0x0102030405060708ull || (words[1] & 0xffffffffffffffull) != 0x31212211121314ull || words[2] != 12)
        wrong |= 8;
    if (wait_signal(channel, to, 2, 3) != Status::ok || read_signal(channel, 2) != 3)
        wrong |= 16;
    // A put of 8 bytes, and one to this rank itself.
    *(volatile u64 *)(here + 64) = 77;
    put(channel, to, there + 64, here + 64, 8);
    put(channel, channel->rank, here + 128, here + 64, 8, signal(3, 1));
    if (wait_signal(channel, channel->rank, 3, 1) != Status::ok || *(volatile u64 *)(here + 128) != 77)
        wrong |= 32;
    for (u64 times = 1; times <= 100; times++)
        if (barrier(channel, 8, times) != Status::ok)
            wrong |= 64;
    if (*(volatile u64 *)(there + 64) != 77) // the other rank's, before the barrier
        wrong |= 128;
    result[0] = wrong;
}

// One thread. Descriptors that name what is not there: result[0] is a bit for each that did not fail.
extern "C" __global__ void wrong_descriptors(Channel *channel, u64 peer, u64 *result) {
    if (channel == nullptr)
        return;
    u8 *heap = channel->heap;
    u64 bytes = channel->heap_bytes, passed = 0;
    put(channel, (u32)peer, heap + bytes - 8, heap, 16, no_signal(), counter(3));
    passed |= (wait_counter(channel, 3, 1) == Status::ok) << 0;
    put(channel, 7, heap, heap, 16, no_signal(), counter(4));
    passed |= (wait_counter(channel, 4, 1) == Status::ok) << 1;
    put(channel, (u32)peer, heap, heap, 16, signal(60000, 1), counter(5));
    passed |= (wait_counter(channel, 5, 1) == Status::ok) << 2;
    get(channel, (u32)peer, heap + bytes, heap, 1, counter(6));
    passed |= (wait_counter(channel, 6, 1) == Status::ok) << 3;
    passed |= (flush(channel, (u32)peer) == Status::ok) << 4;
    // The channel goes on.
    put(channel, (u32)peer, heap, heap, 16, no_signal(), counter(7));
    passed |= (wait_counter(channel, 7, 1) != Status::ok) << 5;
    result[0] = passed;
}

// Two blocks: one waits for a signal that never comes, one puts again and again. result[0] and [1] are 1 when they have failed.
extern "C" __global__ void until_lost(Channel *channel, u64 peer, u64 *result) {
    if (channel == nullptr || threadIdx.x != 0)
        return;
    if (blockIdx.x == 0) {
        result[2] = 1; // it has begun
        result[0] = wait_signal(channel, (u32)peer, 20, 1) == Status::failed;
        return;
    }
    for (u64 count = 1;; count++) {
        put(channel, (u32)peer, channel->heap + 4096, channel->heap, 64, no_signal(), counter(8));
        if (wait_counter(channel, 8, count) != Status::ok)
            break;
    }
    result[1] = 1;
}
