// What NVSHMEM promises of order, from kernels: barriers, fence and quiet, signals, single values, and atomics; checked where it is read, by the
// kernel that waits. Any number of PEs from two on.
//
//     nvcc -rdc=true -arch=native -o order order.cu -I NVSHMEM/include -L NVSHMEM/lib -lnvshmem_device -Xlinker -l:libnvshmem_host.so.3 -lcuda
//     ./order FOLDER [PES]
#include "pes.cuh"

enum Scope { THREAD, WARP, BLOCK };
static const int THREADS[] = {1, 32, 256};
static const char *const SCOPES[] = {"a thread", "a warp", "a block"};
#define BY_SCOPE(name) (scope == THREAD ? nvshmem_##name() : scope == WARP ? nvshmemx_##name##_warp() : nvshmemx_##name##_block())

// The values that a PE has to give.
__host__ __device__ static inline uint32_t value(int from, size_t i) { return (uint32_t)(from + 1) * 1000003u + (uint32_t)i * 13u; }

// A barrier makes puts without completion (nbi) visible: each PE puts a number of each round into everybody's place for it, and reads its own places.
__global__ void barriers(uint32_t *places, const uint32_t *numbers, int me, int pes, int rounds, Scope scope, int *wrong) {
    for (int round = 1; round <= rounds; round++) {
        if (threadIdx.x == 0)
            for (int pe = 0; pe < pes; pe++) nvshmem_putmem_nbi(places + me, numbers + round, sizeof *places, pe);
        __syncthreads();
        BY_SCOPE(barrier_all);
        for (int pe = (int)threadIdx.x; pe < pes; pe += (int)blockDim.x)
            if (*(volatile uint32_t *)(places + pe) != (uint32_t)round) atomicAdd(wrong, 1);
        __syncthreads();
        if (round % 2) // sync orders nothing of ours: only that all have read
            BY_SCOPE(sync_all);
        else
            BY_SCOPE(barrier_all);
    }
}

// What was put before a fence is there when what was put after it is: the reader looks at once.
__global__ void orders(uint32_t *data, uint32_t *source, size_t n, uint64_t *flag, uint64_t *back, int next, int last, int rounds, int *wrong) {
    for (int round = 1; round <= rounds; round++) {
        for (size_t i = threadIdx.x; i < n; i += blockDim.x) source[i] = (uint32_t)(round * 100000) + (uint32_t)i;
        __threadfence_system();
        __syncthreads();
        nvshmemx_putmem_nbi_block(data, source, n * sizeof *data, next);
        if (threadIdx.x == 0) {
            nvshmem_fence();
            if (round % 2)
                nvshmem_uint64_p(flag, (uint64_t)round, next);
            else
                nvshmemx_signal_op(flag, (uint64_t)round, NVSHMEM_SIGNAL_SET, next);
            nvshmem_uint64_wait_until(flag, NVSHMEM_CMP_GE, (uint64_t)round);
        }
        __syncthreads();
        for (size_t i = threadIdx.x; i < n; i += blockDim.x)
            if (*(volatile uint32_t *)(data + i) != (uint32_t)(round * 100000) + (uint32_t)i) atomicAdd(wrong, 1);
        __syncthreads();
        if (threadIdx.x == 0) {
            nvshmem_quiet();
            nvshmemx_signal_op(back, 1, NVSHMEM_SIGNAL_ADD, last);
            nvshmem_signal_wait_until(back, NVSHMEM_CMP_GE, (uint64_t)round);
        }
        __syncthreads();
    }
}

// Puts that carry their signal, set and added to, with and without completion, by a thread and by a block; single values, gets.
__global__ void signals(uint32_t *data, uint32_t *source, uint32_t *fetched, size_t n, uint64_t *signal, int me, int next, int last, int *wrong) {
    for (int i = 0; i < 50; i++) {
        if (threadIdx.x == 0) nvshmem_putmem_signal_nbi(data, source, n * sizeof *data, signal, 1, NVSHMEM_SIGNAL_ADD, next);
        nvshmemx_putmem_signal_block(data + n, source + n, n * sizeof *data, signal, 1, NVSHMEM_SIGNAL_ADD, next);
        nvshmemx_putmem_signal_nbi_block(data + 2 * n, source + 2 * n, n * sizeof *data, signal + 1, (uint64_t)i + 1, NVSHMEM_SIGNAL_SET, next);
        if (threadIdx.x == 0) {
            nvshmem_signal_wait_until(signal, NVSHMEM_CMP_EQ, 2 * (uint64_t)i + 2);
            nvshmem_signal_wait_until(signal + 1, NVSHMEM_CMP_EQ, (uint64_t)i + 1);
            if (nvshmem_signal_fetch(signal) != 2 * (uint64_t)i + 2) atomicAdd(wrong, 1);
            nvshmem_quiet();
            nvshmem_barrier_all();
        }
        __syncthreads();
    }
    nvshmemx_getmem_nbi_block(fetched, source, n * sizeof *data, last);
    if (threadIdx.x == 0) {
        nvshmem_quiet();
        nvshmem_uint32_p(data + 3 * n, 5u + (uint32_t)me, next);
        // Every second element to every third place, one by one: NVSHMEM's own call for that (iput) is not implemented over any remote transport.
        for (int i = 0; i < 20; i++) nvshmem_uint32_p(data + 3 * n + 1 + 3 * i, source[2 * i], next);
        nvshmem_barrier_all();
        if (nvshmem_uint32_g(data + 3 * n, me) != 5u + (uint32_t)last) atomicAdd(wrong, 1);
        if (nvshmem_uint32_g(source + 7, last) != value(last, 7)) atomicAdd(wrong, 1);
        for (int i = 0; i < 20; i++)
            if (*(volatile uint32_t *)(data + 3 * n + 1 + 3 * i) != value(last, 2 * (size_t)i)) atomicAdd(wrong, 1);
    }
}

// Every atomic that IBRC has, from all PEs to the words of the next, and one counter at PE 0 that all add to, PE 0 over the adapter as well.
template <typename T>
__global__ void atomics(T *words, T *counter, int next, int *wrong) {
#define IS(call, expected) if ((call) != (T)(expected)) atomicAdd(wrong, 1)
#define BOTH(name, ...) (sizeof(T) == 8 ? (T)nvshmem_uint64_atomic_##name((uint64_t *)__VA_ARGS__) : (T)nvshmem_uint32_atomic_##name((uint32_t *)__VA_ARGS__))
#define ONLY(name, ...)                                                                                                   \
    do {                                                                                                                  \
        if (sizeof(T) == 8)                                                                                               \
            nvshmem_uint64_atomic_##name((uint64_t *)__VA_ARGS__);                                                        \
        else                                                                                                              \
            nvshmem_uint32_atomic_##name((uint32_t *)__VA_ARGS__);                                                        \
    } while (0)
    // What gives nothing back is ordered before what comes next by a quiet only.
#define THEN(name, ...)                                                                                                   \
    do {                                                                                                                  \
        ONLY(name, __VA_ARGS__);                                                                                          \
        nvshmem_quiet();                                                                                                  \
    } while (0)
    THEN(set, words, 40, next);
    IS(BOTH(fetch, words, next), 40);
    IS(BOTH(swap, words, 50, next), 40);
    IS(BOTH(compare_swap, words, 1, 60, next), 50);  // not equal: stays
    IS(BOTH(compare_swap, words, 50, 60, next), 50); // equal: taken
    THEN(inc, words, next);
    IS(BOTH(fetch_add, words, 1, next), 61); // not fetch_inc, which IBRC refuses ("RMA/AMO verb 13 not implemented") and never answers
    THEN(add, words, 8, next);
    IS(BOTH(fetch_add, words, 5, next), 70);
    IS(BOTH(fetch_and, words, 0x4f, next), 75);
    THEN(or, words, 0x30, next);
    IS(BOTH(fetch_or, words, 0x100, next), 0x7b);
    THEN(xor, words, 0x1, next);
    IS(BOTH(fetch_xor, words, 0x2, next), 0x17a);
    THEN(and, words, 0xff, next);
    IS(BOTH(fetch, words, next), 0x78);
    for (int i = 0; i < 100; i++) {
        if (i % 2)
            ONLY(add, counter, 3, 0);
        else
            BOTH(fetch_add, counter, 3, 0);
    }
    nvshmem_quiet();
}

static void run() {
    const int ROUNDS = 200;
    const size_t N = 5000;
    int next = (me + 1) % pes, last = (me + pes - 1) % pes, *wrong = symmetric<int>(1);

    uint32_t *places = symmetric<uint32_t>((size_t)pes), *numbers = symmetric<uint32_t>(ROUNDS + 1);
    std::vector<uint32_t> counting((size_t)ROUNDS + 1);
    for (int i = 0; i <= ROUNDS; i++) counting[(size_t)i] = (uint32_t)i;
    upload(numbers, counting);
    for (int scope = THREAD; scope <= BLOCK; scope++) {
        CUDA(cudaMemset(places, 0, (size_t)pes * sizeof *places));
        CUDA(cudaDeviceSynchronize());
        nvshmem_barrier_all();
        barriers<<<1, THREADS[scope]>>>(places, numbers, me, pes, ROUNDS, (Scope)scope, wrong);
        CUDA(cudaDeviceSynchronize());
        if (download(wrong, 1)[0]) fprintf(stderr, "PE %d: barriers of %s\n", me, SCOPES[scope]);
        CHECK(download(wrong, 1)[0] == 0);
    }
    good("200 barriers of a thread, of a warp and of a block: what was put before them was there after them");

    uint32_t *data = symmetric<uint32_t>(4 * N), *source = symmetric<uint32_t>(4 * N), *fetched = symmetric<uint32_t>(N);
    uint64_t *words = symmetric<uint64_t>(8);
    struct counted before = count_in();
    nvshmem_barrier_all();
    orders<<<1, 128>>>(data, source, N, words, words + 1, next, last, ROUNDS, wrong);
    CUDA(cudaDeviceSynchronize());
    CHECK(download(wrong, 1)[0] == 0);
    account("puts in order", before, ROUNDS * N * sizeof *data);
    good("200 times what was put before a fence was there when the flag behind it was");

    std::vector<uint32_t> mine(3 * N), theirs(3 * N);
    for (size_t i = 0; i < 3 * N; i++) mine[i] = value(me, i), theirs[i] = value(last, i);
    upload(source, mine);
    nvshmem_barrier_all();
    before = count_in();
    nvshmem_barrier_all();
    signals<<<1, 128>>>(data, source, fetched, N, words + 2, me, next, last, wrong);
    CUDA(cudaDeviceSynchronize());
    CHECK(download(wrong, 1)[0] == 0);
    CHECK(download(data, 3 * N) == theirs);
    CHECK(download(fetched, N) == std::vector<uint32_t>(theirs.begin(), theirs.begin() + N));
    account("puts with signals", before, (50 * 3 + 1) * N * sizeof *data);
    good("puts that carry signals, single values and gets of a thread and of a block");

    atomics<uint64_t><<<1, 1>>>(words + 4, words + 5, next, wrong);
    CUDA(cudaDeviceSynchronize());
    atomics<uint32_t><<<1, 1>>>((uint32_t *)(words + 6), (uint32_t *)(words + 7), next, wrong);
    CUDA(cudaDeviceSynchronize());
    nvshmem_barrier_all();
    CHECK(download(wrong, 1)[0] == 0);
    if (me == 0) CHECK(download(words, 8)[5] == 300u * (unsigned)pes && download(words, 8)[7] == 300u * (unsigned)pes);
    nvshmem_barrier_all();
    good("atomics of 4 and 8 bytes, every one but fetch_inc, and a counter that all add to");
    nvshmem_finalize();
    good("finalize");
}

int main(int argc, char **argv) { return start(argc, argv, all_good, 10); }
