// NVSHMEM between two processes, point to point: put, get, put with signal, atomics, fence, quiet, barrier and a reduction, from the host and from a
// kernel, every result checked. It starts both processes (as two PEs on one GPU) and waits for them.
//
//     nvcc -rdc=true -arch=native -o ops ops.cu -I NVSHMEM/include -L NVSHMEM/lib -lnvshmem_device -Xlinker -l:libnvshmem_host.so.3 -lcuda
#include "pes.cuh"

static const size_t SIZE = 1 << 20;

static void fill(std::vector<unsigned char> &bytes, unsigned seed) {
    for (auto &byte : bytes) byte = (unsigned char)((seed = seed * 1664525u + 1013904223u) >> 24);
}

// What a kernel does: puts of every size, a get, a put with signal that the peer waits for, and atomics.
__global__ void from_kernel(unsigned char *target, unsigned char *source, unsigned char *fetched, size_t size, uint64_t *signal,
                            uint64_t *counter, uint64_t *swapped, uint64_t *old, int peer, uint64_t round) {
    for (size_t at = 0, step = 1; at + step <= size / 2; at += step, step *= 2) nvshmem_putmem(target + at, source + at, step, peer);
    nvshmem_fence();
    nvshmem_putmem_signal(target + size / 2, source + size / 2, size / 2, signal, round, NVSHMEM_SIGNAL_SET, peer);
    nvshmem_signal_wait_until(signal, NVSHMEM_CMP_GE, round);
    nvshmem_getmem(fetched, source, size, peer);
    for (int i = 0; i < 100; i++) nvshmem_uint64_atomic_fetch_add(counter, 3, peer);
    *old = nvshmem_uint64_atomic_compare_swap(swapped, 7, 1000 + round, peer);
    nvshmem_quiet();
}

static void run() {
    CHECK(pes == 2);
    int rank = me;
    int peer = 1 - rank;
    auto *target = (unsigned char *)nvshmem_malloc(SIZE), *source = (unsigned char *)nvshmem_malloc(SIZE);
    auto *fetched = (unsigned char *)nvshmem_malloc(SIZE);
    auto *words = (uint64_t *)nvshmem_calloc(8, sizeof(uint64_t));
    CHECK(target && source && fetched && words);
    std::vector<unsigned char> mine(SIZE), theirs(SIZE), found(SIZE);
    fill(mine, 100u + (unsigned)rank);
    fill(theirs, 100u + (unsigned)peer);
    CUDA(cudaMemcpy(source, mine.data(), SIZE, cudaMemcpyHostToDevice));
    CUDA(cudaMemset(target, 0, SIZE));
    nvshmem_barrier_all();

    struct counted before = count_in();
    nvshmem_barrier_all();
    nvshmem_putmem(target, source, SIZE, peer);
    nvshmem_quiet();
    nvshmem_barrier_all();
    CUDA(cudaMemcpy(found.data(), target, SIZE, cudaMemcpyDeviceToHost));
    CHECK(found == theirs);
    good("put, quiet and barrier from the host");

    nvshmem_getmem(fetched, source, SIZE, peer);
    CUDA(cudaMemcpy(found.data(), fetched, SIZE, cudaMemcpyDeviceToHost));
    CHECK(found == theirs);
    good("get from the host");
    account("put and get from the host", before, 2 * SIZE);

    // What the host puts without completion is there when the word is that it puts behind a fence.
    for (uint64_t round = 1, seen = 0; round <= 20; round++, seen = 0) {
        CUDA(cudaMemset(target, 0, SIZE));
        CUDA(cudaDeviceSynchronize());
        nvshmem_barrier_all();
        nvshmem_putmem_nbi(target, source, SIZE, peer);
        nvshmem_fence();
        nvshmem_uint64_p(words + 4, round, peer);
        for (int i = 0; i < 100000 && seen != round; i++) CUDA(cudaMemcpy(&seen, words + 4, sizeof seen, cudaMemcpyDeviceToHost));
        CHECK(seen == round);
        CUDA(cudaMemcpy(found.data(), target, SIZE, cudaMemcpyDeviceToHost));
        CHECK(found == theirs);
        nvshmem_quiet();
        nvshmem_barrier_all();
    }
    good("put, fence and a word behind it from the host, 20 times");

    auto *numbers = (int *)nvshmem_malloc(1024 * sizeof(int)), *sums = (int *)nvshmem_malloc(1024 * sizeof(int));
    std::vector<int> values(1024);
    for (int i = 0; i < 1024; i++) values[(size_t)i] = i * (rank + 1);
    CUDA(cudaMemcpy(numbers, values.data(), 4096, cudaMemcpyHostToDevice));
    nvshmem_barrier_all();
    CHECK(nvshmem_int_sum_reduce(NVSHMEM_TEAM_WORLD, sums, numbers, 1024) == 0);
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaMemcpy(values.data(), sums, 4096, cudaMemcpyDeviceToHost));
    for (int i = 0; i < 1024; i++) CHECK(values[(size_t)i] == i * 3);
    good("sum over both from the host");

    before = count_in();
    nvshmem_barrier_all();
    for (uint64_t round = 1; round <= 3; round++) {
        uint64_t seven = 7;
        CUDA(cudaMemset(target, 0, SIZE));
        CUDA(cudaMemset(fetched, 0, SIZE));
        CUDA(cudaMemcpy(words + 2, &seven, 8, cudaMemcpyHostToDevice));
        CUDA(cudaDeviceSynchronize());
        nvshmem_barrier_all();
        from_kernel<<<1, 1>>>(target, source, fetched, SIZE, words, words + 1, words + 2, words + 3, peer, round);
        CUDA(cudaDeviceSynchronize());
        nvshmem_barrier_all();
        uint64_t seen[4];
        CUDA(cudaMemcpy(seen, words, sizeof seen, cudaMemcpyDeviceToHost));
        CUDA(cudaMemcpy(found.data(), target, SIZE, cudaMemcpyDeviceToHost));
        CHECK(!memcmp(found.data() + SIZE / 2, theirs.data() + SIZE / 2, SIZE / 2));
        CHECK(!memcmp(found.data(), theirs.data(), SIZE / 2 - 1)); // 1 + 2 + 4 + ... is one byte short of the half
        CUDA(cudaMemcpy(found.data(), fetched, SIZE, cudaMemcpyDeviceToHost));
        CHECK(found == theirs);
        CHECK(seen[0] == round && seen[1] == 300 * round && seen[2] == 1000 + round && seen[3] == 7);
        nvshmem_barrier_all();
    }
    account("puts and gets from a kernel", before, 3 * (SIZE - 1 + SIZE));
    good("put, fence, put with signal, wait, get, fetch and add, compare and swap, quiet from a kernel, three times");
    nvshmem_finalize();
    good("finalize");
}

int main(int argc, char **argv) { return start(argc, argv, all_good, 10); }
