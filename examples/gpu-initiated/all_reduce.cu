// All-reduce of floats in one persistent kernel: a ring of puts with signals, without the host.
// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A vector of n parts goes round the ring of n ranks twice: first each part is summed up, then the sums are handed on. Short
// vectors go to all ranks at once. Vectors and slots are there twice. A rank that begins round r + 2 has the sum of round r + 1,
// to which all ranks have contributed: none of them needs anything of round r any more.
#include "example.cuh"

#include <vector>

using namespace nobounce;

constexpr size_t most_bytes = 1 << 20, short_bytes = 8 << 10;
constexpr int threads = 512, rounds = 400;

struct Plan {
    Channel *channel;
    u8 *vectors; // in the heap: the input, then the sum; one for each of two rounds
    u8 *slots;   // in the heap: what other ranks put
    u32 rank, ranks;
    u32 words; // of the vector, a multiple of the number of ranks

    __device__ float *vector(u64 round) const { return (float *)(vectors + (round & 1) * most_bytes); }
    __device__ float *slot(u32 number) const { return (float *)(slots + (size_t)number * most_bytes); }
};

__device__ void add_words(float *to, const float *from, u32 words) {
    for (u32 at = threadIdx.x; at < words; at += blockDim.x)
        to[at] += __ldcv(from + at); // which a peer has stored
}

__device__ bool reduce_at_once(const Plan &plan, u64 round) {
    u32 set = round & 1 ? plan.ranks : 0;
    float *vector = plan.vector(round);
    for (u32 step = 1; step < plan.ranks; step++)
        put_block(plan.channel, (plan.rank + step) % plan.ranks, plan.slot(set + plan.rank), vector, plan.words * sizeof(float), signal((u16)plan.rank, 1));
    for (u32 step = 1; step < plan.ranks; step++) {
        u32 from = (plan.rank + step) % plan.ranks;
        if (wait_signal_block(plan.channel, from, (u16)from, round) != Status::ok)
            return false;
    }
    // Not into what is being put.
    float *sum = plan.slot(set + plan.rank);
    for (u32 at = threadIdx.x; at < plan.words; at += blockDim.x)
        sum[at] = vector[at];
    for (u32 step = 1; step < plan.ranks; step++)
        add_words(sum, plan.slot(set + (plan.rank + step) % plan.ranks), plan.words);
    return true;
}

__device__ bool reduce_in_ring(const Plan &plan, u64 round) {
    u32 next = (plan.rank + 1) % plan.ranks, previous = (plan.rank + plan.ranks - 1) % plan.ranks;
    u32 words = plan.words / plan.ranks, steps = 2 * (plan.ranks - 1), set = round & 1 ? steps : 0;
    for (u32 step = 0; step < steps; step++) {
        u32 part = (plan.rank + 2 * plan.ranks - step) % plan.ranks;
        u32 arriving = (part + plan.ranks - 1) % plan.ranks;
        put_block(plan.channel, next, plan.slot(set + step), plan.vector(round) + (size_t)part * words, words * sizeof(float), signal(0, 1));
        if (wait_signal_block(plan.channel, previous, 0, (round - 1) * steps + step + 1) != Status::ok)
            return false;
        // A sum that arrives has been through the next rank: what was put there before has left.
        float *to = plan.vector(round) + (size_t)arriving * words;
        if (step < plan.ranks - 1)
            add_words(to, plan.slot(set + step), words);
        else
            for (u32 at = threadIdx.x; at < words; at += blockDim.x)
                to[at] = __ldcv(plan.slot(set + step) + at);
        __syncthreads();
    }
    return true;
}

__global__ void all_reduce(Plan plan, const float *input, float *output, u64 first_round, u64 *time) {
    // Two ranks exchange no more bytes at once than in a ring.
    bool is_short = plan.ranks == 2 || plan.words * sizeof(float) <= short_bytes;
    u64 began = now_ns();
    for (u64 round = first_round; round < first_round + rounds; round++) {
        float *vector = plan.vector(round);
        for (u32 at = threadIdx.x; at < plan.words; at += blockDim.x)
            vector[at] = input[at];
        __syncthreads();
        if (!(is_short ? reduce_at_once(plan, round) : reduce_in_ring(plan, round))) {
            if (threadIdx.x == 0)
                time[1] = 1;
            return;
        }
    }
    u64 ended = now_ns(), last = first_round + rounds - 1;
    const float *sum = is_short ? plan.slot((last & 1 ? plan.ranks : 0) + plan.rank) : plan.vector(last);
    for (u32 at = threadIdx.x; at < plan.words; at += blockDim.x)
        output[at] = sum[at];
    if (threadIdx.x == 0)
        time[0] = ended - began;
}

int main(int count, char **arguments) {
    u32 rank = count > 2 ? (u32)atoi(arguments[1]) : 0, ranks = count > 2 ? (u32)atoi(arguments[2]) : 2;
    bool is_right = true;
    for (size_t bytes = 8; bytes <= most_bytes; bytes *= 4) {
        // A world of its own for each size, so that signals begin at 0.
        nb_world *world = join(count, arguments, most_bytes * (2 + 4 * ranks));
        u8 *heap = (u8 *)nb_heap(world);
        Plan plan = {(Channel *)nb_channel(world, 0), heap, heap + 2 * most_bytes, rank, ranks, 0};
        plan.words = (u32)((bytes / 4 + ranks - 1) / ranks * ranks);
        std::vector<float> input(plan.words), output(plan.words);
        for (u32 at = 0; at < plan.words; at++)
            input[at] = (float)((at * 7 + rank * 13) % 101);
        float *device;
        u64 *time;
        CHECK(cudaMalloc(&device, 2 * plan.words * sizeof(float)));
        CHECK(cudaMallocHost(&time, 2 * sizeof(u64)));
        CHECK(cudaMemcpy(device, input.data(), plan.words * sizeof(float), cudaMemcpyHostToDevice));
        nb_barrier(world);
        double best = 1e30;
        for (int run = 0; run < 3; run++) {
            time[0] = time[1] = 0;
            all_reduce<<<1, threads>>>(plan, device, device + plan.words, run * rounds + 1, time);
            CHECK(cudaDeviceSynchronize());
            is_right &= time[1] == 0;
            best = time[0] / 1e3 / rounds < best ? time[0] / 1e3 / rounds : best;
        }
        CHECK(cudaMemcpy(output.data(), device + plan.words, plan.words * sizeof(float), cudaMemcpyDeviceToHost));
        u32 wrong = 0;
        for (u32 at = 0; at < plan.words; at++) {
            float sum = 0;
            for (u32 other = 0; other < ranks; other++)
                sum += (float)((at * 7 + other * 13) % 101);
            wrong += output[at] != sum;
        }
        is_right &= wrong == 0;
        if (rank == 0)
            printf("rank 0: all-reduce of %zu bytes: %.2f us, %u wrong\n", plan.words * sizeof(float), best, wrong);
        CHECK(cudaFree(device));
        leave(world, is_right);
    }
}
