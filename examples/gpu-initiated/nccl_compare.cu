// What the examples do, by NCCL's calls from the host: to compare with. nccl_compare RANKS starts all ranks on one GPU.
// SPDX-License-Identifier: MIT OR Apache-2.0
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
#include <functional>
#include <nccl.h>
#include <string>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "halo.cuh"
#include "moe.cuh"

#define CHECK(call) check((int)(call), #call)
static void check(int result, const char *call) {
    if (result == 0)
        return;
    fprintf(stderr, "%s: error %d\n", call, result);
    exit(1);
}

static int rank, ranks;
static ncclComm_t comm;
static cudaStream_t stream;

// Microseconds that all calls take together, the best of three runs after one for warming up.
static double time_of(int count, const std::function<void(int)> &call, const std::function<void()> &prepare = [] {}) {
    cudaEvent_t began, ended;
    CHECK(cudaEventCreate(&began));
    CHECK(cudaEventCreate(&ended));
    double best = 1e30;
    for (int run = 0; run < 4; run++) {
        prepare();
        CHECK(cudaEventRecord(began, stream));
        for (int at = 0; at < count; at++)
            call(at);
        CHECK(cudaEventRecord(ended, stream));
        CHECK(cudaStreamSynchronize(stream));
        float time;
        CHECK(cudaEventElapsedTime(&time, began, ended));
        best = run > 0 && time * 1e3 < best ? time * 1e3 : best;
    }
    return best;
}

static void all_reduce() {
    float *memory;
    CHECK(cudaMalloc(&memory, 2 << 20));
    for (size_t bytes = 8; bytes <= 1 << 20; bytes *= 4) {
        double time = time_of(400, [=](int) { CHECK(ncclAllReduce(memory, memory + (1 << 18), bytes / 4, ncclFloat, ncclSum, comm, stream)); });
        if (rank == 0)
            printf("rank 0: all-reduce of %zu bytes: %.2f us\n", bytes, time / 400);
    }
}

__global__ void compute(float *next, const float *old, int rank, int last) { halo::compute_row(next, old, blockIdx.x + 1, rank, last); }

static bool halo_exchange() {
    using namespace halo;
    std::vector<float> grid = start(rank);
    float *grids;
    CHECK(cudaMalloc(&grids, 2 * grid_bytes));
    auto prepare = [&] {
        for (size_t at : {size_t(0), grid_bytes})
            CHECK(cudaMemcpy((char *)grids + at, grid.data(), grid_bytes, cudaMemcpyHostToDevice));
    };
    auto step = [&](int number) {
        float *old = grids + (number & 1) * grid_bytes / 4, *next = grids + (~number & 1) * grid_bytes / 4;
        compute<<<band, 256, 0, stream>>>(next, old, rank, ranks - 1);
        CHECK(ncclGroupStart());
        for (int peer : {rank - 1, rank + 1}) {
            if (peer < 0 || peer == ranks)
                continue;
            CHECK(ncclSend(next + (peer < rank ? 1 : band) * columns, columns, ncclFloat, peer, comm, stream));
            CHECK(ncclRecv(next + (peer < rank ? 0 : band + 1) * columns, columns, ncclFloat, peer, comm, stream));
        }
        CHECK(ncclGroupEnd());
    };
    double time = time_of(steps, step, prepare);
    CHECK(cudaMemcpy(grid.data(), grids + (steps & 1) * grid_bytes / 4, grid_bytes, cudaMemcpyDeviceToHost));
    size_t wrong = wrong_cells(grid, rank, ranks);
    printf("rank %d: step of %d x %d cells: %.2f us, %zu wrong\n", rank, band, columns, time / steps, wrong);
    return wrong == 0;
}

constexpr size_t slot = (size_t)most_tokens * hidden; // floats

// Block e: the tokens for expert e of all ranks' experts.
__global__ void gather(float *sent, const unsigned short *to, int tokens, int rank, int round) {
    __shared__ Routed routed;
    int count = route_block(routed, to, tokens, (int)blockIdx.x);
    gather_block(sent + blockIdx.x * slot, routed, count, rank, round, 1);
}

// Block r * experts + e: tokens of rank r for the own expert e, of which there are counts[block]. Those of this rank stay here.
__global__ void apply(float *returned, float *received, const float *sent, const int *counts, int rank) {
    size_t first = blockIdx.x * slot;
    bool is_own = blockIdx.x / experts == rank;
    const float *from = (is_own ? sent : received) + first;
    float *to = (is_own ? returned : received) + first, factor = expert_factor(rank * experts + blockIdx.x % experts);
    for (int at = threadIdx.x; at < counts[blockIdx.x] * hidden; at += blockDim.x)
        to[at] = factor * from[at];
}

__global__ void combine(float *output, const float *returned, const unsigned short *to, int tokens) {
    __shared__ Routed routed;
    route_block(routed, to, tokens, 0);
    combine_block(output, routed, tokens, [=](int expert) { return returned + expert * slot; });
}

// Sends a slot for each expert of the other ranks, and receives one for each own expert from each of them.
static void exchange(const float *from, const int *send, float *to, const int *receive) {
    CHECK(ncclGroupStart());
    for (int at = 0; at < ranks * experts; at++) {
        if (at / experts != rank && send[at])
            CHECK(ncclSend(from + at * slot, (size_t)send[at] * hidden, ncclFloat, at / experts, comm, stream));
        if (at / experts != rank && receive[at])
            CHECK(ncclRecv(to + at * slot, (size_t)receive[at] * hidden, ncclFloat, at / experts, comm, stream));
    }
    CHECK(ncclGroupEnd());
}

// The numbers of tokens are known to all: NCCL need not send them.
static bool moe(const Case &wanted) {
    int all = ranks * experts, choice_count = wanted.tokens * choices;
    std::vector<unsigned short> to;
    std::vector<int> send((size_t)rounds * all), receive((size_t)rounds * all);
    for (int round = 0; round < rounds; round++)
        for (int from = 0; from < ranks; from++) {
            std::vector<unsigned short> found = routes(wanted, from, ranks, round);
            if (from == rank)
                to.insert(to.end(), found.begin(), found.end());
            for (int expert : found) {
                send[round * all + expert] += from == rank;
                receive[round * all + from * experts + expert % experts] += expert / experts == rank;
            }
        }
    float *sent, *received, *returned, *output;
    unsigned short *device_to;
    int *counts;
    size_t output_bytes = (size_t)rounds * wanted.tokens * token_bytes;
    for (float **memory : {&sent, &received, &returned})
        CHECK(cudaMalloc(memory, all * slot * sizeof(float)));
    CHECK(cudaMalloc(&output, output_bytes));
    CHECK(cudaMalloc(&device_to, to.size() * sizeof to[0]));
    CHECK(cudaMalloc(&counts, receive.size() * sizeof(int)));
    CHECK(cudaMemcpy(device_to, to.data(), to.size() * sizeof to[0], cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(counts, receive.data(), receive.size() * sizeof(int), cudaMemcpyHostToDevice));
    double time = time_of(rounds, [&](int round) {
        const unsigned short *routing = device_to + round * choice_count;
        gather<<<all, threads, 0, stream>>>(sent, routing, wanted.tokens, rank, round);
        exchange(sent, &send[round * all], received, &receive[round * all]);
        apply<<<all, threads, 0, stream>>>(returned, received, sent, counts + round * all, rank);
        exchange(received, &receive[round * all], returned, &send[round * all]);
        combine<<<all, threads, 0, stream>>>(output + (size_t)round * wanted.tokens * hidden, returned, routing, wanted.tokens);
    });
    std::vector<float> result(output_bytes / sizeof(float));
    CHECK(cudaMemcpy(result.data(), output, output_bytes, cudaMemcpyDeviceToHost));
    size_t wrong = wrong_floats(wanted, rank, ranks, result);
    if (rank == 0 || wrong)
        printf("rank %d: experts of %d tokens, %s: %.2f us, %zu wrong\n", rank, wanted.tokens, wanted.name, time / rounds, wrong);
    for (void *memory : {(void *)sent, (void *)received, (void *)returned, (void *)output, (void *)device_to, (void *)counts})
        CHECK(cudaFree(memory));
    return wrong == 0;
}

int main(int count, char **arguments) {
    ranks = count > 1 ? atoi(arguments[1]) : 2;
    struct Shared {
        ncclUniqueId id;
        volatile bool is_ready;
    } *shared = (Shared *)mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    while (rank + 1 < ranks && fork() == 0)
        rank++;
    // NCCL uses the network between hosts only: each rank says that it is another one.
    setenv("NCCL_HOSTID", std::to_string(rank).c_str(), 1);
    CHECK(cudaSetDevice(0));
    if (rank == 0) {
        CHECK(ncclGetUniqueId(&shared->id));
        __sync_synchronize();
        shared->is_ready = true;
    }
    while (!shared->is_ready)
        usleep(1000);
    CHECK(ncclCommInitRank(&comm, ranks, shared->id, rank));
    CHECK(cudaStreamCreate(&stream));
    all_reduce();
    bool is_right = halo_exchange();
    for (const Case &wanted : cases)
        is_right &= moe(wanted);
    CHECK(ncclCommDestroy(comm));
    int status = 0;
    if (rank + 1 < ranks)
        is_right &= wait(&status) > 0 && status == 0;
    return is_right ? 0 : 1;
}
