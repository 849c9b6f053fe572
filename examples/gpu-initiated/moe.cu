// Dispatch and combine of a mixture-of-experts layer in one persistent kernel. Each rank sends tokens to the experts of all
// ranks, with their number, and gets them back computed. No host code runs between the rounds.
// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Block b sends the tokens of this rank to expert b of all ranks' experts. If another rank has that expert, the block is also the
// expert of this rank with the same number, for tokens of the other rank. In the end each block combines some tokens. Buffers are
// there twice. A block that begins round r + 2 has what all experts returned in round r + 1: all blocks that sent them tokens have
// combined round r, and all experts have returned it.
#include "example.cuh"
#include "moe.cuh"

using namespace nobounce;

// Signals from here on: an expert has returned tokens. Those below: a rank has sent tokens to an expert.
constexpr u16 returns = 32;
constexpr size_t slot_bytes = most_tokens * token_bytes;

// In the heap. A slot has room for all tokens of a rank; `expert` counts through all ranks.
struct Buffers {
    u8 *heap;
    u32 all; // experts

    enum Kind { sent, received, returned };
    __device__ float *slot(Kind kind, u64 round, u32 expert) const { return (float *)(heap + ((kind * 2 + (round & 1)) * all + expert) * slot_bytes); }
    __device__ u64 *count(u64 round, u32 expert) const { return (u64 *)(heap + 6 * all * slot_bytes) + (round & 1) * all + expert; }
};

// Signals have been counted up `before` times, which is even.
__global__ void layer(Channel *channel, const unsigned short *to, int tokens, float *output, u64 before, u64 *time) {
    __shared__ Routed routed;
    u32 rank = channel->rank, expert = blockIdx.x, peer = expert / experts, all = channel->ranks * experts;
    // The expert of this rank that the block is, and where other ranks have its tokens.
    u32 own = rank * experts + expert % experts;
    Buffers buffers = {channel->heap, all};
    u64 began = now_ns();
    for (u64 round = 0; round < rounds; round++) {
        u64 number = before + round + 1;
        bool is_lost = false;
        int count = route_block(routed, to + round * tokens * choices, tokens, (int)expert);
        float *results = buffers.slot(Buffers::returned, round, expert);
        if (peer == rank) {
            gather_block(results, routed, count, (int)rank, (int)round, expert_factor((int)expert));
            __syncthreads();
            if (threadIdx.x == 0)
                signal_add(channel, rank, (u16)(returns + expert), 1);
        } else {
            float *source = buffers.slot(Buffers::sent, round, expert), *work = buffers.slot(Buffers::received, round, expert);
            gather_block(source, routed, count, (int)rank, (int)round, 1);
            if (threadIdx.x == 0)
                put_value(channel, peer, buffers.count(round, own), (u64)count);
            put_block(channel, peer, buffers.slot(Buffers::received, round, own), source, count * token_bytes, signal((u16)own, 1));
            is_lost = wait_signal_block(channel, peer, (u16)expert, number) != Status::ok;
            int received = is_lost ? 0 : (int)__ldcv(buffers.count(round, expert));
            for (int at = threadIdx.x; at < received * hidden; at += blockDim.x)
                work[at] = expert_factor((int)own) * __ldcv(work + at);
            put_block(channel, peer, buffers.slot(Buffers::returned, round, own), work, received * token_bytes, signal((u16)(returns + own), 1));
        }
        for (u32 other = 0; other < all; other++)
            is_lost |= wait_signal_block(channel, other / experts, (u16)(returns + other), number) != Status::ok;
        if (is_lost) {
            if (threadIdx.x == 0)
                time[1] = 1;
            return;
        }
        combine_block(output + round * tokens * hidden, routed, tokens, [=](u32 which) { return buffers.slot(Buffers::returned, round, which); });
        __syncthreads();
    }
    if (threadIdx.x == 0 && blockIdx.x == 0)
        time[0] = now_ns() - began;
}

int main(int count, char **arguments) {
    int rank = count > 3 ? atoi(arguments[1]) : 0, ranks = count > 3 ? atoi(arguments[2]) : 2;
    u32 all = (u32)ranks * experts;
    if (all > returns) {
        fprintf(stderr, "at most %d ranks\n", returns / experts);
        return 2;
    }
    nb_world *world = join(count, arguments, 6 * all * slot_bytes + 2 * all * sizeof(u64));
    Channel *channel = (Channel *)nb_channel(world, 0);
    bool is_right = true;
    u64 before = 0, *time;
    CHECK(cudaMallocHost(&time, 2 * sizeof(u64)));
    for (const Case &wanted : cases) {
        std::vector<unsigned short> all_routes;
        for (int round = 0; round < rounds; round++) {
            std::vector<unsigned short> found = routes(wanted, rank, ranks, round);
            all_routes.insert(all_routes.end(), found.begin(), found.end());
        }
        std::vector<float> output((size_t)rounds * wanted.tokens * hidden);
        unsigned short *to;
        float *device;
        CHECK(cudaMalloc(&to, all_routes.size() * sizeof(unsigned short)));
        CHECK(cudaMalloc(&device, output.size() * sizeof(float)));
        CHECK(cudaMemcpy(to, all_routes.data(), all_routes.size() * sizeof(unsigned short), cudaMemcpyHostToDevice));
        size_t wrong = 0;
        double best = 1e30;
        for (int run = 0; run < 3 && is_right; run++, before += rounds) {
            time[0] = time[1] = 0;
            CHECK(cudaMemset(device, 0xff, output.size() * sizeof(float)));
            nb_barrier(world);
            layer<<<all, threads>>>(channel, to, wanted.tokens, device, before, time);
            CHECK(cudaDeviceSynchronize());
            best = time[0] / 1e3 / rounds < best ? time[0] / 1e3 / rounds : best;
            CHECK(cudaMemcpy(output.data(), device, output.size() * sizeof(float), cudaMemcpyDeviceToHost));
            wrong += wrong_floats(wanted, rank, ranks, output);
            is_right = wrong == 0 && time[1] == 0;
        }
        if (rank == 0 || !is_right)
            printf("rank %d: experts of %d tokens, %s: %.2f us, %zu wrong, %llu failed\n", rank, wanted.tokens, wanted.name, best, wrong, time[1]);
        CHECK(cudaFree(to));
        CHECK(cudaFree(device));
    }
    leave(world, is_right);
}
