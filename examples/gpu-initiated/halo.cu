// Halo exchange of a stencil: a grid is cut into bands of rows, one for each rank. In every step the kernel waits for the rows
// of its neighbours, computes, and puts its own outer rows into their memory.
// SPDX-License-Identifier: MIT OR Apache-2.0
#include "example.cuh"
#include "halo.cuh"

using namespace halo;
using namespace nobounce;

// Two grids in the heap, of band + 2 rows each: rows 0 and band + 1 are those of the neighbours. Signal 0 counts the rows from
// above, signal 1 those from below.
__global__ void step(Channel *channel, u64 number, u32 *finished, u32 *failed) {
    const float *old = (const float *)(channel->heap + (number & 1) * grid_bytes);
    float *next = (float *)(channel->heap + (~number & 1) * grid_bytes);
    u32 rank = channel->rank, last = channel->ranks - 1;
    int row = blockIdx.x + 1;
    bool lost = false;
    // The first step has no neighbours' rows but those that the host has set.
    if (number > 0 && row == 1 && rank > 0)
        lost = wait_signal_block(channel, rank - 1, 0, number) != Status::ok;
    if (number > 0 && row == band && rank < last)
        lost |= wait_signal_block(channel, rank + 1, 1, number) != Status::ok;
    if (lost && threadIdx.x == 0)
        *failed = 1;
    compute_row(next, old, row, rank, last);
    // The block that finishes last puts the outer rows: all others have read theirs.
    __threadfence();
    __syncthreads();
    if (threadIdx.x != 0 || atomicAdd(finished, 1) != gridDim.x - 1)
        return;
    *finished = 0;
    __threadfence();
    if (rank > 0)
        put(channel, rank - 1, next + (band + 1) * columns, next + columns, row_bytes, signal(1, 1));
    if (rank < last)
        put(channel, rank + 1, next, next + band * columns, row_bytes, signal(0, 1));
}

int main(int count, char **arguments) {
    nb_world *world = join(count, arguments, 2 * grid_bytes);
    int rank = atoi(arguments[1]), ranks = atoi(arguments[2]);
    u8 *heap = (u8 *)nb_heap(world);
    Channel *channel = (Channel *)nb_channel(world, 0);
    std::vector<float> grid = start(rank);
    CHECK(cudaMemcpy(heap, grid.data(), grid_bytes, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(heap + grid_bytes, grid.data(), grid_bytes, cudaMemcpyHostToDevice));
    u32 *words;
    CHECK(cudaMalloc(&words, 2 * sizeof(u32)));
    CHECK(cudaMemset(words, 0, 2 * sizeof(u32)));
    cudaEvent_t began, ended;
    CHECK(cudaEventCreate(&began));
    CHECK(cudaEventCreate(&ended));
    nb_barrier(world);
    CHECK(cudaEventRecord(began));
    for (u64 number = 0; number < steps; number++)
        step<<<band, 256>>>(channel, number, words, words + 1);
    CHECK(cudaEventRecord(ended));
    CHECK(cudaDeviceSynchronize());
    float time;
    CHECK(cudaEventElapsedTime(&time, began, ended));
    u32 failed;
    CHECK(cudaMemcpy(&failed, words + 1, sizeof failed, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(grid.data(), heap + (steps & 1) * grid_bytes, grid_bytes, cudaMemcpyDeviceToHost));
    size_t wrong = wrong_cells(grid, rank, ranks);
    printf("rank %d: step of %d x %d cells: %.2f us, %zu wrong, %u failed\n", rank, band, columns, time * 1e3 / steps, wrong, failed);
    leave(world, wrong == 0 && failed == 0);
}
