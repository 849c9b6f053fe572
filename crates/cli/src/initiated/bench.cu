// Kernels of the benchmark of GPU-initiated operations. All arguments are 64-bit words; with a channel of 0 they do nothing.
#include "../../../initiated/include/nobounce.cuh"

using namespace nobounce;

namespace {

__device__ inline u64 now_ns() {
    u64 time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

} // namespace

// One thread. Both ranks put `bytes` with a signal, one after the other. times[0] is the time of the last round's end minus
// that of the first one's beginning, times[1] the number of failed waits; samples (of every round) follow.
extern "C" __global__ void ping_pong(Channel *channel, u64 peer, u64 rounds, u64 bytes, u64 *times, u64 base) {
    if (channel == nullptr || threadIdx.x != 0)
        return;
    u8 *heap = channel->heap;
    bool first = channel->rank < peer;
    u64 began = now_ns(), last = began, failed = 0;
    for (u64 round = 1; round <= rounds && failed == 0; round++) {
        if (first)
            put(channel, (u32)peer, heap + bytes, heap, bytes, signal(0, 1));
        if (wait_signal(channel, (u32)peer, 0, base + round) != Status::ok)
            failed++;
        if (!first)
            put(channel, (u32)peer, heap + bytes, heap, bytes, signal(0, 1));
        u64 now = now_ns();
        times[1 + round] = now - last;
        last = now;
    }
    times[0] = last - began;
    times[1] = failed;
}

// Each block has a channel of its own. Its first thread writes `count` values, then waits until all are complete at the peer.
extern "C" __global__ void values(Channel *channel, u64 stride, u64 peer, u64 count, u64 *times) {
    if (channel == nullptr || threadIdx.x != 0)
        return;
    channel = (Channel *)((u8 *)channel + blockIdx.x * stride);
    u64 *there = (u64 *)channel->heap + blockIdx.x * 64;
    u64 began = now_ns();
    for (u64 value = 1; value <= count; value++)
        put_value(channel, (u32)peer, there, value);
    bool failed = flush(channel, (u32)peer) != Status::ok;
    times[2 * blockIdx.x] = now_ns() - began;
    times[2 * blockIdx.x + 1] = failed;
}

// The same with signals: block b adds 1 to signal `first` + b of the peer.
extern "C" __global__ void signals(Channel *channel, u64 stride, u64 peer, u64 count, u64 first, u64 *times) {
    if (channel == nullptr || threadIdx.x != 0)
        return;
    channel = (Channel *)((u8 *)channel + blockIdx.x * stride);
    u64 began = now_ns();
    for (u64 number = 0; number < count; number++)
        signal_add(channel, (u32)peer, (u16)(first + blockIdx.x), 1);
    bool failed = flush(channel, (u32)peer) != Status::ok;
    times[2 * blockIdx.x] = now_ns() - began;
    times[2 * blockIdx.x + 1] = failed;
}

// One thread. What the signals of this rank are.
extern "C" __global__ void read_signals(Channel *channel, u64 first, u64 count, u64 *found) {
    if (channel == nullptr || threadIdx.x != 0)
        return;
    for (u64 at = 0; at < count; at++)
        found[at] = read_signal(channel, (u16)(first + at));
}

// One thread. Puts (or gets) `count` times `bytes`, at most `ahead` of them incomplete.
extern "C" __global__ void stream(Channel *channel, u64 peer, u64 count, u64 bytes, u64 is_get, u64 ahead, u64 *times, u64 base) {
    if (channel == nullptr || threadIdx.x != 0)
        return;
    u8 *here = channel->heap, *there = here + channel->heap_bytes / 2;
    u64 slots = channel->heap_bytes / 2 / bytes, began = now_ns(), failed = 0;
    for (u64 number = 0; number < count && failed == 0; number++) {
        u64 at = number % slots * bytes;
        if (is_get)
            get(channel, (u32)peer, here + at, there + at, bytes, counter(0));
        else
            put(channel, (u32)peer, there + at, here + at, bytes, no_signal(), counter(0));
        if (number >= ahead && wait_counter(channel, 0, base + number + 1 - ahead) != Status::ok)
            failed++;
    }
    if (failed == 0 && wait_counter(channel, 0, base + count) != Status::ok)
        failed++;
    times[0] = now_ns() - began;
    times[1] = failed;
}

// One thread. One put with a signal, whose arrival is timed from a moment that the host chose: the first after a pause.
extern "C" __global__ void one_put(Channel *channel, u64 peer, u64 bytes, u64 *times, u64 base) {
    if (channel == nullptr || threadIdx.x != 0)
        return;
    u64 began = now_ns();
    put(channel, (u32)peer, channel->heap + bytes, channel->heap, bytes, no_signal(), counter(1));
    times[1] = wait_counter(channel, 1, base + 1) != Status::ok;
    times[0] = now_ns() - began;
}
