// nobounce.cuh: GPU-initiated operations. Header only, C++17, no dependencies; nvcc and NVRTC.
// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A kernel gets a nobounce::Channel* from the host. Memory that all ranks allocate alike is the
// symmetric heap: a local pointer into it and a rank name memory of that rank.
//
//     nobounce::put(channel, rank, there, here, bytes, nobounce::signal(0, 1));   // one thread
//     nobounce::Status status = nobounce::wait_signal(channel, rank, 0, 1);
//
// Operations of one thread to one rank, on one channel, take effect in their order. The threads of a warp or block
// call the _warp or _block form together: their earlier stores are part of the put.
#pragma once

#if !defined(__CUDACC_RTC__)
#include <cstddef>
#include <cstdint>
#endif

namespace nobounce {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// Words of 8 bytes, 64 bytes apart: counters, signals, status.
struct alignas(64) Word {
    u64 value;
    u64 rest[7];
};

// The ring of descriptors, as NCCL's GPI backend has it.
struct Queue {
    u64 *ring;            // pinned host memory
    u64 produced;         // tickets taken
    const Word *consumed; // stored by the proxy
    u64 consumed_seen;    // a copy, to spare loads
    u32 log_depth;
};

// What a kernel and the proxy share. In GPU memory.
struct Channel {
    Word *counters;
    Word *signals;
    Queue queue;
    // From here on ours alone.
    const Word *status; // one for each rank, and one for all: not 0 if it cannot be reached
    u8 *heap;           // the symmetric heap of this rank
    u64 heap_bytes;
    u32 rank, ranks;
    u16 heap_handle;
    u16 first_flush_counter; // one for each rank
    u32 max_message;         // bytes
};

// The host side (src/device.rs) has the same layout.
static_assert(sizeof(Word) == 64 && sizeof(Queue) == 40 && sizeof(Channel) == 96, "layout");
static_assert(__builtin_offsetof(Channel, queue) == 16 && __builtin_offsetof(Queue, log_depth) == 32, "layout");
static_assert(__builtin_offsetof(Channel, status) == 56 && __builtin_offsetof(Channel, rank) == 80, "layout");
static_assert(__builtin_offsetof(Channel, first_flush_counter) == 90 && __builtin_offsetof(Channel, max_message) == 92, "layout");

enum class Status : u32 { ok = 0, failed = 1 };

// A change of a signal at the other rank, after the data of a put.
struct Signal {
    u64 add;
    u16 index;
    bool is_given;
};

__device__ inline Signal signal(u16 index, u64 add) { return Signal{add, index, true}; }
__device__ inline Signal no_signal() { return Signal{0, 0, false}; }

// The counter that the completion of an operation counts up. The source of a put may be reused, and
// the bytes of a get are there, when it has been counted.
struct Counter {
    u16 index;
    bool is_given;
};

__device__ inline Counter counter(u16 index) { return Counter{index, true}; }
__device__ inline Counter no_counter() { return Counter{0, false}; }

constexpr u64 count_mask = (1ull << 56) - 1;
constexpr u64 error_bit = 1ull << 62;

namespace detail {

enum Op : u32 { get = 0, put = 1, put_signal = 2, put_value = 4, put_value_signal = 5, add = 7, flush = 8, reset_counter = 0x80, reset_signal = 0x83 };

struct alignas(16) Descriptor {
    u64 words[8];
};

__device__ inline u64 load(const u64 *from) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}

// A word that threads which this one has synchronized with may have stored.
__device__ inline u64 read(const void *from) {
    u64 value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}

// Later loads see what the peer or the proxy stored before the word that is read.
__device__ inline u64 load_acquire(const u64 *from) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}

// The proxy reads what this thread, and those it has synchronized with, stored before.
__device__ inline void release() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Whether the proxy has ended.
__device__ inline bool has_ended(const Channel *channel) { return load(&channel->status[channel->ranks].value) == 2; }

constexpr u64 no_ticket = ~0ull;

__device__ inline u64 take_ticket(Channel *channel) {
    Queue &queue = channel->queue;
    u64 ticket;
    asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], 1;" : "=l"(ticket) : "l"(&queue.produced) : "memory");
    u64 depth = 1ull << queue.log_depth;
    u64 seen;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(&queue.consumed_seen) : "memory");
    if (ticket - seen >= depth) {
        while (ticket - (seen = load(&queue.consumed->value)) >= depth)
            if (has_ended(channel))
                return no_ticket;
        asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(&queue.consumed_seen), "l"(seen) : "memory");
    }
    return ticket;
}

// Stores a descriptor. Its words may arrive in any order: the owner bit of each says its lap.
__device__ inline void post(Channel *channel, Descriptor descriptor) {
    u64 ticket = take_ticket(channel);
    if (ticket == no_ticket)
        return; // waits fail
    u64 owner = (ticket >> channel->queue.log_depth) & 1;
    u64 *place = channel->queue.ring + 8 * (ticket & ((1ull << channel->queue.log_depth) - 1));
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        u64 low = (descriptor.words[i] & ~1ull) | owner, high = (descriptor.words[i + 1] & ~1ull) | owner;
        asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(place + i), "l"(low), "l"(high) : "memory");
    }
}

__device__ inline u64 header(u32 op, Counter counter, u16 signal_index) {
    u64 flags = counter.is_given ? 6 : 0; // counted, and stored for the kernel
    return (u64)op << 16 | flags << 24 | (u64)counter.index << 32 | (u64)signal_index << 48;
}

__device__ inline u64 offset(const Channel *channel, const void *pointer) { return (u64)((const u8 *)pointer - channel->heap); }

__device__ inline Descriptor transfer(const Channel *channel, u32 op, u32 rank, const void *there, const void *here, u32 bytes, Signal signal, Counter counter) {
    u64 handle = (u64)channel->heap_handle << 16;
    return Descriptor{{header(op, counter, signal.index), (u64)rank << 1 | (u64)bytes << 32, handle | signal.add << 32, handle | (signal.add >> 32) << 32,
                       offset(channel, there) << 1, here ? offset(channel, here) << 1 : 0, 0, 0}};
}

} // namespace detail

// Whether the rank cannot be reached.
__device__ inline bool has_failed(const Channel *channel, u32 rank) { return detail::load_acquire(&channel->status[rank].value) != 0; }

// Writes a value of 1, 2, 4 or 8 bytes, which the descriptor carries. Other stores of this thread
// need not be visible to the peer when it sees the value or the signal.
template <typename T>
__device__ inline void put_value(Channel *channel, u32 rank, T *there, T value, Signal signal = no_signal(), Counter counter = no_counter()) {
    static_assert(sizeof(T) <= 8, "a value has at most 8 bytes");
    union {
        u64 word;
        T value;
    } bits = {0};
    bits.value = value;
    u32 op = signal.is_given ? detail::put_value_signal : detail::put_value;
    detail::Descriptor descriptor = detail::transfer(channel, op, rank, there, nullptr, sizeof(T), signal, counter);
    descriptor.words[6] = bits.word << 32;
    descriptor.words[7] = (bits.word >> 32) << 32;
    detail::post(channel, descriptor);
}

// Writes memory of the rank, then changes a signal there. `here` and `there` lie in the symmetric heap.
__device__ inline void put(Channel *channel, u32 rank, void *there, const void *here, size_t bytes, Signal signal = no_signal(), Counter counter = no_counter()) {
    // A word travels in the descriptor: the proxy need not fetch it from the GPU.
    if (bytes == 8 && ((u64)here & 7) == 0) {
        put_value(channel, rank, (u64 *)there, detail::read(here), signal, counter);
        return;
    }
    const size_t most = channel->max_message;
    detail::release();
    while (bytes > most) {
        detail::post(channel, detail::transfer(channel, detail::put, rank, there, here, most, no_signal(), no_counter()));
        there = (u8 *)there + most;
        here = (const u8 *)here + most;
        bytes -= most;
    }
    u32 op = signal.is_given ? detail::put_signal : detail::put;
    detail::post(channel, detail::transfer(channel, op, rank, there, here, (u32)bytes, signal, counter));
}

// Reads memory of the rank. The bytes are there when the counter was counted.
__device__ inline void get(Channel *channel, u32 rank, void *here, const void *there, size_t bytes, Counter counter) {
    const size_t most = channel->max_message;
    detail::release();
    while (bytes > most) {
        detail::post(channel, detail::transfer(channel, detail::get, rank, there, here, most, no_signal(), no_counter()));
        there = (const u8 *)there + most;
        here = (u8 *)here + most;
        bytes -= most;
    }
    detail::post(channel, detail::transfer(channel, detail::get, rank, there, here, (u32)bytes, no_signal(), counter));
}

// Changes a signal of the rank, after all earlier operations of this thread to it.
__device__ inline void signal_add(Channel *channel, u32 rank, u16 index, u64 add, Counter counter = no_counter()) {
    put(channel, rank, channel->heap, channel->heap, 0, signal(index, add), counter);
}

// Adds to a word of the symmetric heap of the rank. Do not change such a word on its own GPU at the same time.
__device__ inline void add(Channel *channel, u32 rank, u64 *there, u64 value, Counter counter = no_counter()) {
    detail::release();
    detail::Descriptor descriptor = detail::transfer(channel, detail::add, rank, there, nullptr, 8, no_signal(), counter);
    descriptor.words[6] = value << 32;
    descriptor.words[7] = (value >> 32) << 32;
    detail::post(channel, descriptor);
}

__device__ inline u64 read_signal(const Channel *channel, u16 index) {
    return detail::load_acquire(&channel->signals[index].value);
}

// Waits until a signal of this rank is at least `value`; fails if the rank that sends it is gone.
__device__ inline Status wait_signal(const Channel *channel, u32 from, u16 index, u64 value) {
    while (detail::load_acquire(&channel->signals[index].value) < value)
        // A signal from before the rank was lost counts.
        if (has_failed(channel, from) && detail::load_acquire(&channel->signals[index].value) < value)
            return Status::failed;
    return Status::ok;
}

__device__ inline u64 read_counter(const Channel *channel, u16 index) {
    return detail::load_acquire(&channel->counters[index].value);
}

// Waits until so many operations of the counter are complete; fails if one of them failed. A failure
// stays in the counter until it is reset.
__device__ inline Status wait_counter(const Channel *channel, u16 index, u64 count) {
    bool ended;
    do {
        ended = detail::has_ended(channel); // what was complete before that counts
        u64 value = detail::load_acquire(&channel->counters[index].value);
        if (value & error_bit)
            return Status::failed;
        if ((value & count_mask) >= count)
            return Status::ok;
    } while (!ended);
    return Status::failed;
}

// Sets a counter to 0, with its error. Earlier operations that name it must be complete or failed.
__device__ inline Status reset_counter(Channel *channel, u16 index) {
    detail::post(channel, detail::Descriptor{{detail::header(detail::reset_counter, counter(index), 0), 0, 0, 0, 0, 0, 0, 0}});
    while (detail::load_acquire(&channel->counters[index].value) != 0)
        if (detail::has_ended(channel))
            return Status::failed;
    return Status::ok;
}

// Waits until all earlier operations of this channel to the rank are complete there; fails if the rank
// is gone, or if one of them was refused since the last flush. One thread at a time for each rank.
__device__ inline Status flush(Channel *channel, u32 rank) {
    u16 index = channel->first_flush_counter + (u16)rank;
    u64 before = detail::load(&channel->counters[index].value) & count_mask, value;
    detail::post(channel, detail::Descriptor{{detail::header(detail::flush, counter(index), 0), (u64)rank << 1, 0, 0, 0, 0, 0, 0}});
    bool ended;
    do {
        ended = detail::has_ended(channel);
        value = detail::load_acquire(&channel->counters[index].value);
        if ((value & count_mask) != before)
            return value & error_bit ? Status::failed : Status::ok;
    } while (!ended);
    return Status::failed;
}

// Waits until every rank has called it as often as this one. Uses the signals from `first` on, one for
// each rank; `times` counts the calls, from 1 on.
__device__ inline Status barrier(Channel *channel, u16 first, u64 times) {
    for (u32 rank = 0; rank < channel->ranks; rank++)
        if (rank != channel->rank)
            signal_add(channel, rank, first + (u16)channel->rank, 1);
    for (u32 rank = 0; rank < channel->ranks; rank++)
        if (rank != channel->rank && wait_signal(channel, rank, first + (u16)rank, times) != Status::ok)
            return Status::failed;
    return Status::ok;
}

// The same, called by all threads of a warp or block together: one of them posts.
__device__ inline void put_warp(Channel *channel, u32 rank, void *there, const void *here, size_t bytes, Signal signal = no_signal(), Counter counter = no_counter()) {
    __syncwarp();
    u32 lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    if (lane == 0)
        put(channel, rank, there, here, bytes, signal, counter);
    __syncwarp();
}

__device__ inline void put_block(Channel *channel, u32 rank, void *there, const void *here, size_t bytes, Signal signal = no_signal(), Counter counter = no_counter()) {
    __syncthreads();
    if (threadIdx.x + threadIdx.y + threadIdx.z == 0)
        put(channel, rank, there, here, bytes, signal, counter);
    __syncthreads();
}

// The status that all threads of the block get.
__device__ inline Status wait_signal_block(const Channel *channel, u32 from, u16 index, u64 value) {
    bool failed = false;
    if (threadIdx.x + threadIdx.y + threadIdx.z == 0)
        failed = wait_signal(channel, from, index, value) != Status::ok;
    failed = __syncthreads_or(failed);
    detail::load_acquire(&channel->signals[index].value); // for each thread
    return failed ? Status::failed : Status::ok;
}

} // namespace nobounce
